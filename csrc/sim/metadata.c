/* metadata.c: the AMDGPU note, a MessagePack map of maps.
 *
 * Fills what the kernel descriptor does not say: arguments, register and
 * spill counts, workgroup limit. Every length is checked against what is
 * left; nothing recurses, so depth cannot exhaust the stack.
 * Source: LLVM, User Guide for AMDGPU Backend, "Code Object V3 and Above
 * Metadata"; the MessagePack specification.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "object.h"
#include "report.h"

#include <stdlib.h>
#include <string.h>

typedef struct cursor {
    const uint8_t *at, *end;
} cursor;

typedef enum item_kind {
    ITEM_UINT,   /* value */
    ITEM_STRING, /* value bytes of text follow the cursor */
    ITEM_BINARY, /* the same, or an extension */
    ITEM_ARRAY,  /* value items follow */
    ITEM_MAP,    /* value pairs follow */
    ITEM_OTHER   /* nil, bool, negative integer, float: skipped over */
} item_kind;

typedef struct item {
    item_kind kind;
    uint64_t value;
} item;

static bool take_number(cursor *from, size_t bytes, uint64_t *value)
{
    *value = 0;
    if ((size_t)(from->end - from->at) < bytes) {
        return false;
    }
    for (size_t i = 0; i < bytes; i++) {
        *value = *value << 8 | *from->at++;
    }
    return true;
}

/* Reads one item's header; the payload of strings, the elements of arrays
 * and maps stay to be read. False: truncated or not MessagePack. */
static bool take_item(cursor *from, item *out)
{
    uint64_t byte, length;

    if (!take_number(from, 1, &byte)) {
        return false;
    }
    if (byte <= 0x7f) {
        *out = (item){ITEM_UINT, byte};
    } else if (byte <= 0x8f) {
        *out = (item){ITEM_MAP, byte & 0x0f};
    } else if (byte <= 0x9f) {
        *out = (item){ITEM_ARRAY, byte & 0x0f};
    } else if (byte <= 0xbf) {
        *out = (item){ITEM_STRING, byte & 0x1f};
    } else if (byte >= 0xe0 || byte <= 0xc3) {
        *out = (item){ITEM_OTHER, 0}; /* negative fixint, nil, bool */
        return byte != 0xc1;          /* 0xc1 is never used */
    } else if (byte <= 0xc6) {        /* binary 8, 16, 32 */
        if (!take_number(from, (size_t)1 << (byte - 0xc4), &length)) {
            return false;
        }
        *out = (item){ITEM_BINARY, length};
    } else if (byte <= 0xc9) { /* extension 8, 16, 32: one type byte more */
        if (!take_number(from, (size_t)1 << (byte - 0xc7), &length)) {
            return false;
        }
        *out = (item){ITEM_BINARY, length + 1};
    } else if (byte <= 0xcb) { /* float 32, 64 */
        *out = (item){ITEM_BINARY, byte == 0xca ? 4 : 8};
    } else if (byte <= 0xcf) { /* unsigned 8, 16, 32, 64 */
        *out = (item){ITEM_UINT, 0};
        return take_number(from, (size_t)1 << (byte - 0xcc), &out->value);
    } else if (byte <= 0xd3) { /* signed 8, 16, 32, 64 */
        size_t bytes = (size_t)1 << (byte - 0xd0);
        if (!take_number(from, bytes, &length)) {
            return false;
        }
        bool negative = (length >> (8 * bytes - 1) & 1) != 0;
        *out = (item){negative ? ITEM_OTHER : ITEM_UINT, length};
    } else if (byte <= 0xd8) { /* fixed extension 1 to 16 */
        *out = (item){ITEM_BINARY, ((uint64_t)1 << (byte - 0xd4)) + 1};
    } else if (byte <= 0xdb) { /* string 8, 16, 32 */
        *out = (item){ITEM_STRING, 0};
        if (!take_number(from, (size_t)1 << (byte - 0xd9), &out->value)) {
            return false;
        }
    } else { /* array 16, 32; map 16, 32 */
        *out = (item){byte <= 0xdd ? ITEM_ARRAY : ITEM_MAP, 0};
        if (!take_number(from, byte & 1 ? 4 : 2, &out->value)) {
            return false;
        }
    }
    /* Each element takes a byte at least: a bound on every loop below. */
    return out->value <= (uint64_t)(from->end - from->at) ||
           out->kind == ITEM_UINT || out->kind == ITEM_OTHER;
}

static bool skip_item(cursor *from)
{
    for (uint64_t pending = 1; pending > 0; pending--) {
        item next;
        if (!take_item(from, &next)) {
            return false;
        }
        if (next.kind == ITEM_STRING || next.kind == ITEM_BINARY) {
            from->at += next.value;
        } else if (next.kind == ITEM_ARRAY) {
            pending += next.value;
        } else if (next.kind == ITEM_MAP) {
            pending += 2 * next.value;
        }
    }
    return true;
}

static bool take_container(cursor *from, item_kind kind, uint64_t *count)
{
    item head;

    if (!take_item(from, &head) || head.kind != kind) {
        return false;
    }
    *count = head.value;
    return true;
}

typedef struct text {
    const char *at;
    size_t bytes;
} text;

static bool take_text(cursor *from, text *out)
{
    item head;

    if (!take_item(from, &head) || head.kind != ITEM_STRING) {
        return false;
    }
    *out = (text){(const char *)from->at, (size_t)head.value};
    from->at += head.value;
    return true;
}

static bool take_u32(cursor *from, uint32_t *out)
{
    item head;

    if (!take_item(from, &head) || head.kind != ITEM_UINT ||
        head.value > UINT32_MAX) {
        return false;
    }
    *out = (uint32_t)head.value;
    return true;
}

static bool text_is(text t, const char *word)
{
    return t.bytes == strlen(word) && memcmp(t.at, word, t.bytes) == 0;
}

static bool copy_text(text from, char **to)
{
    char *copy = malloc(from.bytes + 1);

    if (copy == NULL) {
        return false;
    }
    memcpy(copy, from.at, from.bytes);
    copy[from.bytes] = '\0';
    free(*to); /* a key that occurs twice */
    *to = copy;
    return true;
}

static bool read_arg(cursor *from, sim_arg *arg)
{
    uint64_t pairs;

    if (!take_container(from, ITEM_MAP, &pairs)) {
        return false;
    }
    for (uint64_t i = 0; i < pairs; i++) {
        text key, value;
        bool good;
        if (!take_text(from, &key)) {
            return false;
        }
        if (text_is(key, ".offset")) {
            good = take_u32(from, &arg->offset);
        } else if (text_is(key, ".size")) {
            good = take_u32(from, &arg->size);
        } else if (text_is(key, ".name")) {
            good = take_text(from, &value) && copy_text(value, &arg->name);
        } else if (text_is(key, ".value_kind")) {
            good = take_text(from, &value) && copy_text(value, &arg->kind);
        } else {
            good = skip_item(from);
        }
        if (!good) {
            return false;
        }
    }
    if (arg->name == NULL && !copy_text((text){"", 0}, &arg->name)) {
        return false;
    }
    arg->hidden = arg->kind != NULL && strncmp(arg->kind, "hidden_", 7) == 0;
    return arg->kind != NULL &&
           sim_within(arg->offset, arg->size, SIM_MAX_KERNARG);
}

static bool read_args(cursor *from, sim_kernel *kernel)
{
    uint64_t count;

    if (!take_container(from, ITEM_ARRAY, &count) || kernel->arg != NULL) {
        return false;
    }
    if (count == 0) {
        return true;
    }
    kernel->arg = calloc((size_t)count, sizeof kernel->arg[0]);
    if (kernel->arg == NULL) {
        return false;
    }
    kernel->arg_count = (size_t)count;
    for (uint64_t i = 0; i < count; i++) {
        if (!read_arg(from, &kernel->arg[i])) {
            return false;
        }
    }
    return true;
}

/* The value of .symbol without its ".kd", without moving the cursor. */
static bool peek_symbol(cursor from, uint64_t pairs, text *symbol)
{
    for (uint64_t i = 0; i < pairs; i++) {
        text key;
        if (!take_text(&from, &key)) {
            return false;
        }
        if (text_is(key, ".symbol")) {
            if (!take_text(&from, symbol) || symbol->bytes < 3) {
                return false;
            }
            symbol->bytes -= 3;
            return true;
        }
        if (!skip_item(&from)) {
            return false;
        }
    }
    return false;
}

static sim_kernel *kernel_named(sim_object *object, text name)
{
    for (size_t i = 0; i < object->kernel_count; i++) {
        if (text_is(name, object->kernel[i].name)) {
            return &object->kernel[i];
        }
    }
    return NULL;
}

static bool read_kernel(cursor *from, sim_object *object)
{
    uint64_t pairs;
    text symbol;
    sim_kernel *kernel;
    uint32_t kernarg_bytes = 0;

    if (!take_container(from, ITEM_MAP, &pairs) ||
        !peek_symbol(*from, pairs, &symbol)) {
        return false;
    }
    kernel = kernel_named(object, symbol);
    if (kernel == NULL || kernel->has_metadata) {
        return false; /* the note and the symbol table disagree */
    }
    const struct {
        const char *key;
        uint32_t *value;
    } number[] = {
        {".vgpr_count", &kernel->vgprs},
        {".agpr_count", &kernel->agprs},
        {".sgpr_count", &kernel->sgprs},
        {".vgpr_spill_count", &kernel->vgpr_spills},
        {".sgpr_spill_count", &kernel->sgpr_spills},
        {".max_flat_workgroup_size", &kernel->max_threads},
        {".wavefront_size", &kernel->wave_size},
        {".kernarg_segment_size", &kernarg_bytes},
    };
    for (uint64_t i = 0; i < pairs; i++) {
        text key;
        bool known = false, good = true;
        if (!take_text(from, &key)) {
            return false;
        }
        for (size_t n = 0; n < sizeof number / sizeof number[0]; n++) {
            if (text_is(key, number[n].key)) {
                good = take_u32(from, number[n].value);
                known = true;
            }
        }
        if (text_is(key, ".args")) {
            good = read_args(from, kernel);
        } else if (!known) {
            good = skip_item(from);
        }
        if (!good) {
            return false;
        }
    }
    if (kernarg_bytes > kernel->kernarg_bytes) {
        kernel->kernarg_bytes = kernarg_bytes;
    }
    for (size_t i = 0; i < kernel->arg_count; i++) {
        const sim_arg *arg = &kernel->arg[i];
        if (!sim_within(arg->offset, arg->size, kernel->kernarg_bytes)) {
            return false;
        }
    }
    kernel->has_metadata = true;
    return kernel->kernarg_bytes <= SIM_MAX_KERNARG;
}

static bool read_root(cursor *from, sim_object *object)
{
    uint64_t pairs, kernels;

    if (!take_container(from, ITEM_MAP, &pairs)) {
        return false;
    }
    for (uint64_t i = 0; i < pairs; i++) {
        text key, value;
        if (!take_text(from, &key)) {
            return false;
        }
        if (text_is(key, "amdhsa.target")) {
            if (!take_text(from, &value) ||
                value.bytes >= sizeof object->target) {
                return false;
            }
            memcpy(object->target, value.at, value.bytes);
            object->target[value.bytes] = '\0';
        } else if (text_is(key, "amdhsa.kernels")) {
            if (!take_container(from, ITEM_ARRAY, &kernels)) {
                return false;
            }
            for (uint64_t k = 0; k < kernels; k++) {
                if (!read_kernel(from, object)) {
                    return false;
                }
            }
        } else if (!skip_item(from)) {
            return false;
        }
    }
    return true;
}

hipError_t sim_metadata_read(sim_object *object, const uint8_t *note,
                             size_t bytes)
{
    cursor from = {note, note + bytes};

    if (!read_root(&from, object)) {
        return sim_fail(hipErrorInvalidImage,
                        "code object: AMDGPU metadata note of %zu bytes is "
                        "corrupt at byte %zu",
                        bytes, (size_t)(from.at - note));
    }
    return hipSuccess;
}
