/* guard_devices.c: what the guard knows of each device, as functions of _C:
 *
 *   def breakers() -> [(device, kernel, half_open, failures, retry_in_s,
 *                       cause)]:
 *       "Those that are not closed; device as "sim", "hip:0"."
 *   def latency() -> [(device, kernel, calls, seconds, flops, p50_s, p99_s)]:
 *   def identities() -> [(device, text)]:
 *       "A device, and the versions of driver and runtime, in one line."
 *   def complaints() -> [(device, text)]:
 *       "Why a device's state is not kept on disk."
 *   def guard_device(device_type, device_index, arch):
 *       "Make a device known before its first call.  Raises RuntimeError."
 *   def breaker_trip(device, kernel, cause, cooldown_s=None):
 *   def breaker_reset(kernel):                 # a str, or None for all
 *       "Open or close by hand.  Raise Error."
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "python/guard.h"
#include "python/parse.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <time.h>

/* -- lists ----------------------------------------------------------------- */

static PyObject *device_name(const fa_station *s)
{
    const fa_backend backend = s->driver->backend;
    return backend == FA_SIM
               ? PyUnicode_FromString("sim")
               : PyUnicode_FromFormat("%s:%d", fa_backend_name(backend),
                                      (int)s->device);
}

int fa_list_append(PyObject *list, PyObject *item)
{
    const int failed = item == NULL || PyList_Append(list, item) ? -1 : 0;
    Py_XDECREF(item);
    return failed;
}

/* Appends what is asked of one device; -1 with an exception set. */
typedef int append_function(PyObject *list, fa_station *station);

static int append_breakers(PyObject *list, fa_station *s)
{
    int failed = 0;
    struct timespec now = {0}; /* of time() the second begins some ms later */
    bool half_open[FA_STORE_MAX];
    fa_store_entry *entries = calloc(FA_STORE_MAX, sizeof *entries);
    if (entries == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    (void)clock_gettime(CLOCK_REALTIME, &now);
    size_t count = 0;
    Py_BEGIN_ALLOW_THREADS /* its lock may be held by one that writes to disk */
    count = fa_breaker_list(&s->breaker, entries, half_open, FA_STORE_MAX);
    Py_END_ALLOW_THREADS
    for (size_t i = 0; i < count && !failed; i++) {
        const fa_store_entry *e = &entries[i];
        const int64_t left = e->retry - (int64_t)now.tv_sec;
        failed = fa_list_append(
            list, Py_BuildValue("(NsOIds)", device_name(s), e->kernel,
                                half_open[i] ? Py_True : Py_False,
                                (unsigned)e->failures,
                                left > 0 ? (double)left : 0.0, e->cause));
    }
    free(entries);
    return failed;
}

static int append_latency(PyObject *list, fa_station *s)
{
    const double ns = 1e-9;
    int failed = 0;
    for (size_t row = 0; row < FA_VARIANT_COUNT && !failed; row++) {
        const fa_latency *l = &s->latency[row];
        if (l->calls != 0) {
            failed = fa_list_append(
                list, Py_BuildValue(
                          "(NsKdddd)", device_name(s), fa_variants[row].symbol,
                          (unsigned long long)l->calls, (double)l->ns * ns,
                          (double)l->kiloflops * 1000.0,
                          fa_latency_quantile(l, 0.5) * ns,
                          fa_latency_quantile(l, 0.99) * ns));
        }
    }
    return failed;
}

static int append_identity(PyObject *list, fa_station *s)
{
    return fa_list_append(
        list, Py_BuildValue("(Ns)", device_name(s), s->breaker.identity));
}

static int append_complaint(PyObject *list, fa_station *s)
{
    char text[FA_ERROR_CHARS];
    Py_BEGIN_ALLOW_THREADS
    fa_breaker_complaint(&s->breaker, text);
    Py_END_ALLOW_THREADS
    return text[0] == '\0'
               ? 0
               : fa_list_append(list,
                                Py_BuildValue("(Ns)", device_name(s), text));
}

static PyObject *list_devices(append_function *append)
{
    int failed = 0;
    fa_guard *guard = fa_state_guard();
    PyObject *list = PyList_New(0);
    if (list == NULL || guard == NULL) {
        return list;
    }
    fa_station *s = fa_guard_station(guard, 0);
    for (size_t i = 1; s != NULL && !failed; i++) {
        failed = append(list, s);
        s = fa_guard_station(guard, i);
    }
    if (failed) {
        Py_DECREF(list);
        return NULL;
    }
    return list;
}

PyObject *fa_module_breakers(PyObject *Py_UNUSED(module),
                             PyObject *Py_UNUSED(unused))
{
    return list_devices(append_breakers);
}

PyObject *fa_module_latency(PyObject *Py_UNUSED(module),
                            PyObject *Py_UNUSED(unused))
{
    return list_devices(append_latency);
}

PyObject *fa_module_identities(PyObject *Py_UNUSED(module),
                               PyObject *Py_UNUSED(unused))
{
    return list_devices(append_identity);
}

PyObject *fa_module_complaints(PyObject *Py_UNUSED(module),
                               PyObject *Py_UNUSED(unused))
{
    return list_devices(append_complaint);
}

/* -- by hand --------------------------------------------------------------- */

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
        fa_parse_int("device_type", args[0], &device_type) ||
        fa_parse_int("device_index", args[1], &target.device) ||
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
         fa_parse_time("cooldown_s", args[3], 1e9, &cooldown_ns))) {
        return NULL;
    }
    for (int i = 0; i < 3; i++) {
        texts[i] = fa_parse_text(names[i], args[i], &owners[i]);
        if (texts[i] == NULL) {
            goto done;
        }
    }
    if (parse_device(texts[0], &backend, &device)) {
        goto done;
    }
    if (fa_state_guard() == NULL) {
        PyErr_SetString(PyExc_ValueError, "guard: expected one, got none yet");
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    done = fa_guard_trip(fa_state_guard(), backend, device, texts[1], texts[2],
                         cooldown_ns, &error) == FA_OK;
    Py_END_ALLOW_THREADS
    if (!done) {
        (void)fa_raise_error(module, &error);
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
        (text = fa_parse_text("kernel", kernel, &owner)) == NULL) {
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
