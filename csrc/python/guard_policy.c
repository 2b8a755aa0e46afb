/* guard_policy.c: the process's guard and its policy, as functions of _C:
 *
 *   def guard(mode, factor, floor_ms, cooldown_s, abort_on_hang, dir,
 *             dir_else):
 *       "Set the policy: mode "off", "async" or "sync".  The folders, str or
 *        None, count the first time.  Raises Error."
 *   def guard_stop():
 *       "End the watching thread, before the interpreter ends."
 *   def guard_counts() -> dict:
 *       "misses, captured, unwatched, outstanding, quarantined."
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "python/guard.h"
#include "python/parse.h"
#include "python/report.h"

#include <pthread.h>

/* Kernels of torch's dispatcher get no pointer of ours: state.h. */
static _Atomic(fa_guard *) the_guard;

fa_guard *fa_state_guard(void)
{
    return atomic_load_explicit(&the_guard, memory_order_acquire);
}

static void before_fork(void)
{
    fa_guard_fork(fa_state_guard(), FA_FORK_BEFORE);
}

static void in_parent(void)
{
    fa_guard_fork(fa_state_guard(), FA_FORK_PARENT);
}

static void in_child(void)
{
    fa_guard_fork(fa_state_guard(), FA_FORK_CHILD);
}

static int parse_mode(PyObject *from, fa_guard_mode *to)
{
    static const char *const names[] = {"off", "async", "sync"};
    for (int i = 0; i < 3; i++) {
        if (PyUnicode_Check(from) &&
            PyUnicode_CompareWithASCIIString(from, names[i]) == 0) {
            *to = (fa_guard_mode)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "mode: expected off, async or sync, got %R",
                 from);
    return -1;
}

/* The first policy makes the guard, all others change it. */
static fa_status set_policy(const fa_policy *policy, fa_error *error)
{
    fa_guard *guard = fa_state_guard();
    if (guard != NULL) {
        fa_guard_set(guard, policy);
        return FA_OK;
    }
    fa_status status = fa_guard_open(policy, &guard, error);
    if (status != FA_OK) {
        return status;
    }
    /* The handlers need it; a fork before they are there finds it unused. */
    atomic_store(&the_guard, guard);
    if (pthread_atfork(before_fork, in_parent, in_child) != 0) {
        atomic_store(&the_guard, NULL);
        fa_guard_close(guard);
        return fa_fail(error, FA_ENOMEM, "guard: out of memory");
    }
    return FA_OK;
}

PyObject *fa_module_guard(PyObject *module, PyObject *const *args,
                          Py_ssize_t count)
{
    enum { MODE, FACTOR, FLOOR_MS, COOLDOWN_S, ABORT, DIR, DIR_ELSE, ARGS };
    fa_policy policy = {.mode = FA_GUARD_OFF, .report = fa_report_to_stderr};
    fa_error error;
    fa_status status = FA_OK;
    PyObject *owner = NULL;
    PyObject *owner_else = NULL;
    int failed = -1;
    if (fa_check_count("guard", count, ARGS, ARGS)) {
        return NULL;
    }
    if (fa_parse_double("factor", args[FACTOR], &policy.factor)) {
        return NULL;
    }
    if (!(policy.factor > 0.0)) {
        return PyErr_Format(PyExc_ValueError,
                            "factor: expected a number above 0, got %R",
                            args[FACTOR]);
    }
    if (parse_mode(args[MODE], &policy.mode) ||
        fa_parse_time("floor_ms", args[FLOOR_MS], 1e6, &policy.floor_ns) ||
        fa_parse_time("cooldown_s", args[COOLDOWN_S], 1e9,
                      &policy.cooldown_ns) ||
        fa_parse_bool(args[ABORT], &policy.abort_on_hang) ||
        fa_parse_path(args[DIR], &owner, &policy.dir) ||
        fa_parse_path(args[DIR_ELSE], &owner_else, &policy.dir_else)) {
        goto done;
    }
    status = set_policy(&policy, &error);
    failed = status == FA_OK ? 0 : -1;
    if (failed) {
        (void)fa_raise_error(module, &error);
    }

done:
    Py_XDECREF(owner_else);
    Py_XDECREF(owner);
    if (failed) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* From now on nothing is guarded: what is left of the process is its end. */
PyObject *fa_module_guard_stop(PyObject *module, PyObject *unused)
{
    fa_guard *guard = fa_state_guard();
    (void)module;
    (void)unused;
    if (guard != NULL) {
        Py_BEGIN_ALLOW_THREADS
        fa_guard_stop(guard);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

PyObject *fa_module_guard_counts(PyObject *module, PyObject *unused)
{
    fa_guard_counts c = {.misses = 0};
    fa_guard *guard = fa_state_guard();
    (void)module;
    (void)unused;
    if (guard != NULL) {
        Py_BEGIN_ALLOW_THREADS
        fa_guard_reap(guard);
        Py_END_ALLOW_THREADS
        fa_guard_count(guard, &c);
    }
    return Py_BuildValue("{sKsKsKsKsK}", "misses", (unsigned long long)c.misses,
                         "captured", (unsigned long long)c.captured,
                         "unwatched", (unsigned long long)c.unwatched,
                         "outstanding", (unsigned long long)c.outstanding,
                         "quarantined", (unsigned long long)c.quarantined);
}
