/* report.c: the calling thread's last error and its text.
 *
 * State: one buffer and one code per thread. hipGetLastError and its
 * relatives leave the text alone, so that a caller can ask for the code
 * first and for the reason afterwards.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "report.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char report[4096];
static _Thread_local hipError_t last_error;

void sim_report_clear(void)
{
    report[0] = '\0';
}

hipError_t sim_fail(hipError_t code, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    (void)vsnprintf(report, sizeof report, format, args);
    va_end(args);
    last_error = code;
    return code;
}

HIPSIM_API const char *hipsimLastReport(void)
{
    return report;
}

HIPSIM_API hipError_t hipGetLastError(void)
{
    hipError_t code = last_error;

    last_error = hipSuccess;
    return code;
}

HIPSIM_API hipError_t hipPeekAtLastError(void)
{
    return last_error;
}

typedef struct error_name {
    hipError_t code;
    const char *name, *text;
} error_name;

static const error_name error_names[] = {
    {hipSuccess, "hipSuccess", "no error"},
    {hipErrorInvalidValue, "hipErrorInvalidValue", "invalid argument"},
    {hipErrorOutOfMemory, "hipErrorOutOfMemory", "out of memory"},
    {hipErrorInvalidDevice, "hipErrorInvalidDevice", "invalid device ordinal"},
    {hipErrorInvalidImage, "hipErrorInvalidImage",
     "device kernel image is invalid"},
    {hipErrorNoBinaryForGpu, "hipErrorNoBinaryForGpu",
     "no kernel image is available for execution on the device"},
    {hipErrorFileNotFound, "hipErrorFileNotFound", "file not found"},
    {hipErrorInvalidHandle, "hipErrorInvalidHandle", "invalid resource handle"},
    {hipErrorNotFound, "hipErrorNotFound", "named symbol not found"},
    {hipErrorNotReady, "hipErrorNotReady", "device not ready"},
    {hipErrorIllegalAddress, "hipErrorIllegalAddress",
     "an illegal memory access was encountered"},
    {hipErrorLaunchTimeOut, "hipErrorLaunchTimeOut",
     "the launch timed out and was terminated"},
    {hipErrorLaunchFailure, "hipErrorLaunchFailure",
     "unspecified launch failure"},
};

static const error_name *find_error(hipError_t code)
{
    for (size_t i = 0; i < sizeof error_names / sizeof error_names[0]; i++) {
        if (error_names[i].code == code) {
            return &error_names[i];
        }
    }
    return NULL;
}

HIPSIM_API const char *hipGetErrorName(hipError_t code)
{
    const error_name *known = find_error(code);

    return known != NULL ? known->name : "hipErrorUnknown";
}

HIPSIM_API const char *hipGetErrorString(hipError_t code)
{
    const error_name *known = find_error(code);

    return known != NULL ? known->text : "unknown error";
}
