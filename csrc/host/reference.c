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

/* -- attention ------------------------------------------------------------- */

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

/* How many keys row `i` sees, from the first on. */
static int64_t visible(const fa_problem *p, int64_t i)
{
    const int64_t keys = p->k.size[2];
    const int64_t last = p->causal == FA_CAUSAL_NONE ? keys - 1
                         : p->causal == FA_CAUSAL_TOP_LEFT
                             ? i
                             : i + keys - p->q.size[2];
    return last < 0 ? 0 : last < keys ? last + 1 : keys;
}

/* Writes the weights of a row's keys to `weights`; returns how many there
 * are, and lse. */
static int64_t softmax(const fa_problem *p, const place *at, double *weights,
                       double *lse)
{
    const int64_t keys = visible(p, at->i);
    double most = -(double)INFINITY;
    double sum = 0.0;
    for (int64_t j = 0; j < keys; j++) {
        weights[j] = 0.0;
        for (int64_t d = 0; d < p->q.size[3]; d++) {
            weights[j] += fa_element_get(&p->q, at->b, at->h, at->i, d) *
                          fa_element_get(&p->k, at->b, at->hk, j, d);
        }
        weights[j] *= p->scale;
        most = fmax(most, weights[j]);
    }
    for (int64_t j = 0; j < keys; j++) {
        weights[j] = exp(weights[j] - most);
        sum += weights[j];
    }
    for (int64_t j = 0; j < keys; j++) {
        weights[j] /= sum;
    }
    *lse = most + log(sum); /* -inf + -inf if no key is seen */
    return keys;
}

void fa_reference_forward(const fa_problem *p, double *out, double *lse,
                          double *scores)
{
    const int64_t dim = p->v.size[3];
    const int64_t rows = p->q.size[0] * p->q.size[1] * p->q.size[2];
    for (int64_t row = 0; row < rows; row++) {
        const place at = place_of(p, row);
        const int64_t keys = softmax(p, &at, scores, &lse[row]);
        for (int64_t d = 0; d < dim; d++) {
            double total = 0.0;
            for (int64_t j = 0; j < keys; j++) {
                total += scores[j] * fa_element_get(&p->v, at.b, at.hk, j, d);
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

void fa_reference_backward(const fa_problem *p, const fa_gradients *g,
                           double *dq, double *dk, double *dv, double *scratch)
{
    const int64_t dim = p->q.size[3];
    const int64_t dim_v = p->v.size[3];
    const int64_t seqlen_k = p->k.size[2];
    const int64_t rows = p->q.size[0] * p->q.size[1] * p->q.size[2];
    const int64_t key_rows = p->k.size[0] * p->k.size[1] * seqlen_k;
    double *const weights = scratch;
    double *const gradients = scratch + seqlen_k; /* of the weights */
    memset(dq, 0, (size_t)(rows * dim) * sizeof *dq);
    memset(dk, 0, (size_t)(key_rows * dim) * sizeof *dk);
    memset(dv, 0, (size_t)(key_rows * dim_v) * sizeof *dv);
    for (int64_t row = 0; row < rows; row++) {
        const place at = place_of(p, row);
        double lse = 0.0;
        const int64_t keys = softmax(p, &at, weights, &lse);
        /* A weight moves with its own score and against all others. */
        double delta = g->dlse.data == NULL
                           ? 0.0
                           : -fa_element_get(&g->dlse, at.b, at.h, at.i, 0);
        for (int64_t j = 0; j < keys; j++) {
            gradients[j] = weight_gradient(p, g, &at, j);
            delta += weights[j] * gradients[j];
        }
        for (int64_t j = 0; j < keys; j++) {
            const int64_t key = (at.b * p->k.size[1] + at.hk) * seqlen_k + j;
            const double score = p->scale * weights[j] * (gradients[j] - delta);
            for (int64_t d = 0; d < dim; d++) {
                dq[row * dim + d] +=
                    score * fa_element_get(&p->k, at.b, at.hk, j, d);
                dk[key * dim + d] +=
                    score * fa_element_get(&p->q, at.b, at.h, at.i, d);
            }
            for (int64_t d = 0; d < dim_v; d++) {
                dv[key * dim_v + d] +=
                    weights[j] * fa_element_get(&g->dout, at.b, at.h, at.i, d);
            }
        }
    }
}
