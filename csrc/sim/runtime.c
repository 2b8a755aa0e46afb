/* runtime.c: modules and launches, under HIP's names.
 *
 *   hipModuleLoad(hipModule_t *, const char *path)
 *   hipModuleLoadData(hipModule_t *, const void *image)
 *   hipModuleUnload(hipModule_t)
 *   hipModuleGetFunction(hipFunction_t *, hipModule_t, const char *name)
 *   hipModuleLaunchKernel(hipFunction_t, grid x, y, z, block x, y, z,
 *                         unsigned dynamic LDS bytes, hipStream_t,
 *                         void **params, void **extra)
 *
 * and the same with a launch's own tensors, hipsimLaunch and, with a deadline,
 * hipsimLaunchWithin. Device queries are
 * in device.c, memory in heap.c, streams and events in stream.c, error codes
 * in report.c. A module stays alive until its last launch has returned, even
 * if it is unloaded meanwhile.
 *
 * State: the list of modules, under the table lock.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "launch.h"
#include "report.h"
#include "table.h"
#include "tensors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct hipsim_function {
    struct hipsim_module *module;
    const sim_kernel *kernel;
};

struct hipsim_module {
    struct hipsim_module *next;
    sim_object *object;
    sim_code *code;
    struct hipsim_function *function; /* one per kernel of the object */
    size_t users;                     /* the list, and running launches */
};

static hipModule_t modules;

static void close_module(hipModule_t module)
{
    if (module != NULL) {
        free(module->function);
        sim_code_free(module->code);
        sim_object_free(module->object);
        free(module);
    }
}

/* Drops one use; the last one closes the module. */
static void release_module(hipModule_t module)
{
    sim_table_lock();
    bool last = --module->users == 0;
    sim_table_unlock();
    if (last) {
        close_module(module);
    }
}

static hipError_t open_module(hipModule_t *out, const void *image, size_t bytes)
{
    hipModule_t module = calloc(1, sizeof *module);
    hipError_t status;

    if (module == NULL) {
        return sim_fail(hipErrorOutOfMemory, "module: out of memory");
    }
    status = sim_object_load(image, bytes, true, &module->object);
    if (status != hipSuccess) {
        goto fail;
    }
    const sim_object *object = module->object;
    module->function =
        calloc(object->kernel_count + 1, sizeof module->function[0]);
    module->code =
        sim_code_create((uint64_t)(uintptr_t)object->image + object->text,
                        (size_t)object->text_bytes);
    if (module->function == NULL || module->code == NULL) {
        status = sim_fail(hipErrorOutOfMemory, "module: out of memory");
        goto fail;
    }
    for (size_t i = 0; i < object->kernel_count; i++) {
        module->function[i].module = module;
        module->function[i].kernel = &object->kernel[i];
    }
    module->users = 1;
    sim_table_lock();
    module->next = modules;
    modules = module;
    sim_table_unlock();
    *out = module;
    return hipSuccess;

fail:
    close_module(module);
    return status;
}

HIPSIM_API hipError_t hipsimModuleLoad(hipModule_t *module, const void *image,
                                       size_t bytes)
{
    sim_report_clear();
    if (module == NULL || image == NULL) {
        return sim_fail(hipErrorInvalidValue,
                        "module: expected a place and an image, got NULL");
    }
    *module = NULL;
    return open_module(module, image, bytes);
}

HIPSIM_API hipError_t hipModuleLoadData(hipModule_t *module, const void *image)
{
    sim_report_clear();
    if (module == NULL || image == NULL) {
        return sim_fail(hipErrorInvalidValue,
                        "module: expected a place and an image, got NULL");
    }
    *module = NULL;
    size_t bytes = sim_image_size(image);
    if (bytes == 0) {
        return sim_fail(hipErrorInvalidImage,
                        "code object: truncated, memory ends before what the "
                        "headers promise");
    }
    return open_module(module, image, bytes);
}

/* Reads a whole file; *bytes is malloc'ed. */
static hipError_t read_path(const char *path, uint8_t **bytes, size_t *size)
{
    struct stat facts;
    uint8_t *buffer = NULL;
    size_t got = 0;
    hipError_t status = hipErrorFileNotFound;
    int file = open(path, O_RDONLY | O_CLOEXEC);

    if (file < 0) {
        return sim_fail(status, "%s: %s", path, strerror(errno));
    }
    if (fstat(file, &facts) != 0 || !S_ISREG(facts.st_mode) ||
        facts.st_size > SIM_MAX_IMAGE) {
        status = sim_fail(status, "%s: expected a file of at most %d bytes",
                          path, SIM_MAX_IMAGE);
        goto done;
    }
    buffer = malloc((size_t)facts.st_size + 1);
    if (buffer == NULL) {
        status = sim_fail(hipErrorOutOfMemory, "%s: no memory for %lld bytes",
                          path, (long long)facts.st_size);
        goto done;
    }
    while (got < (size_t)facts.st_size) {
        ssize_t part = read(file, buffer + got, (size_t)facts.st_size - got);
        if (part < 0 && errno == EINTR) {
            continue;
        }
        if (part < 0) {
            status = sim_fail(status, "%s: %s", path, strerror(errno));
            goto done;
        }
        if (part == 0) {
            break; /* shorter than it was: the loader will see */
        }
        got += (size_t)part;
    }
    *bytes = buffer;
    *size = got;
    buffer = NULL;
    status = hipSuccess;

done:
    free(buffer);
    (void)close(file);
    return status;
}

HIPSIM_API hipError_t hipModuleLoad(hipModule_t *module, const char *path)
{
    uint8_t *image = NULL;
    size_t bytes = 0;

    sim_report_clear();
    if (module == NULL || path == NULL) {
        return sim_fail(hipErrorInvalidValue,
                        "module: expected a place and a path, got NULL");
    }
    *module = NULL;
    hipError_t status = read_path(path, &image, &bytes);
    if (status == hipSuccess) {
        status = open_module(module, image, bytes);
    }
    free(image);
    return status;
}

/* The link that points to `module`, or NULL. The caller holds the lock. */
static hipModule_t *find_module(hipModule_t module)
{
    for (hipModule_t *link = &modules; *link != NULL; link = &(*link)->next) {
        if (*link == module) {
            return link;
        }
    }
    return NULL;
}

HIPSIM_API hipError_t hipModuleUnload(hipModule_t module)
{
    sim_report_clear();
    sim_table_lock();
    hipModule_t *link = find_module(module);
    if (link != NULL) {
        *link = module->next;
    }
    sim_table_unlock();
    if (link == NULL) {
        return sim_fail(hipErrorInvalidHandle, "module %p is not loaded",
                        (void *)module);
    }
    release_module(module);
    return hipSuccess;
}

HIPSIM_API hipError_t hipModuleGetFunction(hipFunction_t *function,
                                           hipModule_t module, const char *name)
{
    hipError_t status = hipSuccess;

    sim_report_clear();
    if (function == NULL || name == NULL) {
        return sim_fail(hipErrorInvalidValue,
                        "function: expected a place and a name, got NULL");
    }
    *function = NULL;
    sim_table_lock();
    if (find_module(module) == NULL) {
        status = sim_fail(hipErrorInvalidHandle, "module %p is not loaded",
                          (void *)module);
    } else {
        const sim_kernel *kernel = sim_object_find(module->object, name);
        if (kernel != NULL) {
            *function = &module->function[kernel - module->object->kernel];
        } else {
            status =
                sim_fail(hipErrorNotFound,
                         "kernel %s is not among the module's %zu; `hipsim "
                         "info` lists them",
                         name, module->object->kernel_count);
        }
    }
    sim_table_unlock();
    return status;
}

/* Checks a function handle and takes a use of its module. */
static hipError_t take_function(hipFunction_t function)
{
    uintptr_t at = (uintptr_t)function;
    hipError_t status = hipErrorInvalidHandle;

    sim_table_lock();
    for (hipModule_t m = modules; m != NULL; m = m->next) {
        uintptr_t first = (uintptr_t)m->function;
        size_t bytes = m->object->kernel_count * sizeof m->function[0];
        if (at >= first && at - first < bytes &&
            (at - first) % sizeof m->function[0] == 0) {
            m->users++;
            status = hipSuccess;
            break;
        }
    }
    sim_table_unlock();
    return status == hipSuccess
               ? status
               : sim_fail(status, "function %p is of no loaded module",
                          (void *)function);
}

/* The part of a tensor's address range that its sizes and strides reach. */
static hipError_t add_tensor(sim_region_list *list, sim_tensor_list *elements,
                             const hipsim_tensor *t, size_t index)
{
    int64_t low = 0, high = 0, span; /* elements from data, both reached */
    bool good = t->ndim >= 0 && t->ndim <= HIPSIM_MAX_DIMS &&
                t->element_bytes >= 1 && t->element_bytes <= 64 &&
                (t->access & ~(uint32_t)(HIPSIM_READ | HIPSIM_WRITE)) == 0 &&
                t->access != 0;

    for (int32_t d = 0; good && d < t->ndim; d++) {
        if (t->size[d] == 0) {
            return hipSuccess; /* no element, nothing to touch */
        }
    }
    for (int32_t d = 0; good && d < t->ndim; d++) {
        int64_t *bound = t->stride[d] < 0 ? &low : &high;
        good = t->size[d] > 0 &&
               !__builtin_mul_overflow(t->size[d] - 1, t->stride[d], &span) &&
               !__builtin_add_overflow(*bound, span, bound);
    }
    int64_t first = 0, bytes = 0, data = (int64_t)(intptr_t)t->data;
    good = good && t->data != NULL && data > 0 &&
           !__builtin_mul_overflow(low, t->element_bytes, &first) &&
           !__builtin_add_overflow(data, first, &first) && first > 0 &&
           !__builtin_sub_overflow(high, low, &bytes) &&
           !__builtin_add_overflow(bytes, 1, &bytes) &&
           !__builtin_mul_overflow(bytes, t->element_bytes, &bytes);
    if (!good) {
        return sim_fail(hipErrorInvalidValue,
                        "tensor %zu: data %p, %d dimensions of %d-byte "
                        "elements, access %u: sizes, strides or access make "
                        "no address range",
                        index, t->data, t->ndim, t->element_bytes, t->access);
    }
    if (!sim_regions_add(list, (uint64_t)first, (uint64_t)bytes, t->access) ||
        !sim_tensors_add(elements, t, (uint64_t)first,
                         (uint64_t)first + (uint64_t)bytes)) {
        return sim_fail(hipErrorOutOfMemory, "tensor %zu: out of memory",
                        index);
    }
    return hipSuccess;
}

/* Launches `function`, whose module the caller holds. */
static hipError_t launch_held(hipFunction_t function, sim_launch *launch,
                              const hipsim_tensor *tensors, size_t count,
                              sim_stats *stats)
{
    sim_region_list memory = {0};
    sim_tensor_list elements = {0};
    hipError_t status;

    launch->object = function->module->object;
    launch->kernel = function->kernel;
    launch->code = function->module->code;
    status = sim_launch_check(launch);
    for (size_t i = 0; status == hipSuccess && i < count; i++) {
        status = add_tensor(&memory, &elements, &tensors[i], i);
    }
    launch->tensors = &elements;
    if (status == hipSuccess) {
        sim_table_lock();
        bool added = sim_heap_regions(&memory);
        sim_table_unlock();
        status = added ? sim_launch_run(launch, &memory, stats)
                       : sim_fail(hipErrorOutOfMemory,
                                  "%s: no memory for the table of "
                                  "allocations",
                                  launch->kernel->name);
    }
    sim_regions_free(&memory);
    sim_tensors_free(&elements);
    launch->tensors = NULL;
    return status;
}

HIPSIM_API hipError_t hipsimLaunch(hipFunction_t function,
                                   const uint32_t grid[3],
                                   const uint32_t block[3],
                                   uint32_t dynamic_lds_bytes, void **params,
                                   const hipsim_tensor *tensors,
                                   size_t tensor_count, hipsim_stats *stats)
{
    return hipsimLaunchWithin(function, grid, block, dynamic_lds_bytes, params,
                              tensors, tensor_count, 0, stats);
}

HIPSIM_API hipError_t hipsimLaunchWithin(
    hipFunction_t function, const uint32_t grid[3], const uint32_t block[3],
    uint32_t dynamic_lds_bytes, void **params, const hipsim_tensor *tensors,
    size_t tensor_count, uint64_t deadline, hipsim_stats *stats)
{
    sim_stats counted = {0};

    sim_report_clear();
    if (grid == NULL || block == NULL ||
        (tensors == NULL && tensor_count != 0)) {
        return sim_fail(hipErrorInvalidValue,
                        "hipsimLaunch: grid, block or tensors is NULL");
    }
    hipError_t status = take_function(function);
    if (status == hipSuccess) {
        sim_launch launch = {
            .groups = {grid[0], grid[1], grid[2]},
            .block = {block[0], block[1], block[2]},
            .dynamic_lds_bytes = dynamic_lds_bytes,
            .deadline = deadline,
            .params = params,
        };
        status =
            launch_held(function, &launch, tensors, tensor_count, &counted);
        release_module(function->module);
    }
    if (stats != NULL) {
        *stats = (hipsim_stats){counted.wave_instructions, counted.waves,
                                counted.workgroups, counted.misaligned};
    }
    return status;
}

/* HIP's `extra`: (1, pointer), (2, pointer to size), in any order, then 3. */
static hipError_t read_extra(void **extra, sim_launch *launch)
{
    enum { BUFFER_POINTER = 1, BUFFER_SIZE = 2, END = 3, MAX_ENTRIES = 4 };

    for (int i = 0; extra != NULL && i < MAX_ENTRIES; i += 2) {
        uintptr_t key = (uintptr_t)extra[i];
        if (key == END) {
            return hipSuccess;
        }
        if (key == BUFFER_POINTER) {
            launch->packed = extra[i + 1];
        } else if (key == BUFFER_SIZE && extra[i + 1] != NULL) {
            launch->packed_bytes = *(const size_t *)extra[i + 1];
        } else {
            break;
        }
        if (i + 2 == MAX_ENTRIES && (uintptr_t)extra[i + 2] == END) {
            return hipSuccess;
        }
    }
    return extra == NULL
               ? hipSuccess
               : sim_fail(hipErrorInvalidValue,
                          "hipModuleLaunchKernel: extra: expected buffer "
                          "pointer (1), buffer size (2) and end (3)");
}

HIPSIM_API hipError_t hipModuleLaunchKernel(
    hipFunction_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
    unsigned block_x, unsigned block_y, unsigned block_z,
    unsigned dynamic_lds_bytes, hipStream_t stream, void **params, void **extra)
{
    sim_launch launch = {
        .groups = {grid_x, grid_y, grid_z},
        .block = {block_x, block_y, block_z},
        .dynamic_lds_bytes = dynamic_lds_bytes,
        .params = params,
    };
    sim_stats counted;

    sim_report_clear();
    if (params != NULL && extra != NULL) {
        return sim_fail(hipErrorInvalidValue,
                        "hipModuleLaunchKernel: both params and extra");
    }
    hipError_t status = sim_stream_check(stream);
    if (status == hipSuccess) {
        status = read_extra(extra, &launch);
    }
    if (status == hipSuccess) {
        status = take_function(function);
    }
    if (status == hipSuccess) {
        status = launch_held(function, &launch, NULL, 0, &counted);
        release_module(function->module);
    }
    return status;
}
