/* check_features.c: are the features of this problem ours?
 *
 * Like check.c it looks at numbers only.  What tensors of indices contain is
 * left to whoever made them: on a GPU it could not be read without waiting.
 *
 * B batch, H query heads, Sq and Sk lengths.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "host/plan.h"

static const char *const score_axes[4] = {"batch", "head", "row", "key"};

/* -- tensors of scores ----------------------------------------------------- */

/* One of (B, H, Sq, Sk), whose sizes may be 1. */
static fa_status check_scores(const char *name, const fa_tensor *t,
                              int64_t element_bytes, const fa_problem *p,
                              fa_error *error)
{
    const int64_t full[4] = {p->q.size[0], p->q.size[1], p->q.size[2],
                             p->k.size[2]};
    for (int d = 0; d < 4; d++) {
        if (t->size[d] != 1 && t->size[d] != full[d]) {
            return fa_fail(error, FA_EINVAL,
                           "%s: expected size 1 or %lld in dimension %d (%s), "
                           "got %lld",
                           name, (long long)full[d], d, score_axes[d],
                           (long long)t->size[d]);
        }
    }
    if (fa_tensor_is_empty(t)) {
        return FA_OK;
    }
    /* Kernels hold byte offsets inside a tile in 32 bits. */
    for (int d = 2; d < 4; d++) {
        if (t->size[d] != 1 && t->stride[d] >= (1 << 24) / element_bytes) {
            return fa_fail(error, FA_EUNSUPPORTED,
                           "%s: expected a stride below 2^24 bytes in "
                           "dimension %d (%s), got %lld elements of %d",
                           name, d, score_axes[d], (long long)t->stride[d],
                           (int)element_bytes);
        }
    }
    return fa_check_strides(name, t, error);
}

static fa_status check_bias(const fa_problem *p, fa_error *error)
{
    const fa_tensor *bias = &p->features.bias;
    const fa_dtype sums = fa_dtype_of_sums(p->q.dtype);
    if (bias->data == NULL) {
        return FA_OK;
    }
    if (bias->dtype != p->q.dtype && bias->dtype != sums) {
        return fa_fail(error, FA_EINVAL,
                       "bias: expected dtype %s%s (as q), got %s",
                       fa_dtype_name(p->q.dtype),
                       fa_dtype_is_half(p->q.dtype) ? " or float32" : "",
                       fa_dtype_name(bias->dtype));
    }
    return check_scores("bias", bias, (int64_t)fa_dtype_bytes(bias->dtype), p,
                        error);
}

/* -- vectors --------------------------------------------------------------- */

/* That `t` has these sizes, as many as `dims`, and is contiguous. */
static fa_status check_dense(const char *name, const fa_tensor *t, int dims,
                             const int64_t size[4], fa_error *error)
{
    int64_t expected = 1;
    for (int d = dims - 1; d >= 0; d--) {
        if (t->size[d] != size[d]) {
            return fa_fail(error, FA_EINVAL,
                           "%s: expected size %lld in dimension %d, got %lld",
                           name, (long long)size[d], d, (long long)t->size[d]);
        }
        if (t->size[d] != 1 && t->stride[d] != expected) {
            return fa_fail(error, FA_EINVAL,
                           "%s: expected a contiguous tensor, got stride %lld "
                           "in dimension %d",
                           name, (long long)t->stride[d], d);
        }
        /* Wraps for what cannot exist; fa_check_strides refuses that. */
        expected = (int64_t)((uint64_t)expected * (uint64_t)size[d]);
    }
    return FA_OK;
}

static fa_status check_slopes_and_sink(const fa_problem *p, fa_error *error)
{
    const fa_tensor *alibi = &p->features.alibi;
    const fa_tensor *sink = &p->features.sink;
    const fa_dtype sums = fa_dtype_of_sums(p->q.dtype);
    const int64_t heads = p->q.size[1];
    const int64_t batch = alibi->size[0] == 1 ? 1 : p->q.size[0];
    fa_status status = FA_OK;
    if (alibi->data != NULL &&
        ((status = fa_check_dtype("alibi", alibi, sums, "lse", error)) !=
             FA_OK ||
         (status = check_dense("alibi", alibi, 2, (int64_t[4]){batch, heads},
                               error)) != FA_OK)) {
        return status;
    }
    if (sink->data != NULL &&
        ((status = fa_check_dtype("sink", sink, sums, "lse", error)) != FA_OK ||
         (status = check_dense("sink", sink, 1, (int64_t[4]){heads}, error)) !=
             FA_OK)) {
        return status;
    }
    return FA_OK;
}

/* -- numbers --------------------------------------------------------------- */

static fa_status check_numbers(const fa_problem *p, fa_error *error)
{
    const fa_features *f = &p->features;
    /* Kernels hold it and its reciprocal in single precision. */
    if (!(f->softcap >= 0.0 && f->softcap <= 0x1p120) ||
        (f->softcap > 0.0 && f->softcap < 0x1p-120)) {
        return fa_fail(error, FA_EINVAL,
                       "softcap: expected 0 (none) or 2^-120..2^120, got %g",
                       f->softcap);
    }
    if (!(f->dropout_p >= 0.0 && f->dropout_p < 1.0)) {
        return fa_fail(error, FA_EINVAL,
                       "dropout_p: expected at least 0 and below 1, got %g",
                       f->dropout_p);
    }
    if (fa_keep_of(f->dropout_p) < FA_KEEP_ALL && f->seed == NULL) {
        return fa_fail(error, FA_EINVAL,
                       "seed: expected 2 elements for dropout_p %g, got none",
                       f->dropout_p);
    }
    if (p->window_left < -1 || p->window_right < -1) {
        const bool left = p->window_left < -1;
        return fa_fail(error, FA_EINVAL,
                       "window_%s: expected -1 (open) or a number of keys, got "
                       "%lld",
                       left ? "left" : "right",
                       (long long)(left ? p->window_left : p->window_right));
    }
    return f->sink_keys >= 0 && f->sink_keys <= FA_LENGTH_MAX
               ? FA_OK
               : fa_fail(error, FA_EINVAL,
                         "sink_keys: expected 0..%d, got %lld",
                         (int)FA_LENGTH_MAX, (long long)f->sink_keys);
}

/* -- lists of what is seen ------------------------------------------------- */

/* What spans already say, and what says it again. */
static fa_status check_alone(const fa_problem *p, fa_error *error)
{
    const struct {
        const char *name;
        int64_t got;
        int64_t expected;
    } numbers[] = {{"causal", p->causal, FA_CAUSAL_NONE},
                   {"window_left", p->window_left, -1},
                   {"window_right", p->window_right, -1},
                   {"sink_keys", p->features.sink_keys, 0}};
    for (int i = 0; i < 4; i++) {
        if (numbers[i].got != numbers[i].expected) {
            return fa_fail(error, FA_EINVAL,
                           "%s: expected %lld beside span_q, got %lld",
                           numbers[i].name, (long long)numbers[i].expected,
                           (long long)numbers[i].got);
        }
    }
    if (p->features.blocks.data != NULL) {
        return fa_fail(error, FA_EINVAL,
                       "blocks: expected none beside span_q, got some");
    }
    return p->q.size[0] == 1
               ? FA_OK
               : fa_fail(error, FA_EINVAL,
                         "span_q: expected a q of batch size 1 beside it, got "
                         "%lld",
                         (long long)p->q.size[0]);
}

/* That what has `count` rows is there where the other one is. */
static fa_status check_partner(const char *name, const fa_tensor *t,
                               int64_t count, const char *other,
                               fa_error *error)
{
    return t->data != NULL || count == 0
               ? FA_OK
               : fa_fail(error, FA_EINVAL,
                         "%s: expected one beside %s, got none", name, other);
}

static fa_status check_spans(const fa_problem *p, bool backward,
                             fa_error *error)
{
    const fa_tensor *of_rows = &p->features.span_q;
    const fa_tensor *of_keys = &p->features.span_k;
    const int64_t rows = p->q.size[2];
    const int64_t keys = p->k.size[2];
    fa_status status = FA_OK;
    if (of_rows->data == NULL) {
        return of_keys->data == NULL
                   ? FA_OK
                   : check_partner("span_q", of_rows, rows, "span_k", error);
    }
    if ((status = check_dense("span_q", of_rows, 2, (int64_t[4]){rows, 4},
                              error)) != FA_OK ||
        (status = check_alone(p, error)) != FA_OK) {
        return status;
    }
    if (backward && (status = check_partner("span_k", of_keys, keys, "span_q",
                                            error)) != FA_OK) {
        return status;
    }
    return of_keys->data == NULL ? FA_OK
                                 : check_dense("span_k", of_keys, 2,
                                               (int64_t[4]){keys, 2}, error);
}

static fa_status check_block_size(const char *name, int64_t size,
                                  fa_error *error)
{
    return size > 0 && size % 128 == 0 && size <= FA_LENGTH_MAX
               ? FA_OK
               : fa_fail(error, FA_EINVAL,
                         "%s: expected a multiple of 128 up to 2^30, got %lld",
                         name, (long long)size);
}

/* Lists for `length` rows or keys in blocks of `own`. */
static fa_status check_lists(const char *name, const fa_tensor *t,
                             const fa_problem *p, int64_t length, int64_t own,
                             fa_error *error)
{
    const int64_t size[4] = {t->size[0] == 1 ? 1 : p->q.size[0],
                             t->size[1] == 1 ? 1 : p->q.size[1],
                             (length + own - 1) / own, t->size[3]};
    if (t->size[3] < 1 || t->size[3] > FA_LENGTH_MAX) {
        return fa_fail(error, FA_EINVAL,
                       "%s: expected a size of 1..%d in dimension 3, got %lld",
                       name, (int)FA_LENGTH_MAX, (long long)t->size[3]);
    }
    const fa_status status = check_dense(name, t, 4, size, error);
    return status == FA_OK ? fa_check_strides(name, t, error) : status;
}

static fa_status check_blocks(const fa_problem *p, bool backward,
                              fa_error *error)
{
    const fa_features *f = &p->features;
    const int64_t rows = p->q.size[2];
    const int64_t keys = p->k.size[2];
    fa_status status = FA_OK;
    if (f->blocks.data == NULL) {
        return f->blocks_t.data == NULL
                   ? FA_OK
                   : check_partner("blocks", &f->blocks, rows, "blocks_t",
                                   error);
    }
    if ((status = check_block_size("block_q", f->block_q, error)) != FA_OK ||
        (status = check_block_size("block_k", f->block_k, error)) != FA_OK ||
        (status = check_lists("blocks", &f->blocks, p, rows, f->block_q,
                              error)) != FA_OK) {
        return status;
    }
    if (backward && (status = check_partner("blocks_t", &f->blocks_t, keys,
                                            "blocks", error)) != FA_OK) {
        return status;
    }
    return f->blocks_t.data == NULL ? FA_OK
                                    : check_lists("blocks_t", &f->blocks_t, p,
                                                  keys, f->block_k, error);
}

/* -- all of them ----------------------------------------------------------- */

fa_status fa_check_features(const fa_problem *p, bool backward, fa_error *error)
{
    fa_status status = FA_OK;
    if ((status = check_bias(p, error)) != FA_OK ||
        (p->features.mask.data != NULL &&
         (status = check_scores("mask", &p->features.mask, 1, p, error)) !=
             FA_OK) ||
        (status = check_slopes_and_sink(p, error)) != FA_OK ||
        (status = check_numbers(p, error)) != FA_OK ||
        (status = check_spans(p, backward, error)) != FA_OK) {
        return status;
    }
    return check_blocks(p, backward, error);
}

static fa_status check_dbias(const fa_problem *p, const fa_gradients *g,
                             fa_error *error)
{
    const fa_tensor *bias = &p->features.bias;
    const fa_tensor *t = &g->dbias;
    fa_status status = FA_OK;
    if (bias->data == NULL) {
        return fa_fail(error, FA_EINVAL,
                       "wanted: expected no 8 (dbias) without bias, got %u",
                       (unsigned)g->wanted);
    }
    if ((status = fa_check_dtype("dbias", t, bias->dtype, "bias", error)) !=
            FA_OK ||
        (status = fa_check_elements("bias", bias, bias->size[3], "dbias",
                                    error)) != FA_OK) {
        return status;
    }
    for (int d = 0; d < 4; d++) {
        if (t->size[d] != bias->size[d]) {
            return fa_fail(error, FA_EINVAL,
                           "dbias: expected size %lld in dimension %d (%s, as "
                           "in bias), got %lld",
                           (long long)bias->size[d], d, score_axes[d],
                           (long long)t->size[d]);
        }
    }
    status =
        check_scores("dbias", t, (int64_t)fa_dtype_bytes(t->dtype), p, error);
    return status == FA_OK ? fa_check_overlap("dbias", t, error) : status;
}

static fa_status check_dsink(const fa_problem *p, const fa_gradients *g,
                             fa_error *error)
{
    const fa_tensor *t = &g->dsink;
    const int64_t *q = p->q.size;
    const fa_dtype sums = fa_dtype_of_sums(p->q.dtype);
    if (p->features.sink.data == NULL) {
        return fa_fail(error, FA_EINVAL,
                       "wanted: expected no 16 (dsink) without sink, got %u",
                       (unsigned)g->wanted);
    }
    fa_status status = fa_check_dtype("dsink", t, sums, "lse", error);
    return status == FA_OK
               ? check_dense("dsink", t, 4, (int64_t[4]){q[0], q[1], q[2], 1},
                             error)
               : status;
}

fa_status fa_check_feature_gradients(const fa_problem *p, const fa_gradients *g,
                                     fa_error *error)
{
    fa_status status = FA_OK;
    if ((g->wanted & FA_WANT_DBIAS) != 0) {
        status = check_dbias(p, g, error);
    }
    return status == FA_OK && (g->wanted & FA_WANT_DSINK) != 0
               ? check_dsink(p, g, error)
               : status;
}
