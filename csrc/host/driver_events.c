/* driver_events.c: streams, events and the identity of a GPU.
 *
 * HIP copied this part of CUDA's driver API with its flags and numbers, so one
 * implementation serves both; only the names differ.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "host/driver.h"

#include <stdio.h>

enum {
    SUCCESS = 0,
    NOT_READY = 600,
    WITH_TIMING = 0,  /* flags of an event */
    NON_BLOCKING = 1, /* of a stream: does not wait for the default one */
    NOT_CAPTURING = 0
};

#define SYMBOL(member, text, need) {offsetof(fa_event_api, member), text, need}
static const fa_symbol hip_symbols[] = {
    SYMBOL(event_create, "hipEventCreateWithFlags", true),
    SYMBOL(event_destroy, "hipEventDestroy", true),
    SYMBOL(event_record, "hipEventRecord", true),
    SYMBOL(event_query, "hipEventQuery", true),
    SYMBOL(event_elapsed, "hipEventElapsedTime", true),
    SYMBOL(stream_create, "hipStreamCreateWithFlags", true),
    SYMBOL(stream_destroy, "hipStreamDestroy", true),
    SYMBOL(stream_wait_event, "hipStreamWaitEvent", true),
    SYMBOL(stream_is_capturing, "hipStreamIsCapturing", true),
    SYMBOL(exchange_capture_mode, "hipThreadExchangeStreamCaptureMode", true),
    SYMBOL(get_pci_bus_id, "hipDeviceGetPCIBusId", true),
    SYMBOL(driver_version, "hipDriverGetVersion", true),
    SYMBOL(runtime_version, "hipRuntimeGetVersion", false),
};
static const fa_symbol cuda_symbols[] = {
    SYMBOL(event_create, "cuEventCreate", true),
    SYMBOL(event_destroy, "cuEventDestroy_v2", true),
    SYMBOL(event_record, "cuEventRecord", true),
    SYMBOL(event_query, "cuEventQuery", true),
    SYMBOL(event_elapsed, "cuEventElapsedTime", true),
    SYMBOL(stream_create, "cuStreamCreate", true),
    SYMBOL(stream_destroy, "cuStreamDestroy_v2", true),
    SYMBOL(stream_wait_event, "cuStreamWaitEvent", true),
    SYMBOL(stream_is_capturing, "cuStreamIsCapturing", true),
    SYMBOL(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", true),
    SYMBOL(get_pci_bus_id, "cuDeviceGetPCIBusId", true),
    SYMBOL(driver_version, "cuDriverGetVersion", true),
};
#undef SYMBOL

static fa_status check(const char *what, int code, fa_error *error)
{
    return code == SUCCESS
               ? FA_OK
               : fa_fail(error, FA_EDEVICE, "%s: error %d", what, code);
}

static fa_status event_new(const fa_driver *driver, void **event,
                           fa_error *error)
{
    return check("event: create",
                 driver->event_api.event_create(event, WITH_TIMING), error);
}

static void event_free(const fa_driver *driver, void *event)
{
    (void)driver->event_api.event_destroy(event);
}

static fa_status event_record(const fa_driver *driver, void *event,
                              void *stream, fa_error *error)
{
    return check("event: record", driver->event_api.event_record(event, stream),
                 error);
}

static fa_status event_done(const fa_driver *driver, void *event, bool *done,
                            fa_error *error)
{
    const int code = driver->event_api.event_query(event);
    *done = code == SUCCESS;
    return code == NOT_READY ? FA_OK : check("event: query", code, error);
}

static fa_status stream_new(const fa_driver *driver, void **stream,
                            fa_error *error)
{
    return check("stream: create",
                 driver->event_api.stream_create(stream, NON_BLOCKING), error);
}

static void stream_free(const fa_driver *driver, void *stream)
{
    (void)driver->event_api.stream_destroy(stream);
}

static fa_status stream_wait(const fa_driver *driver, void *stream, void *event,
                             fa_error *error)
{
    return check("stream: wait",
                 driver->event_api.stream_wait_event(stream, event, 0), error);
}

/* Where it cannot be told, as on the default stream during a capture elsewhere,
 * a call that synchronises would do harm: yes. */
static bool is_capturing(const fa_driver *driver, void *stream)
{
    int status = NOT_CAPTURING;
    return driver->event_api.stream_is_capturing(stream, &status) != SUCCESS ||
           status != NOT_CAPTURING;
}

static fa_status elapsed(const fa_driver *driver, void *first, void *second,
                         int64_t *ns, fa_error *error)
{
    const double ns_per_ms = 1e6;
    float ms = 0.0f;
    fa_status status =
        check("event: elapsed",
              driver->event_api.event_elapsed(&ms, first, second), error);
    *ns = (int64_t)((double)ms * ns_per_ms);
    return status;
}

static int set_capture_mode(const fa_driver *driver, int mode)
{
    (void)driver->event_api.exchange_capture_mode(&mode);
    return mode;
}

static fa_status identify(const fa_driver *driver, int device,
                          char text[FA_IDENTITY_CHARS], fa_error *error)
{
    char arch[FA_ARCH_CHARS] = "";
    char bus[32] = "";
    int version = 0;
    int runtime = 0;
    const fa_event_api *api = &driver->event_api;
    fa_status status = driver->arch(driver, device, arch, error);
    if (status == FA_OK) {
        status = check("device: PCI bus",
                       api->get_pci_bus_id(bus, sizeof bus, device), error);
    }
    if (status == FA_OK) {
        status = check("device: version", api->driver_version(&version), error);
    }
    if (status == FA_OK && api->runtime_version != NULL) {
        status =
            check("device: runtime", api->runtime_version(&runtime), error);
    }
    (void)snprintf(
        text, FA_IDENTITY_CHARS, "%s %s at %.31s driver %d runtime %d",
        fa_backend_name(driver->backend), arch, bus, version, runtime);
    return status;
}

fa_status fa_driver_bind_events(fa_driver *driver, const char *library,
                                fa_error *error)
{
    const bool is_hip = driver->backend == FA_HIP;
    const fa_symbol *symbols = is_hip ? hip_symbols : cuda_symbols;
    const size_t count = is_hip ? sizeof hip_symbols / sizeof hip_symbols[0]
                                : sizeof cuda_symbols / sizeof cuda_symbols[0];
    driver->identify = identify;
    driver->events = (fa_events){
        .event_new = event_new,
        .event_free = event_free,
        .event_record = event_record,
        .event_done = event_done,
        .stream_new = stream_new,
        .stream_free = stream_free,
        .stream_wait = stream_wait,
        .is_capturing = is_capturing,
        .elapsed = elapsed,
        .set_capture_mode = set_capture_mode,
    };
    return fa_driver_find(driver, library, symbols, count, &driver->event_api,
                          error);
}
