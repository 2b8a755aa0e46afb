/* exec_portable.c: the vector ALU in plain C for any host; exec_avx2.c is
 * the same source with more host instructions and must give the same bits.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define EXEC_VALU exec_valu_portable
#include "exec_vector.h"
