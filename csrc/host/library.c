/* library.c: finding libraries that the process has already loaded, and their
 * functions; also the one function that formats errors.
 *
 * GPU runtimes and libtorch must exist once in a process: a second copy of
 * libamdhip64 would have its own devices and streams.  So nothing is loaded
 * here; the list of loaded objects is searched and the match reopened.
 * Who needs which function is left to the callers' tables.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _GNU_SOURCE /* dl_iterate_phdr */
#include "fa.h"

#include <dlfcn.h>
#include <link.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

fa_status fa_fail(fa_error *error, fa_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    return status;
}

typedef struct search {
    const char *stem;
    char path[4096];
    bool found;
} search;

static int match(struct dl_phdr_info *info, size_t size, void *data)
{
    (void)size;
    search *s = data;
    const char *path = info->dlpi_name;
    if (path == NULL) {
        return 0;
    }
    const char *slash = strrchr(path, '/');
    const char *name = slash == NULL ? path : slash + 1;
    if (strncmp(name, s->stem, strlen(s->stem)) != 0 ||
        strlen(path) >= sizeof s->path) {
        return 0;
    }
    memcpy(s->path, path, strlen(path) + 1);
    s->found = true;
    return 1;
}

void *fa_library_find(const char *stem)
{
    search s = {.stem = stem};
    /* Two steps, because dlopen may not be called inside the iteration. */
    dl_iterate_phdr(match, &s);
    return s.found ? dlopen(s.path, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD) : NULL;
}

const char *fa_library_fill(void *handle, const fa_symbol *symbols,
                            size_t count, void *table)
{
    const char *missing = NULL;
    for (size_t i = 0; i < count; i++) {
        void *address = dlsym(handle, symbols[i].name);
        if (address == NULL && symbols[i].required && missing == NULL) {
            missing = symbols[i].name;
        }
        /* A copy, since C has no cast from object to function pointers. */
        memcpy((char *)table + symbols[i].offset, &address, sizeof address);
    }
    return missing;
}
