/* test.h: the harness of the C tests, and what they share.
 *
 * A test is a function that CHECKs; a failed check is printed and counted,
 * and the test goes on.  SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_TEST_H
#define FA_TEST_H

#include "fa.h"

typedef struct test_run {
    const char *fakes;    /* folder of the fake runtime libraries */
    const char *scratch;  /* folder that may be written to */
    const char *code_dir; /* the real code objects, if they are built */
    const char *sim;      /* the real libhipsim.so, if it is built */
    const char *only;     /* run the tests whose name contains this, or NULL */
    int passed;
    int failed;
    int skipped;
    int checks_failed; /* of the running test */
    bool skip;         /* the running test asked to be skipped */
} test_run;

#define RUN(run, function) test_one(run, #function, function)
void test_one(test_run *run, const char *name, void (*function)(test_run *));
void test_skip(test_run *run, const char *reason, const char *what);

#define CHECK(run, condition) \
    test_check(run, condition, __FILE__, __LINE__, #condition)
bool test_check(test_run *run, bool ok, const char *file, int line,
                const char *what);

/* That `text` contains `part`; prints both if not. */
#define CHECK_TEXT(run, text, part) \
    test_check_text(run, text, part, __FILE__, __LINE__)
bool test_check_text(test_run *run, const char *text, const char *part,
                     const char *file, int line);

/* A contiguous float16 problem without data, no mask, scale 1. */
fa_problem test_problem(int64_t batch, int64_t heads, int64_t key_heads,
                        int64_t seqlen_q, int64_t seqlen_k, int64_t dim);
void test_contiguous(fa_tensor *t, int64_t b, int64_t h, int64_t s, int64_t d);

/* The same problem in another type, laid out alike, and with another head dim
 * of v. */
void test_retype(fa_problem *p, fa_dtype dtype);
void test_head_dim_v(fa_problem *p, int64_t dim);
/* A full bias, contiguous, at an address of its own; nothing is read there. */
void test_add_bias(fa_problem *p, fa_dtype dtype);
/* FA_HAS_* with some legal values; likewise. */
void test_add_features(fa_problem *p, uint32_t features);
/* Gradients as the op makes them, dout like out, no dlse. */
fa_gradients test_gradients(const fa_problem *p, uint32_t wanted);

/* The plan of a problem that must be legal. */
fa_plan test_plan_forward(test_run *run, const fa_problem *p);
fa_plan test_plan_backward(test_run *run, const fa_problem *p,
                           const fa_gradients *g);
/* That fa_plan_why() says exactly this. */
void test_why(test_run *run, const fa_plan *plan, const char *why);

/* Loads a copy of the fake runtime, as PyTorch would the real one, with two
 * devices and all else 0. */
struct fake_state;
void *test_load_fake(test_run *run, const char *name,
                     struct fake_state **state);

/* Whether there are kernels that take bfloat16 through fp16; skips the test if
 * not. */
bool test_fast_bf16(test_run *run);

/* A fixed sequence of numbers, roughly normal. */
double test_random(uint64_t *state);

void test_refusals(test_run *run);
void test_plan(test_run *run);
void test_wide(test_run *run);
void test_args(test_run *run);
void test_features(test_run *run);
void test_feature_refusals(test_run *run);
void test_rotary(test_run *run);
void test_driver(test_run *run);
void test_launch(test_run *run);
void test_code(test_run *run);
void test_reference(test_run *run);
void test_kernels(test_run *run);
void test_torch_abi(test_run *run);
void test_store(test_run *run);
void test_store_damage(test_run *run);
void test_store_kills(test_run *run);
void test_flight(test_run *run);
void test_latency(test_run *run);
void test_breaker(test_run *run);
void test_guard(test_run *run);
void test_guard_failures(test_run *run);
void test_guard_life(test_run *run);
void test_memory(test_run *run);

#endif
