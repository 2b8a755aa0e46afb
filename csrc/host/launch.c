/* launch.c: from a plan to a kernel that runs.
 *
 * A fa_runtime owns the drivers and code objects of one configuration and
 * opens them when a launch first needs them.  Checking the problem is left
 * to plan.c, which must have made the plan.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "host/code.h"
#include "host/driver.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct fa_runtime {
    char *code_dir;
    char *sim_library;
    _Atomic(fa_driver *) driver[FA_BACKEND_COUNT]; /* NULL: not opened */
    fa_code_list codes;
};

fa_status fa_runtime_open(const char *code_dir, const char *sim_library,
                          fa_runtime **out, fa_error *error)
{
    *out = NULL;
    fa_runtime *runtime = calloc(1, sizeof *runtime);
    if (runtime == NULL) {
        return fa_fail(error, FA_ENOMEM, "runtime: out of memory");
    }
    runtime->code_dir = strdup(code_dir);
    runtime->sim_library = strdup(sim_library);
    if (runtime->code_dir == NULL || runtime->sim_library == NULL) {
        fa_runtime_close(runtime);
        return fa_fail(error, FA_ENOMEM, "runtime: out of memory");
    }
    *out = runtime;
    return FA_OK;
}

void fa_runtime_close(fa_runtime *runtime)
{
    if (runtime == NULL) {
        return;
    }
    fa_code_clear(&runtime->codes);
    for (int i = 0; i < FA_BACKEND_COUNT; i++) {
        fa_driver_close(atomic_load(&runtime->driver[i]));
    }
    free(runtime->code_dir);
    free(runtime->sim_library);
    free(runtime);
}

const char *fa_runtime_code_dir(const fa_runtime *runtime)
{
    return runtime->code_dir;
}

const char *fa_runtime_sim_library(const fa_runtime *runtime)
{
    return runtime->sim_library;
}

/* The driver of `backend`, opened if need be.  No lock: of two threads that
 * open it at once, one keeps its driver and the other closes its own. */
static fa_status get_driver(fa_runtime *runtime, fa_backend backend,
                            fa_driver **out, fa_error *error)
{
    fa_driver *mine = NULL;
    *out = NULL;
    if ((unsigned)backend < FA_BACKEND_COUNT) { /* if not, open says so */
        *out = atomic_load(&runtime->driver[backend]);
    }
    if (*out != NULL) {
        return FA_OK;
    }
    fa_status status =
        fa_driver_open(backend, runtime->sim_library, &mine, error);
    if (status != FA_OK) {
        return status;
    }
    if (atomic_compare_exchange_strong(&runtime->driver[backend], out, mine)) {
        *out = mine;
    } else {
        fa_driver_close(mine);
    }
    return FA_OK;
}

/* -- what the kernel is told ----------------------------------------------- */

/* The stride of a dimension of size 1 can be anything, also out of range. */
static void copy_strides(int64_t to[3], const fa_tensor *from)
{
    for (int d = 0; d < 3; d++) {
        to[d] = from->size[d] == 1 ? 0 : from->stride[d];
    }
}

static int32_t diagonal(const fa_problem *p)
{
    const int32_t seqlen_q = (int32_t)p->q.size[2];
    const int32_t seqlen_k = (int32_t)p->k.size[2];
    switch (p->causal) {
    case FA_CAUSAL_TOP_LEFT:
        return 0;
    case FA_CAUSAL_BOTTOM_RIGHT:
        return seqlen_k - seqlen_q;
    default:
        return seqlen_k;
    }
}

static void fill_args(const fa_problem *p, fa_args *args)
{
    const double log2_e = 1.4426950408889634;
    *args = (fa_args){
        .q = p->q.data,
        .k = p->k.data,
        .v = p->v.data,
        .out = p->out.data,
        .lse = p->lse,
        .seqlen_q = (int32_t)p->q.size[2],
        .seqlen_k = (int32_t)p->k.size[2],
        .head_dim = (int32_t)p->q.size[3],
        .heads = (int32_t)p->q.size[1],
        .group = (int32_t)(p->q.size[1] / p->k.size[1]),
        .diagonal = diagonal(p),
        .scale_log2 = (float)(fabs(p->scale) * log2_e),
        .q_flip = p->scale < 0.0 ? UINT32_C(0x80008000) : 0,
    };
    copy_strides(args->q_stride, &p->q);
    copy_strides(args->k_stride, &p->k);
    copy_strides(args->v_stride, &p->v);
    copy_strides(args->out_stride, &p->out);
}

static fa_tensor lse_tensor(const fa_problem *p)
{
    const int64_t *q = p->q.size;
    return (fa_tensor){.data = p->lse,
                       .dtype = FA_F32,
                       .size = {q[0], q[1], q[2], 1},
                       .stride = {q[1] * q[2], q[2], 1, 1}};
}

static fa_status launch(const fa_driver *driver, void *function,
                        const fa_plan *plan, const fa_target *target,
                        const fa_problem *p, fa_counts *counts, fa_error *error)
{
    fa_args args;
    assert(plan->variant != NULL);
    assert(p->q.size[3] <= plan->variant->dim);
    assert(p->out.data != NULL && p->lse != NULL);
    fill_args(p, &args);
    const fa_tensor lse = lse_tensor(p);
    const fa_access tensors[] = {{&p->q, FA_READ},
                                 {&p->k, FA_READ},
                                 {&p->v, FA_READ},
                                 {&p->out, FA_WRITE},
                                 {&lse, FA_WRITE}};
    const fa_launch request = {
        .function = function,
        .symbol = plan->variant->symbol,
        .grid = {plan->grid[0], plan->grid[1], plan->grid[2]},
        .threads = plan->variant->threads,
        .lds_bytes = plan->variant->lds_bytes,
        .stream = target->stream,
        .args = &args,
        .tensors = tensors,
        .tensor_count = sizeof tensors / sizeof tensors[0],
    };
    return driver->launch(driver, &request, counts, error);
}

/* Without keys a row sees nothing: out 0, lse -inf.  No kernel for that. */
static fa_status fill_without_keys(const fa_driver *driver,
                                   const fa_target *target, const fa_problem *p,
                                   fa_error *error)
{
    const uint32_t minus_infinity = 0xff800000;
    const size_t rows = (size_t)(p->q.size[0] * p->q.size[1] * p->q.size[2]);
    fa_tensor dense;
    fa_tensor_like(&p->out, &dense);
    for (int d = 0; d < 4; d++) {
        if (p->out.size[d] != 1 && p->out.stride[d] != dense.stride[d]) {
            return fa_fail(error, FA_EUNSUPPORTED,
                           "out: expected a dense tensor where k has no "
                           "rows, got stride %lld in dimension %d",
                           (long long)p->out.stride[d], d);
        }
    }
    fa_status status =
        driver->fill(driver, p->out.data, 0, 2, rows * (size_t)p->q.size[3],
                     target->stream, error);
    if (status == FA_OK) {
        status = driver->fill(driver, p->lse, minus_infinity, 4, rows,
                              target->stream, error);
    }
    return status;
}

/* The driver of `target` and its device made current; undo the latter with
 * driver->leave(). */
static fa_status enter(fa_runtime *runtime, const fa_target *target,
                       fa_driver **driver, fa_scope *scope, fa_error *error)
{
    if (target->backend == FA_SIM && target->arch == NULL) {
        return fa_fail(error, FA_EINVAL,
                       "arch: expected a name such as gfx906 for the "
                       "simulator, got none");
    }
    fa_status status = get_driver(runtime, target->backend, driver, error);
    if (status != FA_OK) {
        return status;
    }
    return (*driver)->enter(*driver, target->device, scope, error);
}

static fa_status find_kernel(fa_runtime *runtime, fa_driver *driver,
                             const fa_target *target, const fa_variant *variant,
                             void **function, fa_error *error)
{
    *function = NULL;
    if (driver->load == NULL) { /* the null backend has no code */
        return FA_OK;
    }
    return fa_code_function(&runtime->codes, driver, runtime->code_dir,
                            target->device, target->arch, variant, function,
                            error);
}

fa_status fa_runtime_load(fa_runtime *runtime, const fa_target *target,
                          fa_error *error)
{
    fa_driver *driver = NULL;
    fa_scope scope;
    void *function = NULL;
    fa_status status = enter(runtime, target, &driver, &scope, error);
    if (status != FA_OK) {
        return status;
    }
    status =
        find_kernel(runtime, driver, target, &fa_variants[0], &function, error);
    driver->leave(driver, &scope);
    return status;
}

fa_status fa_forward(fa_runtime *runtime, const fa_target *target,
                     const fa_problem *problem, const fa_plan *plan,
                     fa_counts *counts, fa_error *error)
{
    fa_driver *driver = NULL;
    fa_scope scope;
    void *function = NULL;
    *counts = (fa_counts){0};
    if (plan->cause == FA_CAUSE_NO_OUTPUT) {
        return FA_OK;
    }
    /* The plan may be older than the output's memory. */
    if (plan->cause == FA_CAUSE_WIDE &&
        (uintptr_t)problem->out.data % 16 != 0) {
        return fa_fail(error, FA_EINVAL,
                       "out: expected a base aligned to 16 bytes, got %p",
                       problem->out.data);
    }
    fa_status status = enter(runtime, target, &driver, &scope, error);
    if (status != FA_OK) {
        return status;
    }
    if (plan->cause == FA_CAUSE_NO_KEYS) {
        status = fill_without_keys(driver, target, problem, error);
    } else {
        status = find_kernel(runtime, driver, target, plan->variant, &function,
                             error);
        if (status == FA_OK) {
            status =
                launch(driver, function, plan, target, problem, counts, error);
        }
    }
    driver->leave(driver, &scope);
    return status;
}
