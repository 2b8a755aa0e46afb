/* info.c: what is in a code object, as JSON and as assembly.
 *
 * Works on every AMDGPU architecture that object.c loads; the disassembly
 * needs our decoder and is for gfx906 alone.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "object.h"
#include "report.h"
#include "text.h"

#include <stdlib.h>

static void put_kernel(sim_text *to, const sim_object *object,
                       const sim_kernel *kernel)
{
    sim_text_format(to, "{\"name\": ");
    sim_text_string(to, kernel->name);
    sim_text_add(to, ", \"code_hash\": ");
    sim_text_hash(to, object->image + kernel->entry,
                  (size_t)kernel->code_bytes);
    sim_text_format(
        to,
        ", \"vgprs\": %u, \"agprs\": %u, \"sgprs\": %u, \"lds_bytes\": %u, "
        "\"private_bytes\": %u, \"vgpr_spills\": %u, \"sgpr_spills\": %u, ",
        kernel->vgprs, kernel->agprs, kernel->sgprs,
        kernel->descriptor.lds_bytes, kernel->descriptor.private_bytes,
        kernel->vgpr_spills, kernel->sgpr_spills);
    sim_text_format(
        to,
        "\"code_bytes\": %llu, \"kernarg_bytes\": %u, \"max_threads\": %u, "
        "\"wave_size\": %u, \"metadata\": %s, \"args\": [",
        (unsigned long long)kernel->code_bytes, kernel->kernarg_bytes,
        kernel->max_threads, kernel->wave_size,
        kernel->has_metadata ? "true" : "false");
    for (size_t i = 0; i < kernel->arg_count; i++) {
        const sim_arg *arg = &kernel->arg[i];
        sim_text_format(to, "%s{\"name\": ", i != 0 ? ", " : "");
        sim_text_string(to, arg->name);
        sim_text_format(to, ", \"offset\": %u, \"size\": %u, \"kind\": ",
                        arg->offset, arg->size);
        sim_text_string(to, arg->kind);
        sim_text_format(to, "}");
    }
    sim_text_format(to, "]}");
}

/* Hands the text over, or reports that memory ran out. */
static hipError_t finish(sim_text *from, char **out)
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
    sim_text to = {0};

    sim_report_clear();
    if (image == NULL || json == NULL) {
        return sim_fail(hipErrorInvalidValue, "object info: argument is NULL");
    }
    *json = NULL;
    hipError_t status = sim_object_load(image, bytes, false, &object);
    if (status != hipSuccess) {
        return status;
    }
    sim_text_format(&to, "{\"target\": ");
    sim_text_string(&to, object->target);
    sim_text_format(&to, ", \"arch\": ");
    sim_text_string(&to, sim_arch_name(object->flags));
    sim_text_format(&to, ", \"flags\": %u, \"abi\": %u, \"kernels\": [",
                    object->flags, object->version);
    for (size_t i = 0; i < object->kernel_count; i++) {
        sim_text_add(&to, i != 0 ? ", " : "");
        put_kernel(&to, object, &object->kernel[i]);
    }
    sim_text_format(&to, "]}");
    sim_object_free(object);
    return finish(&to, json);
}

/* "; file.hip:12" if the instruction is not of the line before; none is none:
 * *file NULL. */
static void put_line(sim_text *to, const sim_lines *lines, uint64_t offset,
                     const char **file, unsigned *line)
{
    const char *new_file = NULL;
    unsigned new_line = 0;

    (void)sim_lines_find(lines, offset, &new_file, &new_line);
    if (new_file != NULL && (new_file != *file || new_line != *line)) {
        sim_text_add(to, "; ");
        sim_text_add(to, new_file);
        sim_text_format(to, ":%u\n", new_line);
    } else if (new_file == NULL && *file != NULL) {
        sim_text_add(to, "; no line\n");
    }
    *file = new_file;
    *line = new_line;
}

static void put_code(sim_text *to, const sim_object *object,
                     const sim_kernel *kernel, const sim_code *code,
                     const sim_lines *lines)
{
    char line[256];
    uint64_t begin = kernel->entry - object->text;
    const char *source = NULL;
    unsigned source_line = 0;

    sim_text_add(to, kernel->name);
    sim_text_format(to, ":\n");
    for (uint64_t at = 0; at < kernel->code_bytes;) {
        put_line(to, lines, begin + at, &source, &source_line);
        unsigned size =
            sim_disasm(code, (size_t)(begin + at), line, sizeof line);
        sim_text_format(to, "%6llx:  %s\n", (unsigned long long)at, line);
        at += size != 0 ? size : 4;
    }
}

static hipError_t disassemble(const void *image, size_t bytes,
                              const char *kernel, bool lines, char **text)
{
    sim_object *object;
    sim_code *code = NULL;
    sim_text to = {0};
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
                          "disassembly: built for %s, expected gfx906",
                          sim_arch_name(object->flags));
        goto done;
    }
    if (kernel != NULL && only == NULL) {
        status = sim_fail(hipErrorNotFound,
                          "disassembly: kernel %s is not among the object's "
                          "%zu; `hipsim info` lists them",
                          kernel, object->kernel_count);
        goto done;
    }
    code = sim_code_create((uint64_t)(uintptr_t)object->image + object->text,
                           (size_t)object->text_bytes);
    if (code == NULL) {
        status = sim_fail(hipErrorOutOfMemory, "disassembly: out of memory");
        goto done;
    }
    sim_text_add(&to, "");
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
