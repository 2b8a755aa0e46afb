/* test_kernels.c: the shipped gfx906 kernels in the simulator, through the
 * whole host layer, against the reference.
 *
 * Everything that surrounds an output is filled with canaries: before and
 * behind it, and between its elements.
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

enum { GUARD_BYTES = 512, CANARY = 0x7e, MAX_BLOCKS = 32 };

typedef struct shape {
    int64_t batch, heads, key_heads, seqlen_q, seqlen_k, dim, dim_v;
    fa_dtype dtype;
    int causal;
    double scale;
    int64_t pad;      /* elements between rows of every tensor */
    bool interleaved; /* (B, S, H, D) in memory */
    bool strict_bf16;
    uint32_t features; /* FA_HAS_* */
    fa_fp32 fp32;
    const fa_variant *row; /* that must run; NULL: any */
} shape;

/* The types, float32 in both arithmetics. */
static const struct {
    fa_dtype dtype;
    fa_fp32 fp32;
} kinds[] = {{FA_F16, FA_FP32_AUTO},
             {FA_BF16, FA_FP32_AUTO},
             {FA_F32, FA_FP32_FAST},
             {FA_F32, FA_FP32_EXACT},
             {FA_F64, FA_FP32_AUTO}};
enum { KINDS = sizeof kinds / sizeof kinds[0] };

/* A problem in guarded memory. */
typedef struct fixture {
    fa_problem p;
    fa_gradients g;
    fa_runtime *runtime;
    fa_target target;
    void *block[MAX_BLOCKS];
    int block_count;
    uint64_t seed;
} fixture;

static double square(double x)
{
    return x * x;
}

/* What a result may be off in norm, in the type's unit roundoffs.  Seen: 0.7
 * where the result is rounded to 16 bits, else 16. */
static double bound(fa_dtype dtype)
{
    static const double roundoff[] = {0x1p-11, 0x1p-8, 0x1p-24, 0x1p-53};
    return (dtype == FA_F16 || dtype == FA_BF16 ? 1.5 : 32.0) * roundoff[dtype];
}

/* -- memory ---------------------------------------------------------------- */

static size_t extent_bytes(const fa_tensor *t)
{
    int64_t last = 0;
    for (int d = 0; d < 4; d++) {
        last += (t->size[d] - 1) * t->stride[d];
    }
    return (size_t)(last + 1) * fa_dtype_bytes(t->dtype);
}

/* Aligned memory full of canaries, with guards around it. */
static void *make_memory(fixture *f, size_t bytes)
{
    const size_t all = (bytes + 2 * GUARD_BYTES + 63) / 64 * 64;
    char *block = aligned_alloc(64, all);
    if (block == NULL || f->block_count == MAX_BLOCKS) {
        abort();
    }
    memset(block, CANARY, all);
    f->block[f->block_count++] = block;
    return block + GUARD_BYTES;
}

static void lay_out(fixture *f, fa_tensor *t, const shape *s, int64_t heads,
                    int64_t length, int64_t dim)
{
    const int64_t row = dim + s->pad;
    *t = (fa_tensor){.dtype = s->dtype,
                     .size = {s->batch, heads, length, dim},
                     .stride = {heads * length * row,
                                s->interleaved ? row : length * row,
                                s->interleaved ? heads * row : row, 1}};
    t->data = make_memory(f, extent_bytes(t));
}

typedef void (*visitor)(const fa_tensor *t, int64_t b, int64_t h, int64_t i,
                        int64_t d, void *context);

/* Calls `visit` for every element in order. */
static void for_each(const fa_tensor *t, visitor visit, void *context)
{
    for (int64_t n = 0; n < t->size[0] * t->size[1] * t->size[2] * t->size[3];
         n++) {
        const int64_t row = n / t->size[3];
        visit(t, row / t->size[2] / t->size[1], row / t->size[2] % t->size[1],
              row % t->size[2], n % t->size[3], context);
    }
}

static void set_random(const fa_tensor *t, int64_t b, int64_t h, int64_t i,
                       int64_t d, void *seed)
{
    fa_element_set(t, b, h, i, d, test_random(seed));
}

static void set_canary(const fa_tensor *t, int64_t b, int64_t h, int64_t i,
                       int64_t d, void *context)
{
    const size_t bytes = fa_dtype_bytes(t->dtype);
    const int64_t at = b * t->stride[0] + h * t->stride[1] + i * t->stride[2] +
                       d * t->stride[3];
    (void)context;
    memset((char *)t->data + (size_t)at * bytes, CANARY, bytes);
}

/* How many canaries around and between the elements of `t` are gone.  Its
 * elements become canaries, too. */
static size_t count_overwritten(const fa_tensor *t)
{
    const char *data = t->data;
    const size_t bytes = extent_bytes(t);
    size_t wrong = 0;
    for_each(t, set_canary, NULL);
    for (size_t i = 0; i < bytes + 2 * GUARD_BYTES; i++) {
        wrong += data[i - GUARD_BYTES] != CANARY;
    }
    return wrong;
}

/* -- features -------------------------------------------------------------- */

/* Memory for a tensor of test_add_features; NULL for an absent one. */
static void *list_memory(fixture *f, const fa_tensor *t, size_t bytes)
{
    int64_t count = 1;
    for (int d = 0; d < 4; d++) {
        count *= t->size[d];
    }
    return t->data == NULL ? NULL : make_memory(f, (size_t)count * bytes);
}

static void set_slope(const fa_tensor *t, int64_t b, int64_t h, int64_t i,
                      int64_t d, void *seed)
{
    fa_element_set(t, b, h, i, d, fabs(test_random(seed)) / 16.0);
}

/* Two sequences packed behind each other: the first 2/3 and the rest, each
 * causal from the top left. */
static void set_spans(fa_problem *p)
{
    fa_span_of_row *of_row = p->features.span_q.data;
    fa_span_of_key *of_key = p->features.span_k.data;
    const int32_t rows = (int32_t)p->q.size[2];
    const int32_t keys = (int32_t)p->k.size[2];
    const int32_t row = rows * 2 / 3; /* the first of the second */
    const int32_t key = keys * 2 / 3;
    for (int32_t i = 0; i < rows; i++) {
        const int32_t end = i < row ? key : keys;
        const int32_t own = i < row ? i : i - row + key;
        of_row[i] = (fa_span_of_row){.from = i < row ? 0 : key,
                                     .to = own < end ? own : end - 1,
                                     .diagonal = own - i};
    }
    for (int32_t j = 0; j < keys; j++) {
        const int32_t end = j < key ? row : rows;
        const int32_t own = j < key ? j : j - key + row;
        of_key[j] =
            (fa_span_of_key){.from = own < end ? own : end, .to = end - 1};
    }
}

/* Every other block, all of the last rows. */
static void set_blocks(fa_problem *p)
{
    fa_features *f = &p->features;
    const int64_t key_blocks = f->blocks_t.size[2];
    int32_t *list = f->blocks.data;
    int32_t *list_t = f->blocks_t.data;
    memset(list_t, 0, (size_t)(key_blocks * f->blocks_t.size[3]) * 4);
    for (int64_t i = 0; i < f->blocks.size[2]; i++) {
        int32_t *own = list + i * f->blocks.size[3];
        memset(own, 0, (size_t)f->blocks.size[3] * 4);
        for (int64_t j = 0; j < key_blocks; j++) {
            int32_t *other = list_t + j * f->blocks_t.size[3];
            if ((i + j) % 2 == 0 || i + 1 == f->blocks.size[2]) {
                own[++own[0]] = (int32_t)j;
                other[++other[0]] = (int32_t)i;
            }
        }
    }
}

static void add_features(fixture *f, const shape *s)
{
    const size_t sums = s->dtype == FA_F64 ? 8 : 4;
    fa_features *to = &f->p.features;
    test_add_features(&f->p, s->features);
    /* Lists for all heads at once; scores for each. */
    to->blocks.size[0] = to->blocks.size[1] = 1;
    to->bias.data = list_memory(f, &to->bias, sums);
    to->mask.data = list_memory(f, &to->mask, 1);
    to->alibi.data = list_memory(f, &to->alibi, sums);
    to->sink.data = list_memory(f, &to->sink, sums);
    to->span_q.data = list_memory(f, &to->span_q, 4);
    to->span_k.data = list_memory(f, &to->span_k, 4);
    to->blocks.data = list_memory(f, &to->blocks, 4);
    to->blocks_t.data = list_memory(f, &to->blocks_t, 4);
    if (to->bias.data != NULL) {
        for_each(&to->bias, set_random, &f->seed);
    }
    if (to->mask.data != NULL) {
        uint8_t *mask = to->mask.data;
        const int64_t count = to->mask.size[1] * to->mask.stride[1];
        for (int64_t i = 0; i < s->batch * count; i++) {
            mask[i] = test_random(&f->seed) > -0.5;
        }
    }
    if (to->alibi.data != NULL) {
        for_each(&to->alibi, set_slope, &f->seed);
    }
    if (to->sink.data != NULL) {
        for_each(&to->sink, set_random, &f->seed);
    }
    if (to->seed != NULL) {
        int64_t *seed = make_memory(f, 2 * sizeof *seed);
        seed[0] = INT64_C(0x123456789abcdef);
        seed[1] = 42;
        to->seed = seed;
    }
    if (to->span_q.data != NULL) {
        set_spans(&f->p);
    }
    if (to->blocks.data != NULL) {
        set_blocks(&f->p);
    }
}

static void set_up(test_run *run, fixture *f, const shape *s)
{
    fa_error error = {""};
    memset(f, 0, sizeof *f);
    f->seed = 2024;
    f->p.scale = s->scale;
    f->p.causal = s->causal;
    f->p.strict_bf16 = s->strict_bf16;
    f->p.fp32 = s->fp32;
    f->p.window_left = f->p.window_right = -1;
    f->target = (fa_target){.backend = FA_SIM, .arch = "gfx906"};
    lay_out(f, &f->p.q, s, s->heads, s->seqlen_q, s->dim);
    lay_out(f, &f->p.k, s, s->key_heads, s->seqlen_k, s->dim);
    lay_out(f, &f->p.v, s, s->key_heads, s->seqlen_k, s->dim_v);
    lay_out(f, &f->p.out, s, s->heads, s->seqlen_q, s->dim_v);
    for_each(&f->p.q, set_random, &f->seed);
    for_each(&f->p.k, set_random, &f->seed);
    for_each(&f->p.v, set_random, &f->seed);
    add_features(f, s);
    CHECK(run, fa_runtime_open(run->code_dir, run->sim, &f->runtime, &error) ==
                   FA_OK);
}

static void tear_down(fixture *f)
{
    fa_runtime_close(f->runtime);
    for (int i = 0; i < f->block_count; i++) {
        free(f->block[i]);
    }
}

static fa_tensor rows_tensor(fixture *f)
{
    const int64_t *q = f->p.q.size;
    fa_tensor t = {.dtype = f->p.q.dtype == FA_F64 ? FA_F64 : FA_F32,
                   .size = {q[0], q[1], q[2], 1},
                   .stride = {q[1] * q[2], q[2], 1, 1}};
    t.data = make_memory(f, extent_bytes(&t));
    return t;
}

/* -- comparing ------------------------------------------------------------- */

typedef struct difference {
    const double *expected; /* the next one */
    double squares;
    double norm;
    double largest;
    int mismatched; /* infinities that are not the same */
} difference;

static void compare(const fa_tensor *t, int64_t b, int64_t h, int64_t i,
                    int64_t d, void *context)
{
    difference *diff = context;
    const double expected = *diff->expected++;
    const double got = fa_element_get(t, b, h, i, d);
    if (isinf(expected)) {
        diff->mismatched += !(got == expected);
        return;
    }
    diff->squares += square(got - expected);
    diff->norm += square(expected);
    diff->largest = fmax(diff->largest, fabs(got - expected));
}

/* The relative error in norm. */
static double error_of(const fa_tensor *t, const double *expected)
{
    difference diff = {.expected = expected};
    for_each(t, compare, &diff);
    return diff.norm > 0.0 ? sqrt(diff.squares / diff.norm)
                           : sqrt(diff.squares);
}

static double *make_doubles(fixture *f, int64_t count)
{
    return make_memory(f, (size_t)count * sizeof(double));
}

static int64_t count_of(const fa_tensor *t)
{
    return t->size[0] * t->size[1] * t->size[2] * t->size[3];
}

/* Reports the error of one tensor and what surrounds it. */
static void check_result(test_run *run, const char *name, const fa_tensor *t,
                         const double *expected, double most)
{
    const double error = error_of(t, expected);
    CHECK(run, error <= most);
    if (run->only != NULL || !(error <= most)) { /* for a closer look */
        printf("%s: %.2e, at most %.2e\n", name, error, most);
    }
    CHECK(run, count_overwritten(t) == 0);
}

/* -- running --------------------------------------------------------------- */

static void check_row(test_run *run, const fa_plan *plan, const shape *s)
{
    bool found = s->row == NULL;
    for (int i = 0; i < plan->count; i++) {
        found |= plan->step[i].variant == s->row;
    }
    if (!CHECK(run, found)) {
        printf("not run: %s\n", s->row->symbol);
    }
}

/* Plans and runs the forward into out and `lse`. */
static bool run_forward(test_run *run, fixture *f, const shape *s,
                        const fa_tensor *lse)
{
    fa_plan plan;
    fa_counts counts = {0};
    fa_error error = {""};
    f->p.lse = lse->data;
    bool ok = CHECK(run, fa_plan_forward(&f->p, &plan, &error) == FA_OK);
    if (ok) {
        if (s->row != NULL && s->row->pass == FA_FORWARD) {
            check_row(run, &plan, s);
        }
        void *workspace = make_memory(f, plan.workspace.bytes);
        ok = CHECK(run, fa_forward(f->runtime, &f->target, &f->p, &plan,
                                   workspace, &counts, &error) == FA_OK);
        CHECK(run, counts.wave_instructions > 0);
    }
    if (!ok) {
        CHECK_TEXT(run, error.text, "(no error)");
    }
    return ok;
}

static void check_forward(test_run *run, const shape *s)
{
    fixture f;
    set_up(run, &f, s);
    const fa_tensor lse = rows_tensor(&f);
    if (run_forward(run, &f, s, &lse)) {
        double *out = make_doubles(&f, count_of(&f.p.out));
        double *exact = make_doubles(&f, count_of(&lse));
        double *scores = make_doubles(&f, s->seqlen_k);
        fa_reference_forward(&f.p, out, exact, scores);
        difference of_lse = {.expected = exact};
        for_each(&lse, compare, &of_lse);
        CHECK(run, of_lse.mismatched == 0);
        CHECK(run, of_lse.largest < (s->dtype == FA_F64 ? 1e-13 : 1e-5));
        check_result(run, "out", &f.p.out, out, bound(s->dtype));
        CHECK(run, count_overwritten(&lse) == 0);
    }
    tear_down(&f);
}

/* Forward and backward, gradients in q's type. */
static void check_backward(test_run *run, const shape *s)
{
    fixture f;
    fa_plan plan;
    fa_counts counts = {0};
    fa_error error = {""};
    set_up(run, &f, s);
    const fa_tensor lse = rows_tensor(&f);
    const bool dbias = (s->features & FA_HAS_BIAS) != 0;
    const bool dsink = (s->features & FA_HAS_SINK) != 0;
    f.g.wanted = FA_WANT_DQ | FA_WANT_DK | FA_WANT_DV |
                 (dbias ? FA_WANT_DBIAS : 0U) | (dsink ? FA_WANT_DSINK : 0U);
    fa_tensor residue = {.dtype = FA_F32,
                         .size = {1, 1, 1, fa_residue_floats(&f.p)},
                         .stride = {0, 0, 0, 1}};
    residue.data =
        s->dtype == FA_F64 ? NULL : make_memory(&f, extent_bytes(&residue));
    f.p.out_lo = residue.data;
    lay_out(&f, &f.g.dout, s, s->heads, s->seqlen_q, s->dim_v);
    lay_out(&f, &f.g.dq, s, s->heads, s->seqlen_q, s->dim);
    lay_out(&f, &f.g.dk, s, s->key_heads, s->seqlen_k, s->dim);
    lay_out(&f, &f.g.dv, s, s->key_heads, s->seqlen_k, s->dim_v);
    f.g.dlse = rows_tensor(&f);
    f.g.dsink = rows_tensor(&f);
    f.g.dbias = f.p.features.bias;
    f.g.dbias.data = dbias ? make_memory(&f, extent_bytes(&f.g.dbias)) : NULL;
    for_each(&f.g.dout, set_random, &f.seed);
    for_each(&f.g.dlse, set_random, &f.seed);
    bool ok = run_forward(run, &f, s, &lse) &&
              CHECK(run, fa_plan_backward(&f.p, &f.g, &plan, &error) == FA_OK);
    if (ok) {
        check_row(run, &plan, s);
        void *workspace = make_memory(&f, plan.workspace.bytes);
        ok = CHECK(run, fa_backward(f.runtime, &f.target, &f.p, &f.g, &plan,
                                    workspace, &counts, &error) == FA_OK);
    }
    if (!ok) {
        CHECK_TEXT(run, error.text, "(no error)");
        tear_down(&f);
        return;
    }
    double *all = calloc((size_t)(count_of(&f.g.dq) + count_of(&f.g.dk) +
                                  count_of(&f.g.dv) + count_of(&f.g.dbias) +
                                  count_of(&f.g.dsink) + 2 * s->seqlen_k),
                         sizeof *all);
    if (all == NULL) {
        abort();
    }
    double *dk = all + count_of(&f.g.dq);
    double *dv = dk + count_of(&f.g.dk);
    double *of_bias = dv + count_of(&f.g.dv);
    double *of_sink = of_bias + count_of(&f.g.dbias);
    double *scratch = of_sink + count_of(&f.g.dsink);
    fa_reference_backward(&f.p, &f.g, all, dk, dv, dbias ? of_bias : NULL,
                          of_sink, scratch);
    check_result(run, "dq", &f.g.dq, all, bound(s->dtype));
    check_result(run, "dk", &f.g.dk, dk, bound(s->dtype));
    check_result(run, "dv", &f.g.dv, dv, bound(s->dtype));
    if (dbias) {
        check_result(run, "dbias", &f.g.dbias, of_bias, bound(s->dtype));
    }
    if (dsink) {
        check_result(run, "dsink", &f.g.dsink, of_sink, bound(s->dtype));
    }
    CHECK(run, residue.data == NULL || count_overwritten(&residue) == 0);
    free(all);
    tear_down(&f);
}

static bool is_built(test_run *run)
{
    static const char *const units[] = {"f16", "f32", "f64"};
    char path[4096];
    for (int i = 0; i < 4; i++) {
        if (i == 3) {
            snprintf(path, sizeof path, "%s", run->sim);
        } else {
            snprintf(path, sizeof path, "%s/fa_gfx906_%s.co", run->code_dir,
                     units[i]);
        }
        if (access(path, R_OK) != 0) {
            test_skip(run, "not built:", path);
            return false;
        }
    }
    return true;
}

/* Two query tiles and two key tiles, neither full. */
static const shape usual = {.batch = 1,
                            .heads = 2,
                            .key_heads = 1,
                            .seqlen_q = 130,
                            .seqlen_k = 70,
                            .dim = 64,
                            .dim_v = 64,
                            .causal = FA_CAUSAL_NONE,
                            .scale = 0.125};

/* All features, in sets that can be combined. */
static const uint32_t sets[] = {
    FA_HAS_BIAS | FA_HAS_SINK | FA_HAS_SOFTCAP | FA_HAS_SINK_KEYS,
    FA_HAS_MASK | FA_HAS_ALIBI | FA_HAS_DROPOUT | FA_HAS_SPANS,
    FA_HAS_BIAS | FA_HAS_SINK | FA_HAS_DROPOUT | FA_HAS_BLOCKS | FA_HAS_ALIBI};
enum { SETS = sizeof sets / sizeof sets[0] };

/* Every row of the table is a pass, a type and a bucket; the steps of a call
 * bring in FA_PREPARE, the strict kernels and that of dbias. */
static void check_rows(test_run *run, bool backward)
{
    for (int i = 0; i < FA_VARIANT_COUNT; i++) {
        const fa_variant *v = &fa_variants[i];
        if (v->pass != (backward ? FA_BACKWARD_Q : FA_FORWARD)) {
            continue;
        }
        for (int dtype = FA_F16; dtype <= FA_F64; dtype++) {
            shape s = usual;
            if ((v->reads >> dtype & 1) == 0) {
                continue;
            }
            s.dtype = (fa_dtype)dtype;
            s.strict_bf16 = s.dtype == FA_BF16 && v->arith == FA_F32;
            s.fp32 = v->arith == FA_F64 ? FA_FP32_EXACT : FA_FP32_FAST;
            /* float16 of so many channels needs no wider arithmetic */
            s.row = s.dtype == FA_F16 && v->arith == FA_F32 ? NULL : v;
            s.dim = s.dim_v = v->dim;
            s.pad = dtype % 2 == 0 ? 8 : 3; /* wide and narrow */
            s.features = v->level == FA_FULL ? sets[0] : 0;
            (backward ? check_backward : check_forward)(run, &s);
        }
    }
}

static void every_forward_agrees_with_the_reference(test_run *run)
{
    if (is_built(run)) {
        check_rows(run, false);
    }
}

static void every_backward_agrees_with_the_reference(test_run *run)
{
    if (is_built(run)) {
        check_rows(run, true);
    }
}

static void ragged_head_dims_and_interleaved_heads_agree(test_run *run)
{
    if (!is_built(run)) {
        return;
    }
    for (int i = 0; i < KINDS; i++) {
        shape s = {.batch = 2,
                   .heads = 2,
                   .key_heads = 2,
                   .seqlen_q = 9,
                   .seqlen_k = 33,
                   .dim = 40,
                   .dim_v = 40,
                   .dtype = kinds[i].dtype,
                   .fp32 = kinds[i].fp32,
                   .scale = -0.3,
                   .interleaved = true};
        check_backward(run, &s);
        s.dim = 77;
        s.dim_v = 5;
        check_backward(run, &s);
    }
}

static void causal_masks_agree_also_where_rows_see_nothing(test_run *run)
{
    if (!is_built(run)) {
        return;
    }
    for (int i = 0; i < KINDS; i++) {
        shape s = usual;
        s.dtype = kinds[i].dtype;
        s.fp32 = kinds[i].fp32;
        s.seqlen_q = 100;
        s.causal = FA_CAUSAL_TOP_LEFT;
        check_backward(run, &s);
        s.causal = FA_CAUSAL_BOTTOM_RIGHT;
        check_backward(run, &s);
        s.seqlen_q = 5;
        check_backward(run, &s);
    }
}

static void features_agree(test_run *run)
{
    if (!is_built(run)) {
        return;
    }
    for (int i = 0; i < KINDS; i++) {
        for (int k = 1; k < SETS; k++) {
            shape s = usual;
            s.dtype = kinds[i].dtype;
            s.fp32 = kinds[i].fp32;
            s.features = sets[k];
            check_backward(run, &s);
            s.seqlen_q = 260; /* several blocks of each side */
            s.seqlen_k = 515;
            s.heads = 1;
            check_backward(run, &s);
        }
    }
}

static void one_row_and_one_key_agree(test_run *run)
{
    if (!is_built(run)) {
        return;
    }
    for (int i = 0; i < KINDS; i++) {
        shape s = usual;
        s.dtype = kinds[i].dtype;
        s.fp32 = kinds[i].fp32;
        s.heads = s.key_heads = s.seqlen_q = s.seqlen_k = 1;
        check_forward(run, &s);
        s.dim = s.dim_v = 1;
        check_forward(run, &s);
    }
}

void test_kernels(test_run *run)
{
    RUN(run, every_forward_agrees_with_the_reference);
    RUN(run, every_backward_agrees_with_the_reference);
    RUN(run, ragged_head_dims_and_interleaved_heads_agree);
    RUN(run, causal_masks_agree_also_where_rows_see_nothing);
    RUN(run, features_agree);
    RUN(run, one_row_and_one_key_agree);
}
