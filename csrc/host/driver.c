/* driver.c: opens a backend, and is the one that launches nothing.
 *
 * The simulator is the only library that is loaded here, by its path; GPU
 * runtimes are those that PyTorch has loaded already.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "host/driver.h"

#include <assert.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

const char *fa_backend_name(fa_backend backend)
{
    static const char *const names[FA_BACKEND_COUNT] = {"hip", "sim", "standin",
                                                        "null"};
    assert((size_t)backend < FA_BACKEND_COUNT);
    return names[backend];
}

/* The null backend accepts everything, so that what remains is exactly the
 * host's part of a call. */
static fa_status null_launch(const fa_driver *driver, const fa_launch *launch,
                             fa_counts *counts, fa_error *error)
{
    (void)driver;
    (void)error;
    counts->workgroups =
        (uint64_t)launch->grid[0] * launch->grid[1] * launch->grid[2];
    return FA_OK;
}

static fa_status null_enter(const fa_driver *driver, int device,
                            fa_scope *scope, fa_error *error)
{
    (void)driver;
    (void)device;
    (void)error;
    *scope = (fa_scope){0};
    return FA_OK;
}

static void null_leave(const fa_driver *driver, const fa_scope *scope)
{
    (void)driver;
    (void)scope;
}

static fa_status null_fill(const fa_driver *driver, void *data, uint64_t bits,
                           size_t element_bytes, size_t count, void *stream,
                           fa_error *error)
{
    (void)driver;
    (void)data;
    (void)bits;
    (void)element_bytes;
    (void)count;
    (void)stream;
    (void)error;
    return FA_OK;
}

static fa_status null_identify(const fa_driver *driver, int device,
                               char text[FA_IDENTITY_CHARS], fa_error *error)
{
    (void)driver;
    (void)error;
    (void)snprintf(text, FA_IDENTITY_CHARS, "null:%d", device);
    return FA_OK;
}

/* Its events are all one, and over at once: what is left is the guard's own
 * time. */
static fa_status null_new(const fa_driver *driver, void **event,
                          fa_error *error)
{
    static int the_event;
    (void)driver;
    (void)error;
    *event = &the_event;
    return FA_OK;
}

static void null_free(const fa_driver *driver, void *event)
{
    (void)driver;
    (void)event;
}

static fa_status null_order(const fa_driver *driver, void *first, void *second,
                            fa_error *error)
{
    (void)driver;
    (void)first;
    (void)second;
    (void)error;
    return FA_OK;
}

static fa_status null_done(const fa_driver *driver, void *event, bool *done,
                           fa_error *error)
{
    (void)driver;
    (void)event;
    (void)error;
    *done = true;
    return FA_OK;
}

static bool null_is_capturing(const fa_driver *driver, void *stream)
{
    (void)driver;
    (void)stream;
    return false;
}

static fa_status null_elapsed(const fa_driver *driver, void *first,
                              void *second, int64_t *ns, fa_error *error)
{
    (void)driver;
    (void)first;
    (void)second;
    (void)error;
    *ns = 0;
    return FA_OK;
}

static int null_set_capture_mode(const fa_driver *driver, int mode)
{
    (void)driver;
    return mode;
}

static fa_status bind_null(fa_driver *driver)
{
    driver->identify = null_identify;
    driver->events = (fa_events){
        .event_new = null_new,
        .event_free = null_free,
        .event_record = null_order,
        .event_done = null_done,
        .stream_new = null_new,
        .stream_free = null_free,
        .stream_wait = null_order,
        .is_capturing = null_is_capturing,
        .elapsed = null_elapsed,
        .set_capture_mode = null_set_capture_mode,
    };
    driver->enter = null_enter;
    driver->leave = null_leave;
    driver->launch = null_launch;
    driver->fill = null_fill;
    return FA_OK;
}

fa_status fa_driver_find(const fa_driver *driver, const char *library,
                         const fa_symbol *symbols, size_t count, void *table,
                         fa_error *error)
{
    const char *missing =
        fa_library_fill(driver->library, symbols, count, table);
    return missing == NULL
               ? FA_OK
               : fa_fail(error, FA_ELIBRARY,
                         "%s: expected it to export %s, got nothing of that "
                         "name",
                         library, missing);
}

static void *reopen(const char *stem, const char *owner, fa_error *error)
{
    void *library = fa_library_find(stem);
    if (library == NULL) {
        fa_fail(error, FA_ELIBRARY,
                "%s: expected the library to be loaded already, as %s does, "
                "but the process has none",
                stem, owner);
    }
    return library;
}

fa_status fa_driver_open(fa_backend backend, const char *library,
                         fa_driver **out, fa_error *error)
{
    fa_status status = FA_ELIBRARY;
    *out = NULL;
    if ((unsigned)backend >= FA_BACKEND_COUNT) {
        return fa_fail(error, FA_EINVAL, "backend: expected 0..%d, got %d",
                       FA_BACKEND_COUNT - 1, (int)backend);
    }
    fa_driver *driver = calloc(1, sizeof *driver);
    if (driver == NULL) {
        return fa_fail(error, FA_ENOMEM, "driver: out of memory");
    }
    driver->backend = backend;
    switch (backend) {
    case FA_HIP:
        driver->library =
            reopen("libamdhip64", "a ROCm build of PyTorch", error);
        if (driver->library != NULL) {
            status = fa_driver_bind_hip(driver, error);
        }
        break;
    case FA_SIM:
        driver->library = dlopen(library, RTLD_NOW | RTLD_LOCAL);
        if (driver->library == NULL) {
            fa_fail(error, FA_ELIBRARY, "sim_library: cannot load %s: %s",
                    library, dlerror());
        } else {
            status = fa_driver_bind_sim(driver, error);
        }
        break;
    case FA_STANDIN:
        driver->library =
            reopen("libcuda.so", "a CUDA build of PyTorch", error);
        if (driver->library != NULL) {
            status = fa_driver_bind_cuda(driver, error);
        }
        break;
    case FA_NULL:
        status = bind_null(driver);
        break;
    case FA_BACKEND_COUNT:
        break; /* refused above */
    }
    if (status != FA_OK) {
        fa_driver_close(driver);
        return status;
    }
    *out = driver;
    return FA_OK;
}

void fa_driver_close(fa_driver *driver)
{
    if (driver == NULL) {
        return;
    }
    if (driver->library != NULL) {
        dlclose(driver->library);
    }
    free(driver);
}
