/* main.c: runs the C tests and prints "N passed, N failed, N skipped".
 *
 *   ctest FAKES SCRATCH CODE_DIR SIM [PART_OF_A_NAME]
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "fake_runtime.h"
#include "test.h"

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void test_one(test_run *run, const char *name, void (*function)(test_run *))
{
    if (run->only != NULL && strstr(name, run->only) == NULL) {
        return;
    }
    run->checks_failed = 0;
    run->skip = false;
    function(run);
    if (run->checks_failed != 0) {
        run->failed++;
        printf("FAILED  %s\n", name);
    } else if (run->skip) {
        run->skipped++;
    } else {
        run->passed++;
    }
}

void test_skip(test_run *run, const char *reason, const char *what)
{
    printf("skipped: %s %s\n", reason, what);
    run->skip = true;
}

bool test_check(test_run *run, bool ok, const char *file, int line,
                const char *what)
{
    if (!ok) {
        printf("%s:%d: not so: %s\n", file, line, what);
        run->checks_failed++;
    }
    return ok;
}

bool test_check_text(test_run *run, const char *text, const char *part,
                     const char *file, int line)
{
    bool ok = strstr(text, part) != NULL;
    if (!ok) {
        printf("%s:%d: expected \"%s\"\n  in \"%s\"\n", file, line, part, text);
        run->checks_failed++;
    }
    return ok;
}

void test_contiguous(fa_tensor *t, int64_t b, int64_t h, int64_t s, int64_t d)
{
    *t = (fa_tensor){.dtype = FA_F16,
                     .size = {b, h, s, d},
                     .stride = {h * s * d, s * d, d, 1}};
}

fa_problem test_problem(int64_t batch, int64_t heads, int64_t key_heads,
                        int64_t seqlen_q, int64_t seqlen_k, int64_t dim)
{
    fa_problem p = {.scale = 1.0, .window_left = -1, .window_right = -1};
    test_contiguous(&p.q, batch, heads, seqlen_q, dim);
    test_contiguous(&p.k, batch, key_heads, seqlen_k, dim);
    test_contiguous(&p.v, batch, key_heads, seqlen_k, dim);
    fa_tensor_like(&p.q, dim, &p.out);
    return p;
}

void test_retype(fa_problem *p, fa_dtype dtype)
{
    p->q.dtype = p->k.dtype = p->v.dtype = p->out.dtype = dtype;
}

void test_head_dim_v(fa_problem *p, int64_t dim)
{
    const fa_dtype dtype = p->v.dtype;
    test_contiguous(&p->v, p->v.size[0], p->v.size[1], p->v.size[2], dim);
    p->v.dtype = dtype;
    fa_tensor_like(&p->q, dim, &p->out);
}

void test_add_bias(fa_problem *p, fa_dtype dtype)
{
    fa_tensor *bias = &p->features.bias;
    test_contiguous(bias, p->q.size[0], p->q.size[1], p->q.size[2],
                    p->k.size[2]);
    bias->dtype = dtype;
    bias->data = (void *)0x70000000;
}

/* Dense int32 or sums, at an address of its own. */
static fa_tensor list_at(uintptr_t address, fa_dtype dtype, int64_t a,
                         int64_t b, int64_t c, int64_t d)
{
    fa_tensor t;
    test_contiguous(&t, a, b, c, d);
    t.dtype = dtype;
    t.data = (void *)address; /* NOLINT */
    return t;
}

void test_add_features(fa_problem *p, uint32_t features)
{
    const fa_dtype sums = p->q.dtype == FA_F64 ? FA_F64 : FA_F32;
    const int64_t batch = p->q.size[0];
    const int64_t heads = p->q.size[1];
    const int64_t rows = p->q.size[2];
    const int64_t keys = p->k.size[2];
    fa_features *f = &p->features;
    if ((features & FA_HAS_BIAS) != 0) {
        test_add_bias(p, sums);
    }
    if ((features & FA_HAS_MASK) != 0) {
        f->mask = list_at(0x71000000, FA_F64, batch, heads, rows, keys);
    }
    if ((features & FA_HAS_ALIBI) != 0) {
        f->alibi = list_at(0x72000000, sums, batch, heads, 1, 1);
    }
    if ((features & FA_HAS_SINK) != 0) {
        f->sink = list_at(0x73000000, sums, heads, 1, 1, 1);
    }
    f->softcap = (features & FA_HAS_SOFTCAP) != 0 ? 30.0 : 0.0;
    if ((features & FA_HAS_DROPOUT) != 0) {
        f->dropout_p = 0.25;
        f->seed = (const int64_t *)0x74000000;
    }
    if ((features & FA_HAS_SINK_KEYS) != 0) {
        f->sink_keys = 4;
        p->window_left = 7;
    }
    if ((features & FA_HAS_SPANS) != 0) {
        f->span_q = list_at(0x75000000, FA_F16, rows, 4, 1, 1);
        f->span_k = list_at(0x76000000, FA_F16, keys, 2, 1, 1);
    }
    if ((features & FA_HAS_BLOCKS) != 0) {
        f->block_q = 128;
        f->block_k = 256;
        f->blocks = list_at(0x77000000, FA_F16, batch, heads,
                            (rows + 127) / 128, 1 + (keys + 255) / 256);
        f->blocks_t = list_at(0x78000000, FA_F16, 1, 1, (keys + 255) / 256,
                              1 + (rows + 127) / 128);
    }
}

fa_gradients test_gradients(const fa_problem *p, uint32_t wanted)
{
    fa_gradients g = {.wanted = wanted};
    fa_tensor_like(&p->out, p->out.size[3], &g.dout);
    test_contiguous(&g.dlse, p->q.size[0], p->q.size[1], p->q.size[2], 1);
    g.dlse.dtype = p->q.dtype == FA_F64 ? FA_F64 : FA_F32;
    fa_gradients_like(p, false, &g);
    return g;
}

fa_plan test_plan_forward(test_run *run, const fa_problem *p)
{
    fa_plan plan;
    fa_error error = {"(no error)"};
    if (!CHECK(run, fa_plan_forward(p, &plan, &error) == FA_OK)) {
        CHECK_TEXT(run, error.text, "(no error)");
    }
    return plan;
}

fa_plan test_plan_backward(test_run *run, const fa_problem *p,
                           const fa_gradients *g)
{
    fa_plan plan;
    fa_error error = {"(no error)"};
    if (!CHECK(run, fa_plan_backward(p, g, &plan, &error) == FA_OK)) {
        CHECK_TEXT(run, error.text, "(no error)");
    }
    return plan;
}

void test_why(test_run *run, const fa_plan *plan, const char *why)
{
    char text[FA_WHY_CHARS];
    fa_plan_why(plan, text);
    CHECK_TEXT(run, text, why);
    CHECK(run, strlen(text) == strlen(why));
}

void *test_load_fake(test_run *run, const char *name, fake_state **state)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", run->fakes, name);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!CHECK(run, library != NULL)) {
        abort(); /* the tests were not built as their Makefile does */
    }
    *state = dlsym(library, "fake");
    memset(*state, 0, sizeof **state);
    (*state)->device_count = 2;
    return library;
}

bool test_fast_bf16(test_run *run)
{
    for (int i = 0; i < FA_VARIANT_COUNT; i++) {
        const fa_variant *v = &fa_variants[i];
        if (v->arith == FA_F16 && (v->reads & FA_READS_BF16) != 0) {
            return true;
        }
    }
    test_skip(run, "no row of variants.def:", "bfloat16 through fp16");
    return false;
}

double test_random(uint64_t *state)
{
    double sum = 0.0; /* of 12 uniform numbers: variance 1 */
    for (int i = 0; i < 12; i++) {
        *state = *state * UINT64_C(6364136223846793005) +
                 UINT64_C(1442695040888963407);
        sum += ldexp((double)(*state >> 11), -53);
    }
    return sum - 6.0;
}

int main(int argc, char **argv)
{
    if (argc < 5) {
        fprintf(stderr,
                "usage: %s FAKES SCRATCH CODE_DIR SIM [PART_OF_A_NAME]\n",
                argv[0]);
        return 2;
    }
    test_run run = {.fakes = argv[1],
                    .scratch = argv[2],
                    .code_dir = argv[3],
                    .sim = argv[4],
                    .only = argc > 5 ? argv[5] : NULL};
    setvbuf(stdout, NULL, _IOLBF, BUFSIZ);
    test_refusals(&run);
    test_plan(&run);
    test_wide(&run);
    test_args(&run);
    test_features(&run);
    test_feature_refusals(&run);
    test_rotary(&run);
    test_reference(&run);
    test_driver(&run);
    test_launch(&run);
    test_code(&run);
    test_torch_abi(&run);
    test_store(&run);
    test_store_damage(&run);
    test_store_kills(&run);
    test_flight(&run);
    test_latency(&run);
    test_breaker(&run);
    test_guard(&run);
    test_guard_failures(&run);
    test_guard_life(&run);
    test_memory(&run);
    test_kernels(&run);
    printf("%d passed, %d failed, %d skipped\n", run.passed, run.failed,
           run.skipped);
    return run.failed != 0;
}
