/* driver_cuda.c: the CUDA driver API, for the stand-in only.
 *
 * The same kernel sources, compiled by nvcc to fa_sm_XX.cubin, meet a real
 * GPU's concurrency here.  The runtime API is left to PyTorch: both share the
 * device's primary context, which is what enter() makes current.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "host/driver.h"

#include <stdio.h>
#include <string.h>

/* The numbers are the CUDA driver API's. */
enum {
    EM_CUDA_MACHINE = 190,
    CUDA_SUCCESS_CODE = 0,
    CUDA_ERROR_NO_BINARY = 209,
    CUDA_CC_MAJOR = 75,
    CUDA_CC_MINOR = 76,
    CUDA_MAX_DYNAMIC_LDS = 8 /* "shared memory" in CUDA's words */
};

/* _v2 where cuda.h maps the plain name to it: the plain symbols are the
 * 32-bit interface of CUDA 3. */
#define SYMBOL(member, text) {offsetof(fa_cuda_api, member), text, true}
static const fa_symbol symbols[] = {
    SYMBOL(init, "cuInit"),
    SYMBOL(device_get_count, "cuDeviceGetCount"),
    SYMBOL(device_get, "cuDeviceGet"),
    SYMBOL(device_get_attribute, "cuDeviceGetAttribute"),
    SYMBOL(primary_context_retain, "cuDevicePrimaryCtxRetain"),
    SYMBOL(primary_context_release, "cuDevicePrimaryCtxRelease_v2"),
    SYMBOL(context_get_device, "cuCtxGetDevice"),
    SYMBOL(context_get_current, "cuCtxGetCurrent"),
    SYMBOL(context_set_current, "cuCtxSetCurrent"),
    SYMBOL(module_load_data, "cuModuleLoadData"),
    SYMBOL(module_unload, "cuModuleUnload"),
    SYMBOL(module_get_function, "cuModuleGetFunction"),
    SYMBOL(function_set_attribute, "cuFuncSetAttribute"),
    SYMBOL(launch_kernel, "cuLaunchKernel"),
    SYMBOL(memset_d16_async, "cuMemsetD16Async"),
    SYMBOL(memset_d32_async, "cuMemsetD32Async"),
    SYMBOL(memset_2d_d32_async, "cuMemsetD2D32Async"),
    SYMBOL(get_error_string, "cuGetErrorString"),
};
#undef SYMBOL

static fa_status check(const fa_driver *driver, const char *what,
                       const char *call, int code, fa_status status,
                       fa_error *error)
{
    if (code == CUDA_SUCCESS_CODE) {
        return FA_OK;
    }
    const char *text = NULL;
    (void)driver->api.cuda.get_error_string(code, &text);
    return fa_fail(error, status, "%s: %s: error %d: %s", what, call, code,
                   text == NULL ? "no text" : text);
}

static fa_status cuda_device_count(const fa_driver *driver, int *count,
                                   fa_error *error)
{
    *count = 0;
    return check(driver, "device", "cuDeviceGetCount",
                 driver->api.cuda.device_get_count(count), FA_EDEVICE, error);
}

/* Every tensor of PyTorch lives in its device's primary context, and PyTorch
 * leaves the one of its current device current; then there is nothing to do.
 * Otherwise the primary context is held until leave(). */
static fa_status cuda_enter(const fa_driver *driver, int device,
                            fa_scope *scope, fa_error *error)
{
    const fa_cuda_api *cuda = &driver->api.cuda;
    void *primary = NULL;
    int current = -1;
    *scope = (fa_scope){0};
    int code = cuda->device_get(&scope->device, device);
    if (code != CUDA_SUCCESS_CODE) {
        return check(driver, "device", "cuDeviceGet", code, FA_EDEVICE, error);
    }
    code = cuda->context_get_current(&scope->context);
    if (code == CUDA_SUCCESS_CODE && scope->context != NULL) {
        code = cuda->context_get_device(&current);
    }
    if (code != CUDA_SUCCESS_CODE) {
        return check(driver, "device", "cuCtxGetDevice", code, FA_EDEVICE,
                     error);
    }
    if (current == scope->device) {
        return FA_OK;
    }
    code = cuda->primary_context_retain(&primary, scope->device);
    if (code != CUDA_SUCCESS_CODE) {
        return check(driver, "device", "cuDevicePrimaryCtxRetain", code,
                     FA_EDEVICE, error);
    }
    code = cuda->context_set_current(primary);
    if (code != CUDA_SUCCESS_CODE) {
        (void)cuda->primary_context_release(scope->device);
        return check(driver, "device", "cuCtxSetCurrent", code, FA_EDEVICE,
                     error);
    }
    scope->changed = true;
    return FA_OK;
}

static void cuda_leave(const fa_driver *driver, const fa_scope *scope)
{
    if (scope->changed) {
        /* It was current a moment ago, and there is nobody to tell. */
        (void)driver->api.cuda.context_set_current(scope->context);
        (void)driver->api.cuda.primary_context_release(scope->device);
    }
}

static fa_status cuda_arch(const fa_driver *driver, int device,
                           char arch[FA_ARCH_CHARS], fa_error *error)
{
    const fa_cuda_api *cuda = &driver->api.cuda;
    int handle = 0;
    int major = 0;
    int minor = 0;
    int code = cuda->device_get(&handle, device);
    if (code == CUDA_SUCCESS_CODE) {
        code = cuda->device_get_attribute(&major, CUDA_CC_MAJOR, handle);
    }
    if (code == CUDA_SUCCESS_CODE) {
        code = cuda->device_get_attribute(&minor, CUDA_CC_MINOR, handle);
    }
    snprintf(arch, FA_ARCH_CHARS, "sm_%d%d", major, minor);
    return check(driver, "device", "cuDeviceGetAttribute", code, FA_EDEVICE,
                 error);
}

static fa_status cuda_load(const fa_driver *driver, const char *path,
                           const void *image, size_t bytes, void **module,
                           fa_error *error)
{
    (void)bytes;
    *module = NULL;
    int code = driver->api.cuda.module_load_data(module, image);
    return check(driver, path,
                 code == CUDA_ERROR_NO_BINARY
                     ? "built for another architecture: cuModuleLoadData"
                     : "not a usable code object: cuModuleLoadData",
                 code, FA_ECODE, error);
}

static void cuda_unload(const fa_driver *driver, void *module)
{
    (void)driver->api.cuda.module_unload(module);
}

static fa_status cuda_function(const fa_driver *driver, const char *path,
                               void *module, const char *symbol,
                               uint32_t lds_bytes, void **function,
                               fa_error *error)
{
    const fa_cuda_api *cuda = &driver->api.cuda;
    *function = NULL;
    int code = cuda->module_get_function(function, module, symbol);
    if (code != CUDA_SUCCESS_CODE) {
        *function = NULL;
        return fa_fail(error, FA_ECODE,
                       "%s: expected kernel %s in it, got none (error %d); "
                       "it was built from another version of the sources",
                       path, symbol, code);
    }
    /* Beyond 48 KiB, dynamic shared memory must be asked for. */
    code = cuda->function_set_attribute(*function, CUDA_MAX_DYNAMIC_LDS,
                                        (int)lds_bytes);
    return check(driver, symbol, "cuFuncSetAttribute", code, FA_EDEVICE, error);
}

static fa_status cuda_launch(const fa_driver *driver, const fa_launch *launch,
                             fa_counts *counts, fa_error *error)
{
    const uint32_t *grid = launch->grid;
    void *params[] = {launch->args};
    int code = driver->api.cuda.launch_kernel(
        launch->function, grid[0], grid[1], grid[2], launch->threads, 1, 1,
        launch->lds_bytes, launch->stream, params, NULL);
    counts->workgroups = (uint64_t)grid[0] * grid[1] * grid[2];
    return check(driver, launch->symbol, "cuLaunchKernel", code, FA_EDEVICE,
                 error);
}

/* Of 8 bytes, the low halves as one column and the high ones as another. */
static int fill_eight(const fa_cuda_api *cuda, uint64_t address, uint64_t bits,
                      size_t count, void *stream)
{
    int code =
        cuda->memset_2d_d32_async(address, 8, (unsigned)bits, 1, count, stream);
    return code != CUDA_SUCCESS_CODE
               ? code
               : cuda->memset_2d_d32_async(
                     address + 4, 8, (unsigned)(bits >> 32), 1, count, stream);
}

static fa_status cuda_fill(const fa_driver *driver, void *data, uint64_t bits,
                           size_t element_bytes, size_t count, void *stream,
                           fa_error *error)
{
    const fa_cuda_api *cuda = &driver->api.cuda;
    const uint64_t at = (uint64_t)(uintptr_t)data;
    int code =
        element_bytes == 8 ? fill_eight(cuda, at, bits, count, stream)
        : element_bytes == 4
            ? cuda->memset_d32_async(at, (unsigned)bits, count, stream)
            : cuda->memset_d16_async(at, (unsigned short)bits, count, stream);
    return check(driver, "out", "cuMemsetAsync", code, FA_EDEVICE, error);
}

fa_status fa_driver_bind_cuda(fa_driver *driver, fa_error *error)
{
    fa_status status = fa_driver_find(driver, "libcuda", symbols,
                                      sizeof symbols / sizeof symbols[0],
                                      &driver->api.cuda, error);
    if (status != FA_OK) {
        return status;
    }
    /* PyTorch has initialised it long ago if there is a tensor to serve. */
    status = check(driver, "device", "cuInit", driver->api.cuda.init(0),
                   FA_EDEVICE, error);
    driver->code_suffix = "cubin";
    driver->code_machine = EM_CUDA_MACHINE;
    driver->device_count = cuda_device_count;
    driver->enter = cuda_enter;
    driver->leave = cuda_leave;
    driver->arch = cuda_arch;
    driver->load = cuda_load;
    driver->unload = cuda_unload;
    driver->function = cuda_function;
    driver->launch = cuda_launch;
    driver->fill = cuda_fill;
    return status == FA_OK ? fa_driver_bind_events(driver, "libcuda", error)
                           : status;
}
