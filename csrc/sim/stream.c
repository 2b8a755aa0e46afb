/* stream.c: streams and events.
 *
 * A launch ends before its call returns, so a stream is always idle and an
 * event complete as soon as it is recorded; what is left is bookkeeping:
 * handles that are checked, and the time of each record.
 *
 * State: the lists of streams and events, under the table lock.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "report.h"
#include "table.h"

#include <stdlib.h>
#include <time.h>

struct hipsim_stream {
    struct hipsim_stream *next;
};

struct hipsim_event {
    struct hipsim_event *next;
    double recorded_ms; /* monotonic host time, negative before a record */
};

static hipStream_t streams;
static hipEvent_t events;

/* The default streams have no object: NULL, legacy and per thread. */
static bool is_default(hipStream_t stream)
{
    return (uintptr_t)stream <= 2;
}

/* The link that points to `stream`, or NULL. The caller holds the lock. */
static hipStream_t *find_stream(hipStream_t stream)
{
    for (hipStream_t *link = &streams; *link != NULL; link = &(*link)->next) {
        if (*link == stream) {
            return link;
        }
    }
    return NULL;
}

static hipEvent_t *find_event(hipEvent_t event)
{
    for (hipEvent_t *link = &events; *link != NULL; link = &(*link)->next) {
        if (*link == event) {
            return link;
        }
    }
    return NULL;
}

hipError_t sim_stream_check(hipStream_t stream)
{
    if (is_default(stream)) {
        return hipSuccess;
    }
    sim_table_lock();
    bool known = find_stream(stream) != NULL;
    sim_table_unlock();
    return known ? hipSuccess
                 : sim_fail(hipErrorInvalidHandle, "stream %p is not known",
                            (void *)stream);
}

static hipError_t check_stream(hipStream_t stream)
{
    sim_report_clear();
    return sim_stream_check(stream);
}

HIPSIM_API hipError_t hipStreamCreateWithFlags(hipStream_t *stream,
                                               unsigned flags)
{
    sim_report_clear();
    if (stream == NULL || flags > 1) {
        return sim_fail(hipErrorInvalidValue,
                        "hipStreamCreate: flags 0x%x, or stream is NULL",
                        flags);
    }
    *stream = calloc(1, sizeof **stream);
    if (*stream == NULL) {
        return sim_fail(hipErrorOutOfMemory, "hipStreamCreate: no memory");
    }
    sim_table_lock();
    (*stream)->next = streams;
    streams = *stream;
    sim_table_unlock();
    return hipSuccess;
}

HIPSIM_API hipError_t hipStreamCreate(hipStream_t *stream)
{
    return hipStreamCreateWithFlags(stream, 0);
}

HIPSIM_API hipError_t hipStreamDestroy(hipStream_t stream)
{
    sim_report_clear();
    sim_table_lock();
    hipStream_t *link = is_default(stream) ? NULL : find_stream(stream);
    if (link != NULL) {
        *link = stream->next;
        free(stream);
    }
    sim_table_unlock();
    return link != NULL ? hipSuccess
                        : sim_fail(hipErrorInvalidHandle,
                                   "hipStreamDestroy: stream %p is not known",
                                   (void *)stream);
}

HIPSIM_API hipError_t hipStreamSynchronize(hipStream_t stream)
{
    return check_stream(stream);
}

HIPSIM_API hipError_t hipStreamQuery(hipStream_t stream)
{
    return check_stream(stream);
}

/* *status: 0 is hipStreamCaptureStatusNone. */
HIPSIM_API hipError_t hipStreamIsCapturing(hipStream_t stream, int *status)
{
    hipError_t error = check_stream(stream);

    if (error == hipSuccess && status == NULL) {
        return sim_fail(hipErrorInvalidValue,
                        "hipStreamIsCapturing: status is NULL");
    }
    if (error == hipSuccess) {
        *status = 0;
    }
    return error;
}

HIPSIM_API hipError_t hipEventCreateWithFlags(hipEvent_t *event, unsigned flags)
{
    (void)flags; /* none changes what a host clock can tell */
    sim_report_clear();
    if (event == NULL) {
        return sim_fail(hipErrorInvalidValue, "hipEventCreate: event is NULL");
    }
    *event = calloc(1, sizeof **event);
    if (*event == NULL) {
        return sim_fail(hipErrorOutOfMemory, "hipEventCreate: no memory");
    }
    (*event)->recorded_ms = -1.0;
    sim_table_lock();
    (*event)->next = events;
    events = *event;
    sim_table_unlock();
    return hipSuccess;
}

HIPSIM_API hipError_t hipEventCreate(hipEvent_t *event)
{
    return hipEventCreateWithFlags(event, 0);
}

/* Looks an event up; *recorded_ms is negative before the first record. */
static hipError_t check_event(hipEvent_t event, double *recorded_ms)
{
    sim_table_lock();
    bool known = find_event(event) != NULL;
    *recorded_ms = known ? event->recorded_ms : 0.0;
    sim_table_unlock();
    return known ? hipSuccess
                 : sim_fail(hipErrorInvalidHandle, "event %p is not known",
                            (void *)event);
}

HIPSIM_API hipError_t hipEventDestroy(hipEvent_t event)
{
    sim_report_clear();
    sim_table_lock();
    hipEvent_t *link = find_event(event);
    if (link != NULL) {
        *link = event->next;
        free(event);
    }
    sim_table_unlock();
    return link != NULL ? hipSuccess
                        : sim_fail(hipErrorInvalidHandle,
                                   "hipEventDestroy: event %p is not known",
                                   (void *)event);
}

HIPSIM_API hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream)
{
    struct timespec now;
    hipError_t status = check_stream(stream);

    if (status != hipSuccess) {
        return status;
    }
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    sim_table_lock();
    bool known = find_event(event) != NULL;
    if (known) {
        event->recorded_ms =
            (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
    }
    sim_table_unlock();
    return known ? hipSuccess
                 : sim_fail(hipErrorInvalidHandle,
                            "hipEventRecord: event %p is not known",
                            (void *)event);
}

HIPSIM_API hipError_t hipEventQuery(hipEvent_t event)
{
    double recorded_ms;

    sim_report_clear();
    return check_event(event, &recorded_ms);
}

HIPSIM_API hipError_t hipEventSynchronize(hipEvent_t event)
{
    return hipEventQuery(event);
}

HIPSIM_API hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event,
                                         unsigned flags)
{
    double recorded_ms;
    hipError_t status = check_stream(stream);

    if (status == hipSuccess && flags != 0) {
        return sim_fail(hipErrorInvalidValue,
                        "hipStreamWaitEvent: flags 0x%x, expected 0", flags);
    }
    return status != hipSuccess ? status : check_event(event, &recorded_ms);
}

HIPSIM_API hipError_t hipEventElapsedTime(float *ms, hipEvent_t start,
                                          hipEvent_t stop)
{
    double first, second;

    sim_report_clear();
    if (ms == NULL) {
        return sim_fail(hipErrorInvalidValue,
                        "hipEventElapsedTime: ms is NULL");
    }
    hipError_t status = check_event(start, &first);
    if (status == hipSuccess) {
        status = check_event(stop, &second);
    }
    if (status != hipSuccess) {
        return status;
    }
    if (first < 0.0 || second < 0.0) {
        return sim_fail(hipErrorInvalidHandle,
                        "hipEventElapsedTime: an event was never recorded");
    }
    *ms = (float)(second - first);
    return hipSuccess;
}
