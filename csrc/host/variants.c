/* variants.c: the rows of variants.def as a table, and what their words mean:
 * names of types, passes and levels, sizes of types.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "fa.h"

#include <assert.h>

const fa_variant fa_variants[FA_VARIANT_COUNT] = {
#define FA_VARIANT(symbol, pass, arith, reads, dim, level, rows, steps, \
                   threads, lds_bytes)                                  \
    {#symbol, pass, arith, reads, dim, level, rows, steps, threads, lds_bytes},
#include "kernels/variants.def"
#undef FA_VARIANT
};

const char *fa_dtype_name(fa_dtype dtype)
{
    static const char *const names[] = {"float16", "bfloat16", "float32",
                                        "float64"};
    assert((size_t)dtype < sizeof names / sizeof names[0]);
    return names[dtype];
}

size_t fa_dtype_bytes(fa_dtype dtype)
{
    return dtype == FA_F64 ? 8 : dtype == FA_F32 ? 4 : 2;
}

bool fa_dtype_is_half(fa_dtype dtype)
{
    return dtype == FA_F16 || dtype == FA_BF16;
}

fa_dtype fa_dtype_of_sums(fa_dtype dtype)
{
    return dtype == FA_F64 ? FA_F64 : FA_F32;
}

const char *fa_pass_name(fa_pass pass)
{
    static const char *const names[] = {"forward",       "prepare",
                                        "backward_kv",   "backward_q",
                                        "backward_bias", "rotary"};
    assert((size_t)pass < sizeof names / sizeof names[0]);
    return names[pass];
}

const char *fa_level_name(fa_level level)
{
    static const char *const names[] = {"plain", "full"};
    assert((size_t)level < sizeof names / sizeof names[0]);
    return names[level];
}
