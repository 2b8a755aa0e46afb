/* fa_f32.hip: the kernels whose products are computed in fp32.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define FA_ROW_FA_F16(...)
#define FA_ROW_FA_F32 FA_MAKE_KERNEL
#define FA_ROW_FA_F64(...)
#include "kernels.h"
