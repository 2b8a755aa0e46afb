/* fake_runtime.c: a GPU runtime without a GPU.  See fake_runtime.h.
 *
 * A code object's text, behind its 64-byte ELF header, says how loading it
 * goes: "foreign" and "bad" fail, "incomplete" lacks all kernels.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "fake_runtime.h"
#include "sim/hipsim.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT fake_state fake;

static int context[8]; /* the address of context[i] is device i's context */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of what is noted */

static int outcome(const char *call)
{
    const char *failing = fake.failing_call;
    if (failing != NULL && strcmp(failing, call) == 0 &&
        fake.failing_after-- <= 0) {
        fake.failing_call = NULL;
        return fake.code;
    }
    return 0;
}

static void note_op(int what, const void *stream, const void *event)
{
    pthread_mutex_lock(&lock);
    if (fake.ops < FAKE_OPS) {
        fake.op[fake.ops].what = what;
        fake.op[fake.ops].stream = stream;
        fake.op[fake.ops].event = event;
    }
    fake.ops++;
    pthread_mutex_unlock(&lock);
}

static int load(void **module, const void *image)
{
    const char *text = (const char *)image + 64;
    if (strcmp(text, "foreign") == 0) {
        return 209;
    }
    if (strcmp(text, "bad") == 0) {
        return 200;
    }
    if (fake.slow) {
        nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    }
    fake.loads++;
    memcpy(module, &image, sizeof image);
    return 0;
}

static int lookup(void **function, void *module, const char *symbol)
{
    fake.lookups++;
    if (strcmp((const char *)module + 64, "incomplete") == 0) {
        return 500;
    }
    memcpy(function, &symbol, sizeof symbol);
    return 0;
}

static fake_launch *note_launch(void *function, unsigned x, unsigned y,
                                unsigned z, unsigned threads,
                                unsigned lds_bytes, void *stream, void **params)
{
    static fake_launch spare;
    note_op(FAKE_LAUNCH, stream, NULL);
    if (fake.at_launch != NULL) {
        fake.at_launch();
    }
    pthread_mutex_lock(&lock);
    fake_launch *l =
        fake.launches < FAKE_LAUNCHES ? &fake.launch[fake.launches] : &spare;
    *l = (fake_launch){.symbol = function,
                       .grid = {x, y, z},
                       .threads = threads,
                       .lds_bytes = lds_bytes,
                       .stream = stream};
    if (strncmp(function, "fa_rotary", 9) == 0) {
        memcpy(&l->rotary, params[0], sizeof l->rotary);
    } else {
        memcpy(&l->args, params[0], sizeof l->args);
    }
    fake.launches++;
    fake.device_at_launch = fake.device;
    fake.stream = stream;
    const char *hanging = fake.hanging;
    if (hanging != NULL && strcmp(hanging, function) == 0) {
        fake.hangs = true;
    }
    pthread_mutex_unlock(&lock);
    return l;
}

static int fill(void *data, unsigned value, size_t bytes, size_t count,
                void *stream)
{
    fake.stream = stream;
    for (size_t i = 0; i < count; i++) {
        memcpy((char *)data + i * bytes, &value, bytes);
    }
    return 0;
}

/* -- streams and events, which both have ----------------------------------- */

/* An event knows whether it was recorded while everything hung. */
typedef struct event {
    bool recorded;
    bool hung;
} event;

static int event_create(void **out, const char *call)
{
    const int code = outcome(call);
    event *e = code == 0 ? calloc(1, sizeof *e) : NULL;
    fake.events += e != NULL;
    *out = e;
    return code;
}

static int event_destroy(void *e)
{
    fake.events--;
    free(e);
    return 0;
}

static int event_record(void *given, const void *stream, const char *call)
{
    event *e = given;
    note_op(FAKE_RECORD, stream, e);
    fake.records++;
    e->recorded = true;
    e->hung = fake.hangs;
    return outcome(call);
}

static int event_query(void *given, const char *call)
{
    const event *e = given;
    const int code = outcome(call);
    return code != 0 ? code : e->hung && fake.hangs ? 600 : 0;
}

static int stream_create(void **out, const char *call)
{
    const int code = outcome(call);
    *out = code == 0 ? malloc(1) : NULL;
    fake.streams += code == 0;
    return code;
}

static int stream_destroy(void *stream)
{
    fake.streams--;
    free(stream);
    return 0;
}

static int stream_wait(void *stream, const void *e, const char *call)
{
    note_op(FAKE_WAIT, stream, e);
    fake.waits++;
    pthread_mutex_lock(&lock);
    fake.waiting = stream;
    pthread_mutex_unlock(&lock);
    return outcome(call);
}

/* 0 is the mode of every thread at its start. */
static int exchange(int *mode)
{
    static _Thread_local int current;
    const int before = current;
    current = *mode;
    *mode = before;
    fake.relaxed += (current == 2) - (before == 2);
    return 0;
}

static int bus_id(char *text, int chars, int device, const char *call)
{
    snprintf(text, (size_t)chars, "0000:%02x:00.0", (unsigned)device);
    return outcome(call);
}

#define BOTH(hip, cuda, parameters, body) \
    EXPORT int hip parameters             \
    {                                     \
        const char *const call = #hip;    \
        body;                             \
    }                                     \
    EXPORT int cuda parameters            \
    {                                     \
        const char *const call = #cuda;   \
        body;                             \
    }

#ifndef FAKE_INCOMPLETE
BOTH(hipEventCreateWithFlags, cuEventCreate, (void **e, unsigned flags),
     (void)flags;
     return event_create(e, call))
BOTH(hipEventDestroy, cuEventDestroy_v2, (void *e), (void)call;
     return event_destroy(e))
BOTH(hipEventRecord, cuEventRecord, (void *e, void *stream),
     return event_record(e, stream, call))
#ifndef FAKE_EVENTLESS
BOTH(hipEventQuery, cuEventQuery, (void *e), return event_query(e, call))
#endif
BOTH(hipEventElapsedTime, cuEventElapsedTime,
     (float *ms, void *first, void *second), (void)first;
     (void)second; *ms = fake.elapsed_ms; return outcome(call))
BOTH(hipStreamCreateWithFlags, cuStreamCreate, (void **s, unsigned flags),
     (void)flags;
     return stream_create(s, call))
BOTH(hipStreamDestroy, cuStreamDestroy_v2, (void *s), (void)call;
     return stream_destroy(s))
BOTH(hipStreamWaitEvent, cuStreamWaitEvent, (void *s, void *e, unsigned flags),
     (void)flags;
     return stream_wait(s, e, call))
BOTH(hipStreamIsCapturing, cuStreamIsCapturing, (void *s, int *status), (void)s;
     *status = fake.capturing; return outcome(call))
BOTH(hipThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode,
     (int *mode), (void)call;
     return exchange(mode))
BOTH(hipDeviceGetPCIBusId, cuDeviceGetPCIBusId,
     (char *text, int chars, int device),
     return bus_id(text, chars, device, call))
BOTH(hipDriverGetVersion, cuDriverGetVersion, (int *version), *version = 50400;
     return outcome(call))

EXPORT int hipRuntimeGetVersion(int *version)
{
    *version = 50422;
    return outcome("hipRuntimeGetVersion");
}
#endif

/* -- HIP ------------------------------------------------------------------- */

EXPORT int hipGetDevice(int *device)
{
    *device = fake.device;
    return outcome("hipGetDevice");
}

#ifndef FAKE_INCOMPLETE

EXPORT int hipGetDeviceCount(int *count)
{
    *count = fake.device_count;
    return outcome("hipGetDeviceCount");
}

EXPORT int hipSetDevice(int device)
{
    fake.device = device;
    return outcome("hipSetDevice");
}

static int put_arch(const char *arch, char *properties, size_t at)
{
    if (arch == NULL) {
        return 1;
    }
    memcpy(properties + at, arch, strlen(arch) + 1);
    return 0;
}

EXPORT int hipGetDevicePropertiesR0600(void *properties, int device)
{
    (void)device;
    return put_arch(fake.arch_r0600, properties, 1160);
}

EXPORT int hipGetDeviceProperties(void *properties, int device)
{
    (void)device;
    return put_arch(fake.arch_r0000, properties, 396);
}

EXPORT int hipModuleLoadData(void **module, const void *image)
{
    return load(module, image);
}

EXPORT int hipModuleUnload(void *module)
{
    (void)module;
    fake.unloads++;
    return 0;
}

EXPORT int hipModuleGetFunction(void **function, void *module,
                                const char *symbol)
{
    return lookup(function, module, symbol);
}

EXPORT int hipModuleLaunchKernel(void *function, unsigned x, unsigned y,
                                 unsigned z, unsigned threads, unsigned one,
                                 unsigned also_one, unsigned lds_bytes,
                                 void *stream, void **params, void **extra)
{
    (void)one;
    (void)also_one;
    (void)extra;
    note_launch(function, x, y, z, threads, lds_bytes, stream, params);
    return outcome("hipModuleLaunchKernel");
}

EXPORT int hipMemsetD16Async(void *data, unsigned short value, size_t count,
                             void *stream)
{
    return fill(data, value, 2, count, stream);
}

EXPORT int hipMemset2DAsync(void *data, size_t pitch, int byte, size_t width,
                            size_t height, void *stream)
{
    fake.stream = stream;
    for (size_t i = 0; i < height; i++) {
        memset((char *)data + i * pitch, byte, width);
    }
    return outcome("hipMemset2DAsync");
}

#ifndef FAKE_PARTIAL
EXPORT int hipMemsetD32Async(void *data, int value, size_t count, void *stream)
{
    return fill(data, (unsigned)value, 4, count, stream);
}
#endif

EXPORT int hipGetLastError(void)
{
    pthread_mutex_lock(&lock);
    fake.errors_cleared = fake.launches + 1;
    pthread_mutex_unlock(&lock);
    return 0;
}

EXPORT const char *hipGetErrorString(int code)
{
    return code == FAKE_UNKNOWN ? NULL
           : code == 719        ? "unspecified launch failure"
                                : "some failure";
}

EXPORT const char *hipGetErrorName(int code)
{
    return code == FAKE_UNKNOWN ? NULL
           : code == 719        ? "hipErrorLaunchFailure"
           : code == 209        ? "hipErrorNoBinaryForGpu"
                                : "hipErrorSomething";
}

EXPORT int hipsimLaunchWithin(hipFunction_t function, const uint32_t grid[3],
                              const uint32_t block[3], uint32_t lds_bytes,
                              void **params, const hipsim_tensor *tensors,
                              size_t count, uint64_t deadline,
                              hipsim_stats *stats)
{
    fake_launch *l = note_launch(function, grid[0], grid[1], grid[2], block[0],
                                 lds_bytes, NULL, params);
    l->tensor_count = (int)count;
    for (size_t i = 0; i < count && i < FAKE_TENSORS; i++) {
        l->tensor_data[i] = tensors[i].data;
        l->tensor_stride0[i] = tensors[i].stride[0];
        l->tensor_access[i] = tensors[i].access;
        l->tensor_bytes[i] = tensors[i].element_bytes;
    }
    *stats = (hipsim_stats){.wave_instructions = 1000, .workgroups = 3};
    fake.deadline = deadline;
    return deadline != 0 && fake.deadline_cost > deadline
               ? 702
               : outcome("hipsimLaunch");
}

#ifndef FAKE_PARTIAL
EXPORT int hipsimModuleLoad(hipModule_t *module, const void *image,
                            size_t bytes)
{
    (void)bytes;
    return load((void **)(void *)module, image);
}
#endif

EXPORT const char *hipsimLastReport(void)
{
    return fake.report == NULL ? "" : fake.report;
}

/* -- CUDA ------------------------------------------------------------------ */

EXPORT int cuInit(unsigned flags)
{
    (void)flags;
    return outcome("cuInit");
}

EXPORT int cuDeviceGetCount(int *count)
{
    *count = fake.device_count;
    return 0;
}

EXPORT int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return ordinal < fake.device_count ? 0 : 101;
}

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    (void)device;
    *value = attribute == 75 ? fake.cc_major : fake.cc_minor;
    return attribute == 75 || attribute == 76 ? 0 : 1;
}

EXPORT int cuDevicePrimaryCtxRetain(void **out, int device)
{
    fake.retained++;
    *out = &context[device];
    return 0;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device)
{
    (void)device;
    fake.retained--;
    return 0;
}

EXPORT int cuCtxGetDevice(int *device)
{
    *device = fake.device;
    return fake.device < 0 ? 201 : 0;
}

EXPORT int cuCtxGetCurrent(void **out)
{
    const int device = fake.device;
    *out = device < 0 ? NULL : &context[device];
    return outcome("cuCtxGetCurrent");
}

EXPORT int cuCtxSetCurrent(void *in)
{
    fake.device = in == NULL ? -1 : (int)((int *)in - context);
    return outcome("cuCtxSetCurrent");
}

EXPORT int cuModuleLoadData(void **module, const void *image)
{
    return load(module, image);
}

EXPORT int cuModuleUnload(void *module)
{
    (void)module;
    fake.unloads++;
    return 0;
}

EXPORT int cuModuleGetFunction(void **function, void *module,
                               const char *symbol)
{
    return lookup(function, module, symbol);
}

EXPORT int cuFuncSetAttribute(void *function, int attribute, int value)
{
    (void)function;
    fake.allowed_lds = value;
    return attribute == 8 ? 0 : 1;
}

EXPORT int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z,
                          unsigned threads, unsigned one, unsigned also_one,
                          unsigned lds_bytes, void *stream, void **params,
                          void **extra)
{
    (void)one;
    (void)also_one;
    (void)extra;
    note_launch(function, x, y, z, threads, lds_bytes, stream, params);
    return outcome("cuLaunchKernel");
}

EXPORT int cuMemsetD16Async(uint64_t data, unsigned short value, size_t count,
                            void *stream)
{
    return fill((void *)(uintptr_t)data, value, 2, count, stream);
}

#ifndef FAKE_PARTIAL
EXPORT int cuMemsetD32Async(uint64_t data, unsigned value, size_t count,
                            void *stream)
{
    return fill((void *)(uintptr_t)data, value, 4, count, stream);
}
#endif

EXPORT int cuMemsetD2D32Async(uint64_t data, size_t pitch, unsigned value,
                              size_t width, size_t height, void *stream)
{
    for (size_t i = 0; i < height; i++) {
        fill((char *)(uintptr_t)data + i * pitch, value, 4, width, stream);
    }
    return outcome("cuMemsetD2D32Async");
}

EXPORT int cuGetErrorString(int code, const char **text)
{
    *text = code == FAKE_UNKNOWN ? NULL
            : code == 700        ? "an illegal memory access"
                                 : "some failure";
    return 0;
}

#endif
