/* driver.h: one shape for four ways to run a kernel.
 *
 * A driver is a handle of a runtime library, the functions found in it, and
 * the operations below, which hide how HIP and the CUDA driver API differ.
 * Drivers are filled once and never change, so any thread may use them.
 * When and with what they are used is left to code.c and launch.c.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_HOST_DRIVER_H
#define FA_HOST_DRIVER_H

#include "fa.h"
#include "host/store.h"
#include "kernels/args.h"

struct hipsim_tensor; /* sim/hipsim.h */
struct hipsim_stats;

typedef struct fa_driver fa_driver;

enum { FA_ARCH_CHARS = 64 };

/* A tensor that a kernel touches.  FA_BACKWARD_KV for bfloat16 can have most: q
 * k v dout dk dv, rows and what was prepared of four tensors, and bias, mask,
 * slopes, seed and both spans. */
enum { FA_READ = 1, FA_WRITE = 2, FA_MAX_ACCESSES = 21 };
typedef struct fa_access {
    const fa_tensor *tensor;
    uint32_t access;
    int32_t element_bytes;
} fa_access;

typedef struct fa_launch {
    void *function;
    const char *symbol; /* for messages */
    uint32_t grid[3];   /* in workgroups */
    uint32_t threads;
    uint32_t lds_bytes; /* static in AMD code objects, dynamic on CUDA */
    uint64_t wave_instructions; /* most of a workgroup, where they are counted:
                                 * one more is FA_ELATE; 0: no limit */
    void *stream;
    void *args;               /* fa_args, or as the kernel's pass says */
    const fa_access *tensors; /* all the memory it may touch */
    size_t tensor_count;
} fa_launch;

/* What was current before fa_driver.enter. */
typedef struct fa_scope {
    bool changed;
    int device;
    void *context;
} fa_scope;

/* HIP's functions, also exported by libhipsim; hipsim's own are NULL on a
 * real runtime.  Errors are ints, 0 is success. */
typedef struct fa_hip_api {
    int (*get_device_count)(int *count);
    int (*get_device)(int *device);
    int (*set_device)(int device);
    int (*get_properties_r0600)(void *properties, int device);
    int (*get_properties)(void *properties, int device);
    int (*module_load_data)(void **module, const void *image);
    int (*module_unload)(void *module);
    int (*module_get_function)(void **function, void *module,
                               const char *symbol);
    int (*module_launch_kernel)(void *function, unsigned grid_x,
                                unsigned grid_y, unsigned grid_z,
                                unsigned block_x, unsigned block_y,
                                unsigned block_z, unsigned lds_bytes,
                                void *stream, void **params, void **extra);
    int (*memset_d16_async)(void *data, unsigned short value, size_t count,
                            void *stream);
    int (*memset_d32_async)(void *data, int value, size_t count, void *stream);
    int (*memset_2d_async)(void *data, size_t pitch, int byte, size_t width,
                           size_t height, void *stream);
    int (*get_last_error)(void);
    const char *(*get_error_string)(int error);
    const char *(*get_error_name)(int error);
    int (*sim_launch)(void *function, const uint32_t grid[3],
                      const uint32_t block[3], uint32_t lds_bytes,
                      void **params, const struct hipsim_tensor *tensors,
                      size_t count, uint64_t deadline,
                      struct hipsim_stats *stats);
    int (*sim_module_load)(void **module, const void *image, size_t bytes);
    const char *(*sim_last_report)(void);
} fa_hip_api;

/* The CUDA driver API; device pointers are 64-bit integers there. */
typedef struct fa_cuda_api {
    int (*init)(unsigned flags);
    int (*device_get_count)(int *count);
    int (*device_get)(int *device, int ordinal);
    int (*device_get_attribute)(int *value, int attribute, int device);
    int (*primary_context_retain)(void **context, int device);
    int (*primary_context_release)(int device);
    int (*context_get_device)(int *device);
    int (*context_get_current)(void **context);
    int (*context_set_current)(void *context);
    int (*module_load_data)(void **module, const void *image);
    int (*module_unload)(void *module);
    int (*module_get_function)(void **function, void *module,
                               const char *symbol);
    int (*function_set_attribute)(void *function, int attribute, int value);
    int (*launch_kernel)(void *function, unsigned grid_x, unsigned grid_y,
                         unsigned grid_z, unsigned block_x, unsigned block_y,
                         unsigned block_z, unsigned lds_bytes, void *stream,
                         void **params, void **extra);
    int (*memset_d16_async)(uint64_t data, unsigned short value, size_t count,
                            void *stream);
    int (*memset_d32_async)(uint64_t data, unsigned value, size_t count,
                            void *stream);
    int (*memset_2d_d32_async)(uint64_t data, size_t pitch, unsigned value,
                               size_t width, size_t height, void *stream);
    int (*get_error_string)(int error, const char **text);
} fa_cuda_api;

enum { FA_CAPTURE_RELAXED = 2 }; /* it does not */

/* Streams, and events that mark places in them.  Where `event_new` is NULL a
 * launch is over when it returns, and all others are NULL too. */
typedef struct fa_events {
    fa_status (*event_new)(const fa_driver *, void **event, fa_error *);
    void (*event_free)(const fa_driver *, void *event);
    fa_status (*event_record)(const fa_driver *, void *event, void *stream,
                              fa_error *);
    /* A failure means that the device has failed; nothing is done then. */
    fa_status (*event_done)(const fa_driver *, void *event, bool *done,
                            fa_error *);
    fa_status (*stream_new)(const fa_driver *, void **stream, fa_error *);
    void (*stream_free)(const fa_driver *, void *stream);
    fa_status (*stream_wait)(const fa_driver *, void *stream, void *event,
                             fa_error *);
    bool (*is_capturing)(const fa_driver *, void *stream);
    /* What lies between two events that are done, in ns. */
    fa_status (*elapsed)(const fa_driver *, void *first, void *second,
                         int64_t *ns, fa_error *);
    /* Whether what this thread asks may disturb captures of others; returns the
     * mode before, to be set again. */
    int (*set_capture_mode)(const fa_driver *, int mode);
} fa_events;

/* The same in both libraries but for the names. */
typedef struct fa_event_api {
    int (*event_create)(void **event, unsigned flags);
    int (*event_destroy)(void *event);
    int (*event_record)(void *event, void *stream);
    int (*event_query)(void *event);
    int (*event_elapsed)(float *ms, void *first, void *second);
    int (*stream_create)(void **stream, unsigned flags);
    int (*stream_destroy)(void *stream);
    int (*stream_wait_event)(void *stream, void *event, unsigned flags);
    int (*stream_is_capturing)(void *stream, int *status);
    int (*exchange_capture_mode)(int *mode);
    int (*get_pci_bus_id)(char *text, int chars, int device);
    int (*driver_version)(int *version);
    int (*runtime_version)(int *version); /* may be NULL */
} fa_event_api;

struct fa_driver {
    fa_backend backend;
    const char *code_suffix; /* of a code object's file name: "co" */
    uint16_t code_machine;   /* ELF e_machine of a code object */
    void *library;           /* counted handle; NULL for FA_NULL */
    union {
        fa_hip_api hip;
        fa_cuda_api cuda;
    } api;
    fa_event_api event_api;

    fa_status (*device_count)(const fa_driver *, int *count, fa_error *);
    /* Makes `device` current on this thread; leave() undoes it.  A scope
     * that enter() failed for needs no leave(). */
    fa_status (*enter)(const fa_driver *, int device, fa_scope *, fa_error *);
    void (*leave)(const fa_driver *, const fa_scope *);
    /* The architecture as in code object names: "gfx906", "sm_90". */
    fa_status (*arch)(const fa_driver *, int device, char arch[FA_ARCH_CHARS],
                      fa_error *);
    /* `path` is for messages.  The image stays valid until unload(). */
    fa_status (*load)(const fa_driver *, const char *path, const void *image,
                      size_t bytes, void **module, fa_error *);
    void (*unload)(const fa_driver *, void *module);
    fa_status (*function)(const fa_driver *, const char *path, void *module,
                          const char *symbol, uint32_t lds_bytes,
                          void **function, fa_error *);
    fa_status (*launch)(const fa_driver *, const fa_launch *, fa_counts *,
                        fa_error *);
    /* Stores `count` elements of 2, 4 or 8 bytes in stream order. */
    fa_status (*fill)(const fa_driver *, void *data, uint64_t bits,
                      size_t element_bytes, size_t count, void *stream,
                      fa_error *);
    /* One line for what a failure may depend on: the device, and the versions
     * of driver and runtime. */
    fa_status (*identify)(const fa_driver *, int device,
                          char text[FA_IDENTITY_CHARS], fa_error *);
    fa_events events;
};

/* Opens a backend.  `library` is the path of libhipsim.so for FA_SIM and
 * unused otherwise.  On failure *driver is NULL. */
fa_status fa_driver_open(fa_backend backend, const char *library,
                         fa_driver **driver, fa_error *error);
void fa_driver_close(fa_driver *driver); /* accepts NULL */

/* What driver_hip.c and driver_cuda.c bring to fa_driver_open: fill `api`
 * from driver->library, and the operations. */
fa_status fa_driver_bind_hip(fa_driver *driver, fa_error *error);
fa_status fa_driver_bind_sim(fa_driver *driver, fa_error *error);
fa_status fa_driver_bind_cuda(fa_driver *driver, fa_error *error);

/* What they share: fills `table` with functions of driver->library; one that is
 * required and missing is named, as one of `library`. */
fa_status fa_driver_find(const fa_driver *driver, const char *library,
                         const fa_symbol *symbols, size_t count, void *table,
                         fa_error *error);

/* Part of the GPUs' (driver_events.c): fills event_api, events and
 * identify. */
fa_status fa_driver_bind_events(fa_driver *driver, const char *library,
                                fa_error *error);

#endif
