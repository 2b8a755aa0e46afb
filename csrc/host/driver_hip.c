/* driver_hip.c: the HIP runtime, real (libamdhip64) or simulated (libhipsim).
 *
 * Only calls of HIP 5.4 are used, but for hipGetDevicePropertiesR0600 where
 * it exists.  The simulator has the same ones and differs where it is better
 * informed: it is told which tensors a launch may touch, counts instructions
 * and explains a fault.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "host/driver.h"
#include "sim/hipsim.h"

#include <stdio.h>
#include <string.h>

enum { EM_AMDGPU_MACHINE = 224 };

/* A kernel's LDS is a static array, which the code object accounts for. */
static const unsigned no_dynamic_lds = 0;

#define SYMBOL(member, text, need) {offsetof(fa_hip_api, member), text, need}
static const fa_symbol common_symbols[] = {
    SYMBOL(get_device_count, "hipGetDeviceCount", true),
    SYMBOL(get_properties_r0600, "hipGetDevicePropertiesR0600", false),
    SYMBOL(get_properties, "hipGetDeviceProperties", false),
    SYMBOL(module_unload, "hipModuleUnload", true),
    SYMBOL(module_get_function, "hipModuleGetFunction", true),
    SYMBOL(get_error_string, "hipGetErrorString", true),
    SYMBOL(get_error_name, "hipGetErrorName", true),
};
static const fa_symbol hip_symbols[] = {
    SYMBOL(get_device, "hipGetDevice", true),
    SYMBOL(set_device, "hipSetDevice", true),
    SYMBOL(module_load_data, "hipModuleLoadData", true),
    SYMBOL(module_launch_kernel, "hipModuleLaunchKernel", true),
    SYMBOL(memset_d16_async, "hipMemsetD16Async", true),
    SYMBOL(memset_d32_async, "hipMemsetD32Async", true),
    SYMBOL(memset_2d_async, "hipMemset2DAsync", true),
    SYMBOL(get_last_error, "hipGetLastError", true),
};
static const fa_symbol sim_symbols[] = {
    SYMBOL(sim_launch, "hipsimLaunchWithin", true),
    SYMBOL(sim_module_load, "hipsimModuleLoad", true),
    SYMBOL(sim_last_report, "hipsimLastReport", true),
};
#undef SYMBOL

/* The HIP call `call` returned `code`: a failure's name and meaning, and the
 * simulator's own report if there is one, go behind `what`. */
static fa_status check(const fa_driver *driver, const char *what,
                       const char *call, int code, fa_status status,
                       fa_error *error)
{
    const fa_hip_api *hip = &driver->api.hip;
    if (code == hipSuccess) {
        return FA_OK;
    }
    const char *report =
        hip->sim_last_report == NULL ? "" : hip->sim_last_report();
    const char *name = hip->get_error_name(code);
    const char *text = hip->get_error_string(code);
    return fa_fail(error, status, "%s: %s: %s (%d): %s", what, call,
                   name == NULL ? "unknown error" : name, code,
                   report[0] != '\0' ? report
                   : text == NULL    ? "no text"
                                     : text);
}

static fa_status hip_device_count(const fa_driver *driver, int *count,
                                  fa_error *error)
{
    *count = 0;
    return check(driver, "device", "hipGetDeviceCount",
                 driver->api.hip.get_device_count(count), FA_EDEVICE, error);
}

static fa_status hip_enter(const fa_driver *driver, int device, fa_scope *scope,
                           fa_error *error)
{
    const fa_hip_api *hip = &driver->api.hip;
    *scope = (fa_scope){0};
    int code = hip->get_device(&scope->device);
    if (code != hipSuccess) {
        return check(driver, "device", "hipGetDevice", code, FA_EDEVICE, error);
    }
    if (scope->device == device) {
        return FA_OK;
    }
    code = hip->set_device(device);
    if (code != hipSuccess) {
        return check(driver, "device", "hipSetDevice", code, FA_EDEVICE, error);
    }
    scope->changed = true;
    return FA_OK;
}

static void hip_leave(const fa_driver *driver, const fa_scope *scope)
{
    if (scope->changed) {
        /* It was current a moment ago, and there is nobody to tell. */
        (void)driver->api.hip.set_device(scope->device);
    }
}

/* gcnArchName lies at a fixed place in each of the two layouts of
 * hipDeviceProp_t, of which the plain symbol means the old one in every
 * release of ROCm. */
enum {
    PROPERTIES_BYTES = 4096, /* both are below 1,500 */
    ARCH_AT_R0600 = 1160,
    ARCH_AT_R0000 = 396
};

static bool read_arch(int (*get)(void *, int), int device, size_t at,
                      char arch[FA_ARCH_CHARS], int *code)
{
    /* Aligned as a struct of pointers must be. */
    union {
        char bytes[PROPERTIES_BYTES];
        void *align;
    } properties;
    memset(&properties, 0, sizeof properties);
    *code = get == NULL ? hipErrorNotFound : get(&properties, device);
    const char *name = properties.bytes + at;
    if (*code != hipSuccess || strncmp(name, "gfx", 3) != 0) {
        return false;
    }
    /* "gfx906:sramecc+:xnack-" runs code built for plain gfx906. */
    size_t length = strcspn(name, ":");
    if (length >= FA_ARCH_CHARS) {
        return false;
    }
    memcpy(arch, name, length);
    arch[length] = '\0';
    return true;
}

static fa_status hip_arch(const fa_driver *driver, int device,
                          char arch[FA_ARCH_CHARS], fa_error *error)
{
    const fa_hip_api *hip = &driver->api.hip;
    int code = hipSuccess;
    if (read_arch(hip->get_properties_r0600, device, ARCH_AT_R0600, arch,
                  &code) ||
        read_arch(hip->get_properties, device, ARCH_AT_R0000, arch, &code)) {
        return FA_OK;
    }
    if (code != hipSuccess) {
        return check(driver, "device", "hipGetDeviceProperties", code,
                     FA_EDEVICE, error);
    }
    return fa_fail(error, FA_EDEVICE,
                   "device: expected an architecture name that starts with "
                   "gfx, got none from hipGetDeviceProperties");
}

static fa_status loaded(const fa_driver *driver, const char *path, int code,
                        void **module, fa_error *error)
{
    if (code != hipSuccess) {
        *module = NULL;
    }
    return check(driver, path,
                 code == hipErrorNoBinaryForGpu
                     ? "built for another architecture: hipModuleLoadData"
                     : "not a usable code object: hipModuleLoadData",
                 code, FA_ECODE, error);
}

static fa_status hip_load(const fa_driver *driver, const char *path,
                          const void *image, size_t bytes, void **module,
                          fa_error *error)
{
    (void)bytes; /* HIP believes the headers */
    return loaded(driver, path, driver->api.hip.module_load_data(module, image),
                  module, error);
}

static void hip_unload(const fa_driver *driver, void *module)
{
    (void)driver->api.hip.module_unload(module);
}

static fa_status hip_function(const fa_driver *driver, const char *path,
                              void *module, const char *symbol,
                              uint32_t lds_bytes, void **function,
                              fa_error *error)
{
    (void)lds_bytes;
    int code = driver->api.hip.module_get_function(function, module, symbol);
    if (code == hipSuccess) {
        return FA_OK;
    }
    *function = NULL;
    return fa_fail(error, FA_ECODE,
                   "%s: expected kernel %s in it, got none (error %d); it "
                   "was built from another version of the sources",
                   path, symbol, code);
}

static fa_status hip_launch(const fa_driver *driver, const fa_launch *launch,
                            fa_counts *counts, fa_error *error)
{
    const fa_hip_api *hip = &driver->api.hip;
    const uint32_t *grid = launch->grid;
    void *params[] = {launch->args};
    /* Before ROCm 7 the launch may report what an earlier, unrelated call
     * left behind. */
    (void)hip->get_last_error();
    int code = hip->module_launch_kernel(
        launch->function, grid[0], grid[1], grid[2], launch->threads, 1, 1,
        no_dynamic_lds, launch->stream, params, NULL);
    counts->workgroups = (uint64_t)grid[0] * grid[1] * grid[2];
    return check(driver, launch->symbol, "hipModuleLaunchKernel", code,
                 FA_EDEVICE, error);
}

/* HIP 5.4 has no pattern of 8 bytes: the bytes that are not 0 follow a fill
 * with zeros, one column each. */
static int fill_eight(const fa_hip_api *hip, void *data, uint64_t bits,
                      size_t count, void *stream)
{
    int code = hip->memset_d32_async(data, 0, 2 * count, stream);
    for (int i = 0; i < 8 && code == hipSuccess; i++) {
        const int byte = (int)(bits >> 8 * i & 0xff);
        if (byte != 0) {
            code = hip->memset_2d_async((char *)data + i, 8, byte, 1, count,
                                        stream);
        }
    }
    return code;
}

static fa_status hip_fill(const fa_driver *driver, void *data, uint64_t bits,
                          size_t element_bytes, size_t count, void *stream,
                          fa_error *error)
{
    const fa_hip_api *hip = &driver->api.hip;
    const uint32_t low = (uint32_t)bits;
    int32_t word = 0;
    memcpy(&word, &low, sizeof word);
    int code =
        element_bytes == 8 ? fill_eight(hip, data, bits, count, stream)
        : element_bytes == 4
            ? hip->memset_d32_async(data, word, count, stream)
            : hip->memset_d16_async(data, (unsigned short)bits, count, stream);
    return check(driver, "out", "hipMemsetAsync", code, FA_EDEVICE, error);
}

/* -- the simulator --------------------------------------------------------- */

/* The simulator's whole world is one device in host memory. */
static fa_status sim_enter(const fa_driver *driver, int device, fa_scope *scope,
                           fa_error *error)
{
    (void)driver;
    *scope = (fa_scope){0};
    return device == 0 ? FA_OK
                       : fa_fail(error, FA_EINVAL,
                                 "device: expected 0 for the simulator, "
                                 "got %d",
                                 device);
}

static void sim_leave(const fa_driver *driver, const fa_scope *scope)
{
    (void)driver;
    (void)scope;
}

static fa_status sim_load(const fa_driver *driver, const char *path,
                          const void *image, size_t bytes, void **module,
                          fa_error *error)
{
    return loaded(driver, path,
                  driver->api.hip.sim_module_load(module, image, bytes), module,
                  error);
}

static fa_status sim_launch(const fa_driver *driver, const fa_launch *launch,
                            fa_counts *counts, fa_error *error)
{
    hipsim_tensor tensors[FA_MAX_ACCESSES];
    hipsim_stats stats = {0};
    if (launch->tensor_count > FA_MAX_ACCESSES) {
        return fa_fail(error, FA_EINVAL, "tensors: expected at most %d",
                       (int)FA_MAX_ACCESSES);
    }
    for (size_t i = 0; i < launch->tensor_count; i++) {
        const fa_tensor *from = launch->tensors[i].tensor;
        hipsim_tensor *to = &tensors[i];
        *to = (hipsim_tensor){.data = from->data,
                              .element_bytes = launch->tensors[i].element_bytes,
                              .ndim = 4,
                              .access = launch->tensors[i].access};
        for (int d = 0; d < 4; d++) {
            to->size[d] = from->size[d];
            to->stride[d] = from->size[d] == 1 ? 0 : from->stride[d];
        }
    }
    const uint32_t block[3] = {launch->threads, 1, 1};
    void *params[] = {launch->args};
    int code = driver->api.hip.sim_launch(
        launch->function, launch->grid, block, no_dynamic_lds, params, tensors,
        launch->tensor_count, launch->wave_instructions, &stats);
    counts->wave_instructions = stats.wave_instructions;
    counts->workgroups = stats.workgroups;
    return check(driver, launch->symbol, "hipsimLaunch", code,
                 code == hipErrorLaunchTimeOut ? FA_ELATE : FA_EDEVICE, error);
}

static fa_status sim_identify(const fa_driver *driver, int device,
                              char text[FA_IDENTITY_CHARS], fa_error *error)
{
    (void)driver;
    (void)device;
    (void)error;
    (void)snprintf(text, FA_IDENTITY_CHARS, "sim");
    return FA_OK;
}

static fa_status sim_fill(const fa_driver *driver, void *data, uint64_t bits,
                          size_t element_bytes, size_t count, void *stream,
                          fa_error *error)
{
    (void)driver;
    (void)stream;
    (void)error;
    /* The low bytes come first, on every host that runs this. */
    for (size_t i = 0; i < count; i++) {
        memcpy((char *)data + i * element_bytes, &bits, element_bytes);
    }
    return FA_OK;
}

/* -- binding --------------------------------------------------------------- */

/* The common functions, then the `count` of the backend's own `symbols`. */
static fa_status bind_common(fa_driver *driver, const char *library,
                             const fa_symbol *symbols, size_t count,
                             fa_error *error)
{
    fa_hip_api *hip = &driver->api.hip;
    fa_status status = fa_driver_find(
        driver, library, common_symbols,
        sizeof common_symbols / sizeof common_symbols[0], hip, error);
    if (status == FA_OK) {
        status = fa_driver_find(driver, library, symbols, count, hip, error);
    }
    driver->code_suffix = "co";
    driver->code_machine = EM_AMDGPU_MACHINE;
    driver->device_count = hip_device_count;
    driver->arch = hip_arch;
    driver->unload = hip_unload;
    driver->function = hip_function;
    return status;
}

fa_status fa_driver_bind_hip(fa_driver *driver, fa_error *error)
{
    driver->enter = hip_enter;
    driver->leave = hip_leave;
    driver->load = hip_load;
    driver->launch = hip_launch;
    driver->fill = hip_fill;
    fa_status status =
        bind_common(driver, "libamdhip64", hip_symbols,
                    sizeof hip_symbols / sizeof hip_symbols[0], error);
    return status == FA_OK ? fa_driver_bind_events(driver, "libamdhip64", error)
                           : status;
}

fa_status fa_driver_bind_sim(fa_driver *driver, fa_error *error)
{
    driver->enter = sim_enter;
    driver->leave = sim_leave;
    driver->load = sim_load;
    driver->launch = sim_launch;
    driver->fill = sim_fill;
    driver->identify = sim_identify;
    return bind_common(driver, "libhipsim", sim_symbols,
                       sizeof sim_symbols / sizeof sim_symbols[0], error);
}
