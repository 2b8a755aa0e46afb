/* ops.h: the operators for torch's dispatcher.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_PYTHON_OPS_H
#define FA_PYTHON_OPS_H

#include "fa.h"

/* Defines flash_attn_rocm::fwd, ::bwd and ::rotary and their kernels for CUDA
 * and CPU tensors, once per process.  *registered is false, with nothing
 * changed, where this torch lacks the functions.  On failure torch keeps
 * nothing of ours. */
fa_status fa_ops_register(bool *registered, fa_error *error);

/* Whether libtorch's stable C functions are there. */
bool fa_ops_have_torch_abi(void);

/* -- ops_rotary.c */

#define FA_ROTARY_SCHEMA                                                    \
    "rotary(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, " \
    "bool inverse) -> (Tensor out_q, Tensor out_k)"
void fa_op_rotary(uint64_t *stack, uint64_t inputs, uint64_t outputs);

#endif
