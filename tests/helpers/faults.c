/* faults.c: a library to preload, which lets what flash_attn_rocm/_C asks of the
 * C library and of torch fail when a test says so.
 *
 *   faults_memory(n)      the n-th calloc, malloc, strdup or pthread_atfork from
 *                         now on that _C makes itself fails; 0: none
 *   faults_torch(name, n) the n-th call of aoti_torch_<name> fails, once; 0: none
 *   faults_device(kind)   1: every tensor of index 1 on, counted from now, is on
 *                         device index 7; 2: all tensors are on a GPU; 0: as is
 *   faults_left()         calls that are still to come until one fails; 0: it did
 *
 * What torch exports _C finds by dlsym(), which therefore is in here, too.  Of one
 * thread at a time.  SPDX-License-Identifier: BSD-3-Clause */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);

static int memory_left;
static const char *torch_name = "";
static int torch_left;
static int device_kind;
static int devices_asked;
static uintptr_t from;
static uintptr_t to;

static int find_module(struct dl_phdr_info *info, size_t size, void *unused)
{
    (void)size;
    (void)unused;
    if (strstr(info->dlpi_name, "/_C.abi3.so") == NULL) {
        return 0;
    }
    from = info->dlpi_addr;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        const uintptr_t end =
            (uintptr_t)(info->dlpi_addr + part->p_vaddr + part->p_memsz);
        to = part->p_type == PT_LOAD && end > to ? end : to;
    }
    return 1;
}

static int is_ours(void *caller)
{
    return (uintptr_t)caller >= from && (uintptr_t)caller < to;
}

static int fails(void *caller)
{
    return memory_left != 0 && is_ours(caller) && --memory_left == 0;
}

EXPORT void faults_memory(int nth)
{
    to = 0;
    dl_iterate_phdr(find_module, NULL);
    memory_left = nth;
}

EXPORT void faults_torch(const char *name, int nth)
{
    static char kept[128];
    strncpy(kept, name, sizeof kept - 1);
    torch_name = kept;
    torch_left = nth;
}

EXPORT void faults_device(int kind)
{
    device_kind = kind;
    devices_asked = 0;
}

EXPORT int faults_left(void)
{
    return memory_left + torch_left;
}

EXPORT void *malloc(size_t bytes)
{
    return fails(__builtin_return_address(0)) ? NULL : __libc_malloc(bytes);
}

EXPORT void *calloc(size_t count, size_t bytes)
{
    return fails(__builtin_return_address(0)) ? NULL
                                              : __libc_calloc(count, bytes);
}

EXPORT char *strdup(const char *text)
{
    const size_t bytes = strlen(text) + 1;
    void *copy =
        fails(__builtin_return_address(0)) ? NULL : __libc_malloc(bytes);
    return copy == NULL ? NULL : memcpy(copy, text, bytes);
}

static void *real_dlsym(void *library, const char *name)
{
    static void *(*real)(void *, const char *);
    if (real == NULL) {
        void *found = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
        if (found == NULL) {
            found = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
        }
        memcpy(&real, &found, sizeof real);
    }
    return real(library, name);
}

/* What pthread_atfork() of the object that calls it comes to. */
EXPORT int __register_atfork(void (*before)(void), void (*parent)(void),
                             void (*child)(void), void *object)
{
    int (*real)(void (*)(void), void (*)(void), void (*)(void), void *);
    void *found = real_dlsym(RTLD_NEXT, "__register_atfork");
    memcpy(&real, &found, sizeof real);
    void *caller = NULL;
    memcpy(&caller, &before, sizeof caller);
    return fails(caller) ? ENOMEM : real(before, parent, child, object);
}

/* -- torch ------------------------------------------------------------------ */

typedef intptr_t word;
typedef int function(word, word, word, word, word, word, word, word);
#define WORDS word a, word b, word c, word d, word e, word f, word g, word h

/* All return an int and take whole numbers and addresses, eight at most. */
#define TORCH(X)             \
    X(library_init_fragment) \
    X(library_init_impl)     \
    X(library_def)           \
    X(library_impl)          \
    X(get_data_ptr)          \
    X(get_dim)               \
    X(get_numel)             \
    X(get_sizes)             \
    X(get_strides)           \
    X(get_dtype)             \
    X(get_device_type)       \
    X(get_device_index)      \
    X(empty_strided)

static int changed(const char *name, word out)
{
    if (device_kind == 2 && strcmp(name, "get_device_type") == 0) {
        *(int32_t *)out = 1;
    }
    if (device_kind == 1 && strcmp(name, "get_device_index") == 0 &&
        devices_asked++ > 0) {
        *(int32_t *)out = 7;
    }
    return 0;
}

#define WRAP(name)                                               \
    static function *real_##name;                                \
    static int wrap_##name(WORDS)                                \
    {                                                            \
        if (torch_left != 0 && strcmp(torch_name, #name) == 0 && \
            --torch_left == 0) {                                 \
            return 1;                                            \
        }                                                        \
        const int code = real_##name(a, b, c, d, e, f, g, h);    \
        return code == 0 ? changed(#name, b) : code;             \
    }
TORCH(WRAP)
#undef WRAP

EXPORT void *dlsym(void *library, const char *name)
{
    void *found = real_dlsym(library, name);
    if (found == NULL || strncmp(name, "aoti_torch_", 11) != 0) {
        return found;
    }
#define TAKE(one)                                  \
    if (strcmp(name + 11, #one) == 0) {            \
        function *mine = wrap_##one;               \
        memcpy(&real_##one, &found, sizeof found); \
        memcpy(&found, &mine, sizeof found);       \
        return found;                              \
    }
    TORCH(TAKE)
#undef TAKE
    return found;
}
