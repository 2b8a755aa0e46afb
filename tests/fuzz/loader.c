/* loader.c: fuzz target: the input is a file.
 *
 * Everything that reads one: the ELF loader, bundles, descriptors, the metadata
 * note, DWARF lines, information, disassembly. If it loads, its first kernel
 * runs for a few instructions, with arguments of a size that may be wrong.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "fuzz.h"

#include <stdlib.h>
#include <string.h>

enum { BUDGET = 300, BUFFER_BYTES = 4096, ARGUMENT_BYTES = 512 };

/* The name of the first kernel, or "". JSON escapes are not undone: a kernel
 * whose name needs them is not run. */
static void first_kernel(const char *json, char *name, size_t size)
{
    static const char before[] = "\"kernels\": [{\"name\": \"";
    const char *at = strstr(json, before);
    size_t length = 0;

    if (at != NULL) {
        at += sizeof before - 1;
        length = strcspn(at, "\"\\");
    }
    length = length < size ? length : 0;
    if (length != 0) {
        memcpy(name, at, length);
    }
    name[length] = '\0';
}

static void run(hipModule_t module, const char *kernel, size_t bytes)
{
    static void *buffer;
    uint64_t arguments[ARGUMENT_BYTES / 8];
    size_t given = 8 * (bytes % (ARGUMENT_BYTES / 8 + 1));
    /* HIP's list of (key, value) */
    void *extra[] = {(void *)1, arguments, (void *)2, &given, (void *)3};
    hipFunction_t function;

    if (buffer == NULL && hipMalloc(&buffer, BUFFER_BYTES) != hipSuccess) {
        abort();
    }
    for (size_t i = 0; i < ARGUMENT_BYTES / 8; i++) {
        arguments[i] = i % 4 == 3 ? 5 : (uint64_t)(uintptr_t)buffer;
    }
    if (hipModuleGetFunction(&function, module, kernel) == hipSuccess) {
        (void)hipModuleLaunchKernel(function, 2, 1, 1, 100, 1, 1, 256, NULL,
                                    NULL, extra);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    hipModule_t module;
    char *text, name[64] = "";

    (void)hipsimSetOption("threads", 1);
    (void)hipsimSetOption("budget", BUDGET);
    (void)hipsimSetOption("check", (int64_t)(bytes % 3));
    if (hipsimObjectInfo(data, bytes, &text) == hipSuccess) {
        first_kernel(text, name, sizeof name);
        hipsimFree(text);
    }
    if (hipsimDisassembleLines(data, bytes, NULL, &text) == hipSuccess) {
        hipsimFree(text);
    }
    if (hipsimModuleLoad(&module, data, bytes) == hipSuccess) {
        if (name[0] != '\0') {
            run(module, name, bytes);
        }
        if (hipModuleUnload(module) != hipSuccess) {
            abort();
        }
    }
    return 0;
}
