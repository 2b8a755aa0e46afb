/* test_forward.c: the shipped gfx906 kernels in the simulator, through the
 * whole host layer, against the reference.
 *
 * Everything that surrounds an output is filled with canaries: before and
 * behind it, and between its rows.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "host/reference.h"
#include "test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { GUARD = 256, CANARY16 = 0x7e11 };
static const uint32_t canary32 = 0x7fc12345;

typedef struct shape {
    int64_t batch, heads, key_heads, seqlen_q, seqlen_k, dim;
    int causal;
    double scale;
    int64_t pad;      /* elements between rows of every tensor */
    bool interleaved; /* (B, S, H, D) in memory */
} shape;

static int64_t extent(const fa_tensor *t)
{
    int64_t last = 0;
    for (int d = 0; d < 4; d++) {
        last += (t->size[d] - 1) * t->stride[d];
    }
    return last + 1;
}

static void lay_out(fa_tensor *t, const shape *s, int64_t heads, int64_t length)
{
    const int64_t row = s->dim + s->pad;
    *t = (fa_tensor){.dtype = FA_F16,
                     .size = {s->batch, heads, length, s->dim},
                     .stride = {heads * length * row,
                                s->interleaved ? row : length * row,
                                s->interleaved ? heads * row : row, 1}};
}

/* Aligned memory for `count` halves with guards; the caller frees *block. */
static uint16_t *make_halves(int64_t count, void **block)
{
    const size_t bytes = ((size_t)count + 2 * GUARD) * sizeof(uint16_t);
    uint16_t *data = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (data == NULL) {
        abort();
    }
    for (int64_t i = 0; i < count + 2 * GUARD; i++) {
        data[i] = CANARY16;
    }
    *block = data;
    return data + GUARD;
}

static void fill_random(fa_tensor *t, uint64_t *seed, void **block)
{
    uint16_t *data = make_halves(extent(t), block);
    for (int64_t i = 0; i < extent(t); i++) {
        data[i] = fa_half_from_double(test_random(seed));
    }
    t->data = data;
}

static double square(double x)
{
    return x * x;
}

/* How many canaries around and between the rows of `out` were written to. */
static int64_t count_overwritten(const fa_tensor *out)
{
    const uint16_t *data = out->data;
    const int64_t count = extent(out);
    bool *owned = calloc((size_t)count, sizeof *owned);
    int64_t wrong = 0;
    if (owned == NULL) {
        abort();
    }
    for (int64_t b = 0; b < out->size[0]; b++) {
        for (int64_t h = 0; h < out->size[1]; h++) {
            for (int64_t i = 0; i < out->size[2]; i++) {
                const int64_t at = b * out->stride[0] + h * out->stride[1] +
                                   i * out->stride[2];
                memset(&owned[at], 1, (size_t)out->size[3]);
            }
        }
    }
    for (int64_t i = -GUARD; i < count + GUARD; i++) {
        if ((i < 0 || i >= count || !owned[i]) && data[i] != CANARY16) {
            wrong++;
        }
    }
    free(owned);
    return wrong;
}

/* Runs `s` in the simulator; relative error of out and largest one of lse. */
static void run_shape(test_run *run, const shape *s, const char *symbol)
{
    fa_problem p = {.scale = s->scale, .causal = s->causal};
    fa_target target = {.backend = FA_SIM, .arch = "gfx906"};
    fa_runtime *runtime = NULL;
    fa_plan plan;
    fa_counts counts = {0};
    fa_error error = {""};
    void *blocks[4] = {NULL};
    uint64_t seed = 2024;
    lay_out(&p.q, s, s->heads, s->seqlen_q);
    lay_out(&p.k, s, s->key_heads, s->seqlen_k);
    lay_out(&p.v, s, s->key_heads, s->seqlen_k);
    lay_out(&p.out, s, s->heads, s->seqlen_q);
    fill_random(&p.q, &seed, &blocks[0]);
    fill_random(&p.k, &seed, &blocks[1]);
    fill_random(&p.v, &seed, &blocks[2]);
    p.out.data = make_halves(extent(&p.out), &blocks[3]);
    const int64_t rows = s->batch * s->heads * s->seqlen_q;
    uint32_t *lse_bits = malloc((size_t)(rows + 2 * GUARD) * sizeof *lse_bits);
    double *out = calloc((size_t)(rows * s->dim), sizeof *out);
    double *lse = calloc((size_t)rows, sizeof *lse);
    double *scores = calloc((size_t)s->seqlen_k, sizeof *scores);
    if (lse_bits == NULL || out == NULL || lse == NULL || scores == NULL) {
        abort();
    }
    for (int64_t i = 0; i < rows + 2 * GUARD; i++) {
        lse_bits[i] = canary32;
    }
    p.lse = (float *)(void *)(lse_bits + GUARD);

    if (!CHECK(run, fa_plan_make(&p, &plan, &error) == FA_OK) ||
        !CHECK(run, strcmp(plan.variant->symbol, symbol) == 0) ||
        !CHECK(run, fa_runtime_open(run->code_dir, run->sim, &runtime,
                                    &error) == FA_OK) ||
        !CHECK(run, fa_forward(runtime, &target, &p, &plan, &counts, &error) ==
                        FA_OK)) {
        CHECK_TEXT(run, error.text, "(no error)");
        goto done;
    }
    CHECK(run, counts.wave_instructions > 0);
    CHECK(run, counts.workgroups ==
                   (uint64_t)plan.grid[0] * plan.grid[1] * plan.grid[2]);

    fa_reference_forward(&p, out, lse, scores);
    double difference = 0.0;
    double norm = 0.0;
    double worst_lse = 0.0;
    int mismatched = 0;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t i = row % s->seqlen_q;
        const int64_t h = row / s->seqlen_q % s->heads;
        const int64_t b = row / s->seqlen_q / s->heads;
        const uint16_t *got = (const uint16_t *)p.out.data +
                              b * p.out.stride[0] + h * p.out.stride[1] +
                              i * p.out.stride[2];
        for (int64_t d = 0; d < s->dim; d++) {
            const double x = fa_half_to_double(got[d]);
            difference += square(x - out[row * s->dim + d]);
            norm += square(out[row * s->dim + d]);
        }
        if (isinf(lse[row])) {
            mismatched += !((double)p.lse[row] == lse[row]);
        } else {
            worst_lse = fmax(worst_lse, fabs((double)p.lse[row] - lse[row]));
        }
    }
    const double relative =
        norm > 0.0 ? sqrt(difference / norm) : sqrt(difference);
    /* Seen: out at most 2.7e-4 (rounding to fp16 alone is 2.1e-4), lse at
     * most 1.4e-6. */
    CHECK(run, relative < 5e-4);
    CHECK(run, worst_lse < 1e-5);
    CHECK(run, mismatched == 0);
    CHECK(run, count_overwritten(&p.out) == 0);
    int64_t wrong = 0;
    for (int64_t i = 0; i < GUARD; i++) {
        wrong += lse_bits[i] != canary32;
        wrong += lse_bits[GUARD + rows + i] != canary32;
    }
    CHECK(run, wrong == 0);
    if (run->only != NULL) { /* for whoever looks closely */
        printf("%s: out %.2e lse %.2e\n", symbol, relative, worst_lse);
    }

done:
    fa_runtime_close(runtime);
    free(scores);
    free(lse);
    free(out);
    free(lse_bits);
    for (int i = 0; i < 4; i++) {
        free(blocks[i]);
    }
}

static bool is_built(test_run *run)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/fa_gfx906.co", run->code_dir);
    if (access(path, R_OK) != 0) {
        test_skip(run, "not built:", path);
        return false;
    }
    if (access(run->sim, R_OK) != 0) {
        test_skip(run, "not built:", run->sim);
        return false;
    }
    return true;
}

static void every_kernel_agrees_with_the_reference(test_run *run)
{
    if (!is_built(run)) {
        return;
    }
    /* Two query tiles and two key tiles, neither full. */
    shape s = {1, 2, 1, 130, 70, 0, FA_CAUSAL_NONE, 0.125, 0, false};
    for (int i = 0; i < FA_VARIANT_COUNT; i++) {
        const fa_variant *v = &fa_variants[i];
        s.dim = v->dim;
        s.pad = v->load == FA_LOAD_WIDE ? 8 : 3;
        run_shape(run, &s, v->symbol);
    }
}

static void ragged_head_dims_and_interleaved_heads_agree(test_run *run)
{
    if (!is_built(run)) {
        return;
    }
    shape s = {2, 2, 2, 9, 33, 40, FA_CAUSAL_NONE, -0.3, 0, true};
    run_shape(run, &s, "fa_fwd_f16_d64_plain");
    s.dim = 77;
    run_shape(run, &s, "fa_fwd_f16_d128_plain_narrow");
}

static void causal_masks_agree_also_where_rows_see_nothing(test_run *run)
{
    if (!is_built(run)) {
        return;
    }
    shape s = {1, 2, 2, 100, 66, 64, FA_CAUSAL_TOP_LEFT, 0.125, 0, false};
    run_shape(run, &s, "fa_fwd_f16_d64_plain");
    s.causal = FA_CAUSAL_BOTTOM_RIGHT;
    run_shape(run, &s, "fa_fwd_f16_d64_plain");
    s.seqlen_q = 5;
    run_shape(run, &s, "fa_fwd_f16_d64_plain");
}

static void one_row_and_one_key_agree(test_run *run)
{
    if (!is_built(run)) {
        return;
    }
    shape s = {1, 1, 1, 1, 1, 64, FA_CAUSAL_NONE, 1.0, 0, false};
    run_shape(run, &s, "fa_fwd_f16_d64_plain");
    s.dim = 1;
    run_shape(run, &s, "fa_fwd_f16_d64_plain_narrow");
}

void test_forward(test_run *run)
{
    RUN(run, every_kernel_agrees_with_the_reference);
    RUN(run, ragged_head_dims_and_interleaved_heads_agree);
    RUN(run, causal_masks_agree_also_where_rows_see_nothing);
    RUN(run, one_row_and_one_key_agree);
}
