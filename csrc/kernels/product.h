/* product.h: the two matrix products of attention, from LDS.
 *
 * A workgroup owns 32 * OWN rows and walks over the others, 64 at a time.
 * Every 32 lanes own 4 * OWN rows: lane group g = lane / 8 mod 4 has rows
 * g + 4i, lane c = lane mod 8 has rows c + 8j of the step.  Owned rows never
 * leave their 8 lanes, so wave32 and wave64 run the same code.
 *
 * fa_multiply_rows   S[i][j] += own row . walked row
 * fa_add_share       A[i][.] += sum over rows of a share of weight * row
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_PRODUCT_H
#define FA_KERNELS_PRODUCT_H

#include "columns.h"

enum { FA_WALKED = 8 }; /* rows of a step that one lane has */

/* Sizes that follow from the kind of number, the head-dim bucket and the
 * rows that a lane owns. */
template <int KIND, int DIM, int OWN> struct fa_shape {
    enum {
        ROWS = 32 * OWN,
        WAVE_ROWS = FA_WAVE / 8 * OWN,
        CHUNK = FA_CHUNK_BYTES / FA_OPERAND(KIND), /* channels */
        CHUNKS = (DIM + CHUNK - 1) / CHUNK,
        OWN_BYTES = ROWS * FA_CHUNK_BYTES,
        CHANNELS = DIM / 8,                 /* of a sum, in one lane */
        GROUP = FA_IS_DOUBLE(KIND) ? 2 : 4, /* neighbours among them */
        GROUPS = CHANNELS / GROUP,          /* 8 * GROUP channels apart */
        SHARE_AREA = FA_THREADS * 8 * OWN
    };
};

static FA_DEVICE int fa_own_row(int own, uint32_t tid, int i)
{
    return (int)(tid >> 5) * 4 * own + (int)((tid >> 3) & 3) + 4 * i;
}

/* The first of GROUP neighbouring channels that this lane has. */
static FA_DEVICE int fa_channel(int group, uint32_t tid, int u)
{
    return group * ((int)(tid & 7) + 8 * u);
}

template <int OWN, typename Number>
static FA_DEVICE void fa_clear_products(Number s[OWN][FA_WALKED])
{
#pragma unroll
    for (int i = 0; i < OWN; i++) {
#pragma unroll
        for (int j = 0; j < FA_WALKED; j++) {
            s[i][j] = 0;
        }
    }
}

/* S += own . walked over granules from .. to - 1 of a chunk.  One granule at a
 * time: unrolling further makes the compiler hoist all LDS reads and spill.
 * XOR with the granule's offset undoes the granule order that stage.h
 * describes. */
template <int KIND, int OWN>
static FA_DEVICE void fa_multiply_rows(FA_NUMBER(KIND) s[OWN][FA_WALKED],
                                       fa_lds own, fa_lds walk, int from,
                                       int to, uint32_t tid)
{
    uint32_t g = (tid >> 3) & 3;
    uint32_t c = tid & 7;
    uint32_t own_base =
        (uint32_t)fa_own_row(OWN, tid, 0) * FA_CHUNK_BYTES + (g << 4);
    uint32_t walk_base = c * FA_CHUNK_BYTES + (c << 4);

#pragma unroll 1
    for (int x = from * 16; x < to * 16; x += 16) {
#pragma unroll
        for (int half = 0; half < 16; half += 8) {
            u32x2 a[OWN];
            u32x2 b[FA_WALKED];
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                a[i] = fa_lds_load2(own + (own_base ^ (x + half)) +
                                    4 * i * FA_CHUNK_BYTES);
            }
#pragma unroll
            for (int j = 0; j < FA_WALKED; j++) {
                b[j] = fa_lds_load2(walk + (walk_base ^ (x + half)) +
                                    8 * j * FA_CHUNK_BYTES);
            }
#pragma unroll
            for (int i = 0; i < OWN; i++) {
#pragma unroll
                for (int j = 0; j < FA_WALKED; j++) {
                    s[i][j] = fa_multiply<KIND>(a[i], b[j], s[i][j]);
                }
            }
        }
    }
}

/* The same for the first `granules` of a chunk; of fp32 by FA_APART_GRANULES.
 * This must not depend on the pass: the backward needs the forward's S to the
 * bit. */
template <int KIND, int DIM, int OWN>
static FA_DEVICE void fa_multiply_chunk(FA_NUMBER(KIND) s[OWN][FA_WALKED],
                                        fa_lds own, fa_lds walk, int granules,
                                        uint32_t tid)
{
    if constexpr (KIND == FA_F32) {
        enum { APART = FA_APART_GRANULES(DIM) };
#pragma unroll 1
        for (int from = 0; from < granules; from += APART) {
            float part[OWN][FA_WALKED];
            fa_clear_products<OWN>(part);
            fa_multiply_rows<KIND, OWN>(
                part, own, walk, from, fa_min_int(from + APART, granules), tid);
#pragma unroll
            for (int i = 0; i < OWN; i++) {
#pragma unroll
                for (int j = 0; j < FA_WALKED; j++) {
                    s[i][j] += part[i][j];
                }
            }
        }
    } else {
        fa_multiply_rows<KIND, OWN>(s, own, walk, 0, granules, tid);
    }
}

/* -- weights --------------------------------------------------------------- */

/* Of an fp16 weight: P is at most 1, so 2^12 P is far from fp16's largest
 * value, and its smallest normal number is then 2^-26. */
#define FA_P_LOG2(KIND) (FA_IS_HALF(KIND) ? 12.0f : 0.0f)
#define FA_P_SCALE 0x1p12f

/* A lane's weights of one owned row, as its neighbours need them: fp16 in
 * pairs of rows 8 apart, others as they are. */
template <int KIND> struct fa_weights {
    FA_NUMBER(KIND) of[FA_WALKED];
};
template <> struct fa_weights<FA_F16> {
    uint32_t of[FA_WALKED / 2];
};
template <> struct fa_weights<FA_BF16> {
    uint32_t of[FA_WALKED / 2];
};

/* The empty asm in fa_opaque makes the compiler pack here and not at the use,
 * where twice the registers would have been kept alive. */
template <int KIND>
static FA_DEVICE void fa_set_weights(fa_weights<KIND> *w,
                                     const FA_NUMBER(KIND) p[FA_WALKED])
{
    if constexpr (FA_IS_HALF(KIND)) {
#pragma unroll
        for (int n = 0; n < FA_WALKED / 2; n++) {
            w->of[n] = fa_opaque(fa_pack_halves(p[2 * n], p[2 * n + 1]));
        }
    } else {
#pragma unroll
        for (int j = 0; j < FA_WALKED; j++) {
            w->of[j] = p[j];
        }
    }
}

/* sum and all the weights. */
template <int KIND>
static FA_DEVICE FA_NUMBER(KIND)
    fa_add_weights(FA_NUMBER(KIND) sum, const fa_weights<KIND> *w)
{
    const uint32_t ones = 0x3c003c00; /* fp16 */

    if constexpr (FA_IS_HALF(KIND)) {
#pragma unroll
        for (int n = 0; n < FA_WALKED / 2; n++) {
            sum = fa_dot2(w->of[n], ones, sum);
        }
    } else {
#pragma unroll
        for (int j = 0; j < FA_WALKED; j++) {
            sum += w->of[j];
        }
    }
    return sum;
}

/* Share number n: 8 bytes. */
template <int KIND>
static FA_DEVICE u32x2 fa_share(const fa_weights<KIND> *w, int n)
{
    u32x2 y;
    if constexpr (FA_IS_DOUBLE(KIND)) {
        y = fa_bits<u32x2>(w->of[n]);
    } else {
        y.x = fa_bits<uint32_t>(w->of[2 * n]);
        y.y = fa_bits<uint32_t>(w->of[2 * n + 1]);
    }
    return y;
}

/* Four neighbouring channels (two of doubles) of one slot, times its weight. */
template <int KIND>
static FA_DEVICE void fa_add_group(FA_NUMBER(KIND) * sum, u32x2 unit, int slot,
                                   u32x4 x)
{
    uint32_t w = slot == 0 ? unit.x : unit.y;
    uint32_t of[4] = {x.x, x.y, x.z, x.w};

    if constexpr (FA_IS_DOUBLE(KIND)) {
        u32x2 half[2];
        half[0].x = x.x;
        half[0].y = x.y;
        half[1].x = x.z;
        half[1].y = x.w;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            sum[e] = fa_fma(fa_bits<double>(unit), fa_bits<double>(half[e]),
                            (double)sum[e]);
        }
    } else {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            sum[e] = FA_IS_HALF(KIND)
                         ? fa_dot2(w, of[e], (float)sum[e])
                         : fa_fma(fa_bits<float>(w), fa_bits<float>(of[e]),
                                  (float)sum[e]);
        }
    }
}

/* fp32: 16 rows are summed apart and then added, or the roundings of
 * thousands of rows add up to more than PyTorch's.  A group of channels at a
 * time, because there are no registers for one more set of sums; the units are
 * read again for each. */
template <int KIND, int DIM, int OWN>
static FA_DEVICE void
fa_add_apart(FA_NUMBER(KIND) sum[OWN][fa_shape<KIND, DIM, OWN>::CHANNELS],
             fa_lds columns, fa_lds area, uint32_t tid)
{
    typedef fa_shape<KIND, DIM, OWN> shape;
    enum { SLOT = FA_SLOT_BYTES(KIND, DIM), STRIDE = FA_THREADS * 8 };

#pragma unroll
    for (int u = 0; u < shape::GROUPS; u++) {
        float part[OWN][shape::GROUP];

        fa_keep_order();
#pragma unroll
        for (int i = 0; i < OWN; i++) {
#pragma unroll
            for (int e = 0; e < shape::GROUP; e++) {
                part[i][e] = 0.0f;
            }
        }
#pragma unroll 1
        for (int unit = 0; unit < 8; unit++) {
            fa_lds from = columns + (tid & 7) * 16 + unit * 2 * SLOT + u * 128;
            u32x2 x[OWN];
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                x[i] = fa_lds_load2(area + (tid & ~7u) * 8 + unit * 8 +
                                    i * STRIDE);
            }
#pragma unroll
            for (int slot = 0; slot < 2; slot++) {
                u32x4 y = fa_lds_load4(from + slot * SLOT);
#pragma unroll
                for (int i = 0; i < OWN; i++) {
                    fa_add_group<KIND>(part[i], x[i], slot, y);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < OWN; i++) {
#pragma unroll
            for (int e = 0; e < shape::GROUP; e++) {
                sum[i][u * shape::GROUP + e] += part[i][e];
            }
        }
    }
}

template <int KIND, int DIM, int OWN>
static FA_DEVICE void
fa_clear_sums(FA_NUMBER(KIND) sum[OWN][fa_shape<KIND, DIM, OWN>::CHANNELS])
{
#pragma unroll
    for (int i = 0; i < OWN; i++) {
#pragma unroll
        for (int e = 0; e < fa_shape<KIND, DIM, OWN>::CHANNELS; e++) {
            sum[i][e] = 0;
        }
    }
}

/* sum += x, and what rounding takes from that to *rest (Knuth's two-sum), which
 * is no number any more once the sum is NaN or Inf. */
template <typename Number>
static FA_DEVICE void fa_add_exactly(Number *sum, Number *rest, Number x)
{
    Number made = *sum + x;
    Number part = made - *sum;

    *rest += (*sum - (made - part)) + (x - part);
    *sum = made;
}

/* rest: NULL, or what rounding took from `to`. */
template <int KIND, int DIM, int OWN>
static FA_DEVICE void
fa_add_sums(FA_NUMBER(KIND) to[OWN][fa_shape<KIND, DIM, OWN>::CHANNELS],
            FA_NUMBER(KIND) (*rest)[fa_shape<KIND, DIM, OWN>::CHANNELS],
            const FA_NUMBER(KIND) sum[OWN][fa_shape<KIND, DIM, OWN>::CHANNELS])
{
#pragma unroll
    for (int i = 0; i < OWN; i++) {
#pragma unroll
        for (int e = 0; e < fa_shape<KIND, DIM, OWN>::CHANNELS; e++) {
            if (rest != nullptr) {
                fa_add_exactly(&to[i][e], &rest[i][e], sum[i][e]);
            } else {
                to[i][e] += sum[i][e];
            }
        }
    }
}

/* A += W X for one share: its 8 units come from lanes c = 0..7 in turn, each
 * with its slots, and `columns` is the first of them in LDS.  Units lie in
 * the order of the threads, which is free of bank conflicts both ways. */
template <int KIND, int DIM, int OWN>
static FA_DEVICE void
fa_add_share(FA_NUMBER(KIND) sum[OWN][fa_shape<KIND, DIM, OWN>::CHANNELS],
             const fa_weights<KIND> w[OWN], int n, fa_lds columns, fa_lds area,
             uint32_t tid)
{
    typedef fa_shape<KIND, DIM, OWN> shape;
    enum {
        SLOTS = FA_IS_DOUBLE(KIND) ? 1 : 2, /* of a unit */
        SLOT = FA_SLOT_BYTES(KIND, DIM),
        STRIDE = FA_THREADS *
            8 /* bytes from one owned row's unit to the next */
    };

    fa_wave_sync(); /* the units of the last share are read */
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        u32x2 unit = fa_share(&w[i], n);
        fa_lds_store2(area + tid * 8 + i * STRIDE, unit.x, unit.y);
    }
    fa_wave_sync();
    if constexpr (KIND == FA_F32) {
        fa_add_apart<KIND, DIM, OWN>(sum, columns, area, tid);
        return;
    }
#pragma unroll 1
    for (int unit = 0; unit < 8; unit++) {
        fa_lds from = columns + (tid & 7) * 16 + unit * SLOTS * SLOT;
        u32x2 x[OWN];
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            x[i] = fa_lds_load2(area + (tid & ~7u) * 8 + unit * 8 + i * STRIDE);
        }
#pragma unroll
        for (int slot = 0; slot < SLOTS; slot++) {
#pragma unroll
            for (int u = 0; u < shape::GROUPS; u++) {
                if (u % 4 == 0 && shape::GROUPS >= 4) {
                    fa_keep_order();
                }
                u32x4 y = fa_lds_load4(from + slot * SLOT + u * 128);
#pragma unroll
                for (int i = 0; i < OWN; i++) {
                    fa_add_group<KIND>(&sum[i][u * shape::GROUP], x[i], slot,
                                       y);
                }
            }
        }
    }
}

#endif
