/* test_plan.c: which kernels run, in which order, with which grids and which
 * workspace.
 *
 * Names of kernels come from the table, so that its rows may change.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "host/plan.h"
#include "test.h"

#include <stdio.h>
#include <string.h>

enum { ALL = FA_WANT_DQ | FA_WANT_DK | FA_WANT_DV };

/* The first row of a pass, a level and an arithmetic that reads `dtype` and
 * serves `dim`. */
static const fa_variant *row_of(fa_level level, fa_pass pass, fa_dtype arith,
                                fa_dtype dtype, int64_t dim)
{
    for (int i = 0; i < FA_VARIANT_COUNT; i++) {
        const fa_variant *v = &fa_variants[i];
        if (v->pass == pass && v->level == level && v->arith == arith &&
            v->dim >= dim && (v->reads >> dtype & 1) != 0) {
            return v;
        }
    }
    return NULL;
}

static const fa_variant *row(fa_pass pass, fa_dtype arith, fa_dtype dtype,
                             int64_t dim)
{
    return row_of(FA_PLAIN, pass, arith, dtype, dim);
}

static const fa_variant *prepare_row(fa_dtype dtype)
{
    return row(FA_PREPARE, dtype == FA_F64 ? FA_F64 : FA_F32, dtype, 1);
}

typedef struct expected_step {
    const fa_variant *variant;
    uint32_t prepare;
    uint32_t only_unfit;
} expected_step;

static void check_steps(test_run *run, const fa_plan *plan, int count,
                        const expected_step *expected)
{
    if (!CHECK(run, plan->count == count)) {
        return;
    }
    for (int i = 0; i < count; i++) {
        CHECK(run, expected[i].variant != NULL);
        CHECK(run, plan->step[i].variant == expected[i].variant);
        CHECK(run, plan->step[i].prepare == expected[i].prepare);
        CHECK(run, plan->step[i].only_unfit == expected[i].only_unfit);
    }
}

/* -- the choice ------------------------------------------------------------ */

static void every_row_of_the_table_is_chosen_for_its_own_head_dim(test_run *run)
{
    for (int i = 0; i < FA_VARIANT_COUNT; i++) {
        const fa_variant *v = &fa_variants[i];
        int found = 0;
        if (v->pass == FA_ROTARY) { /* of test_rotary.c */
            continue;
        }
        for (int dtype = FA_F16; dtype <= FA_F64; dtype++) {
            for (int strict = 0; strict < 2; strict++) {
                fa_problem p = test_problem(2, 4, 2, 200, 100, v->dim);
                test_retype(&p, (fa_dtype)dtype);
                p.strict_bf16 = strict == 1;
                p.fp32 = strict == 1 ? FA_FP32_EXACT : FA_FP32_FAST;
                const bool full = v->level == FA_FULL;
                if (full) {
                    test_add_bias(&p, dtype == FA_F64 ? FA_F64 : FA_F32);
                }
                const fa_gradients g =
                    test_gradients(&p, full ? ALL | FA_WANT_DBIAS : ALL);
                const fa_plan plan = v->pass == FA_FORWARD
                                         ? test_plan_forward(run, &p)
                                         : test_plan_backward(run, &p, &g);
                for (int s = 0; s < plan.count; s++) {
                    found += plan.step[s].variant == v;
                }
            }
        }
        if (!CHECK(run, found > 0)) {
            printf("never chosen: %s\n", v->symbol);
        }
    }
}

static void
the_smallest_bucket_that_holds_both_head_dims_is_chosen(test_run *run)
{
    static const int64_t dims[] = {8,   9,   31,  32,  33,  64,  65, 96,
                                   100, 127, 128, 129, 192, 193, 256};
    for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++) {
        fa_problem p = test_problem(1, 1, 1, 8, 8, dims[i]);
        fa_plan plan = test_plan_forward(run, &p);
        const fa_variant *v = row(FA_FORWARD, FA_F16, FA_F16, dims[i]);
        CHECK(run, plan.step[0].variant == v);
        for (int j = 0; j < FA_VARIANT_COUNT; j++) {
            const fa_variant *other = &fa_variants[j];
            CHECK(run, other->pass != FA_FORWARD || other->arith != FA_F16 ||
                           other->level != FA_PLAIN || other->dim < dims[i] ||
                           other->dim >= v->dim);
        }
        test_head_dim_v(&p, 8); /* the larger of the two decides */
        plan = test_plan_forward(run, &p);
        CHECK(run, plan.step[0].variant == v);
        p = test_problem(1, 1, 1, 8, 8, 8);
        test_head_dim_v(&p, dims[i]);
        plan = test_plan_forward(run, &p);
        CHECK(run, plan.step[0].variant == v);
    }
}

static void a_forward_is_one_step_but_for_bfloat16(test_run *run)
{
    static const fa_dtype types[] = {FA_F16, FA_F32, FA_F64};
    fa_problem p = test_problem(2, 4, 2, 200, 100, 40);
    for (int i = 0; i < 3; i++) {
        test_retype(&p, types[i]);
        const fa_plan plan = test_plan_forward(run, &p);
        check_steps(
            run, &plan, 1,
            &(expected_step){row(FA_FORWARD, types[i], types[i], 40), 0, 0});
        CHECK(run, plan.workspace.bytes == 0);
    }
}

static void
bfloat16_goes_through_fp16_and_again_where_it_did_not_fit(test_run *run)
{
    if (!test_fast_bf16(run)) {
        return;
    }
    fa_problem p = test_problem(2, 4, 2, 200, 100, 40);
    char symbols[FA_SYMBOLS_CHARS];
    test_retype(&p, FA_BF16);
    const fa_plan plan = test_plan_forward(run, &p);
    const fa_variant *fast = row(FA_FORWARD, FA_F16, FA_BF16, 40);
    check_steps(run, &plan, 3,
                (expected_step[]){
                    {prepare_row(FA_BF16), FA_SET_Q | FA_SET_K | FA_SET_V, 0},
                    {fast, 0, 0},
                    {row(FA_FORWARD, FA_F32, FA_BF16, 40), 0, 1}});
    fa_plan_symbols(&plan, symbols);
    CHECK(run, strcmp(symbols, fast->symbol) == 0);
}

static void strict_bfloat16_runs_in_float32_arithmetic(test_run *run)
{
    fa_problem p = test_problem(2, 4, 2, 200, 100, 40);
    test_retype(&p, FA_BF16);
    p.strict_bf16 = true;
    const fa_plan plan = test_plan_forward(run, &p);
    check_steps(run, &plan, 1,
                &(expected_step){row(FA_FORWARD, FA_F32, FA_BF16, 40), 0, 0});
    CHECK(run, plan.workspace.bytes == 0);
    const fa_gradients g = test_gradients(&p, ALL);
    const fa_plan backward = test_plan_backward(run, &p, &g);
    const expected_step prepare = {prepare_row(FA_BF16), FA_SET_DOUT, 0};
    check_steps(
        run, &backward, 4,
        (expected_step[]){prepare,
                          {row(FA_BACKWARD_Q, FA_F32, FA_BF16, 40), 0, 0},
                          prepare,
                          {row(FA_BACKWARD_KV, FA_F32, FA_BF16, 40), 0, 0}});
}

static void float64_goes_over_keys_then_queries(test_run *run)
{
    fa_problem p = test_problem(2, 4, 2, 200, 100, 40);
    test_retype(&p, FA_F64);
    const fa_gradients g = test_gradients(&p, ALL);
    const fa_plan plan = test_plan_backward(run, &p, &g);
    const fa_variant *kv = row(FA_BACKWARD_KV, FA_F64, FA_F64, 40);
    const fa_variant *q = row(FA_BACKWARD_Q, FA_F64, FA_F64, 40);
    char symbols[FA_SYMBOLS_CHARS];
    char expected[FA_SYMBOLS_CHARS];
    check_steps(run, &plan, 3,
                (expected_step[]){{prepare_row(FA_F64), FA_SET_DOUT, 0},
                                  {kv, 0, 0},
                                  {q, 0, 0}});
    fa_plan_symbols(&plan, symbols);
    snprintf(expected, sizeof expected, "%s+%s", kv->symbol, q->symbol);
    CHECK(run, strcmp(symbols, expected) == 0);
}

/* Whatever else is wanted. */
static void others_go_over_queries_first_for_the_delta_of_dk(test_run *run)
{
    static const fa_dtype types[] = {FA_F16, FA_F32};
    fa_problem p = test_problem(2, 4, 2, 200, 100, 40);
    for (uint32_t i = 0; i < 2 * ALL; i++) {
        const fa_dtype t = types[i / ALL];
        const uint32_t wanted = i % ALL + 1;
        const uint32_t norms =
            t == FA_F16 ? FA_SET_V | FA_SET_DOUT : FA_SET_DOUT;
        test_retype(&p, t);
        const expected_step prepare = {prepare_row(t), norms, 0};
        const expected_step correct = {prepare_row(t), FA_SET_DOUT, 0};
        const expected_step kv = {row(FA_BACKWARD_KV, t, t, 40), 0, 0};
        const expected_step q = {row(FA_BACKWARD_Q, t, t, 40), 0, 0};
        const fa_gradients g = test_gradients(&p, wanted);
        const fa_plan plan = test_plan_backward(run, &p, &g);
        const bool sums = (wanted & FA_WANT_DK) != 0;
        if (sums) {
            check_steps(run, &plan, 4,
                        (expected_step[]){prepare, q, correct, kv});
        } else if (wanted == FA_WANT_DV) {
            check_steps(run, &plan, 2, (expected_step[]){prepare, kv});
        } else if (wanted == FA_WANT_DQ) {
            check_steps(run, &plan, 2, (expected_step[]){prepare, q});
        } else {
            check_steps(run, &plan, 3, (expected_step[]){prepare, kv, q});
        }
        for (int k = 0; k < plan.count; k++) {
            CHECK(run, plan.step[k].row_sums == (sums && (k == 1 || k == 2)));
        }
    }
}

/* Of 2^22 multiply-adds in a forward, and those of `more` keys, or less. */
static fa_problem small_float32(int64_t more)
{
    fa_problem p = test_problem(1, 2, 1, 128, 128 + more, 64);
    test_retype(&p, FA_F32);
    return p;
}

static void small_problems_of_float32_are_computed_in_float64(test_run *run)
{
    static const struct {
        fa_fp32 fp32;
        bool small;
        bool large;
    } cases[] = {{FA_FP32_AUTO, true, false},
                 {FA_FP32_FAST, false, false},
                 {FA_FP32_EXACT, true, true}};
    const fa_variant *exact = row_of(FA_FULL, FA_FORWARD, FA_F64, FA_F32, 64);
    const fa_variant *fast = row(FA_FORWARD, FA_F32, FA_F32, 64);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        for (int64_t more = -1; more < 2; more++) {
            fa_problem p = small_float32(more);
            p.fp32 = cases[i].fp32;
            const bool is = more <= 0 ? cases[i].small : cases[i].large;
            CHECK(run, fa_is_exact32(&p) == is);
            const fa_plan plan = test_plan_forward(run, &p);
            check_steps(run, &plan, 1,
                        &(expected_step){is ? exact : fast, 0, 0});
            CHECK(run, plan.workspace.bytes == 0);
            test_add_features(&p, FA_HAS_SOFTCAP);
            CHECK(run,
                  test_plan_forward(run, &p).step[0].variant ==
                      (is ? exact
                          : row_of(FA_FULL, FA_FORWARD, FA_F32, FA_F32, 64)));
        }
    }
}

static void check_same_steps(test_run *run, const fa_plan *a, const fa_plan *b)
{
    CHECK(run, a->count == b->count && a->count > 0);
    CHECK(run, a->workspace.bytes == b->workspace.bytes);
    for (int i = 0; i < a->count; i++) {
        CHECK(run, a->step[i].variant == b->step[i].variant);
        CHECK(run, a->step[i].prepare == b->step[i].prepare);
        CHECK(run, a->step[i].row_sums == b->step[i].row_sums);
        CHECK(run, a->step[i].dq_follows == b->step[i].dq_follows);
    }
}

static void other_types_do_not_ask_how_float32_is_computed(test_run *run)
{
    static const fa_dtype types[] = {FA_F16, FA_BF16, FA_F64};
    for (int i = 0; i < 3; i++) {
        fa_problem p = small_float32(0);
        test_retype(&p, types[i]);
        const fa_gradients g = test_gradients(&p, ALL);
        const fa_plan usual = test_plan_forward(run, &p);
        const fa_plan usual_back = test_plan_backward(run, &p, &g);
        p.fp32 = FA_FP32_EXACT;
        const fa_plan exact = test_plan_forward(run, &p);
        const fa_plan exact_back = test_plan_backward(run, &p, &g);
        check_same_steps(run, &usual, &exact);
        check_same_steps(run, &usual_back, &exact_back);
    }
}

/* Delta of a float32 output would be the largest error by far. */
static void float32_in_float64_takes_the_corrected_delta(test_run *run)
{
    const fa_problem p = small_float32(0);
    const fa_variant *of_rows = row(FA_PREPARE, FA_F64, FA_F32, 1);
    const expected_step prepare = {of_rows, FA_SET_DOUT, 0};
    const fa_variant *kv_row =
        row_of(FA_FULL, FA_BACKWARD_KV, FA_F64, FA_F32, 64);
    const fa_variant *q_row =
        row_of(FA_FULL, FA_BACKWARD_Q, FA_F64, FA_F32, 64);
    const expected_step kv = {kv_row, 0, 0};
    const expected_step q = {q_row, 0, 0};
    for (uint32_t wanted = 1; wanted <= ALL; wanted++) {
        const fa_gradients g = test_gradients(&p, wanted);
        const fa_plan plan = test_plan_backward(run, &p, &g);
        const bool dq = (wanted & FA_WANT_DQ) != 0;
        const bool keys = (wanted & (FA_WANT_DK | FA_WANT_DV)) != 0;
        char symbols[FA_SYMBOLS_CHARS];
        char expected[FA_SYMBOLS_CHARS];
        fa_plan_symbols(&plan, symbols);
        if (wanted == FA_WANT_DV) {
            check_steps(run, &plan, 2, (expected_step[]){prepare, kv});
            snprintf(expected, sizeof expected, "%s", kv_row->symbol);
        } else if (!dq) {
            check_steps(run, &plan, 4,
                        (expected_step[]){prepare, q, prepare, kv});
            snprintf(expected, sizeof expected, "%s+%s", q_row->symbol,
                     kv_row->symbol);
        } else {
            check_steps(run, &plan, keys ? 5 : 4,
                        (expected_step[]){prepare, q, prepare, q, kv});
            snprintf(expected, sizeof expected, "%s%s%s", q_row->symbol,
                     keys ? "+" : "", keys ? kv_row->symbol : "");
        }
        CHECK(run, strcmp(symbols, expected) == 0);
        for (int k = 0; k < plan.count; k++) {
            const bool sums = wanted != FA_WANT_DV && (k == 1 || k == 2);
            CHECK(run, plan.step[k].row_sums == sums);
            CHECK(run, plan.step[k].dq_follows == (dq && k == 1));
        }
        CHECK(run, plan.workspace.bytes ==
                       (size_t)2 * 128 * FA_ROW_NUMBERS * sizeof(double));
    }
}

static void dbias_of_float32_in_float64_follows_once(test_run *run)
{
    fa_problem p = small_float32(0);
    test_add_bias(&p, FA_F32);
    const fa_variant *bias =
        row_of(FA_FULL, FA_BACKWARD_BIAS, FA_F64, FA_F32, 64);
    for (int i = 0; i < 2; i++) {
        const uint32_t wanted = FA_WANT_DBIAS | (i == 0 ? ALL : 0U);
        const fa_gradients g = test_gradients(&p, wanted);
        const fa_plan plan = test_plan_backward(run, &p, &g);
        int prepares = 0;
        for (int k = 0; k < plan.count; k++) {
            prepares += plan.step[k].variant->pass == FA_PREPARE;
        }
        CHECK(run, plan.count == (i == 0 ? 6 : 4) && prepares == 2);
        CHECK(run, plan.step[plan.count - 1].variant == bias);
    }
}

static void a_backward_of_bfloat16_repeats_both_passes(test_run *run)
{
    if (!test_fast_bf16(run)) {
        return;
    }
    fa_problem p = test_problem(2, 4, 2, 200, 100, 40);
    test_retype(&p, FA_BF16);
    const fa_gradients g = test_gradients(&p, ALL);
    const fa_plan plan = test_plan_backward(run, &p, &g);
    check_steps(
        run, &plan, 6,
        (expected_step[]){{prepare_row(FA_BF16),
                           FA_SET_Q | FA_SET_K | FA_SET_V | FA_SET_DOUT, 0},
                          {row(FA_BACKWARD_Q, FA_F16, FA_BF16, 40), 0, 0},
                          {row(FA_BACKWARD_Q, FA_F32, FA_BF16, 40), 0, 1},
                          {prepare_row(FA_BF16), FA_SET_DOUT, 0},
                          {row(FA_BACKWARD_KV, FA_F16, FA_BF16, 40), 0, 0},
                          {row(FA_BACKWARD_KV, FA_F32, FA_BF16, 40), 0, 1}});
}

/* The other kernels' roundings of dS do not average out over so few. */
static void float16_of_fewer_than_8_channels_runs_in_float32(test_run *run)
{
    static const int64_t dims_v[] = {1, 7, 64, 256};
    for (int64_t dim = 1; dim <= 8; dim++) {
        for (int i = 0; i < 4; i++) {
            fa_problem p = test_problem(2, 4, 2, 200, 100, dim);
            test_head_dim_v(&p, dims_v[i]);
            const fa_dtype arith = dim < 8 ? FA_F32 : FA_F16;
            const int64_t most = dim > dims_v[i] ? dim : dims_v[i];
            const fa_gradients g = test_gradients(&p, ALL);
            const fa_plan forward = test_plan_forward(run, &p);
            const fa_plan backward = test_plan_backward(run, &p, &g);
            const uint32_t prepare =
                dim < 8 ? FA_SET_DOUT : FA_SET_DOUT | FA_SET_V;
            check_steps(run, &forward, 1,
                        (expected_step[]){
                            {row(FA_FORWARD, arith, FA_F16, most), 0, 0}});
            const fa_variant *rows = row(FA_PREPARE, FA_F32, FA_F16, most);
            check_steps(run, &backward, 4,
                        (expected_step[]){
                            {rows, prepare, 0},
                            {row(FA_BACKWARD_Q, arith, FA_F16, most), 0, 0},
                            {rows, FA_SET_DOUT, 0},
                            {row(FA_BACKWARD_KV, arith, FA_F16, most), 0, 0}});
        }
    }
}

/* That of dq also for dk, whose delta it corrects. */
static void only_the_passes_of_wanted_gradients_run(test_run *run)
{
    const fa_problem p = test_problem(2, 4, 2, 200, 100, 64);
    for (uint32_t wanted = 1; wanted <= ALL; wanted++) {
        const fa_gradients g = test_gradients(&p, wanted);
        const fa_plan plan = test_plan_backward(run, &p, &g);
        bool kv = false;
        bool q = false;
        for (int i = 0; i < plan.count; i++) {
            kv |= plan.step[i].variant->pass == FA_BACKWARD_KV;
            q |= plan.step[i].variant->pass == FA_BACKWARD_Q;
        }
        CHECK(run, kv == ((wanted & (FA_WANT_DK | FA_WANT_DV)) != 0));
        CHECK(run, q == ((wanted & (FA_WANT_DQ | FA_WANT_DK)) != 0));
    }
}

/* -- grids ----------------------------------------------------------------- */

static uint32_t tiles(int64_t length, int32_t rows)
{
    return (uint32_t)((length + rows - 1) / rows);
}

static void every_legal_problem_has_its_kernels(test_run *run)
{
    for (int64_t dim = 1; dim <= 257; dim++) {
        for (int i = 0; i < 16; i++) { /* types, strict, features */
            fa_plan plan;
            fa_error error;
            fa_problem p = test_problem(1, 2, 1, 4, 4, dim);
            const fa_status expected = dim > 256 ? FA_EUNSUPPORTED : FA_OK;
            test_retype(&p, (fa_dtype)(i % 4));
            p.strict_bf16 = i / 4 % 2 == 1;
            p.fp32 = p.strict_bf16 ? FA_FP32_EXACT : FA_FP32_FAST;
            test_add_features(&p, i >= 8 ? FA_HAS_BIAS : 0);
            const fa_gradients g =
                test_gradients(&p, i >= 8 ? ALL | FA_WANT_DBIAS : ALL);
            CHECK(run, fa_plan_forward(&p, &plan, &error) == expected);
            CHECK(run, (plan.count != 0) == (expected == FA_OK));
            CHECK(run, fa_plan_backward(&p, &g, &plan, &error) == expected);
            CHECK(run, (plan.count != 0) == (expected == FA_OK));
        }
    }
}

static void grids_cover_every_row_head_and_batch(test_run *run)
{
    static const int64_t lengths[] = {1, 63, 64, 65, 127, 128, 129, 1 << 20};
    for (int i = 0; i < 8 * 8; i++) {
        const int64_t queries = lengths[i / 8];
        const int64_t keys = lengths[i % 8];
        fa_problem p = test_problem(3, 8, 2, queries, keys, 64);
        const fa_gradients g = test_gradients(&p, ALL);
        const fa_plan forward = test_plan_forward(run, &p);
        const fa_plan plan = test_plan_backward(run, &p, &g);
        const uint32_t *grid = forward.step[0].grid;
        CHECK(run, grid[0] == tiles(queries, forward.step[0].variant->rows));
        CHECK(run, grid[1] == 8 && grid[2] == 3);
        /* Each of four tensors has a range of workgroups of its own. */
        grid = plan.step[0].grid;
        CHECK(run, grid[0] == 4 * tiles(queries > keys ? queries : keys, 64));
        CHECK(run, grid[1] == 8 && grid[2] == 3);
        grid = plan.step[1].grid;
        CHECK(run, grid[0] == tiles(queries, plan.step[1].variant->rows));
        CHECK(run, grid[1] == 8 && grid[2] == 3);
        grid = plan.step[3].grid;
        CHECK(run, grid[0] == tiles(keys, plan.step[3].variant->rows));
        CHECK(run, grid[1] == 2 && grid[2] == 3);
    }
}

/* -- the workspace --------------------------------------------------------- */

/* The arrays lie inside the workspace, aligned, without overlap. */
static void check_workspace(test_run *run, const fa_plan *plan,
                            size_t rows_bytes, const size_t scales[4],
                            const size_t blocks[4])
{
    const fa_workspace *w = &plan->workspace;
    size_t end = 0;
    size_t at[9] = {w->rows};
    size_t bytes[9] = {rows_bytes};
    for (int i = 0; i < 4; i++) {
        at[1 + 2 * i] = w->scale_of[i];
        bytes[1 + 2 * i] = scales[i];
        at[2 + 2 * i] = w->block_of[i];
        bytes[2 + 2 * i] = blocks[i];
    }
    for (int i = 0; i < 9; i++) {
        if (bytes[i] == 0) {
            CHECK(run, at[i] == FA_NOWHERE);
            continue;
        }
        CHECK(run, at[i] % 16 == 0 && at[i] >= end && at[i] < end + 16);
        end = at[i] + bytes[i];
    }
    CHECK(run, w->bytes >= end && w->bytes < end + 16 && w->bytes % 16 == 0);
}

static void the_workspace_holds_what_the_steps_exchange(test_run *run)
{
    /* 2 * 4 * 65 = 520 query rows in 16 blocks, 2 * 2 * 129 = 516 key rows in
     * 12 blocks. */
    const size_t numbers = (size_t)520 * FA_ROW_NUMBERS;
    fa_problem p = test_problem(2, 4, 2, 65, 129, 40);
    fa_gradients g = test_gradients(&p, ALL);
    fa_plan plan = test_plan_backward(run, &p, &g);
    check_workspace(run, &plan, numbers * 4, (size_t[4]){0},
                    (size_t[4]){0, 0, 12 * 8, 16 * 8});
    test_retype(&p, FA_F32);
    g = test_gradients(&p, ALL);
    plan = test_plan_backward(run, &p, &g);
    check_workspace(run, &plan, numbers * 4, (size_t[4]){0}, (size_t[4]){0});
    test_retype(&p, FA_F64);
    g = test_gradients(&p, ALL);
    plan = test_plan_backward(run, &p, &g);
    check_workspace(run, &plan, numbers * 8, (size_t[4]){0}, (size_t[4]){0});
}

static void bfloat16_needs_a_scale_for_each_row(test_run *run)
{
    if (!test_fast_bf16(run)) {
        return;
    }
    const size_t numbers = (size_t)520 * FA_ROW_NUMBERS;
    fa_problem p = test_problem(2, 4, 2, 65, 129, 40);
    test_retype(&p, FA_BF16);
    const fa_gradients g = test_gradients(&p, ALL);
    fa_plan plan = test_plan_backward(run, &p, &g);
    check_workspace(run, &plan, numbers * 4,
                    (size_t[4]){520 * 4, 516 * 4, 516 * 4, 520 * 4},
                    (size_t[4]){16 * 8, 12 * 8, 12 * 8, 16 * 8});
    plan = test_plan_forward(run, &p);
    check_workspace(run, &plan, 0, (size_t[4]){520 * 4, 516 * 4, 516 * 4, 0},
                    (size_t[4]){16 * 8, 12 * 8, 12 * 8, 0});
}

/* Its size must not wrap: these are some 2^59 rows on each side, of which
 * float64 needs 2^64 bytes and bfloat16 more. */
static void a_workspace_that_cannot_exist_is_refused(test_run *run)
{
    for (int dtype = FA_F16; dtype <= FA_F64; dtype++) {
        fa_error error = {"(accepted)"};
        fa_plan plan;
        fa_problem p = test_problem(65535, 65535, 65535, 1 << 27, 1 << 27, 1);
        test_retype(&p, (fa_dtype)dtype);
        const fa_gradients g = test_gradients(&p, ALL);
        CHECK(run, fa_plan_backward(&p, &g, &plan, &error) == FA_EUNSUPPORTED);
        CHECK_TEXT(run, error.text, "q: expected a workspace below 2^62 bytes");
    }
}

/* -- without kernels ------------------------------------------------------- */

static void check_empty(test_run *run, const fa_problem *p, const char *why)
{
    const fa_plan plan = test_plan_forward(run, p);
    CHECK(run, plan.count == 0 && plan.workspace.bytes == 0);
    test_why(run, &plan, why);
}

static void empty_problems_need_no_kernel(test_run *run)
{
    fa_problem p = test_problem(0, 2, 2, 4, 4, 64);
    check_empty(run, &p, "empty: out has no elements");
    p = test_problem(2, 2, 2, 0, 4, 64);
    check_empty(run, &p, "empty: out has no elements");
    p = test_problem(2, 0, 0, 4, 4, 64);
    check_empty(run, &p, "empty: out has no elements");
    p = test_problem(2, 0, 2, 4, 4, 64);
    check_empty(run, &p, "empty: out has no elements");
    p = test_problem(2, 2, 1, 4, 0, 64);
    check_empty(run, &p, "empty: no keys, so out is 0 and lse -inf");
    p = test_problem(2, 2, 1, 0, 0, 64);
    check_empty(run, &p, "empty: out has no elements");
}

static void empty_backwards_fill_what_has_elements(test_run *run)
{
    static const struct {
        int64_t batch, heads, key_heads, queries, keys;
        uint32_t wanted;
        fa_work work;
    } cases[] = {
        {2, 2, 2, 0, 4, ALL, FA_WORK_NO_KEYS},
        {2, 2, 2, 0, 4, FA_WANT_DQ, FA_WORK_NONE},
        {2, 2, 2, 4, 0, ALL, FA_WORK_NO_KEYS},
        {2, 2, 2, 4, 0, FA_WANT_DK | FA_WANT_DV, FA_WORK_NONE},
        {2, 0, 2, 4, 4, ALL, FA_WORK_NO_KEYS},
        {0, 2, 2, 4, 4, ALL, FA_WORK_NONE},
        {2, 2, 2, 0, 0, ALL, FA_WORK_NONE},
        {2, 2, 2, 4, 4, 0, FA_WORK_NONE},
        {2, 2, 2, 4, 4, FA_WANT_DV, FA_WORK_STEPS},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const fa_problem p =
            test_problem(cases[i].batch, cases[i].heads, cases[i].key_heads,
                         cases[i].queries, cases[i].keys, 64);
        const fa_gradients g = test_gradients(&p, cases[i].wanted);
        const fa_plan plan = test_plan_backward(run, &p, &g);
        CHECK(run, plan.work == cases[i].work);
        CHECK(run, (plan.count == 0) == (plan.work != FA_WORK_STEPS));
        if (plan.work != FA_WORK_STEPS) {
            test_why(run, &plan,
                     plan.work == FA_WORK_NONE
                         ? "empty: no gradient has elements"
                         : "empty: the gradients are 0");
        }
    }
}

void test_plan(test_run *run)
{
    RUN(run, every_row_of_the_table_is_chosen_for_its_own_head_dim);
    RUN(run, the_smallest_bucket_that_holds_both_head_dims_is_chosen);
    RUN(run, a_forward_is_one_step_but_for_bfloat16);
    RUN(run, float16_of_fewer_than_8_channels_runs_in_float32);
    RUN(run, bfloat16_goes_through_fp16_and_again_where_it_did_not_fit);
    RUN(run, strict_bfloat16_runs_in_float32_arithmetic);
    RUN(run, float64_goes_over_keys_then_queries);
    RUN(run, others_go_over_queries_first_for_the_delta_of_dk);
    RUN(run, small_problems_of_float32_are_computed_in_float64);
    RUN(run, other_types_do_not_ask_how_float32_is_computed);
    RUN(run, float32_in_float64_takes_the_corrected_delta);
    RUN(run, dbias_of_float32_in_float64_follows_once);
    RUN(run, a_backward_of_bfloat16_repeats_both_passes);
    RUN(run, only_the_passes_of_wanted_gradients_run);
    RUN(run, every_legal_problem_has_its_kernels);
    RUN(run, grids_cover_every_row_head_and_batch);
    RUN(run, the_workspace_holds_what_the_steps_exchange);
    RUN(run, bfloat16_needs_a_scale_for_each_row);
    RUN(run, a_workspace_that_cannot_exist_is_refused);
    RUN(run, empty_problems_need_no_kernel);
    RUN(run, empty_backwards_fill_what_has_elements);
}
