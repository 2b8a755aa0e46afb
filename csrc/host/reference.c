/* reference.c: attention and its gradients in plain C and double precision.
 *
 * Slow and obvious: what every kernel is compared with in the C tests.  The
 * product never falls back to it.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "host/reference.h"

#include <math.h>
#include <string.h>

double fa_half_to_double(uint16_t half)
{
    const int exponent = (half >> 10) & 31;
    const int fraction = half & 1023;
    double value = exponent == 0    ? ldexp(fraction, -24)
                   : exponent != 31 ? ldexp(1024 + fraction, exponent - 25)
                   : fraction == 0  ? (double)INFINITY
                                    : (double)NAN;
    return half & 0x8000 ? -value : value;
}

uint16_t fa_half_from_double(double value)
{
    const uint16_t sign = signbit(value) ? 0x8000 : 0;
    const double size = fabs(value);
    if (isnan(value)) {
        return (uint16_t)(sign | 0x7e00);
    }
    if (size >= 65520.0) { /* rounds past 65504, the largest */
        return (uint16_t)(sign | 0x7c00);
    }
    int exponent = 0;
    (void)frexp(size, &exponent); /* size < 2^exponent */
    /* Ten bits follow the leading one; below 2^-14 the steps stay 2^-24. */
    const int step = size < 0x1p-14 ? -24 : exponent - 11;
    const int count = (int)nearbyint(ldexp(size, -step));
    /* A count of 2048 is the next binade's 1024: the addition carries. */
    return (uint16_t)(sign + (step + 24) * 1024 + count);
}

double fa_bfloat_to_double(uint16_t bfloat)
{
    const uint32_t bits = (uint32_t)bfloat << 16; /* the high half of a float */
    float value = 0.0F;
    memcpy(&value, &bits, sizeof value);
    return (double)value;
}

uint16_t fa_bfloat_from_double(double value)
{
    const uint16_t sign = signbit(value) ? 0x8000 : 0;
    const double size = fabs(value);
    int exponent = 0;
    uint32_t bits = 0;
    if (isnan(value)) {
        return (uint16_t)(sign | 0x7fc0);
    }
    if (size >= 0x1.ffp127) { /* rounds past 0x1.fep127, the largest */
        return (uint16_t)(sign | 0x7f80);
    }
    (void)frexp(size, &exponent); /* size < 2^exponent */
    /* Seven bits follow the leading one; below 2^-126 the steps stay 2^-133. */
    const int step = size < 0x1p-126 ? -133 : exponent - 8;
    const float rounded = (float)ldexp(nearbyint(ldexp(size, -step)), step);
    memcpy(&bits, &rounded, sizeof bits);
    return (uint16_t)(sign | bits >> 16);
}

/* -- elements -------------------------------------------------------------- */

static int64_t offset(const fa_tensor *t, int64_t b, int64_t h, int64_t i,
                      int64_t d)
{
    return b * t->stride[0] + h * t->stride[1] + i * t->stride[2] +
           d * t->stride[3];
}

double fa_element_get(const fa_tensor *t, int64_t b, int64_t h, int64_t i,
                      int64_t d)
{
    const int64_t at = offset(t, b, h, i, d);
    switch (t->dtype) {
    case FA_F16:
        return fa_half_to_double(((const uint16_t *)t->data)[at]);
    case FA_BF16:
        return fa_bfloat_to_double(((const uint16_t *)t->data)[at]);
    case FA_F32:
        return (double)((const float *)t->data)[at];
    default:
        return ((const double *)t->data)[at];
    }
}

void fa_element_set(const fa_tensor *t, int64_t b, int64_t h, int64_t i,
                    int64_t d, double value)
{
    const int64_t at = offset(t, b, h, i, d);
    switch (t->dtype) {
    case FA_F16:
        ((uint16_t *)t->data)[at] = fa_half_from_double(value);
        break;
    case FA_BF16:
        ((uint16_t *)t->data)[at] = fa_bfloat_from_double(value);
        break;
    case FA_F32:
        ((float *)t->data)[at] = (float)value;
        break;
    default:
        ((double *)t->data)[at] = value;
        break;
    }
}

/* -- what a row sees ------------------------------------------------------- */

/* Where a row of queries lies: batch, head, its key head, number. */
typedef struct place {
    int64_t b, h, hk, i;
} place;

static place place_of(const fa_problem *p, int64_t row)
{
    const int64_t heads = p->q.size[1];
    const int64_t h = row / p->q.size[2] % heads;
    return (place){.b = row / p->q.size[2] / heads,
                   .h = h,
                   .hk = h / (heads / p->k.size[1]),
                   .i = row % p->q.size[2]};
}

/* The offset of a score in a tensor whose sizes may be 1. */
static int64_t score_at(const fa_tensor *t, const place *at, int64_t j)
{
    const int64_t index[4] = {at->b, at->h, at->i, j};
    int64_t sum = 0;
    for (int d = 0; d < 4; d++) {
        sum += t->size[d] == 1 ? 0 : index[d] * t->stride[d];
    }
    return sum;
}

/* The key at distance 0. */
static int64_t own_key(const fa_problem *p, int64_t i)
{
    const fa_span_of_row *spans = p->features.span_q.data;
    const bool top_left =
        p->causal == FA_CAUSAL_TOP_LEFT || p->causal == FA_CAUSAL_NONE_TOP_LEFT;
    return spans != NULL ? i + spans[i].diagonal
           : top_left    ? i
                         : i + p->k.size[2] - p->q.size[2];
}

static bool is_in_window(const fa_problem *p, int64_t i, int64_t j)
{
    const int64_t after = j - own_key(p, i);
    const bool causal =
        p->causal == FA_CAUSAL_TOP_LEFT || p->causal == FA_CAUSAL_BOTTOM_RIGHT;
    const int64_t most = causal                 ? 0
                         : p->window_right >= 0 ? p->window_right
                                                : INT64_MAX;
    return after <= most && (p->window_left < 0 || -after <= p->window_left ||
                             j < p->features.sink_keys);
}

static bool is_in_block(const fa_problem *p, const place *at, int64_t j)
{
    const fa_features *f = &p->features;
    const fa_tensor *t = &f->blocks;
    const place block = {at->b, at->h, 0, at->i / f->block_q};
    const int32_t *list = t->data;
    list += (t->size[0] == 1 ? 0 : block.b * t->stride[0]) +
            (t->size[1] == 1 ? 0 : block.h * t->stride[1]) +
            block.i * t->size[3];
    for (int32_t n = 1; n <= list[0]; n++) {
        if (list[n] == j / f->block_k) {
            return true;
        }
    }
    return false;
}

static bool sees(const fa_problem *p, const place *at, int64_t j)
{
    const fa_features *f = &p->features;
    const fa_span_of_row *spans = f->span_q.data;
    const uint8_t *mask = f->mask.data;
    if ((mask != NULL && mask[score_at(&f->mask, at, j)] == 0) ||
        (f->blocks.data != NULL && !is_in_block(p, at, j))) {
        return false;
    }
    return spans == NULL ? is_in_window(p, at->i, j)
                         : spans[at->i].from <= j && j <= spans[at->i].to;
}

/* -- dropout --------------------------------------------------------------- */

/* Philox4x32-10, Salmon and others, SC 2011. */
void fa_reference_philox(const uint32_t counter[4], const uint32_t key[2],
                         uint32_t out[4])
{
    uint32_t k[2] = {key[0], key[1]};
    memcpy(out, counter, 4 * sizeof out[0]);
    for (int round = 0; round < 10; round++) {
        const uint64_t a = UINT64_C(0xd2511f53) * out[0];
        const uint64_t b = UINT64_C(0xcd9e8d57) * out[2];
        const uint32_t next[4] = {
            (uint32_t)(b >> 32) ^ out[1] ^ k[0], (uint32_t)b,
            (uint32_t)(a >> 32) ^ out[3] ^ k[1], (uint32_t)a};
        memcpy(out, next, sizeof next);
        k[0] += 0x9e3779b9;
        k[1] += 0xbb67ae85;
    }
}

/* What dropout multiplies a weight with. */
static double dropped(const fa_problem *p, const place *at, int64_t j)
{
    const fa_features *f = &p->features;
    const double keep = fmax(1.0, floor((1.0 - f->dropout_p) * 65536.0 + 0.5));
    uint32_t words[4];
    if (keep >= 65536.0) {
        return 1.0;
    }
    const uint64_t seed = (uint64_t)f->seed[0];
    const uint32_t counter[4] = {
        (uint32_t)((j >> 6) * 8 + (j & 7)), (uint32_t)at->i,
        (uint32_t)(at->b * p->q.size[1] + at->h), (uint32_t)f->seed[1]};
    fa_reference_philox(
        counter, (uint32_t[2]){(uint32_t)seed, (uint32_t)(seed >> 32)}, words);
    const int64_t half = j >> 3 & 7;
    const uint32_t bits = words[half / 2] >> 16 * (half % 2) & 0xffff;
    const double number = bits < 0x8000 ? bits : (double)bits - 65536.0;
    return number < keep - 32768.0 ? 65536.0 / keep : 0.0;
}

/* -- attention ------------------------------------------------------------- */

/* The score of a key that is seen; *slope: by how much it follows q.k. */
static double score(const fa_problem *p, const place *at, int64_t j,
                    double *slope)
{
    const fa_features *f = &p->features;
    double x = 0.0;
    for (int64_t d = 0; d < p->q.size[3]; d++) {
        x += fa_element_get(&p->q, at->b, at->h, at->i, d) *
             fa_element_get(&p->k, at->b, at->hk, j, d);
    }
    x *= p->scale;
    *slope = p->scale;
    if (f->softcap > 0.0) {
        const double t = tanh(x / f->softcap);
        x = f->softcap * t;
        *slope *= 1.0 - t * t;
    }
    if (f->alibi.data != NULL) {
        const int64_t b = f->alibi.size[0] == 1 ? 0 : at->b;
        const int64_t distance = own_key(p, at->i) - j;
        x -= fa_element_get(&f->alibi, b, at->h, 0, 0) * fabs((double)distance);
    }
    if (f->bias.data != NULL) {
        fa_tensor one = f->bias;
        one.stride[3] = 1;
        x += fa_element_get(&one, 0, 0, 0, score_at(&f->bias, at, j));
    }
    return x;
}

/* Writes the weights of all keys to `weights`, 0 of one that is not seen, and
 * lse.  Returns the weight of the sink. */
static double softmax(const fa_problem *p, const place *at, double *weights,
                      double *lse)
{
    const fa_tensor *sink = &p->features.sink;
    const int64_t keys = p->k.size[2];
    const double none = -(double)INFINITY;
    const double of_sink =
        sink->data == NULL ? none : fa_element_get(sink, at->h, 0, 0, 0);
    double most = of_sink;
    double sum = 0.0;
    double unused = 0.0;
    for (int64_t j = 0; j < keys; j++) {
        weights[j] = sees(p, at, j) ? score(p, at, j, &unused) : none;
        most = fmax(most, weights[j]);
    }
    for (int64_t j = 0; j < keys; j++) {
        weights[j] = weights[j] == none ? 0.0 : exp(weights[j] - most);
        sum += weights[j];
    }
    const double sinks = of_sink == none ? 0.0 : exp(of_sink - most);
    sum += sinks;
    for (int64_t j = 0; j < keys && sum != 0.0; j++) {
        weights[j] /= sum;
    }
    *lse = most + log(sum); /* -inf + -inf if no key is seen */
    return sum == 0.0 ? 0.0 : sinks / sum;
}

void fa_reference_forward(const fa_problem *p, double *out, double *lse,
                          double *scores)
{
    const int64_t dim = p->v.size[3];
    const int64_t rows = p->q.size[0] * p->q.size[1] * p->q.size[2];
    for (int64_t row = 0; row < rows; row++) {
        const place at = place_of(p, row);
        (void)softmax(p, &at, scores, &lse[row]);
        for (int64_t d = 0; d < dim; d++) {
            double total = 0.0;
            for (int64_t j = 0; j < p->k.size[2]; j++) {
                total += !sees(p, &at, j)
                             ? 0.0
                             : scores[j] * dropped(p, &at, j) *
                                   fa_element_get(&p->v, at.b, at.hk, j, d);
            }
            out[row * dim + d] = total;
        }
    }
}

/* dout of a row times v of a key. */
static double weight_gradient(const fa_problem *p, const fa_gradients *g,
                              const place *at, int64_t j)
{
    double sum = 0.0;
    for (int64_t d = 0; d < p->v.size[3]; d++) {
        sum += fa_element_get(&g->dout, at->b, at->h, at->i, d) *
               fa_element_get(&p->v, at->b, at->hk, j, d);
    }
    return sum;
}

/* Where a score's part of dbias goes, which is contiguous. */
static int64_t bias_at(const fa_problem *p, const place *at, int64_t j)
{
    const int64_t *size = p->features.bias.size;
    const int64_t head = size[2] * size[3];
    fa_tensor dense = {.size = {size[0], size[1], size[2], size[3]},
                       .stride = {size[1] * head, head, size[3], 1}};
    return score_at(&dense, at, j);
}

/* What one row adds to the gradients. */
typedef struct results {
    double *dq, *dk, *dv, *dbias, *dsink;
} results;

static void add_key(const fa_problem *p, const fa_gradients *g, const place *at,
                    int64_t row, int64_t j, double weight, double moved,
                    const results *to)
{
    const int64_t dim = p->q.size[3];
    const int64_t dim_v = p->v.size[3];
    const int64_t key = (at->b * p->k.size[1] + at->hk) * p->k.size[2] + j;
    double slope = 0.0;
    (void)score(p, at, j, &slope);
    for (int64_t d = 0; d < dim; d++) {
        to->dq[row * dim + d] +=
            slope * moved * fa_element_get(&p->k, at->b, at->hk, j, d);
        to->dk[key * dim + d] +=
            slope * moved * fa_element_get(&p->q, at->b, at->h, at->i, d);
    }
    for (int64_t d = 0; d < dim_v; d++) {
        to->dv[key * dim_v + d] +=
            weight * fa_element_get(&g->dout, at->b, at->h, at->i, d);
    }
    if (to->dbias != NULL) {
        to->dbias[bias_at(p, at, j)] += moved;
    }
}

void fa_reference_backward(const fa_problem *p, const fa_gradients *g,
                           double *dq, double *dk, double *dv, double *dbias,
                           double *dsink, double *scratch)
{
    const results to = {dq, dk, dv, dbias, dsink};
    const int64_t *bias = p->features.bias.size;
    const int64_t seqlen_k = p->k.size[2];
    const int64_t rows = p->q.size[0] * p->q.size[1] * p->q.size[2];
    const int64_t key_rows = p->k.size[0] * p->k.size[1] * seqlen_k;
    double *const weights = scratch;
    double *const gradients = scratch + seqlen_k; /* of the weights */
    memset(dq, 0, (size_t)(rows * p->q.size[3]) * sizeof *dq);
    memset(dk, 0, (size_t)(key_rows * p->k.size[3]) * sizeof *dk);
    memset(dv, 0, (size_t)(key_rows * p->v.size[3]) * sizeof *dv);
    if (dbias != NULL) {
        memset(dbias, 0,
               (size_t)(bias[0] * bias[1] * bias[2] * bias[3]) * sizeof *dbias);
    }
    for (int64_t row = 0; row < rows; row++) {
        const place at = place_of(p, row);
        double lse = 0.0;
        const double of_sink = softmax(p, &at, weights, &lse);
        /* A weight moves with its own score and against all others. */
        double delta = g->dlse.data == NULL
                           ? 0.0
                           : -fa_element_get(&g->dlse, at.b, at.h, at.i, 0);
        for (int64_t j = 0; j < seqlen_k; j++) {
            if (sees(p, &at, j)) {
                gradients[j] =
                    weight_gradient(p, g, &at, j) * dropped(p, &at, j);
                delta += weights[j] * gradients[j];
            }
        }
        for (int64_t j = 0; j < seqlen_k; j++) {
            if (sees(p, &at, j)) {
                add_key(p, g, &at, row, j, weights[j] * dropped(p, &at, j),
                        weights[j] * (gradients[j] - delta), &to);
            }
        }
        if (dsink != NULL) {
            dsink[row] = of_sink == 0.0 ? 0.0 : -of_sink * delta;
        }
    }
}
