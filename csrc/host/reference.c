/* reference.c: attention in plain C and double precision.
 *
 * Slow and obvious: what every kernel is compared with in the C tests.  The
 * product never falls back to it.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "host/reference.h"

#include <math.h>

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

static double element(const fa_tensor *t, int64_t b, int64_t h, int64_t i,
                      int64_t d)
{
    const uint16_t *data = t->data;
    return fa_half_to_double(data[b * t->stride[0] + h * t->stride[1] +
                                  i * t->stride[2] + d * t->stride[3]]);
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

void fa_reference_forward(const fa_problem *p, double *out, double *lse,
                          double *scores)
{
    const int64_t heads = p->q.size[1];
    const int64_t dim = p->q.size[3];
    for (int64_t row = 0; row < p->q.size[0] * heads * p->q.size[2]; row++) {
        const int64_t i = row % p->q.size[2];
        const int64_t h = row / p->q.size[2] % heads;
        const int64_t b = row / p->q.size[2] / heads;
        const int64_t hk = h / (heads / p->k.size[1]);
        const int64_t keys = visible(p, i);
        double most = -(double)INFINITY;
        double sum = 0.0;
        for (int64_t j = 0; j < keys; j++) {
            scores[j] = 0.0;
            for (int64_t d = 0; d < dim; d++) {
                scores[j] +=
                    element(&p->q, b, h, i, d) * element(&p->k, b, hk, j, d);
            }
            scores[j] *= p->scale;
            most = fmax(most, scores[j]);
        }
        for (int64_t j = 0; j < keys; j++) {
            scores[j] = exp(scores[j] - most);
            sum += scores[j];
        }
        lse[row] = most + log(sum); /* -inf + -inf if no key is seen */
        for (int64_t d = 0; d < dim; d++) {
            double total = 0.0;
            for (int64_t j = 0; j < keys; j++) {
                total += scores[j] * element(&p->v, b, hk, j, d);
            }
            out[row * dim + d] = keys == 0 ? 0.0 : total / sum;
        }
    }
}
