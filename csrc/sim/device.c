/* device.c: the one simulated device and what it says of itself.
 *
 * The properties struct has two layouts. hipGetDeviceProperties fills the
 * one from before ROCm 6, hipGetDevicePropertiesR0600 the later one; both
 * are written by byte offset, so no HIP header is needed. Numbers are those
 * of an MI50 with 32 GiB.
 * Source: HIP's hip_runtime_api.h of ROCm 5.4 and 6.0 for the offsets (the
 * architecture name at 396 and 1160 is also documented by llvm-project issue
 * 167695); the Linux amdgpu driver's topology table for the numbers.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "device.h"
#include "launch.h"
#include "report.h"

#include <string.h>

static const char device_name[] = "hipsim gfx906 (simulated)";
static const char arch_name[] = "gfx906:sramecc+:xnack-";

typedef enum field_kind { FIELD_INT, FIELD_SIZE, FIELD_TEXT } field_kind;

typedef struct field {
    uint16_t old_at, new_at; /* byte offsets in the two layouts */
    field_kind kind;
    uint64_t value;
    const char *text;
} field;

enum {
    OLD_BYTES = 792,
    NEW_BYTES = 1472,
    TEXT_BYTES = 256,
    ABSENT = UINT16_MAX
};

#define INT(old_at, new_at, value) {old_at, new_at, FIELD_INT, value, NULL}
#define SIZE(old_at, new_at, value) {old_at, new_at, FIELD_SIZE, value, NULL}
static const field fields[] = {
    {0, 0, FIELD_TEXT, 0, device_name},
    {396, 1160, FIELD_TEXT, 0, arch_name},
    SIZE(256, 288, SIM_DEVICE_MEMORY), /* totalGlobalMem */
    SIZE(264, 296, SIM_MAX_LDS),       /* sharedMemPerBlock */
    INT(272, 304, 65536),              /* regsPerBlock */
    INT(276, 308, SIM_LANES),          /* warpSize */
    INT(280, 320, SIM_MAX_BLOCK),      /* maxThreadsPerBlock */
    INT(284, 324, SIM_MAX_BLOCK),      /* maxThreadsDim[0..2] */
    INT(288, 328, SIM_MAX_BLOCK),
    INT(292, 332, SIM_MAX_BLOCK),
    INT(296, 336, INT32_MAX), /* maxGridSize[0..2] */
    INT(300, 340, 65536),
    INT(304, 344, 65536),
    INT(308, 348, 1725000),         /* clockRate, kHz */
    INT(312, 608, 1000000),         /* memoryClockRate, kHz */
    INT(316, 612, 4096),            /* memoryBusWidth, bits */
    SIZE(320, 352, INT32_MAX),      /* totalConstMem */
    INT(328, 360, 9),               /* major */
    INT(332, 364, 0),               /* minor */
    INT(336, 388, 60),              /* multiProcessorCount: CUs */
    INT(340, 616, 4 << 20),         /* l2CacheSize */
    INT(344, 624, 2560),            /* maxThreadsPerMultiProcessor */
    INT(352, 1424, 1000000),        /* clockInstructionRate, kHz */
    INT(360, 576, 1),               /* concurrentKernels */
    SIZE(376, 1416, SIM_MAX_LDS),   /* maxSharedMemoryPerMultiProcessor */
    INT(388, 400, 1),               /* canMapHostMemory */
    INT(392, ABSENT, 906),          /* gcnArch */
    SIZE(ABSENT, 640, SIM_MAX_LDS), /* sharedMemPerMultiprocessor */
    INT(ABSENT, 648, 65536),        /* regsPerMultiprocessor */
    SIZE(712, 312, INT32_MAX),      /* memPitch */
    INT(740, 580, 1),               /* ECCEnabled */
};
#undef INT
#undef SIZE

static void write_field(uint8_t *to, const field *f)
{
    int32_t number = (int32_t)f->value;

    if (f->kind == FIELD_TEXT) {
        (void)strncpy((char *)to, f->text, TEXT_BYTES - 1);
    } else if (f->kind == FIELD_INT) {
        memcpy(to, &number, sizeof number);
    } else {
        memcpy(to, &f->value, sizeof f->value);
    }
}

static hipError_t check_device(int device)
{
    return device == 0 ? hipSuccess
                       : sim_fail(hipErrorInvalidDevice,
                                  "device %d, expected 0", device);
}

static hipError_t write_properties(void *properties, int device, bool is_new)
{
    sim_report_clear();
    if (properties == NULL) {
        return sim_fail(hipErrorInvalidValue,
                        "hipGetDeviceProperties: properties is NULL");
    }
    hipError_t status = check_device(device);
    if (status != hipSuccess) {
        return status;
    }
    memset(properties, 0, is_new ? NEW_BYTES : OLD_BYTES);
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        uint16_t at = is_new ? fields[i].new_at : fields[i].old_at;
        if (at != ABSENT) {
            write_field((uint8_t *)properties + at, &fields[i]);
        }
    }
    return hipSuccess;
}

HIPSIM_API hipError_t hipGetDeviceProperties(void *properties, int device)
{
    return write_properties(properties, device, false);
}

HIPSIM_API hipError_t hipGetDevicePropertiesR0600(void *properties, int device)
{
    return write_properties(properties, device, true);
}

HIPSIM_API hipError_t hipInit(unsigned flags)
{
    sim_report_clear();
    return flags == 0 ? hipSuccess
                      : sim_fail(hipErrorInvalidValue,
                                 "hipInit: flags 0x%x, expected 0", flags);
}

HIPSIM_API hipError_t hipSetDevice(int device)
{
    sim_report_clear();
    return check_device(device);
}

/* Launches are over when they return. */
HIPSIM_API hipError_t hipDeviceSynchronize(void)
{
    sim_report_clear();
    return hipSuccess;
}

static hipError_t give_int(const char *call, int *to, int value)
{
    sim_report_clear();
    if (to == NULL) {
        return sim_fail(hipErrorInvalidValue, "%s: argument is NULL", call);
    }
    *to = value;
    return hipSuccess;
}

HIPSIM_API hipError_t hipGetDeviceCount(int *count)
{
    return give_int("hipGetDeviceCount", count, 1);
}

HIPSIM_API hipError_t hipGetDevice(int *device)
{
    return give_int("hipGetDevice", device, 0);
}

/* The API level we follow, as major * 10^7 + minor * 10^5 + patch. */
enum { HIP_VERSION = 50400000 };

HIPSIM_API hipError_t hipRuntimeGetVersion(int *version)
{
    return give_int("hipRuntimeGetVersion", version, HIP_VERSION);
}

HIPSIM_API hipError_t hipDriverGetVersion(int *version)
{
    return give_int("hipDriverGetVersion", version, HIP_VERSION);
}
