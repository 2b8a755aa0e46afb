/* rotary: turns pairs of channels of q and k by angles that belong to their
 * token, both tensors in one launch:
 *
 *   out[c1] = x[c1] cos - x[c2] sin        pair p of R / 2:
 *   out[c2] = x[c2] cos + x[c1] sin        (p, p + R / 2) or (2p, 2p + 1)
 *
 * with -sin for the inverse, which is also the gradient.  Channels from R on
 * are copied.
 *
 * Shapes  as in fa_rotary_args.
 * Types   of q and k as `stored`; the kernel of fp64 reads nothing else.
 *         Tables of that type or of the arithmetic's.
 * Units   of a head's row: 16 bytes (two times, where pairs lie apart), or of a
 *         narrow tensor a pair or a channel.
 * Grid    x = tiles of 64 tokens; y = groups of FA_ROTARY_HEADS heads of q,
 *         then those of k; z = B.
 * Lanes   a unit of a token each; it keeps its cosines and sines for all heads
 *         of the group.
 * LDS     none.
 * Edges   tokens, heads and channels past the end are not touched.
 * Order   the second product is rounded, then added to the first by an fma.
 * Error   of fp32 and fp64 half an ulp of that product and of the result; types
 *         of 16 bits are rounded once, from fp32.  NaN and Inf stay in their
 *         pair.
 * Source  RoFormer (arXiv 2104.09864), equation 34.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_ROTARY_H
#define FA_KERNELS_ROTARY_H

#include "store.h"

typedef const FA_CONSTANT fa_rotary_args *fa_rotary_in;

/* What elements of an fa_dtype are computed in. */
#define FA_ROTARY_KIND(STORED) ((STORED) == FA_F64 ? (int)FA_F64 : (int)FA_F32)
#define FA_ROTARY_NUMBER(STORED) FA_NUMBER(FA_ROTARY_KIND(STORED))

/* What a workgroup turns: the tokens of a tile, a few heads. */
typedef struct fa_rotary_tile {
    fa_rotary_in args; /* for the tables, whose strides find no registers */
    fa_global_in in;   /* first token and head */
    fa_global_out out;
    int64_t in_token; /* strides in bytes */
    int64_t in_head;
    int64_t in_channel;
    int64_t out_token;
    int64_t out_head;
    int64_t out_channel;
    int batch;
    int first; /* token */
    uint32_t tokens;
    int heads;
    int channels;
    int rotary; /* R */
    bool interleaved;
} fa_rotary_tile;

/* -- 8, 16 or 32 bytes as numbers ------------------------------------------ */

template <int BYTES>
static FA_DEVICE void fa_read_words(uint32_t *to, fa_global_in at)
{
    if constexpr (BYTES == 8) {
        u32x2 x = *(const FA_GLOBAL u32x2 *)at;
        to[0] = x.x;
        to[1] = x.y;
    } else {
#pragma unroll
        for (int i = 0; i < BYTES / 16; i++) {
            u32x4 x = ((const FA_GLOBAL u32x4 *)at)[i];
            to[4 * i] = x.x;
            to[4 * i + 1] = x.y;
            to[4 * i + 2] = x.z;
            to[4 * i + 3] = x.w;
        }
    }
}

/* COUNT elements of type STORED from so many words. */
template <int STORED, int COUNT>
static FA_DEVICE void fa_numbers_of(FA_ROTARY_NUMBER(STORED) * to,
                                    const uint32_t *word)
{
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        if constexpr (STORED == FA_F64) {
            u32x2 both;
            both.x = word[2 * i];
            both.y = word[2 * i + 1];
            to[i] = fa_bits<double>(both);
        } else if constexpr (STORED == FA_F32) {
            to[i] = fa_bits<float>(word[i]);
        } else {
            to[i] = fa_unpack_as(STORED, word[i / 2] >> (i % 2 * 16));
        }
    }
}

/* 16 bytes. */
template <int STORED>
static FA_DEVICE u32x4 fa_granule_of(const FA_ROTARY_NUMBER(STORED) * x)
{
    uint32_t word[4];
    u32x4 y;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (STORED == FA_F64) {
            u32x2 both = fa_bits<u32x2>(x[i / 2]);
            word[i] = i % 2 == 0 ? both.x : both.y;
        } else if constexpr (STORED == FA_F32) {
            word[i] = fa_bits<uint32_t>(x[i]);
        } else {
            word[i] = fa_pack_as(STORED, x[2 * i], x[2 * i + 1]);
        }
    }
    y.x = word[0];
    y.y = word[1];
    y.z = word[2];
    y.w = word[3];
    return y;
}

template <int STORED>
static FA_DEVICE FA_ROTARY_NUMBER(STORED) fa_read_element(fa_global_in at)
{
    if constexpr (STORED == FA_F64) {
        return *(const FA_GLOBAL double *)at;
    } else if constexpr (STORED == FA_F32) {
        return *(const FA_GLOBAL float *)at;
    } else {
        return fa_unpack_as(STORED, *(const FA_GLOBAL uint16_t *)at);
    }
}

/* -- angles ---------------------------------------------------------------- */

/* COUNT entries of a table of type TABLE, from `first` on of a token's row. */
template <int TABLE, int COUNT>
static FA_DEVICE void fa_read_table(FA_ROTARY_NUMBER(TABLE) * to,
                                    const FA_CONSTANT fa_view *view, int batch,
                                    int64_t token, int first, bool wide)
{
    enum { BYTES = FA_ELEMENT(TABLE) };
    int64_t channel = view->stride[3] * BYTES;
    fa_global_in row =
        (fa_global_in)view->data +
        (batch * view->stride[0] + token * view->stride[1]) * BYTES;

    if constexpr (COUNT * BYTES >= 8) {
        if (wide) {
            uint32_t word[COUNT * BYTES / 4];
            fa_read_words<COUNT * BYTES>(word, row + first * BYTES);
            fa_numbers_of<TABLE, COUNT>(to, word);
            return;
        }
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        to[i] = fa_read_element<TABLE>(row + (first + i) * channel);
    }
}

/* Cosines and sines of COUNT pairs from `first` on. */
template <int STORED, int COUNT>
static FA_DEVICE void fa_read_angles(const fa_rotary_tile *t, uint32_t token,
                                     int first,
                                     FA_ROTARY_NUMBER(STORED) * cosine,
                                     FA_ROTARY_NUMBER(STORED) * sine)
{
    enum { WIDER = FA_ROTARY_KIND(STORED) };
    fa_rotary_in a = fa_again(t->args);
    int64_t row = t->first + (int64_t)token;
    bool wide = (a->wide & FA_ROTARY_WIDE_TABLES) != 0;
    bool inverse = a->inverse != 0;

    if (STORED == WIDER || a->stored_table != STORED) {
        fa_read_table<WIDER, COUNT>(cosine, &a->cos, t->batch, row, first,
                                    wide);
        fa_read_table<WIDER, COUNT>(sine, &a->sin, t->batch, row, first, wide);
    } else {
        fa_read_table<STORED, COUNT>(cosine, &a->cos, t->batch, row, first,
                                     wide);
        fa_read_table<STORED, COUNT>(sine, &a->sin, t->batch, row, first, wide);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        sine[i] = inverse ? -sine[i] : sine[i];
    }
}

template <typename Number>
static FA_DEVICE void fa_turn(Number *x, Number *y, Number cosine, Number sine)
{
    Number turned = fa_fma(*x, cosine, -(*y * sine));
    *y = fa_fma(*y, cosine, *x * sine);
    *x = turned;
}

/* -- units ----------------------------------------------------------------- */

/* A granule of pairs that lie apart: one of each half. */
template <int STORED>
static FA_DEVICE void fa_turn_halves(const fa_rotary_tile *t, uint32_t token,
                                     int unit)
{
    enum { GRANULE = 16 / FA_ELEMENT(STORED) };
    FA_ROTARY_NUMBER(STORED) cosine[GRANULE];
    FA_ROTARY_NUMBER(STORED) sine[GRANULE];
    int half = t->rotary / 2 * FA_ELEMENT(STORED);
    fa_global_in in = t->in + token * t->in_token + unit * 16;
    fa_global_out out = t->out + token * t->out_token + unit * 16;

    fa_read_angles<STORED, GRANULE>(t, token, unit * GRANULE, cosine, sine);
#pragma unroll 1
    for (int h = 0; h < t->heads; h++) {
        uint32_t word[8];
        FA_ROTARY_NUMBER(STORED) x[GRANULE];
        FA_ROTARY_NUMBER(STORED) y[GRANULE];
        fa_read_words<16>(word, in);
        fa_read_words<16>(word + 4, in + half);
        fa_numbers_of<STORED, GRANULE>(x, word);
        fa_numbers_of<STORED, GRANULE>(y, word + 4);
#pragma unroll
        for (int i = 0; i < GRANULE; i++) {
            fa_turn(&x[i], &y[i], cosine[i], sine[i]);
        }
        *(FA_GLOBAL u32x4 *)out = fa_granule_of<STORED>(x);
        *(FA_GLOBAL u32x4 *)(out + half) = fa_granule_of<STORED>(y);
        in += t->in_head;
        out += t->out_head;
    }
}

/* A granule of pairs of neighbours. */
template <int STORED>
static FA_DEVICE void fa_turn_neighbours(const fa_rotary_tile *t,
                                         uint32_t token, int unit)
{
    enum { GRANULE = 16 / FA_ELEMENT(STORED), PAIRS = GRANULE / 2 };
    FA_ROTARY_NUMBER(STORED) cosine[PAIRS];
    FA_ROTARY_NUMBER(STORED) sine[PAIRS];
    fa_global_in in = t->in + token * t->in_token + unit * 16;
    fa_global_out out = t->out + token * t->out_token + unit * 16;

    fa_read_angles<STORED, PAIRS>(t, token, unit * PAIRS, cosine, sine);
#pragma unroll 1
    for (int h = 0; h < t->heads; h++) {
        uint32_t word[4];
        FA_ROTARY_NUMBER(STORED) x[GRANULE];
        fa_read_words<16>(word, in);
        fa_numbers_of<STORED, GRANULE>(x, word);
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            fa_turn(&x[2 * i], &x[2 * i + 1], cosine[i], sine[i]);
        }
        *(FA_GLOBAL u32x4 *)out = fa_granule_of<STORED>(x);
        in += t->in_head;
        out += t->out_head;
    }
}

/* What is not turned, as bits: so much at once as Bits holds. */
template <typename Bits>
static FA_DEVICE void fa_copy(const fa_rotary_tile *t, fa_global_in in,
                              fa_global_out out)
{
#pragma unroll 1
    for (int h = 0; h < t->heads; h++) {
        *(FA_GLOBAL Bits *)out = *(const FA_GLOBAL Bits *)in;
        in += t->in_head;
        out += t->out_head;
    }
}

/* One pair, at any addresses. */
template <int STORED>
static FA_DEVICE void fa_turn_pair(const fa_rotary_tile *t, uint32_t token,
                                   int pair)
{
    FA_ROTARY_NUMBER(STORED) cosine[1];
    FA_ROTARY_NUMBER(STORED) sine[1];
    int first = t->interleaved ? 2 * pair : pair;
    int apart = t->interleaved ? 1 : t->rotary / 2;
    fa_global_in in = t->in + token * t->in_token + first * t->in_channel;
    fa_global_out out = t->out + token * t->out_token + first * t->out_channel;
    int64_t in_apart = apart * t->in_channel;
    int64_t out_apart = apart * t->out_channel;

    fa_read_angles<STORED, 1>(t, token, pair, cosine, sine);
#pragma unroll 1
    for (int h = 0; h < t->heads; h++) {
        FA_ROTARY_NUMBER(STORED) x = fa_read_element<STORED>(in);
        FA_ROTARY_NUMBER(STORED) y = fa_read_element<STORED>(in + in_apart);
        fa_turn(&x, &y, cosine[0], sine[0]);
        fa_store_element<FA_ROTARY_KIND(STORED)>(out, STORED, x);
        fa_store_element<FA_ROTARY_KIND(STORED)>(out + out_apart, STORED, y);
        in += t->in_head;
        out += t->out_head;
    }
}

/* -- a tile ---------------------------------------------------------------- */

template <int STORED>
static FA_DEVICE void fa_turn_wide(const fa_rotary_tile *t, uint32_t tid)
{
    enum { GRANULE = 16 / FA_ELEMENT(STORED) };
    uint32_t rotary = (uint32_t)t->rotary / GRANULE;
    uint32_t turned = t->interleaved ? rotary : rotary / 2;
    uint32_t units = turned + (uint32_t)t->channels / GRANULE - rotary;

#pragma unroll 1
    for (uint32_t i = tid; i < t->tokens * units; i += FA_THREADS) {
        uint32_t token = i / units;
        int unit = (int)(i % units);

        if (unit >= (int)turned) {
            int at = (unit - (int)turned + (int)rotary) * 16;
            fa_copy<u32x4>(t, t->in + token * t->in_token + at,
                           t->out + token * t->out_token + at);
        } else if (t->interleaved) {
            fa_turn_neighbours<STORED>(t, token, unit);
        } else {
            fa_turn_halves<STORED>(t, token, unit);
        }
    }
}

template <int STORED>
static FA_DEVICE void fa_turn_narrow(const fa_rotary_tile *t, uint32_t tid)
{
    int pairs = t->rotary / 2;
    uint32_t units = (uint32_t)(t->channels - pairs);

#pragma unroll 1
    for (uint32_t i = tid; i < t->tokens * units; i += FA_THREADS) {
        uint32_t token = i / units;
        int unit = (int)(i % units);

        if (unit < pairs) {
            fa_turn_pair<STORED>(t, token, unit);
            continue;
        }
        int channel = unit + pairs;
        fa_global_in in = t->in + token * t->in_token + channel * t->in_channel;
        fa_global_out out =
            t->out + token * t->out_token + channel * t->out_channel;
        if constexpr (STORED == FA_F64) {
            fa_copy<u32x2>(t, in, out);
        } else if constexpr (STORED == FA_F32) {
            fa_copy<uint32_t>(t, in, out);
        } else {
            fa_copy<uint16_t>(t, in, out);
        }
    }
}

template <int STORED> static FA_DEVICE void fa_rotary_of(fa_rotary_in a)
{
    enum { BYTES = FA_ELEMENT(STORED) };
    int groups_q = (a->heads + FA_ROTARY_HEADS - 1) / FA_ROTARY_HEADS;
    int group = (int)fa_group_y();
    int batch = (int)fa_group_z();
    int token = (int)fa_group_x() * FA_ROTARY_TOKENS;
    int of_k = group >= groups_q ? 1 : 0;
    int head = (group - of_k * groups_q) * FA_ROTARY_HEADS;
    int heads = of_k != 0 ? a->heads_k : a->heads;
    const FA_CONSTANT fa_view *in = &a->in[of_k];
    const FA_CONSTANT fa_view *out = &a->out[of_k];
    fa_rotary_tile t;

    t.args = a;
    t.in =
        (fa_global_in)in->data +
        (batch * in->stride[0] + token * in->stride[1] + head * in->stride[2]) *
            BYTES;
    t.out = (fa_global_out)out->data +
            (batch * out->stride[0] + token * out->stride[1] +
             head * out->stride[2]) *
                BYTES;
    t.in_token = in->stride[1] * BYTES;
    t.in_head = in->stride[2] * BYTES;
    t.in_channel = in->stride[3] * BYTES;
    t.out_token = out->stride[1] * BYTES;
    t.out_head = out->stride[2] * BYTES;
    t.out_channel = out->stride[3] * BYTES;
    t.batch = batch;
    t.first = token;
    t.tokens = (uint32_t)fa_min_int(FA_ROTARY_TOKENS, a->seqlen - token);
    t.heads = fa_min_int(FA_ROTARY_HEADS, heads - head);
    t.channels = a->head_dim;
    t.rotary = a->rotary_dim;
    t.interleaved = a->interleaved != 0;
    if ((a->wide >> of_k & 1) != 0) {
        fa_turn_wide<STORED>(&t, fa_thread());
    } else {
        fa_turn_narrow<STORED>(&t, fa_thread());
    }
}

template <int KIND> static FA_DEVICE void fa_rotary(fa_rotary_in a)
{
    if constexpr (KIND == FA_F64) {
        fa_rotary_of<FA_F64>(a);
    } else if (a->stored == FA_F16) {
        fa_rotary_of<FA_F16>(a);
    } else if (a->stored == FA_BF16) {
        fa_rotary_of<FA_BF16>(a);
    } else {
        fa_rotary_of<FA_F32>(a);
    }
}

#endif
