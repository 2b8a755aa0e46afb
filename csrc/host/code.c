/* code.c: from a device to its kernels.
 *
 * Kernels lie in one file for each arithmetic, its unit, so that a program
 * loads what it uses.  An AMD device "gfx906:sramecc+:xnack-" takes
 * <code_dir>/fa_gfx906_f16.co for the kernels that compute in fp16.  An
 * NVIDIA device of capability 8.6 takes the highest fa_sm_8x_f16.cubin with
 * x <= 6: cubins run on later minor versions of their major one.
 *
 * Files are checked here as far as an ELF header tells, because HIP takes no
 * length and must believe the header; what it cannot tell the runtime says.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "host/code.h"

#include <assert.h>
#include <elf.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PATH_CHARS = 4096 };

struct fa_code {
    fa_code *next;
    const fa_driver *driver;
    int device;
    char asked[FA_ARCH_CHARS]; /* the caller's arch, "" if it gave none */
    fa_dtype unit;             /* the arithmetic of its kernels */
    uint64_t hash;             /* of the image */
    void *module;
    void *image; /* kept: not every runtime copies it */
    char path[PATH_CHARS];
    _Atomic(void *) function[FA_VARIANT_COUNT]; /* NULL: not looked up */
};

static void close_code(fa_code *code)
{
    if (code == NULL) {
        return;
    }
    if (code->module != NULL) {
        code->driver->unload(code->driver, code->module);
    }
    free(code->image);
    free(code);
}

/* -- which file ------------------------------------------------------------ */

/* The architecture without its ":sramecc+:xnack-" features. */
static fa_status strip_arch(const char *from, char arch[FA_ARCH_CHARS],
                            fa_error *error)
{
    size_t length = strcspn(from, ":");
    if (length == 0 || length >= FA_ARCH_CHARS ||
        memchr(from, '/', length) != NULL) {
        return fa_fail(error, FA_EINVAL,
                       "arch: expected a name such as gfx906, got \"%.80s\"",
                       from);
    }
    memcpy(arch, from, length);
    arch[length] = '\0';
    return FA_OK;
}

static const char *unit_name(fa_dtype unit)
{
    return unit == FA_F16 ? "f16" : unit == FA_F32 ? "f32" : "f64";
}

static fa_status make_path(const fa_driver *driver, const char *code_dir,
                           const char *arch, fa_dtype unit,
                           char path[PATH_CHARS], fa_error *error)
{
    int chars = snprintf(path, PATH_CHARS, "%s/fa_%s_%s.%s", code_dir, arch,
                         unit_name(unit), driver->code_suffix);
    return chars < PATH_CHARS
               ? FA_OK
               : fa_fail(error, FA_EINVAL,
                         "code_dir: expected a path below %d characters, "
                         "got %d",
                         (int)PATH_CHARS, chars);
}

/* The code object to load for `arch`: that of the same name, or for
 * "sm_<major><minor>" the highest existing one up to it.  Existence is only
 * asked where there is a choice; read_file reports what is missing. */
static fa_status choose_path(const fa_driver *driver, const char *code_dir,
                             const char *arch, fa_dtype unit,
                             char path[PATH_CHARS], fa_error *error)
{
    char lower[FA_ARCH_CHARS];
    memcpy(lower, arch, strlen(arch) + 1);
    if (driver->backend == FA_STANDIN) {
        char *minor = &lower[strlen(lower) - 1];
        for (; *minor >= '0'; (*minor)--) {
            fa_status status =
                make_path(driver, code_dir, lower, unit, path, error);
            if (status != FA_OK || access(path, R_OK) == 0) {
                return status;
            }
        }
    }
    return make_path(driver, code_dir, arch, unit, path, error);
}

/* -- what is in it --------------------------------------------------------- */

static fa_status read_file(const char *path, const char *arch, void **image,
                           size_t *bytes, fa_error *error)
{
    fa_status status = FA_OK;
    char *data = NULL;
    long length = -1;
    *image = NULL;
    *bytes = 0;
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        return fa_fail(error, FA_ECODE,
                       "%s: expected a code object for %s, got: %s; build it "
                       "with FA_ARCHS=%s",
                       path, arch, strerror(errno), arch);
    }
    if (fseek(file, 0, SEEK_END) != 0 || (length = ftell(file)) < 0 ||
        fseek(file, 0, SEEK_SET) != 0) {
        status = fa_fail(error, FA_ECODE, "%s: expected a file, got: %s", path,
                         strerror(errno));
        goto done;
    }
    /* One byte more, since malloc(0) may be NULL. */
    data = malloc((size_t)length + 1);
    if (data == NULL) {
        status = fa_fail(error, FA_ENOMEM, "%s: out of memory", path);
        goto done;
    }
    if (fread(data, 1, (size_t)length, file) != (size_t)length) {
        status =
            fa_fail(error, FA_ECODE,
                    "%s: expected %ld readable bytes, got fewer", path, length);
        goto done;
    }
    *image = data;
    *bytes = (size_t)length;
    data = NULL;

done:
    free(data);
    fclose(file);
    return status;
}

static fa_status check_image(const fa_driver *driver, const char *path,
                             const void *image, size_t bytes, fa_error *error)
{
    Elf64_Ehdr header;
    if (bytes < sizeof header || memcmp(image, ELFMAG, SELFMAG) != 0 ||
        ((const unsigned char *)image)[EI_CLASS] != ELFCLASS64) {
        return fa_fail(error, FA_ECODE,
                       "%s: expected a code object (64-bit ELF), got %zu "
                       "bytes of something else; the file is corrupt",
                       path, bytes);
    }
    memcpy(&header, image, sizeof header);
    if (header.e_machine != driver->code_machine) {
        return fa_fail(error, FA_ECODE,
                       "%s: expected a code object for ELF machine %d, got "
                       "machine %d",
                       path, (int)driver->code_machine, (int)header.e_machine);
    }
    /* A file cut short: the tables end behind its end. */
    const uint64_t sections =
        header.e_shoff + (uint64_t)header.e_shnum * header.e_shentsize;
    const uint64_t segments =
        header.e_phoff + (uint64_t)header.e_phnum * header.e_phentsize;
    if (header.e_shoff > bytes || sections > bytes || header.e_phoff > bytes ||
        segments > bytes) {
        return fa_fail(
            error, FA_ECODE,
            "%s: expected at least %llu bytes, got %zu; the file "
            "is corrupt",
            path,
            (unsigned long long)(sections > segments ? sections : segments),
            bytes);
    }
    return FA_OK;
}

static fa_status check_device(const fa_driver *driver, int device,
                              fa_error *error)
{
    int count = 0;
    fa_status status = driver->device_count(driver, &count, error);
    if (status == FA_OK && (device < 0 || device >= count)) {
        status = fa_fail(error, FA_EDEVICE,
                         "device: expected an index below the number of "
                         "devices (%d), got %d",
                         count, device);
    }
    return status;
}

static fa_status open_code(const fa_driver *driver, const char *code_dir,
                           int device, const char *asked, fa_dtype unit,
                           fa_code **out, fa_error *error)
{
    fa_status status = FA_OK;
    size_t bytes = 0;
    char arch[FA_ARCH_CHARS];
    *out = NULL;
    fa_code *code = calloc(1, sizeof *code);
    if (code == NULL) {
        return fa_fail(error, FA_ENOMEM, "code object: out of memory");
    }
    code->driver = driver;
    code->device = device;
    code->unit = unit;
    if ((status = check_device(driver, device, error)) != FA_OK) {
        goto fail;
    }
    if (asked[0] == '\0') {
        status = driver->arch(driver, device, arch, error);
    } else if ((status = strip_arch(asked, arch, error)) == FA_OK) {
        if (strlen(asked) >= sizeof code->asked) {
            status = fa_fail(error, FA_EINVAL,
                             "arch: expected a name below %d characters, "
                             "got \"%.80s...\"",
                             (int)sizeof code->asked, asked);
            goto fail;
        }
        memcpy(code->asked, asked, strlen(asked) + 1);
    }
    if (status != FA_OK ||
        (status = choose_path(driver, code_dir, arch, unit, code->path,
                              error)) != FA_OK ||
        (status = read_file(code->path, arch, &code->image, &bytes, error)) !=
            FA_OK ||
        (status = check_image(driver, code->path, code->image, bytes, error)) !=
            FA_OK ||
        (status = driver->load(driver, code->path, code->image, bytes,
                               &code->module, error)) != FA_OK) {
        goto fail;
    }
    code->hash = fa_store_hash(code->image, bytes);
    *out = code;
    return FA_OK;

fail:
    close_code(code);
    return status;
}

/* -- the list -------------------------------------------------------------- */

/* The entry between `code` and `end`, or NULL. */
static fa_code *find(fa_code *code, const fa_code *end, const fa_driver *driver,
                     int device, const char *asked, fa_dtype unit)
{
    for (; code != end; code = code->next) {
        if (code->driver == driver && code->device == device &&
            code->unit == unit && strcmp(code->asked, asked) == 0) {
            return code;
        }
    }
    return NULL;
}

/* Adds `code` unless another thread was first with the same, and returns
 * the one to use. */
static fa_code *publish(fa_code_list *list, fa_code *code)
{
    fa_code *seen = NULL;
    fa_code *head = atomic_load(&list->head);
    for (;;) {
        fa_code *other = find(head, seen, code->driver, code->device,
                              code->asked, code->unit);
        if (other != NULL) {
            close_code(code);
            return other;
        }
        code->next = head;
        seen = head;
        if (atomic_compare_exchange_weak(&list->head, &head, code)) {
            return code;
        }
    }
}

fa_status fa_code_function(fa_code_list *list, const fa_driver *driver,
                           const char *code_dir, int device, const char *arch,
                           const fa_variant *variant, void **function,
                           uint64_t *hash, fa_error *error)
{
    fa_status status = FA_OK;
    const char *asked = arch == NULL ? "" : arch;
    assert(variant >= fa_variants && variant < fa_variants + FA_VARIANT_COUNT);
    *function = NULL;
    const fa_dtype unit = variant->arith;
    fa_code *code =
        find(atomic_load(&list->head), NULL, driver, device, asked, unit);
    if (code == NULL) {
        status = open_code(driver, code_dir, device, asked, unit, &code, error);
        if (status != FA_OK) {
            return status;
        }
        code = publish(list, code);
    }
    *hash = code->hash;
    _Atomic(void *) *slot = &code->function[variant - fa_variants];
    *function = atomic_load(slot);
    if (*function == NULL) {
        /* Two threads may both ask; they get the same answer. */
        status =
            driver->function(driver, code->path, code->module, variant->symbol,
                             variant->lds_bytes, function, error);
        if (status == FA_OK) {
            atomic_store(slot, *function);
        }
    }
    return status;
}

void fa_code_clear(fa_code_list *list)
{
    fa_code *code = atomic_exchange(&list->head, NULL);
    while (code != NULL) {
        fa_code *next = code->next;
        close_code(code);
        code = next;
    }
}
