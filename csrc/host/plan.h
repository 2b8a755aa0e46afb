/* plan.h: what the parts of the planning share: check.c, layout.c, plan.c,
 * wide.c before a launch and args.c at one.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_HOST_PLAN_H
#define FA_HOST_PLAN_H

#include "host/driver.h"

/* The names of the dimensions: "batch", "head", "row", "head dim". */
extern const char *const fa_axes[4];

bool fa_tensor_is_empty(const fa_tensor *t);

/* (batch and heads of `like`, rows, width), contiguous. */
fa_tensor fa_tensor_of_rows(void *data, fa_dtype dtype, const fa_tensor *like,
                            int64_t rows, int64_t width);

/* -- check.c --------------------------------------------------------------- */

enum { FA_LENGTH_MAX = 1 << 30 }; /* lengths and their sums fit 32 bits */

fa_status fa_check_forward(const fa_problem *problem, fa_error *error);
fa_status fa_check_backward(const fa_problem *problem,
                            const fa_gradients *gradients, fa_error *error);
/* Part of both, and of a launch, whose memory may be newer than the plan. */
fa_status fa_check_residue(const fa_problem *problem, fa_error *error);

/* Parts of these: no negative stride and no offset beyond 63 bits; the type
 * `expected`, which is that of `whose`; no element where another one is. */
fa_status fa_check_strides(const char *name, const fa_tensor *t,
                           fa_error *error);
fa_status fa_check_dtype(const char *name, const fa_tensor *t,
                         fa_dtype expected, const char *whose, fa_error *error);
fa_status fa_check_overlap(const char *name, const fa_tensor *t,
                           fa_error *error);
/* That `output`, of the batch, heads and rows of `rows`, can exist. */
fa_status fa_check_elements(const char *name, const fa_tensor *rows,
                            int64_t head_dim, const char *output,
                            fa_error *error);

/* -- check_features.c ------------------------------------------------------ */

/* All of problem->features and the windows.  `backward`: also what only the
 * backward reads. */
fa_status fa_check_features(const fa_problem *problem, bool backward,
                            fa_error *error);
/* dbias and dsink, as far as they are wanted. */
fa_status fa_check_feature_gradients(const fa_problem *problem,
                                     const fa_gradients *gradients,
                                     fa_error *error);

/* -- plan.c ---------------------------------------------------------------- */

/* Whether a problem of float32 is computed in double.  The errors of a small
 * one are a handful of roundings of float that do not average out, and launches
 * are most of its time, unless a single row sees thousands of keys. */
bool fa_is_exact32(const fa_problem *problem);

/* The type of fa_args.rows. */
fa_dtype fa_dtype_of_rows(const fa_problem *problem);

/* FA_HAS_*. */
uint32_t fa_features_of(const fa_problem *problem);

/* Dropout keeps a weight with this / 65536; so much: every one. */
enum { FA_KEEP_ALL = 1 << 16 };
uint32_t fa_keep_of(double dropout_p);

/* -- wide.c ---------------------------------------------------------------- */

/* The tensors in the order of the FA_SET_* bits; NULL for those that a call
 * does not have.  `gradients` is NULL in a forward. */
void fa_list_tensors(const fa_problem *problem, const fa_gradients *gradients,
                     const fa_tensor *list[FA_TENSORS]);

/* Why a tensor is narrow.  An address NULL counts as aligned. */
fa_narrow fa_why_narrow(const fa_tensor *t);

/* -- args.c ---------------------------------------------------------------- */

/* Of FA_PREPARE the arrays, lse lse_lo out_lo rows and their sums, and the
 * sink. */
enum { FA_EXTRAS = 2 * FA_PREPARED + 6 };

/* What one launch is told, and the memory that it touches.  `access` points
 * into `extra` and to the problem's own tensors. */
typedef struct fa_call {
    fa_args args;
    fa_tensor extra[FA_EXTRAS];
    int extra_count;
    fa_access access[FA_MAX_ACCESSES];
    size_t access_count;
} fa_call;

/* Fills *call for one step of `plan`.  A field of fa_args that the pass does
 * not use is zero. */
void fa_call_fill(const fa_problem *problem, const fa_gradients *gradients,
                  const fa_plan *plan, const fa_step *step, void *workspace,
                  fa_call *call);

/* -- rotary.c -------------------------------------------------------------- */

/* What the launch is told; `access` points to the problem's tensors. */
typedef struct fa_rotary_call {
    fa_rotary_args args;
    fa_access access[6];
    size_t access_count;
} fa_rotary_call;

void fa_rotary_call_fill(const fa_rotary *problem, fa_rotary_call *call);

#endif
