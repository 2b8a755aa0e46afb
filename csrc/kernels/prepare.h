/* prepare: what the other passes need to know of whole rows, in one look at
 * the tensors that args->prepare names.
 *
 *   rows[i] = shift, bias, delta and sum of dS, see FA_SHIFT
 *   block_of[x] = largest norm and range of exponents of 64 rows of x; with
 *                 dLSE the norms are of (dO[i], dLSE[i]) and 2 (V[j], 1), whose
 *                 product bounds dS then too
 *   scale_of[x] = the power of two that brings a bf16 row into fp16's range
 *
 * or with row_sums, behind FA_BACKWARD_Q, a corrected delta and dsink alone.
 *
 * Shapes  as in args.h.  x of q, k, v, dout.
 * Types   KIND is FA_F32 for 16-bit and fp32 tensors alike; FA_F64 and
 *         FA_EXACT32 need rows only.
 * Grid    x = 4 * prepare_blocks, tensor after tensor; y = H; z = B.
 *         Workgroups without rows leave at once.
 * Lanes   8 lanes share a row, 32 rows at a time.
 * LDS     128 bytes, for maxima over the workgroup; fp64 needs none.
 * Edges   Rows past the end count for nothing.  A row with NaN or Inf is left
 *         out of the norms, NaN and Inf out of the exponents.
 * Order   fixed, no atomics: repeats bit for bit.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_PREPARE_H
#define FA_KERNELS_PREPARE_H

#include "fit.h"

/* What a lane, then a row, then a block knows. */
typedef struct fa_extent {
    float norm;
    int largest;  /* biased exponent of a finite element, as bf16 has it */
    int smallest; /* 255 - the smallest of one that is not 0 */
} fa_extent;

/* `exact`: with the range of exponents, which bf16 alone needs. */
static FA_DEVICE void fa_extend(fa_extent *e, float x, bool exact)
{
    e->norm = fa_fma(x, x, e->norm);
    if (exact) {
        uint32_t bits = fa_bits<uint32_t>(x);
        int exponent = (int)(bits >> 23 & 255);
        bool counts = exponent != 255 && (bits & 0x7fffffff) != 0;

        e->largest = fa_max_int(e->largest, counts ? exponent : 0);
        e->smallest = fa_max_int(e->smallest, counts ? 255 - exponent : 0);
    }
}

/* -- a row ----------------------------------------------------------------- */

/* A row of x and, for delta, those of out and out_lo: same type.
 * `out` NULL: no delta; `out_lo` NULL: not there. */
typedef struct fa_row {
    fa_global_in x;
    fa_global_in out;
    fa_global_in out_lo;
    int64_t x_channel; /* strides in elements */
    int64_t out_channel;
    int64_t low_channel;
    float low_scale; /* undoes FA_LOW_SCALE */
    int channels;
    int stored;
    bool exact;
} fa_row;

/* Elements e = 0, 1, ... of 16 bytes, as numbers. */
template <typename Number>
static FA_DEVICE Number fa_element_of(u32x4 x, int e, int stored)
{
    uint32_t word[4] = {x.x, x.y, x.z, x.w};

    if constexpr (sizeof(Number) == 8) {
        u32x2 both;
        both.x = word[2 * e];
        both.y = word[2 * e + 1];
        return fa_bits<double>(both);
    } else {
        return stored == FA_F32
                   ? fa_bits<float>(word[e & 3])
                   : fa_unpack_as(stored, word[e / 2] >> (e % 2 * 16));
    }
}

/* One element at any address. */
template <typename Number>
static FA_DEVICE Number fa_any_element(fa_global_in row, int64_t channel,
                                       int stored)
{
    fa_global_in at = row + channel * fa_bytes_of(stored);

    if constexpr (sizeof(Number) == 8) {
        return *(const FA_GLOBAL double *)at;
    } else {
        return stored == FA_F32
                   ? *(const FA_GLOBAL float *)at
                   : fa_unpack_as(stored, *(const FA_GLOBAL uint16_t *)at);
    }
}

template <typename Number>
static FA_DEVICE void fa_take_element(fa_extent *e, Number *delta, Number x,
                                      Number out, const fa_row *row)
{
    if (sizeof(Number) != 8) {
        fa_extend(e, (float)x, row->exact);
    }
    *delta = fa_fma(x, out, *delta);
}

/* 16 bytes at a time; lane c of 8 takes granules c + 8n. */
template <typename Number>
static FA_DEVICE void fa_look_wide(const fa_row *row, fa_extent *e,
                                   Number *delta, uint32_t tid)
{
    enum { MOST = sizeof(Number) == 8 ? 2 : 8 };
    int bytes = fa_bytes_of(row->stored);
    int elements = 16 / bytes;

#pragma unroll 2
    for (int g = (int)(tid & 7); g * elements < row->channels; g += 8) {
        u32x4 x = ((const FA_GLOBAL u32x4 *)row->x)[g];
        u32x4 out = {0, 0, 0, 0};
        u32x4 low = {0, 0, 0, 0};

        if (row->out != nullptr) {
            out = ((const FA_GLOBAL u32x4 *)row->out)[g];
        }
        if (row->out_lo != nullptr) {
            low = ((const FA_GLOBAL u32x4 *)row->out_lo)[g];
        }
#pragma unroll
        for (int n = 0; n < MOST; n++) {
            if (n < elements) {
                fa_take_element<Number>(
                    e, delta, fa_element_of<Number>(x, n, row->stored),
                    fa_element_of<Number>(out, n, row->stored) +
                        fa_element_of<Number>(low, n, row->stored) *
                            (Number)row->low_scale,
                    row);
            }
        }
    }
}

/* Element by element, in the same order, so that a layout changes no bit. */
template <typename Number>
static FA_DEVICE void fa_look_narrow(const fa_row *row, fa_extent *e,
                                     Number *delta, uint32_t tid)
{
    int elements = 16 / fa_bytes_of(row->stored);

#pragma unroll 1
    for (int n = 0;; n++) {
        int granule = (int)(tid & 7) + n / elements * 8;
        int d = granule * elements + n % elements;
        if (granule * elements >= row->channels) {
            break;
        }
        if (d >= row->channels) {
            continue;
        }
        Number x =
            fa_any_element<Number>(row->x, d * row->x_channel, row->stored);
        Number out = 0;

        if (row->out != nullptr) {
            out = fa_any_element<Number>(row->out, d * row->out_channel,
                                         row->stored);
        }
        if (row->out_lo != nullptr) {
            out += fa_any_element<Number>(row->out_lo, d * row->low_channel,
                                          row->stored) *
                   (Number)row->low_scale;
        }
        fa_take_element<Number>(e, delta, x, out, row);
    }
}

/* Over the 8 lanes of a row.  Exponents are exact as floats. */
static FA_DEVICE void fa_share_extent(fa_extent *e)
{
    e->norm = fa_sum8(e->norm);
    e->largest = (int)fa_max8((float)e->largest);
    e->smallest = (int)fa_max8((float)e->smallest);
}

/* 2^14..2^15 for the largest element of a row. */
static FA_DEVICE float fa_row_scale(int largest)
{
    return fa_power_of_2(fa_min_int(127 + 14 - largest, 126));
}

static FA_DEVICE fa_global_in fa_row_at(const FA_CONSTANT fa_view *view,
                                        int batch, int head, int64_t row,
                                        int bytes)
{
    return (fa_global_in)view->data +
           (batch * view->stride[0] + head * view->stride[1] +
            row * view->stride[2]) *
               bytes;
}

/* -- a query's weights ----------------------------------------------------- */

/* From here on half a unit in the last place of a float LSE moves P by a
 * percent. */
#define FA_BIG_LSE 1e5f

/* FA_SHIFT and FA_BIAS of query `at`.  The shift is close to LSE in units of
 * raw scores, so that what remains of a score is exact where P counts. */
template <int KIND>
static FA_DEVICE void fa_set_weight(FA_GLOBAL FA_NUMBER(KIND) * to,
                                    fa_args_in a, int64_t at)
{
    enum { IS_DOUBLE = FA_IS_DOUBLE(KIND) };
    typedef FA_NUMBER(KIND) Number;
    const Number log2_e =
        IS_DOUBLE ? (Number)1.4426950408889634 : (Number)1.44269502e+0f;
    const Number log2_e_low =
        IS_DOUBLE ? (Number)2.0355273740931033e-17 : (Number)1.92596299e-8f;
    Number scale_log2 = fa_unit<KIND, FA_FULL>(a);
    Number lse = ((const FA_GLOBAL FA_OUTER(KIND) *)a->lse)[at];
    bool has_low = KIND != FA_F64 && a->lse_lo != nullptr;
    Number low =
        has_low ? (Number)((const FA_GLOBAL float *)a->lse_lo)[at] : (Number)0;
    Number high = lse * log2_e;
    Number shift = high / scale_log2;

    low = fa_fma(lse, log2_e, -high) + lse * log2_e_low + low * log2_e;
    if (!has_low && fa_abs(high) > (Number)FA_BIG_LSE) {
        /* The upper end of what lse may have been, or P is above 1. */
        low += fa_abs(high) * (Number)(KIND == FA_F64 ? 0x1p-52 : 0x1p-23);
    }
    if (!(scale_log2 > (Number)0x1p-60f && shift - shift == 0)) {
        shift = 0;
    }
    low = fa_if_finite(low);
    to[FA_SHIFT] = shift;
    to[FA_BIAS] = high == -FA_INFINITY ? high /* no key has a weight */
                                       : fa_fma(shift, scale_log2, -high) - low;
}

template <int KIND>
static FA_DEVICE FA_NUMBER(KIND)
    fa_dlse_of(fa_args_in a, int batch, int head, int64_t row)
{
    const FA_CONSTANT fa_view *view = &a->dlse;

    return view->data == nullptr
               ? (FA_NUMBER(KIND))0
               : ((const FA_GLOBAL FA_OUTER(KIND) *)view
                      ->data)[batch * view->stride[0] + head * view->stride[1] +
                              row * view->stride[2]];
}

/* The weight of the sink in a query whose numbers are `of`. */
template <int KIND>
static FA_DEVICE FA_NUMBER(KIND)
    fa_sink_weight(fa_args_in a, int head, const FA_GLOBAL FA_NUMBER(KIND) * of)
{
    typedef FA_NUMBER(KIND) Number;
    Number score =
        ((const FA_GLOBAL FA_OUTER(KIND) *)a->sink)[head] * (Number)a->per_unit;

    return score == -FA_INFINITY
               ? (Number)0
               : fa_weight_less<KIND>(score, of[FA_SHIFT],
                                      fa_unit<KIND, FA_FULL>(a), of[FA_BIAS]);
}

/* The numbers of query `at`; `head` is where a sink's score is. */
template <int KIND>
static FA_DEVICE void fa_set_row(fa_args_in a, int64_t at, int head,
                                 FA_NUMBER(KIND) delta, FA_NUMBER(KIND) dlse)
{
    typedef FA_NUMBER(KIND) Number;
    FA_GLOBAL Number *to = (FA_GLOBAL Number *)a->rows + at * FA_ROW_NUMBERS;
    bool known = KIND == FA_F64 || a->lse_lo != nullptr;
    Number sum = dlse;

    to[FA_DELTA] = delta - dlse;
    fa_set_weight<KIND>(to, a, at);
    if (a->sink != nullptr) {
        Number dsink = fa_sink_weight<KIND>(a, head, to) * (dlse - delta);
        sum -= dsink;
        if (a->dsink != nullptr) {
            ((FA_GLOBAL FA_OUTER(KIND) *)a->dsink)[at] = (FA_OUTER(KIND))dsink;
        }
    }
    to[FA_DS_SUM] = known ? sum : (Number)__builtin_nanf("");
}

/* The delta of query `at` from its row sum, and dsink by it.  That of the
 * output lacks what rounding took from the weights that made it, and has
 * roundings of its own where dP has others: most of the error of dbias and
 * dsink, of dk in fp32 or where rows see almost one key, and of all that
 * FA_EXACT32 makes.  Of an lse that is of more keys than these (without lse_lo)
 * it cannot be told. */
template <int KIND>
static FA_DEVICE void fa_correct_row(fa_args_in a, int64_t at, int head,
                                     FA_NUMBER(KIND) dlse)
{
    typedef FA_NUMBER(KIND) Number;
    FA_GLOBAL Number *to = (FA_GLOBAL Number *)a->rows + at * FA_ROW_NUMBERS;
    bool with_sink = a->sink != nullptr;
    double weight = with_sink ? fa_sink_weight<KIND>(a, head, to) : (Number)0;
    double delta = to[FA_DELTA]; /* less dlse, as the sum had it */

    if (a->lse_lo == nullptr) {
        return;
    }
    delta = (double)to[FA_DS_SUM] - dlse + (1.0 - weight) * delta;
    to[FA_DELTA] = (Number)delta;
    if (with_sink && a->dsink != nullptr) {
        ((FA_GLOBAL float *)a->dsink)[at] = (float)(-weight * delta);
    }
}

/* fp32 and fp64: sum_d dO[d] O[d] in the very order in which the passes form
 * dP (fa_multiply_chunk), one lane a row.  Where the softmax is one key O is
 * its V, and if Sum is what the passes sum in most roundings of dP - delta
 * cancel. */
template <typename Outer, typename Sum>
static FA_DEVICE Sum fa_delta_in_order(fa_args_in a, int batch, int head,
                                       int64_t row, bool wide)
{
    enum { BYTES = sizeof(Outer), GRANULE = 16 / BYTES };
    int stored = BYTES == 8 ? (int)FA_F64 : (int)FA_F32;
    fa_global_in x = fa_row_at(&a->dout, batch, head, row, BYTES);
    fa_global_in out = fa_row_at(&a->out, batch, head, row, BYTES);
    int channels = a->head_dim_v;
    int apart = (int)a->apart;
    Sum sum = 0;
    Sum part = 0;

#pragma unroll 1
    for (int g = 0; g * GRANULE < channels; g++) {
        if (wide) {
            u32x4 one = ((const FA_GLOBAL u32x4 *)x)[g];
            u32x4 other = ((const FA_GLOBAL u32x4 *)out)[g];
#pragma unroll
            for (int e = 0; e < GRANULE; e++) {
                part =
                    fa_fma((Sum)fa_element_of<Outer>(one, e, stored),
                           (Sum)fa_element_of<Outer>(other, e, stored), part);
            }
        } else {
#pragma unroll 1
            for (int d = g * GRANULE;
                 d < fa_min_int(channels, (g + 1) * GRANULE); d++) {
                part = fa_fma((Sum)fa_any_element<Outer>(
                                  x, d * a->dout.stride[3], stored),
                              (Sum)fa_any_element<Outer>(
                                  out, d * a->out.stride[3], stored),
                              part);
            }
        }
        if (BYTES == 4 && apart > 0 && (g + 1) % apart == 0) {
            sum += part;
            part = 0;
        }
    }
    return sum + part;
}

/* fp32 with a residue: row sums correct delta later, and do so best if it is
 * close, so it is summed in double.  Else in the order of dP. */
template <int KIND>
static FA_DEVICE FA_NUMBER(KIND)
    fa_delta_of(fa_args_in a, int batch, int head, int64_t row, bool wide)
{
    typedef FA_NUMBER(KIND) Number;
    typedef FA_OUTER(KIND) Outer;

    return a->lse_lo != nullptr
               ? (Number)fa_delta_in_order<Outer, double>(a, batch, head, row,
                                                          wide)
               : fa_delta_in_order<Outer, Number>(a, batch, head, row, wide);
}

template <int KIND> static FA_DEVICE void fa_prepare(fa_args_in a, fa_lds lds)
{
    enum { IS_DOUBLE = FA_IS_DOUBLE(KIND) };
    typedef FA_NUMBER(KIND) Number;
    uint32_t tid = fa_thread();
    int which = (int)(fa_group_x() / a->prepare_blocks);
    int block = (int)(fa_group_x() % a->prepare_blocks);
    int head = (int)fa_group_y();
    int batch = (int)fa_group_z();
    bool is_query = which == FA_Q_AT || which == FA_DOUT_AT;
    int heads = is_query ? a->heads : a->heads_k;
    int rows = is_query ? a->seqlen_q : a->seqlen_k;
    int channels =
        which == FA_Q_AT || which == FA_K_AT ? a->head_dim : a->head_dim_v;
    int stored = IS_DOUBLE ? fa_stored_of<KIND>(a) : a->stored;

    if ((a->prepare >> which & 1) == 0 || head >= heads ||
        block * FA_BLOCK_ROWS >= rows) {
        return;
    }
    if (KIND != FA_F64 && a->row_sums != 0) {
        int row = block * FA_BLOCK_ROWS + (int)tid;
        if (tid < FA_BLOCK_ROWS && row < rows) {
            fa_correct_row<KIND>(a,
                                 ((int64_t)batch * heads + head) * rows + row,
                                 head, fa_dlse_of<KIND>(a, batch, head, row));
        }
        return;
    }
    /* (clang 22 takes a chain of conditions for four pointers wrong here.) */
    const FA_CONSTANT fa_view *view = fa_view_at(a, fa_view_offset(which));
    int bytes = fa_bytes_of(stored);
    fa_global_in base =
        (fa_global_in)view->data +
        (batch * view->stride[0] + head * view->stride[1]) * bytes;
    int64_t start = ((int64_t)batch * heads + head) * rows;
    fa_extent whole = {0.0f, 0, 0};
    bool spread = false; /* some row spans too many binades */
    bool exact = !IS_DOUBLE && a->scale_of[which] != nullptr;
    uint32_t sets =
        which == FA_DOUT_AT ? FA_SET_DOUT | FA_SET_OUT : 1u << which;
    bool wide = (a->wide & sets) == sets;

    if (IS_DOUBLE || stored == FA_F32) {
        int row = block * FA_BLOCK_ROWS + (int)tid;
        if (which == FA_DOUT_AT && tid < FA_BLOCK_ROWS && row < rows) {
            fa_set_row<KIND>(a, start + row, head,
                             fa_delta_of<KIND>(a, batch, head, row, wide),
                             fa_dlse_of<KIND>(a, batch, head, row));
        }
        return; /* no blocks: nothing is packed into fp16 */
    }
#pragma unroll
    for (int n = 0; n < FA_BLOCK_ROWS; n += 32) {
        int row = block * FA_BLOCK_ROWS + n + (int)(tid >> 3);
        bool valid = row < rows;
        int64_t r = fa_min_int(row, rows - 1);
        fa_extent one = {0.0f, 0, 0};
        Number delta = 0;
        fa_row from;

        from.x = base + r * view->stride[2] * bytes;
        from.x_channel = view->stride[3];
        from.out = nullptr;
        from.out_lo = nullptr;
        from.out_channel = a->out.stride[3];
        from.channels = channels;
        from.stored = stored;
        from.exact = exact;
        from.low_channel = a->out_lo.stride[3];
        from.low_scale = stored == FA_F16 ? 1.0f / FA_LOW_SCALE : 1.0f;
        if (which == FA_DOUT_AT) {
            from.out = fa_row_at(&a->out, batch, head, r, bytes);
            if (!IS_DOUBLE && a->out_lo.data != nullptr) {
                from.out_lo = fa_row_at(&a->out_lo, batch, head, r, bytes);
            }
        }
        if (wide) {
            fa_look_wide<Number>(&from, &one, &delta, tid);
        } else {
            fa_look_narrow<Number>(&from, &one, &delta, tid);
        }
        fa_share_extent(&one);
        delta = fa_sum8(delta);
        if (which == FA_DOUT_AT) {
            Number dlse = fa_dlse_of<KIND>(a, batch, head, r);
            one.norm = fa_fma((float)dlse, (float)dlse, one.norm);
            if (valid && (tid & 7) == 0) {
                fa_set_row<KIND>(a, start + r, head, delta, dlse);
            }
        } else if (which == FA_V_AT && a->dlse.data != nullptr) {
            one.norm = (one.norm + 1.0f) * 4.0f;
        }
        if (valid && exact && (tid & 7) == 0) {
            ((FA_GLOBAL float *)a->scale_of[which])[start + r] =
                fa_row_scale(one.largest);
        }
        /* Rows with NaN or Inf bound nobody: they are not finite anyway. */
        bool counts = valid && one.norm < FA_INFINITY;
        whole.norm = counts ? fa_max(whole.norm, one.norm) : whole.norm;
        spread |= valid && one.largest - (255 - one.smallest) > FA_FIT_BINADES;
        whole.largest =
            valid ? fa_max_int(whole.largest, one.largest) : whole.largest;
        whole.smallest =
            valid ? fa_max_int(whole.smallest, one.smallest) : whole.smallest;
    }
    if (IS_DOUBLE || a->block_of[which] == nullptr) {
        return;
    }
    whole.norm = fa_group_max(whole.norm, lds, tid);
    whole.largest = (int)fa_group_max((float)whole.largest, lds, tid);
    whole.smallest = (int)fa_group_max((float)whole.smallest, lds, tid);
    float some_spread = fa_group_max(spread ? 1.0f : 0.0f, lds, tid);
    if (tid == 0) {
        int64_t blocks = (rows + FA_BLOCK_ROWS - 1) / FA_BLOCK_ROWS;
        FA_GLOBAL fa_block *to = (FA_GLOBAL fa_block *)a->block_of[which] +
                                 ((int64_t)batch * heads + head) * blocks +
                                 block;
        to->norm = whole.norm;
        to->exponents = (uint32_t)whole.largest |
                        (uint32_t)whole.smallest << 8 |
                        (some_spread > 0.0f ? 1u << 16 : 0);
    }
}

#endif
