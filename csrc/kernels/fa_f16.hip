/* fa_f16.hip: the kernels whose products are computed in fp16.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define FA_ROW_FA_F16 FA_MAKE_KERNEL
#define FA_ROW_FA_F32(...)
#define FA_ROW_FA_F64(...)
#include "kernels.h"
