/* launch.c: from a plan to kernels that run.
 *
 * A fa_runtime owns the drivers and code objects of one configuration and
 * opens them when a launch first needs them.  Checking the problem is left
 * to check.c, choosing to plan.c, the arguments to args.c.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "host/code.h"
#include "host/guard.h"
#include "host/plan.h"

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

/* -- without kernels ------------------------------------------------------- */

/* A fill knows no strides, so what it fills must be whole. */
static fa_status fill_tensor(const fa_driver *driver, const fa_target *target,
                             const char *name, const fa_tensor *t,
                             fa_error *error)
{
    fa_tensor dense;
    if (fa_tensor_is_empty(t)) {
        return FA_OK;
    }
    fa_tensor_like(t, t->size[3], &dense);
    for (int d = 0; d < 4; d++) {
        if (t->size[d] != 1 && t->stride[d] != dense.stride[d]) {
            return fa_fail(error, FA_EUNSUPPORTED,
                           "%s: expected a dense tensor where k has no "
                           "rows, got stride %lld in dimension %d",
                           name, (long long)t->stride[d], d);
        }
    }
    const int64_t count = t->size[0] * t->size[1] * t->size[2] * t->size[3];
    return driver->fill(driver, t->data, 0, fa_dtype_bytes(t->dtype),
                        (size_t)count, target->stream, error);
}

/* Without keys a row sees nothing: out 0, lse -inf, and both are exact. */
static fa_status fill_forward(const fa_driver *driver, const fa_target *target,
                              const fa_problem *p, fa_error *error)
{
    const bool is_double = p->q.dtype == FA_F64;
    const uint64_t minus_infinity =
        is_double ? UINT64_C(0xfff0000000000000) : 0xff800000;
    const int64_t rows = p->q.size[0] * p->q.size[1] * p->q.size[2];
    const int64_t floats = p->out_lo == NULL ? 0 : fa_residue_floats(p);
    fa_status status = fill_tensor(driver, target, "out", &p->out, error);
    if (status == FA_OK && floats != 0) {
        status = driver->fill(driver, p->out_lo, 0, sizeof(float),
                              (size_t)floats, target->stream, error);
    }
    return status == FA_OK
               ? driver->fill(driver, p->lse, minus_infinity, is_double ? 8 : 4,
                              (size_t)rows, target->stream, error)
               : status;
}

static fa_status fill_backward(const fa_driver *driver, const fa_target *target,
                               const fa_gradients *g, fa_error *error)
{
    fa_status status = FA_OK;
    if ((g->wanted & FA_WANT_DQ) != 0) {
        status = fill_tensor(driver, target, "dq", &g->dq, error);
    }
    if (status == FA_OK && (g->wanted & FA_WANT_DK) != 0) {
        status = fill_tensor(driver, target, "dk", &g->dk, error);
    }
    if (status == FA_OK && (g->wanted & FA_WANT_DV) != 0) {
        status = fill_tensor(driver, target, "dv", &g->dv, error);
    }
    if (status == FA_OK && (g->wanted & FA_WANT_DBIAS) != 0) {
        status = fill_tensor(driver, target, "dbias", &g->dbias, error);
    }
    return status;
}

/* -- with kernels ---------------------------------------------------------- */

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
                             void **function, uint64_t *hash, fa_error *error)
{
    *function = NULL;
    *hash = 0;
    if (driver->load == NULL) { /* the null backend has no code */
        return FA_OK;
    }
    return fa_code_function(&runtime->codes, driver, runtime->code_dir,
                            target->device, target->arch, variant, function,
                            hash, error);
}

fa_status fa_runtime_load(fa_runtime *runtime, const fa_target *target,
                          uint32_t dtypes, fa_error *error)
{
    fa_driver *driver = NULL;
    fa_scope scope;
    uint32_t seen = 0; /* the arithmetics whose code objects are loaded */
    fa_status status = enter(runtime, target, &driver, &scope, error);
    if (status != FA_OK) {
        return status;
    }
    for (size_t i = 0; i < FA_VARIANT_COUNT && status == FA_OK; i++) {
        const fa_variant *row = &fa_variants[i];
        void *function = NULL;
        uint64_t hash = 0;
        if ((row->reads & dtypes) != 0 && (seen >> row->arith & 1) == 0) {
            seen |= 1U << row->arith;
            status = find_kernel(runtime, driver, target, row, &function, &hash,
                                 error);
        }
    }
    driver->leave(driver, &scope);
    return status;
}

fa_status fa_runtime_know(fa_runtime *runtime, const fa_target *target,
                          fa_error *error)
{
    fa_driver *driver = NULL;
    fa_scope scope;
    fa_status status = enter(runtime, target, &driver, &scope, error);
    if (status != FA_OK) {
        return status;
    }
    if (target->guard != NULL) {
        status = fa_guard_know(target->guard, driver, target->device, error);
    }
    driver->leave(driver, &scope);
    return status;
}

/* No kernel writes what lies between the parts of the residue and behind them,
 * but results repeat to the bit, all of them. */
static fa_status clear_gaps(const fa_driver *driver, const fa_target *target,
                            const fa_problem *p, fa_error *error)
{
    const int64_t rows = p->q.size[0] * p->q.size[1] * p->q.size[2];
    const int64_t elements = rows * p->v.size[3];
    fa_tensor lse_lo;
    fa_tensor out_lo;
    fa_status status = FA_OK;
    fa_residue_parts(p, &lse_lo, &out_lo);
    if (out_lo.data == NULL) {
        return FA_OK;
    }
    float *const end = (float *)lse_lo.data + rows;
    if (end != out_lo.data) {
        status = driver->fill(driver, end, 0, sizeof(float),
                              (size_t)((float *)out_lo.data - end),
                              target->stream, error);
    }
    return status == FA_OK && elements % 2 != 0
               ? driver->fill(driver, (uint16_t *)out_lo.data + elements, 0,
                              sizeof(uint16_t), 1, target->stream, error)
               : status;
}

/* Looks every kernel up, and asks the guard, before the first is launched: a
 * plan that cannot be run to its end is not begun. */
static fa_status run_steps(fa_runtime *runtime, fa_driver *driver,
                           const fa_target *given, const fa_problem *p,
                           const fa_gradients *g, const fa_plan *plan,
                           void *workspace, fa_counts *counts, fa_error *error)
{
    void *functions[FA_MAX_STEPS] = {NULL};
    uint64_t hashes[FA_MAX_STEPS] = {0};
    fa_target on_stream = *given;
    const fa_target *const target = &on_stream;
    fa_ticket ticket;
    fa_status status = FA_OK;
    int done = 0;
    for (int i = 0; i < plan->count && status == FA_OK; i++) {
        status = find_kernel(runtime, driver, target, plan->step[i].variant,
                             &functions[i], &hashes[i], error);
    }
    if (status == FA_OK) {
        status = fa_guard_begin(given, driver, plan, hashes, p, &ticket, error);
    }
    if (status != FA_OK) {
        return status;
    }
    on_stream.stream = ticket.stream;
    if (g == NULL) {
        status = clear_gaps(driver, target, p, error);
    }
    for (; done < plan->count && status == FA_OK; done++) {
        const fa_step *step = &plan->step[done];
        fa_counts of_step = {0};
        fa_call call;
        fa_call_fill(p, g, plan, step, workspace, &call);
        const fa_launch request = {
            .function = functions[done],
            .symbol = step->variant->symbol,
            .grid = {step->grid[0], step->grid[1], step->grid[2]},
            .threads = step->variant->threads,
            .lds_bytes = step->variant->lds_bytes,
            .wave_instructions = ticket.wave_instructions,
            .stream = target->stream,
            .args = &call.args,
            .tensors = call.access,
            .tensor_count = call.access_count,
        };
        status = driver->launch(driver, &request, &of_step, error);
        counts->wave_instructions += of_step.wave_instructions;
        counts->workgroups += of_step.workgroups;
    }
    return fa_guard_end(&ticket, status, done - 1, counts, error);
}

/* The name of a gradient that has elements and no address, or NULL. */
static const char *missing_gradient(const fa_gradients *g)
{
    const struct {
        const char *name;
        const fa_tensor *tensor;
        uint32_t bit;
    } all[] = {{"dq", &g->dq, FA_WANT_DQ},
               {"dk", &g->dk, FA_WANT_DK},
               {"dv", &g->dv, FA_WANT_DV},
               {"dbias", &g->dbias, FA_WANT_DBIAS},
               {"dsink", &g->dsink, FA_WANT_DSINK}};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        if ((g->wanted & all[i].bit) != 0 && all[i].tensor->data == NULL &&
            !fa_tensor_is_empty(all[i].tensor)) {
            return all[i].name;
        }
    }
    return NULL;
}

/* What is written must exist by now, and lse; the residue may. */
static fa_status check_memory(const fa_problem *p, const fa_gradients *g,
                              const fa_plan *plan, const void *workspace,
                              fa_error *error)
{
    const size_t bytes = plan->workspace.bytes;
    const char *missing = NULL;
    if (g == NULL) {
        missing = p->out.data == NULL ? "out" : p->lse == NULL ? "lse" : NULL;
    } else {
        missing = missing_gradient(g);
        missing = missing == NULL && plan->count != 0 && p->lse == NULL
                      ? "lse"
                      : missing;
    }
    if (missing != NULL) {
        return fa_fail(error, FA_EINVAL, "%s: expected its address, got none",
                       missing);
    }
    fa_status status = fa_check_residue(p, error);
    if (status != FA_OK) {
        return status;
    }
    return bytes == 0 || (workspace != NULL && (uintptr_t)workspace % 16 == 0)
               ? FA_OK
               : fa_fail(error, FA_EINVAL,
                         "workspace: expected %zu bytes, aligned to 16, got "
                         "them at %p",
                         bytes, workspace);
}

static fa_status run(fa_runtime *runtime, const fa_target *target,
                     const fa_problem *p, const fa_gradients *g,
                     const fa_plan *plan, void *workspace, fa_counts *counts,
                     fa_error *error)
{
    fa_driver *driver = NULL;
    fa_scope scope;
    *counts = (fa_counts){0};
    if (plan->work == FA_WORK_NONE) {
        return FA_OK;
    }
    fa_status status = check_memory(p, g, plan, workspace, error);
    if (status == FA_OK) {
        status = enter(runtime, target, &driver, &scope, error);
    }
    if (status != FA_OK) {
        return status;
    }
    if (plan->work == FA_WORK_NO_KEYS) {
        status = g == NULL ? fill_forward(driver, target, p, error)
                           : fill_backward(driver, target, g, error);
    }
    if (status == FA_OK && plan->count != 0) {
        status = run_steps(runtime, driver, target, p, g, plan, workspace,
                           counts, error);
    }
    driver->leave(driver, &scope);
    return status;
}

/* -- rotary positions ------------------------------------------------------ */

static fa_status launch_rotary(fa_runtime *runtime, fa_driver *driver,
                               const fa_target *target, const fa_rotary *p,
                               const fa_plan *plan, fa_counts *counts,
                               fa_error *error)
{
    const fa_step *step = &plan->step[0];
    void *function = NULL;
    uint64_t hash = 0;
    fa_rotary_call call;
    fa_ticket ticket;
    fa_status status = find_kernel(runtime, driver, target, step->variant,
                                   &function, &hash, error);
    if (status == FA_OK) {
        status =
            fa_guard_begin(target, driver, plan, &hash, NULL, &ticket, error);
    }
    if (status != FA_OK) {
        return status;
    }
    fa_rotary_call_fill(p, &call);
    const fa_launch request = {
        .function = function,
        .symbol = step->variant->symbol,
        .grid = {step->grid[0], step->grid[1], step->grid[2]},
        .threads = step->variant->threads,
        .lds_bytes = step->variant->lds_bytes,
        .wave_instructions = ticket.wave_instructions,
        .stream = ticket.stream,
        .args = &call.args,
        .tensors = call.access,
        .tensor_count = call.access_count,
    };
    status = driver->launch(driver, &request, counts, error);
    return fa_guard_end(&ticket, status, 0, counts, error);
}

fa_status fa_run_rotary(fa_runtime *runtime, const fa_target *target,
                        const fa_rotary *problem, const fa_plan *plan,
                        fa_counts *counts, fa_error *error)
{
    fa_driver *driver = NULL;
    fa_scope scope;
    *counts = (fa_counts){0};
    if (plan->work == FA_WORK_NONE) {
        return FA_OK;
    }
    const fa_tensor *const outputs[] = {&problem->out_q, &problem->out_k};
    for (int i = 0; i < 2; i++) {
        if (outputs[i]->data == NULL && !fa_tensor_is_empty(outputs[i])) {
            return fa_fail(error, FA_EINVAL,
                           "%s: expected its address, got none",
                           i == 0 ? "out_q" : "out_k");
        }
    }
    fa_status status = enter(runtime, target, &driver, &scope, error);
    if (status == FA_OK) {
        status = launch_rotary(runtime, driver, target, problem, plan, counts,
                               error);
        driver->leave(driver, &scope);
    }
    return status;
}

/* -- attention ------------------------------------------------------------- */

fa_status fa_forward(fa_runtime *runtime, const fa_target *target,
                     const fa_problem *problem, const fa_plan *plan,
                     void *workspace, fa_counts *counts, fa_error *error)
{
    return run(runtime, target, problem, NULL, plan, workspace, counts, error);
}

fa_status fa_backward(fa_runtime *runtime, const fa_target *target,
                      const fa_problem *problem, const fa_gradients *gradients,
                      const fa_plan *plan, void *workspace, fa_counts *counts,
                      fa_error *error)
{
    return run(runtime, target, problem, gradients, plan, workspace, counts,
               error);
}
