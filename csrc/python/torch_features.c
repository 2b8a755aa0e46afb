/* torch_features.c: the options that every op has, from the dispatcher's words:
 * features of attention and numbers.
 *
 * As in torch_args.c, shapes and values are left to the plan, and what indices
 * say to whoever made them.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "python/torch_args.h"

#include <limits.h>
#include <stdio.h>

/* Looks at one tensor of the options; *present: it has elements.  Of what type
 * it is goes to *code. */
static fa_status parse_one(const char *name, uint64_t word, int dims,
                           const char *axes, const fa_torch_device *on,
                           fa_tensor *to, int32_t *code, bool *present,
                           fa_error *error)
{
    const fa_torch_tensor from = fa_torch_as_tensor(word);
    fa_torch_device other;
    bool absent = true;
    fa_status status = fa_torch_is_absent(name, from, &absent, error);
    *present = status == FA_OK && !absent;
    if (!*present) {
        return status;
    }
    status =
        fa_torch_parse_shape(name, from, dims, axes, to, code, &other, error);
    return status == FA_OK ? fa_torch_check_device(name, on, &other, error)
                           : status;
}

/* One whose type is a fa_dtype. */
static fa_status parse_floats(const char *name, uint64_t word, int dims,
                              const char *axes, const fa_torch_device *on,
                              fa_tensor *to, fa_error *error)
{
    int32_t code = 0;
    bool present = false;
    const fa_status status =
        parse_one(name, word, dims, axes, on, to, &code, &present, error);
    return present && status == FA_OK
               ? fa_torch_parse_dtype(name, code, &to->dtype, error)
               : status;
}

/* One whose type is torch's number `expected`, called `type`. */
static fa_status parse_typed(const char *name, uint64_t word, int dims,
                             const char *axes, int32_t expected,
                             const char *type, const fa_torch_device *on,
                             fa_tensor *to, fa_error *error)
{
    int32_t code = 0;
    bool present = false;
    fa_dtype dtype = FA_F16;
    fa_error ignored;
    fa_status status =
        parse_one(name, word, dims, axes, on, to, &code, &present, error);
    if (status != FA_OK || !present || code == expected) {
        return status;
    }
    return fa_torch_parse_dtype(name, code, &dtype, &ignored) == FA_OK
               ? fa_fail(error, FA_EINVAL, "%s: expected dtype %s, got %s",
                         name, type, fa_dtype_name(dtype))
               : fa_fail(error, FA_EINVAL,
                         "%s: expected dtype %s, got torch's dtype number %d",
                         name, type, (int)code);
}

/* Slopes may be the same for all of the batch. */
static fa_status parse_alibi(uint64_t word, const fa_torch_device *on,
                             fa_tensor *to, fa_error *error)
{
    const fa_torch_tensor from = fa_torch_as_tensor(word);
    int64_t dim = 0;
    bool absent = true;
    fa_status status = fa_torch_is_absent("alibi", from, &absent, error);
    if (status != FA_OK || absent) {
        return status;
    }
    if (fa_torch.get_dim(from, &dim) == 0 && dim != 1) {
        return parse_floats("alibi", word, 2, "batch, heads", on, to, error);
    }
    status = parse_floats("alibi", word, 1, "heads", on, to, error);
    to->size[1] = to->size[0];
    to->stride[1] = to->stride[0];
    to->size[0] = 1;
    return status;
}

static fa_status parse_seed(uint64_t word, const fa_torch_device *on,
                            const int64_t **seed, fa_error *error)
{
    fa_tensor t = {.data = NULL};
    fa_status status =
        parse_typed("seed", word, 1, "seed and offset", fa_torch.dtype_int64(),
                    "int64", on, &t, error);
    if (status != FA_OK || t.data == NULL) {
        return status;
    }
    if (t.size[0] != 2) {
        return fa_fail(error, FA_EINVAL, "seed: expected 2 elements, got %lld",
                       (long long)t.size[0]);
    }
    if (t.stride[0] != 1) {
        return fa_fail(error, FA_EINVAL,
                       "seed: expected a contiguous tensor, got stride %lld",
                       (long long)t.stride[0]);
    }
    *seed = t.data;
    return FA_OK;
}

static fa_status parse_lists(const uint64_t *options, const fa_torch_device *on,
                             fa_features *f, fa_error *error)
{
    static const char *const axes = "batch, heads, blocks, 1 + indices";
    const struct {
        const char *name;
        int at;
        int dims;
        const char *axes;
        fa_tensor *to;
    } lists[] = {
        {"span_q", FA_OPTION_SPAN_Q, 2, "rows, 4", &f->span_q},
        {"span_k", FA_OPTION_SPAN_K, 2, "keys, 2", &f->span_k},
        {"blocks", FA_OPTION_BLOCKS, 4, axes, &f->blocks},
        {"blocks_t", FA_OPTION_BLOCKS_T, 4, axes, &f->blocks_t},
    };
    fa_status status = FA_OK;
    for (int i = 0; i < 4 && status == FA_OK; i++) {
        status = parse_typed(lists[i].name, options[lists[i].at], lists[i].dims,
                             lists[i].axes, fa_torch.dtype_int32(), "int32", on,
                             lists[i].to, error);
    }
    return status;
}

static void parse_numbers(const uint64_t *options, fa_problem *p)
{
    const int64_t causal = fa_torch_as_int(options[FA_OPTION_CAUSAL]);
    p->scale = fa_torch_as_double(options[FA_OPTION_SCALE]);
    /* Clamped, not cut: beyond int it must not turn into something legal. */
    p->causal = causal < INT_MIN   ? INT_MIN
                : causal > INT_MAX ? INT_MAX
                                   : (int)causal;
    p->window_left = fa_torch_as_int(options[FA_OPTION_WINDOW_LEFT]);
    p->window_right = fa_torch_as_int(options[FA_OPTION_WINDOW_RIGHT]);
    fa_state_set_arithmetic(p);
    p->features.softcap = fa_torch_as_double(options[FA_OPTION_SOFTCAP]);
    p->features.dropout_p = fa_torch_as_double(options[FA_OPTION_DROPOUT_P]);
    p->features.sink_keys = fa_torch_as_int(options[FA_OPTION_SINK_KEYS]);
    p->features.block_q = fa_torch_as_int(options[FA_OPTION_BLOCK_Q]);
    p->features.block_k = fa_torch_as_int(options[FA_OPTION_BLOCK_K]);
}

fa_status fa_torch_parse_options(const uint64_t *options,
                                 const fa_torch_device *on, fa_problem *p,
                                 fa_error *error)
{
    static const char *const axes = "batch, heads, rows, keys";
    fa_features *f = &p->features;
    fa_status status = FA_OK;
    parse_numbers(options, p);
    if ((status = parse_floats("bias", options[FA_OPTION_BIAS], 4, axes, on,
                               &f->bias, error)) != FA_OK ||
        (status = parse_typed("mask", options[FA_OPTION_MASK], 4, axes,
                              fa_torch.dtype_bool(), "bool", on, &f->mask,
                              error)) != FA_OK ||
        (status = parse_alibi(options[FA_OPTION_ALIBI], on, &f->alibi,
                              error)) != FA_OK ||
        (status = parse_floats("sink", options[FA_OPTION_SINK], 1, "heads", on,
                               &f->sink, error)) != FA_OK ||
        (status = parse_seed(options[FA_OPTION_SEED], on, &f->seed, error)) !=
            FA_OK) {
        return status;
    }
    return parse_lists(options, on, f, error);
}
