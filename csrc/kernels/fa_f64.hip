/* fa_f64.hip: the kernels whose products are computed in fp64.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define FA_ROW_FA_F16(...)
#define FA_ROW_FA_F32(...)
#define FA_ROW_FA_F64 FA_MAKE_KERNEL
#include "kernels.h"
