/* torch_args.h: from the dispatcher's stack to a fa_problem, and tensors of
 * torch's for what comes out.  Shared by the ops.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_PYTHON_TORCH_ARGS_H
#define FA_PYTHON_TORCH_ARGS_H

#include "python/state.h"
#include "python/torch_abi.h"

/* Process-global like the dispatcher's own tables: kernels get no pointer of
 * ours.  Written once, under the GIL, before the first kernel can run. */
extern fa_torch_abi fa_torch;

/* Fills fa_torch and torch's numbers of types and devices.  False if this
 * torch lacks the functions. */
bool fa_torch_open(void);

enum { FA_TORCH_TENSORS = 32 }; /* more than any op has, in and out */

typedef struct fa_torch_device {
    int32_t type;
    int32_t index;
} fa_torch_device;

/* What follows the tensors of every op, as places from the first of it on. */
enum {
    FA_OPTION_BIAS,
    FA_OPTION_MASK,
    FA_OPTION_ALIBI,
    FA_OPTION_SINK,
    FA_OPTION_SEED,
    FA_OPTION_SPAN_Q,
    FA_OPTION_SPAN_K,
    FA_OPTION_BLOCKS,
    FA_OPTION_BLOCKS_T,
    FA_OPTION_SCALE, /* as many tensors as lie before it */
    FA_OPTION_SOFTCAP,
    FA_OPTION_DROPOUT_P,
    FA_OPTION_CAUSAL,
    FA_OPTION_WINDOW_LEFT,
    FA_OPTION_WINDOW_RIGHT,
    FA_OPTION_SINK_KEYS,
    FA_OPTION_BLOCK_Q,
    FA_OPTION_BLOCK_K,
    FA_OPTIONS
};
#define FA_OPTIONS_SCHEMA                                                \
    "Tensor bias, Tensor mask, Tensor alibi, Tensor sink, Tensor seed, " \
    "Tensor span_q, Tensor span_k, Tensor blocks, Tensor blocks_t, "     \
    "float scale, float softcap, float dropout_p, int causal, "          \
    "int window_left, int window_right, int sink_keys, int block_q, "    \
    "int block_k"

fa_torch_tensor fa_torch_as_tensor(uint64_t word);
int64_t fa_torch_as_int(uint64_t word);
double fa_torch_as_double(uint64_t word);
bool fa_torch_as_bool(uint64_t word);
uint64_t fa_torch_as_word(fa_torch_tensor tensor);
void fa_torch_release(fa_torch_tensor tensor); /* accepts NULL */

/* A tensor of four dimensions. */
fa_status fa_torch_parse_tensor(const char *name, fa_torch_tensor from,
                                fa_tensor *to, fa_torch_device *on,
                                fa_error *error);
/* One of three, (batch, heads, seqlen); *to gets a fourth of size 1. */
fa_status fa_torch_parse_rows(const char *name, fa_torch_tensor from,
                              fa_tensor *to, fa_torch_device *on,
                              fa_error *error);
/* One of one; *to gets its size and stride as the first. */
fa_status fa_torch_parse_flat(const char *name, fa_torch_tensor from,
                              fa_tensor *to, fa_torch_device *on,
                              fa_error *error);
/* One of `dims`, the names of which are `axes`, of torch's type number `*code`,
 * which may be none of ours: to->dtype is left alone. */
fa_status fa_torch_parse_shape(const char *name, fa_torch_tensor from, int dims,
                               const char *axes, fa_tensor *to, int32_t *code,
                               fa_torch_device *on, fa_error *error);
fa_status fa_torch_parse_dtype(const char *name, int32_t code, fa_dtype *dtype,
                               fa_error *error);
/* Whether `from` has no elements, which means absent. */
fa_status fa_torch_is_absent(const char *name, fa_torch_tensor from,
                             bool *absent, fa_error *error);
fa_status fa_torch_check_device(const char *name,
                                const fa_torch_device *expected,
                                const fa_torch_device *got, fa_error *error);

/* q, k and v from the first three words. */
fa_status fa_torch_parse_qkv(const uint64_t *stack, fa_problem *problem,
                             fa_torch_device *on, fa_error *error);

/* -- torch_features.c */

/* The options into the problem, whose q lies `on` a device; and the
 * configuration. */
fa_status fa_torch_parse_options(const uint64_t *options,
                                 const fa_torch_device *on, fa_problem *problem,
                                 fa_error *error);

/* A new tensor laid out like `like`, whose data becomes its address. */
fa_status fa_torch_new_like(const char *name, const fa_torch_device *on,
                            fa_tensor *like, fa_torch_tensor *tensor,
                            fa_error *error);
/* A new contiguous one of three dimensions. */
fa_status fa_torch_new_rows(const char *name, const fa_torch_device *on,
                            const int64_t size[3], fa_dtype dtype,
                            fa_torch_tensor *tensor, void **data,
                            fa_error *error);
/* A new one of one dimension.  Without elements, for what is not wanted, it has
 * no address: *data is left alone, and `data` may be NULL. */
fa_status fa_torch_new_flat(const char *name, const fa_torch_device *on,
                            int64_t count, fa_dtype dtype,
                            fa_torch_tensor *tensor, void **data,
                            fa_error *error);
/* Memory for a launch; *tensor and *data stay NULL for 0 bytes.  Released
 * after the launch, it is not given out again before the stream is past. */
fa_status fa_torch_new_workspace(const fa_torch_device *on, size_t bytes,
                                 fa_torch_tensor *tensor, void **data,
                                 fa_error *error);

/* Where the call goes.  `arch` is room for the simulated architecture. */
fa_status fa_torch_choose_target(const fa_torch_device *on,
                                 fa_runtime **runtime, fa_target *target,
                                 char arch[FA_STATE_ARCH_CHARS],
                                 fa_error *error);

/* Notes a served call. */
void fa_torch_record(const fa_torch_device *on, const fa_target *target,
                     const fa_plan *plan, const fa_counts *counts);

/* Ends a kernel: releases its tensors and leaves the results on the stack, or,
 * on failure, releases them too and then throws.  `scratch` may be NULL.  Where
 * counts->late says that a kernel still runs, the guard gets all of them. */
void fa_torch_return(uint64_t *stack, int inputs, fa_torch_tensor *results,
                     int outputs, fa_torch_tensor scratch, fa_status status,
                     const fa_counts *counts, const fa_error *error);

#endif
