/* guard.c: the process's guard, as functions of _C:
 *
 *   def guard(mode, factor, floor_ms, cooldown_s, abort_on_hang, dir, dir_else):
 *       "Set the policy: mode "off", "async" or "sync".  The folders, str or
 *        None, count the first time.  Raises Error."
 *   def guard_stop():
 *       "End the watching thread, before the interpreter ends."
 *   def guard_counts() -> dict:
 *       "misses, captured, unwatched, outstanding, quarantined."
 *   def keep(things):
 *       "What this thread's last call on addresses, which was late, may still
 *        write to: stays alive until its kernel is over."
 *   def last_failure() -> str:
 *       "Why this thread's last call failed: "breaker", "late", "once",
 *        "device" or "other"; "" if it did not."
 *   def breakers() -> [(device, kernel, half_open, failures, retry_in_s, cause)]:
 *       "Those that are not closed; device as "sim", "hip:0"."
 *   def guard_device(device_type, device_index, arch):
 *       "Make a device known before its first call.  Raises RuntimeError."
 *   def breaker_trip(device, kernel, cause, cooldown_s=None):
 *   def breaker_reset(kernel):                 # a str, or None for all
 *       "Open or close by hand.  Raise Error."
 *   def latency() -> [(device, kernel, calls, seconds, flops, p50_s, p99_s)]:
 *   def identities() -> [(device, text)]:
 *       "A device, and the versions of driver and runtime, in one line."
 *   def complaints() -> [(device, text)]:
 *       "Why a device's state is not kept on disk."
 *   def store_list(dir) -> ([(identity, kernel, code_hash, failures, opened,
 *                            retry, cause)], unreadable):
 *   def store_reset(dir, kernel=None) -> int:
 *       "The breakers on disk.  Raise Error."
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "python/guard.h"
#include "python/parse.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Kernels of torch's dispatcher get no pointer of ours: state.h. */
static _Atomic(fa_guard *) the_guard;
static _Thread_local fa_status outcome;
static _Thread_local fa_late *late_call;

fa_guard *fa_state_guard(void)
{
    return atomic_load_explicit(&the_guard, memory_order_acquire);
}

void fa_state_set_outcome(fa_status status)
{
    outcome = status;
}

void fa_state_set_late(fa_late *late)
{
    late_call = late;
}

/* -- the policy ------------------------------------------------------------- */

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
    PyErr_SetString(PyExc_ValueError,
                    "mode: expected off, async or sync, got something else");
    return -1;
}

/* A number of `unit_ns`, at least `least`; more than 30 years are as many. */
static int parse_time(const char *name, PyObject *from, double unit_ns,
                      double least, int64_t *to)
{
    const double most_ns = 1e18;
    const double number = PyFloat_AsDouble(from);
    if (number == -1.0 && PyErr_Occurred()) {
        return -1;
    }
    if (!(number >= least)) {
        PyErr_Format(PyExc_ValueError,
                     "%s: expected a number of at least %d, got %R", name,
                     (int)least, from);
        return -1;
    }
    *to = (int64_t)(number * unit_ns < most_ns ? number * unit_ns : most_ns);
    return 0;
}

/* The bytes of a path, or NULL for None; *owner holds them. */
static int parse_dir(PyObject *from, PyObject **owner, const char **to)
{
    *to = NULL;
    if (from == Py_None) {
        return 0;
    }
    if (!PyUnicode_FSConverter(from, owner)) {
        return -1;
    }
    *to = PyBytes_AsString(*owner);
    return *to == NULL ? -1 : 0;
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
    fa_policy policy = {.mode = FA_GUARD_OFF};
    fa_error error;
    fa_status status = FA_OK;
    PyObject *owner = NULL;
    PyObject *owner_else = NULL;
    int failed = -1;
    if (fa_check_count("guard", count, ARGS, ARGS)) {
        return NULL;
    }
    policy.factor = PyFloat_AsDouble(args[FACTOR]);
    if (policy.factor == -1.0 && PyErr_Occurred()) {
        return NULL;
    }
    if (!(policy.factor > 0.0)) {
        return PyErr_Format(PyExc_ValueError,
                            "factor: expected a number above 0, got %R",
                            args[FACTOR]);
    }
    if (parse_mode(args[MODE], &policy.mode) ||
        parse_time("floor_ms", args[FLOOR_MS], 1e6, 0.0, &policy.floor_ns) ||
        parse_time("cooldown_s", args[COOLDOWN_S], 1e9, 0.0,
                   &policy.cooldown_ns) ||
        fa_parse_bool(args[ABORT], &policy.abort_on_hang) ||
        parse_dir(args[DIR], &owner, &policy.dir) ||
        parse_dir(args[DIR_ELSE], &owner_else, &policy.dir_else)) {
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

/* -- how calls end ---------------------------------------------------------- */

/* On a thread of torch's, perhaps without the GIL. */
static void release_object(void *object)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    Py_DECREF((PyObject *)object);
    PyGILState_Release(gil);
}

PyObject *fa_module_keep(PyObject *module, PyObject *things)
{
    fa_late *late = late_call;
    void *thing = things;
    (void)module;
    late_call = NULL;
    if (late != NULL) {
        Py_INCREF(things);
        fa_guard_keep(fa_state_guard(), late, &thing, 1, release_object);
    }
    Py_RETURN_NONE;
}

PyObject *fa_module_last_failure(PyObject *module, PyObject *unused)
{
    const char *word = "other";
    const fa_status last = outcome;
    (void)module;
    (void)unused;
    outcome = FA_OK; /* it is about one call */
    switch (last) {
    case FA_OK:
        word = "";
        break;
    case FA_EOPEN:
        word = "breaker";
        break;
    case FA_ELATE:
        word = "late";
        break;
    case FA_EONCE:
        word = "once";
        break;
    case FA_EDEVICE:
        word = "device";
        break;
    default:
        break;
    }
    return PyUnicode_FromString(word);
}

/* -- breakers --------------------------------------------------------------- */

static PyObject *device_name(fa_backend backend, int32_t device)
{
    return backend == FA_SIM
               ? PyUnicode_FromString("sim")
               : PyUnicode_FromFormat("%s:%d", fa_backend_name(backend),
                                      (int)device);
}

/* Appends `item`, which is taken; NULL is a failure already. */
static int append(PyObject *list, PyObject *item)
{
    const int failed = item == NULL || PyList_Append(list, item) ? -1 : 0;
    Py_XDECREF(item);
    return failed;
}

static int append_breakers(PyObject *list, fa_backend backend, int32_t device,
                           fa_breaker *breaker)
{
    int failed = 0;
    const time_t now = time(NULL);
    bool half_open[FA_STORE_MAX];
    fa_store_entry *entries = calloc(FA_STORE_MAX, sizeof *entries);
    if (entries == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    size_t count = 0;
    Py_BEGIN_ALLOW_THREADS /* its lock may be held by one that writes to disk */
    count = fa_breaker_list(breaker, entries, half_open, FA_STORE_MAX);
    Py_END_ALLOW_THREADS
    for (size_t i = 0; i < count && !failed; i++) {
        const fa_store_entry *e = &entries[i];
        const int64_t left = e->retry - (int64_t)now;
        failed = append(
            list, Py_BuildValue("(NsOIds)", device_name(backend, device),
                                e->kernel, half_open[i] ? Py_True : Py_False,
                                (unsigned)e->failures,
                                left > 0 ? (double)left : 0.0, e->cause));
    }
    free(entries);
    return failed;
}

static int append_latency(PyObject *list, fa_backend backend, int32_t device,
                          const fa_latency *latency)
{
    const double ns = 1e-9;
    for (size_t row = 0; row < FA_VARIANT_COUNT; row++) {
        const fa_latency *l = &latency[row];
        if (l->calls != 0 &&
            append(list,
                   Py_BuildValue(
                       "(NsKdddd)", device_name(backend, device),
                       fa_variants[row].symbol, (unsigned long long)l->calls,
                       (double)l->ns * ns, (double)l->kiloflops * 1000.0,
                       fa_latency_quantile(l, 0.5) * ns,
                       fa_latency_quantile(l, 0.99) * ns))) {
            return -1;
        }
    }
    return 0;
}

static int append_complaint(PyObject *list, fa_backend backend, int32_t device,
                            fa_breaker *breaker)
{
    char text[FA_ERROR_CHARS];
    Py_BEGIN_ALLOW_THREADS
    fa_breaker_complaint(breaker, text);
    Py_END_ALLOW_THREADS
    return text[0] == '\0'
               ? 0
               : append(list, Py_BuildValue(
                                  "(Ns)", device_name(backend, device), text));
}

typedef enum topic { BREAKERS, LATENCY, COMPLAINTS, IDENTITIES } topic;

/* A list of what is known of each device. */
static PyObject *list_devices(topic what)
{
    fa_backend backend = FA_SIM;
    int32_t device = 0;
    fa_breaker *breaker = NULL;
    const fa_latency *latency = NULL;
    int failed = 0;
    fa_guard *guard = fa_state_guard();
    PyObject *list = PyList_New(0);
    for (size_t i = 0;
         list != NULL && guard != NULL && !failed &&
         fa_guard_station(guard, i, &backend, &device, &breaker, &latency);
         i++) {
        failed =
            what == BREAKERS  ? append_breakers(list, backend, device, breaker)
            : what == LATENCY ? append_latency(list, backend, device, latency)
            : what == COMPLAINTS
                ? append_complaint(list, backend, device, breaker)
                : append(list,
                         Py_BuildValue("(Ns)", device_name(backend, device),
                                       breaker->identity));
    }
    if (failed) {
        Py_DECREF(list);
        return NULL;
    }
    return list;
}

PyObject *fa_module_breakers(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return list_devices(BREAKERS);
}

PyObject *fa_module_latency(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return list_devices(LATENCY);
}

PyObject *fa_module_identities(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return list_devices(IDENTITIES);
}

PyObject *fa_module_complaints(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return list_devices(COMPLAINTS);
}

/* The UTF-8 of a str; *owner holds it. */
static const char *parse_text(const char *name, PyObject *from,
                              PyObject **owner)
{
    if (!PyUnicode_Check(from)) {
        PyErr_Format(PyExc_TypeError, "%s: expected a str, got %R", name, from);
        return NULL;
    }
    *owner = PyUnicode_AsUTF8String(from);
    return *owner == NULL ? NULL : PyBytes_AsString(*owner);
}

/* "sim", or a backend's name, ":" and an index. */
static int parse_device(const char *text, fa_backend *backend, int32_t *device)
{
    const size_t length = strcspn(text, ":");
    for (int i = 0; i < FA_BACKEND_COUNT; i++) {
        const char *name = fa_backend_name((fa_backend)i);
        if (strlen(name) == length && strncmp(name, text, length) == 0) {
            *backend = (fa_backend)i;
            char *end = NULL;
            const char *number = text + length + (text[length] == ':');
            const long index = strtol(number, &end, 10);
            *device = (int32_t)index;
            if ((*number >= '0' && *number <= '9' && *end == '\0' &&
                 index <= INT32_MAX) ||
                (i == FA_SIM && text[length] == '\0')) {
                return 0;
            }
        }
    }
    PyErr_Format(PyExc_ValueError,
                 "device: expected one such as sim or hip:0, got %s", text);
    return -1;
}

PyObject *fa_module_guard_device(PyObject *module, PyObject *const *args,
                                 Py_ssize_t count)
{
    fa_target target = {.guard = fa_state_guard()};
    fa_runtime *runtime = NULL;
    fa_error error;
    char arch[FA_STATE_ARCH_CHARS];
    bool arch_given = false;
    int device_type = 0;
    (void)module;
    if (fa_check_count("guard_device", count, 3, 3) ||
        fa_parse_int(args[0], &device_type) ||
        fa_parse_int(args[1], &target.device) ||
        fa_parse_arch(args[2], arch, &arch_given)) {
        return NULL;
    }
    target.arch = arch_given ? arch : NULL;
    fa_status status =
        fa_state_backend(device_type == 1, &runtime, &target.backend, &error);
    if (status == FA_OK) {
        Py_BEGIN_ALLOW_THREADS
        status = fa_runtime_know(runtime, &target, &error);
        Py_END_ALLOW_THREADS
    }
    if (status != FA_OK) {
        return fa_raise_runtime_error(&error);
    }
    Py_RETURN_NONE;
}

PyObject *fa_module_breaker_trip(PyObject *module, PyObject *const *args,
                                 Py_ssize_t count)
{
    PyObject *owners[3] = {NULL};
    const char *texts[3] = {NULL};
    static const char *const names[] = {"device", "kernel", "cause"};
    fa_backend backend = FA_SIM;
    int32_t device = 0;
    fa_error error;
    bool done = false;
    int64_t cooldown_ns = -1;
    if (fa_check_count("breaker_trip", count, 3, 4) ||
        (count == 4 && args[3] != Py_None &&
         parse_time("cooldown_s", args[3], 1e9, 0.0, &cooldown_ns))) {
        return NULL;
    }
    for (int i = 0; i < 3; i++) {
        texts[i] = parse_text(names[i], args[i], &owners[i]);
        if (texts[i] == NULL) {
            goto done;
        }
    }
    if (parse_device(texts[0], &backend, &device)) {
        goto done;
    }
    if (fa_state_guard() != NULL) {
        Py_BEGIN_ALLOW_THREADS
        done = fa_guard_trip(fa_state_guard(), backend, device, texts[1],
                             texts[2], cooldown_ns, &error) == FA_OK;
        Py_END_ALLOW_THREADS
    }
    if (!done && fa_state_guard() != NULL) {
        (void)fa_raise_error(module, &error);
    } else if (!done) {
        PyErr_SetString(PyExc_ValueError, "guard: expected one, got none yet");
    }

done:
    for (int i = 0; i < 3; i++) {
        Py_XDECREF(owners[i]);
    }
    if (!done) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyObject *fa_module_breaker_reset(PyObject *module, PyObject *kernel)
{
    PyObject *owner = NULL;
    const char *text = NULL;
    (void)module;
    if (kernel != Py_None &&
        (text = parse_text("kernel", kernel, &owner)) == NULL) {
        Py_XDECREF(owner);
        return NULL;
    }
    if (fa_state_guard() != NULL) {
        Py_BEGIN_ALLOW_THREADS
        fa_guard_reset(fa_state_guard(), text);
        Py_END_ALLOW_THREADS
    }
    Py_XDECREF(owner);
    Py_RETURN_NONE;
}

/* -- on disk ---------------------------------------------------------------- */

typedef struct listing {
    PyObject *list;
    int failed;
} listing;

static void visit_entry(void *context, const char *identity,
                        const fa_store_entry *e)
{
    listing *l = context;
    if (!l->failed) {
        l->failed = append(
            l->list, Py_BuildValue("(ssKILLs)", identity, e->kernel,
                                   (unsigned long long)e->code_hash,
                                   (unsigned)e->failures, (long long)e->opened,
                                   (long long)e->retry, e->cause));
    }
}

PyObject *fa_module_store_list(PyObject *module, PyObject *dir)
{
    PyObject *owner = NULL;
    const char *path = NULL;
    size_t unreadable = 0;
    fa_error error;
    if (parse_dir(dir, &owner, &path)) {
        return NULL;
    }
    listing l = {PyList_New(0), 0};
    if (l.list == NULL || path == NULL) {
        l.failed = -1;
    } else if (fa_store_list(path, visit_entry, &l, &unreadable, &error) !=
               FA_OK) {
        (void)fa_raise_error(module, &error);
        l.failed = -1;
    }
    Py_XDECREF(owner);
    if (l.failed) {
        Py_XDECREF(l.list);
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "dir: expected a path, got None");
        }
        return NULL;
    }
    return Py_BuildValue("(Nn)", l.list, (Py_ssize_t)unreadable);
}

PyObject *fa_module_store_reset(PyObject *module, PyObject *const *args,
                                Py_ssize_t count)
{
    PyObject *owner = NULL;
    PyObject *owner_kernel = NULL;
    PyObject *result = NULL;
    const char *path = NULL;
    const char *kernel = NULL;
    size_t removed = 0;
    fa_error error;
    if (fa_check_count("store_reset", count, 1, 2) ||
        parse_dir(args[0], &owner, &path)) {
        return NULL;
    }
    if (path == NULL) {
        PyErr_SetString(PyExc_TypeError, "dir: expected a path, got None");
    } else if (count == 1 || args[1] == Py_None ||
               (kernel = parse_text("kernel", args[1], &owner_kernel)) !=
                   NULL) {
        if (fa_store_reset(path, kernel, &removed, &error) == FA_OK) {
            result = PyLong_FromSize_t(removed);
        } else {
            (void)fa_raise_error(module, &error);
        }
    }
    Py_XDECREF(owner_kernel);
    Py_XDECREF(owner);
    return result;
}
