/* state.c: configuration and records of the process.  See state.h.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "python/state.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

/* -- configuration --------------------------------------------------------- */

typedef enum mode {
    MODE_AUTO,
    MODE_SIM,
    MODE_STANDIN,
    MODE_NULL,
    MODE_OFF,
    MODE_COUNT
} mode;

static const char *const mode_names[MODE_COUNT] = {"auto", "sim", "standin",
                                                   "null", "off"};

/* One configuration; never changed and never freed once published. */
typedef struct setup {
    struct setup *next;
    fa_runtime *runtime;
    mode mode;
    bool strict_bf16;
    fa_fp32 fp32;
} setup;

static setup *setups; /* all of them, under the GIL */
static _Atomic(setup *) current;
static PyObject *sim_arch_function; /* under the GIL */

fa_status fa_state_configure(const char *code_dir, const char *sim_library,
                             const char *mode_name, PyObject *sim_arch,
                             const char *bf16, const char *fp32,
                             fa_error *error)
{
    static const char *const ways[] = {[FA_FP32_AUTO] = "auto",
                                       [FA_FP32_FAST] = "fast",
                                       [FA_FP32_EXACT] = "exact"};
    const int way_count = sizeof ways / sizeof *ways;
    const bool strict = strcmp(bf16, "strict") == 0;
    int way = 0;
    fa_runtime *runtime = NULL;
    setup *found = NULL;
    int wanted = 0;
    while (wanted < MODE_COUNT && strcmp(mode_name, mode_names[wanted])) {
        wanted++;
    }
    if (wanted == MODE_COUNT) {
        return fa_fail(error, FA_EINVAL,
                       "mode: expected auto, sim, standin, null or off, got "
                       "%.80s",
                       mode_name);
    }
    if (!strict && strcmp(bf16, "auto") != 0) {
        return fa_fail(error, FA_EINVAL,
                       "bf16: expected auto or strict, got %.80s", bf16);
    }
    while (way < way_count && strcmp(fp32, ways[way]) != 0) {
        way++;
    }
    if (way == way_count) {
        return fa_fail(error, FA_EINVAL,
                       "fp32: expected auto, fast or exact, got %.80s", fp32);
    }
    for (setup *s = setups; s != NULL && found == NULL; s = s->next) {
        if (strcmp(fa_runtime_code_dir(s->runtime), code_dir) == 0 &&
            strcmp(fa_runtime_sim_library(s->runtime), sim_library) == 0) {
            runtime = s->runtime; /* the modes do not matter to it */
            found = s->mode == (mode)wanted && s->strict_bf16 == strict &&
                            s->fp32 == (fa_fp32)way
                        ? s
                        : NULL;
        }
    }
    if (found == NULL) {
        found = PyMem_Malloc(sizeof *found);
        if (found == NULL) {
            return fa_fail(error, FA_ENOMEM, "configure: out of memory");
        }
        if (runtime == NULL) {
            fa_status status =
                fa_runtime_open(code_dir, sim_library, &runtime, error);
            if (status != FA_OK) {
                PyMem_Free(found);
                return status;
            }
        }
        *found = (setup){setups, runtime, (mode)wanted, strict, (fa_fp32)way};
        setups = found;
    }
    PyObject *old = sim_arch_function;
    Py_INCREF(sim_arch);
    sim_arch_function = sim_arch;
    atomic_store(&current, found);
    Py_XDECREF(old);
    return FA_OK;
}

void fa_state_set_arithmetic(fa_problem *p)
{
    const setup *s = atomic_load(&current);
    p->strict_bf16 = s != NULL && s->strict_bf16;
    p->fp32 = s != NULL ? s->fp32 : FA_FP32_AUTO;
}

fa_status fa_state_backend(bool is_cuda, fa_runtime **runtime,
                           fa_backend *backend, fa_error *error)
{
    const setup *s = atomic_load(&current);
    if (s == NULL) {
        return fa_fail(error, FA_EINVAL,
                       "configure: expected a call of it before the first "
                       "forward, got none");
    }
    *runtime = s->runtime;
    switch (s->mode) {
    case MODE_NULL:
        *backend = FA_NULL;
        return FA_OK;
    case MODE_OFF:
        return fa_fail(error, FA_EUNSUPPORTED,
                       "mode: expected one that runs kernels, got off");
    case MODE_SIM:
        if (is_cuda) {
            return fa_fail(error, FA_EUNSUPPORTED,
                           "q: expected a CPU tensor in mode sim, got a GPU "
                           "tensor");
        }
        break;
    default:
        break;
    }
    *backend = !is_cuda                  ? FA_SIM
               : s->mode == MODE_STANDIN ? FA_STANDIN
                                         : FA_HIP;
    return FA_OK;
}

fa_status fa_state_no_arch(fa_error *error)
{
    return fa_fail(error, FA_EUNSUPPORTED,
                   "q: expected a GPU tensor, got cpu: CPU tensors run on "
                   "the simulator only inside simulate(...) or with "
                   "FLASH_ATTN_ROCM_DEVICE=sim");
}

fa_status fa_state_copy_arch(const char *name, char arch[FA_STATE_ARCH_CHARS],
                             fa_error *error)
{
    const size_t length = strlen(name);
    if (length >= FA_STATE_ARCH_CHARS) {
        return fa_fail(error, FA_EINVAL,
                       "arch: expected a name such as gfx906, got \"%.80s\"",
                       name);
    }
    memcpy(arch, name, length + 1);
    return FA_OK;
}

/* Puts the current exception into *error and clears it: the caller is C++,
 * which gets a text. */
static fa_status take_exception(fa_error *error)
{
    PyObject *type = NULL;
    PyObject *value = NULL;
    PyObject *trace = NULL;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *text = value == NULL ? NULL : PyObject_Str(value);
    PyObject *bytes = text == NULL ? NULL : PyUnicode_AsUTF8String(text);
    const char *chars = bytes == NULL ? NULL : PyBytes_AsString(bytes);
    fa_fail(error, FA_EINVAL,
            "sim_arch: expected a name or None, got an "
            "exception: %.400s",
            chars == NULL ? "without a text" : chars);
    Py_XDECREF(bytes);
    Py_XDECREF(text);
    Py_XDECREF(trace);
    Py_XDECREF(value);
    Py_XDECREF(type);
    PyErr_Clear(); /* of the conversion, if that failed too */
    return FA_EINVAL;
}

static fa_status ask_arch(char arch[FA_STATE_ARCH_CHARS], fa_error *error)
{
    fa_status status = FA_OK;
    PyObject *bytes = NULL;
    PyObject *answer = PyObject_CallObject(sim_arch_function, NULL);
    if (answer == Py_None) {
        status = fa_state_no_arch(error);
    } else if (answer == NULL ||
               (bytes = PyUnicode_AsUTF8String(answer)) == NULL) {
        status = take_exception(error);
    } else {
        status = fa_state_copy_arch(PyBytes_AsString(bytes), arch, error);
    }
    Py_XDECREF(bytes);
    Py_XDECREF(answer);
    return status;
}

fa_status fa_state_ask_arch(char arch[FA_STATE_ARCH_CHARS], fa_error *error)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    fa_status status = ask_arch(arch, error);
    PyGILState_Release(gil);
    return status;
}

/* -- what ran -------------------------------------------------------------- */

/* A reason for a fallback.  There are as many as the package has reason
 * codes, and each stays for good, so that records can point at them. */
typedef struct fallback {
    PyObject *given; /* the object that came first; usually always the same */
    PyObject *text;  /* its exact str */
    uint64_t count;
} fallback;

enum { MAX_FALLBACKS = 128 };
static fallback fallbacks[MAX_FALLBACKS]; /* all three under the GIL */
static size_t fallback_count;

static _Atomic uint64_t fused_count[FA_VARIANT_COUNT];
static _Atomic uint64_t wave_instructions;

typedef enum record_kind { RECORD_NONE, RECORD_FUSED, RECORD_SDPA } record_kind;

typedef struct record {
    record_kind kind;
    fa_backend backend;
    int32_t device_index;
    fa_plan plan;
    fa_counts counts;
    const fallback *reason;
} record;

static _Thread_local record last;

void fa_state_record(fa_backend backend, int32_t device_index,
                     const fa_plan *plan, const fa_counts *counts)
{
    last = (record){.kind = RECORD_FUSED,
                    .backend = backend,
                    .device_index = device_index,
                    .plan = *plan,
                    .counts = *counts};
    for (int i = 0; i < plan->count; i++) {
        if (fa_step_is_main(&plan->step[i])) {
            const ptrdiff_t row = plan->step[i].variant - fa_variants;
            assert(row >= 0 && row < FA_VARIANT_COUNT);
            atomic_fetch_add_explicit(&fused_count[row], 1,
                                      memory_order_relaxed);
        }
    }
    if (counts->wave_instructions != 0) {
        atomic_fetch_add_explicit(&wave_instructions, counts->wave_instructions,
                                  memory_order_relaxed);
    }
}

/* The entry with this text, added if it is new; NULL with an exception. */
static fallback *find_fallback(PyObject *reason)
{
    if (!PyUnicode_Check(reason)) {
        PyErr_SetString(PyExc_TypeError,
                        "reason: expected a str, got another type");
        return NULL;
    }
    /* An exact str also of an enum's member, whose hash is another. */
    PyObject *text = PyUnicode_FromObject(reason);
    if (text == NULL) {
        return NULL;
    }
    for (size_t i = 0; i < fallback_count; i++) {
        int order = PyUnicode_Compare(fallbacks[i].text, text);
        if (order == 0) {
            Py_DECREF(text);
            return &fallbacks[i];
        }
    }
    if (fallback_count == MAX_FALLBACKS) {
        Py_DECREF(text);
        PyErr_Format(PyExc_RuntimeError,
                     "reason: expected one of at most %d reason codes, got "
                     "one more",
                     (int)MAX_FALLBACKS);
        return NULL;
    }
    Py_INCREF(reason);
    fallbacks[fallback_count] = (fallback){reason, text, 0};
    return &fallbacks[fallback_count++];
}

PyObject *fa_state_record_fallback(PyObject *reason)
{
    fallback *entry = NULL;
    /* Reason codes are the same few objects again and again. */
    for (size_t i = 0; i < fallback_count; i++) {
        if (fallbacks[i].given == reason) {
            entry = &fallbacks[i];
            break;
        }
    }
    if (entry == NULL && (entry = find_fallback(reason)) == NULL) {
        return NULL;
    }
    entry->count++;
    last.kind = RECORD_SDPA;
    last.reason = entry;
    Py_RETURN_NONE;
}

PyObject *fa_state_last_call(void)
{
    char why[FA_WHY_CHARS];
    char symbols[FA_SYMBOLS_CHARS];
    char device[32];
    const record *r = &last;
    if (r->kind == RECORD_NONE) {
        Py_RETURN_NONE;
    }
    if (r->kind == RECORD_SDPA) {
        return Py_BuildValue("(ssOsii)", "sdpa", "", r->reason->text, "", 0, 0);
    }
    fa_plan_why(&r->plan, why);
    fa_plan_symbols(&r->plan, symbols);
    if (r->device_index < 0) {
        snprintf(device, sizeof device, "cpu");
    } else {
        snprintf(device, sizeof device, "cuda:%d", (int)r->device_index);
    }
    return Py_BuildValue("(ssssKK)", fa_backend_name(r->backend), symbols, why,
                         device,
                         (unsigned long long)r->counts.wave_instructions,
                         (unsigned long long)r->counts.workgroups);
}

/* Puts key: count into `dict`; steals nothing.  0 or -1 with an exception. */
static int set_count(PyObject *dict, PyObject *key, uint64_t count)
{
    PyObject *number = PyLong_FromUnsignedLongLong(count);
    if (key == NULL || number == NULL) {
        Py_XDECREF(number);
        return -1;
    }
    int failed = PyDict_SetItem(dict, key, number);
    Py_DECREF(number);
    return failed;
}

PyObject *fa_state_counters(void)
{
    PyObject *result = NULL;
    PyObject *fused = PyDict_New();
    PyObject *fallback_counts = PyDict_New();
    if (fused == NULL || fallback_counts == NULL) {
        goto done;
    }
    for (size_t i = 0; i < FA_VARIANT_COUNT; i++) {
        uint64_t count =
            atomic_load_explicit(&fused_count[i], memory_order_relaxed);
        if (count == 0) {
            continue;
        }
        PyObject *symbol = PyUnicode_FromString(fa_variants[i].symbol);
        int failed = set_count(fused, symbol, count);
        Py_XDECREF(symbol);
        if (failed) {
            goto done;
        }
    }
    for (size_t i = 0; i < fallback_count; i++) {
        const fallback *f = &fallbacks[i];
        int failed =
            f->count == 0 ? 0 : set_count(fallback_counts, f->text, f->count);
        if (failed) {
            goto done;
        }
    }
    result = Py_BuildValue("{sOsOsK}", "fused", fused, "fallback",
                           fallback_counts, "wave_instructions",
                           (unsigned long long)atomic_load_explicit(
                               &wave_instructions, memory_order_relaxed));

done:
    Py_XDECREF(fallback_counts);
    Py_XDECREF(fused);
    return result;
}

void fa_state_reset_counters(void)
{
    for (size_t i = 0; i < FA_VARIANT_COUNT; i++) {
        atomic_store_explicit(&fused_count[i], 0, memory_order_relaxed);
    }
    for (size_t i = 0; i < fallback_count; i++) {
        fallbacks[i].count = 0;
    }
    atomic_store_explicit(&wave_instructions, 0, memory_order_relaxed);
}
