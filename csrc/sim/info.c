/* info.c: what is in a code object, as JSON and as assembly.
 *
 * Works on every AMDGPU architecture that object.c loads; the disassembly
 * needs our decoder and is for what gfx906 runs.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "json.h"
#include "object.h"
#include "report.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A growing string; `failed` is set for good when memory ran out. */
typedef struct builder {
    char *text;
    size_t length, capacity;
    bool failed;
} builder;

static void put_raw(builder *to, const char *piece)
{
    size_t length = strlen(piece);

    if (to->failed) {
        return;
    }
    if (to->capacity - to->length <= length) {
        size_t capacity = 2 * to->capacity + length + 256;
        char *grown = realloc(to->text, capacity);
        if (grown == NULL) {
            to->failed = true;
            return;
        }
        to->text = grown;
        to->capacity = capacity;
    }
    memcpy(to->text + to->length, piece, length + 1);
    to->length += length;
}

/* For pieces that are short whatever the file says. */
static void put(builder *to, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static void put(builder *to, const char *format, ...)
{
    char piece[512];
    va_list args;

    va_start(args, format);
    (void)vsnprintf(piece, sizeof piece, format, args);
    va_end(args);
    put_raw(to, piece);
}

static void put_string(builder *to, const char *text)
{
    char byte[JSON_BYTE];

    put_raw(to, "\"");
    for (; *text != '\0'; text++) {
        put_raw(to, json_byte(*text, byte));
    }
    put_raw(to, "\"");
}

static void put_kernel(builder *to, const sim_kernel *kernel)
{
    put(to, "{\"name\": ");
    put_string(to, kernel->name);
    put(to,
        ", \"vgprs\": %u, \"agprs\": %u, \"sgprs\": %u, \"lds_bytes\": %u, "
        "\"private_bytes\": %u, \"vgpr_spills\": %u, \"sgpr_spills\": %u, ",
        kernel->vgprs, kernel->agprs, kernel->sgprs,
        kernel->descriptor.lds_bytes, kernel->descriptor.private_bytes,
        kernel->vgpr_spills, kernel->sgpr_spills);
    put(to,
        "\"code_bytes\": %llu, \"kernarg_bytes\": %u, \"max_threads\": %u, "
        "\"wave_size\": %u, \"metadata\": %s, \"args\": [",
        (unsigned long long)kernel->code_bytes, kernel->kernarg_bytes,
        kernel->max_threads, kernel->wave_size,
        kernel->has_metadata ? "true" : "false");
    for (size_t i = 0; i < kernel->arg_count; i++) {
        const sim_arg *arg = &kernel->arg[i];
        put(to, "%s{\"name\": ", i != 0 ? ", " : "");
        put_string(to, arg->name);
        put(to, ", \"offset\": %u, \"size\": %u, \"kind\": ", arg->offset,
            arg->size);
        put_string(to, arg->kind);
        put(to, "}");
    }
    put(to, "]}");
}

/* Hands the text over, or reports that memory ran out. */
static hipError_t finish(builder *from, char **out)
{
    if (from->failed) {
        free(from->text);
        return sim_fail(hipErrorOutOfMemory,
                        "code object: no memory for "
                        "text of %zu bytes and more",
                        from->length);
    }
    *out = from->text;
    return hipSuccess;
}

HIPSIM_API hipError_t hipsimObjectInfo(const void *image, size_t bytes,
                                       char **json)
{
    sim_object *object;
    builder to = {0};

    sim_report_clear();
    if (image == NULL || json == NULL) {
        return sim_fail(hipErrorInvalidValue, "object info: argument is NULL");
    }
    *json = NULL;
    hipError_t status = sim_object_load(image, bytes, false, &object);
    if (status != hipSuccess) {
        return status;
    }
    put(&to, "{\"target\": ");
    put_string(&to, object->target);
    put(&to, ", \"arch\": ");
    put_string(&to, sim_arch_name(object->flags));
    put(&to, ", \"flags\": %u, \"abi\": %u, \"kernels\": [", object->flags,
        object->version);
    for (size_t i = 0; i < object->kernel_count; i++) {
        put_raw(&to, i != 0 ? ", " : "");
        put_kernel(&to, &object->kernel[i]);
    }
    put(&to, "]}");
    sim_object_free(object);
    return finish(&to, json);
}

/* "; file.hip:12" if the instruction is not of the line before; none is none:
 * *file NULL. */
static void put_line(builder *to, const sim_lines *lines, uint64_t offset,
                     const char **file, unsigned *line)
{
    const char *new_file = NULL;
    unsigned new_line = 0;

    (void)sim_lines_find(lines, offset, &new_file, &new_line);
    if (new_file != NULL && (new_file != *file || new_line != *line)) {
        put_raw(to, "; ");
        put_raw(to, new_file);
        put(to, ":%u\n", new_line);
    } else if (new_file == NULL && *file != NULL) {
        put_raw(to, "; no line\n");
    }
    *file = new_file;
    *line = new_line;
}

static void put_code(builder *to, const sim_object *object,
                     const sim_kernel *kernel, const sim_code *code,
                     const sim_lines *lines)
{
    char line[256];
    uint64_t begin = kernel->entry - object->text;
    const char *source = NULL;
    unsigned source_line = 0;

    put_raw(to, kernel->name);
    put(to, ":\n");
    for (uint64_t at = 0; at < kernel->code_bytes;) {
        put_line(to, lines, begin + at, &source, &source_line);
        unsigned size =
            sim_disasm(code, (size_t)(begin + at), line, sizeof line);
        put(to, "%6llx:  %s\n", (unsigned long long)at, line);
        at += size != 0 ? size : 4;
    }
}

static hipError_t disassemble(const void *image, size_t bytes,
                              const char *kernel, bool lines, char **text)
{
    sim_object *object;
    sim_code *code = NULL;
    builder to = {0};
    hipError_t status;

    sim_report_clear();
    if (image == NULL || text == NULL) {
        return sim_fail(hipErrorInvalidValue, "disassembly: argument is NULL");
    }
    *text = NULL;
    status = sim_object_load(image, bytes, false, &object);
    if (status != hipSuccess) {
        return status;
    }
    const sim_kernel *only =
        kernel != NULL ? sim_object_find(object, kernel) : NULL;
    if (!sim_arch_runs(object->flags)) {
        status = sim_fail(hipErrorNoBinaryForGpu,
                          "disassembly: built for %s, expected gfx906 "
                          "or gfx9-generic",
                          sim_arch_name(object->flags));
        goto done;
    }
    if (kernel != NULL && only == NULL) {
        status = sim_fail(hipErrorNotFound,
                          "disassembly: kernel %s is not among the object's "
                          "%zu",
                          kernel, object->kernel_count);
        goto done;
    }
    code = sim_code_create((uint64_t)(uintptr_t)object->image + object->text,
                           (size_t)object->text_bytes);
    if (code == NULL) {
        status = sim_fail(hipErrorOutOfMemory, "disassembly: out of memory");
        goto done;
    }
    put_raw(&to, "");
    for (size_t i = 0; i < object->kernel_count; i++) {
        if (only == NULL || only == &object->kernel[i]) {
            put_code(&to, object, &object->kernel[i], code,
                     lines ? object->lines : NULL);
        }
    }
    status = finish(&to, text);

done:
    sim_code_free(code);
    sim_object_free(object);
    return status;
}

HIPSIM_API hipError_t hipsimDisassemble(const void *image, size_t bytes,
                                        const char *kernel, char **text)
{
    return disassemble(image, bytes, kernel, false, text);
}

HIPSIM_API hipError_t hipsimDisassembleLines(const void *image, size_t bytes,
                                             const char *kernel, char **text)
{
    return disassemble(image, bytes, kernel, true, text);
}

HIPSIM_API void hipsimFree(void *memory)
{
    free(memory);
}
