/* faults.c: see faults.h.  SPDX-License-Identifier: BSD-3-Clause */
#define _XOPEN_SOURCE 700
#include "faults.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static _Thread_local struct {
    const char *call;
    int left; /* calls until it happens; 0: none is set */
    int error;
    void (*before)(void *);
    void *context;
    bool happened;
} fault;

void fault_set(const char *call, int nth, int error)
{
    memset(&fault, 0, sizeof fault);
    fault.call = call;
    fault.left = nth;
    fault.error = error;
}

void fault_set_before(const char *call, int nth, void (*before)(void *),
                      void *context)
{
    fault_set(call, nth, 0);
    fault.before = before;
    fault.context = context;
}

bool fault_happened(void)
{
    bool happened = fault.happened;
    fault_set(NULL, 0, 0);
    return happened;
}

/* Whether `call` is the one, or one of those, that may fail. */
static bool is_meant(const char *call)
{
    static const char *const memory[] = {"calloc", "malloc", "strdup", "mmap",
                                         "pthread_create"};
    if (fault.call == NULL || strcmp(fault.call, call) == 0) {
        return true;
    }
    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++) {
        if (strcmp(fault.call, "memory") == 0 && strcmp(memory[i], call) == 0) {
            return true;
        }
    }
    return false;
}

static bool fails(const char *call)
{
    if (fault.left == 0 || !is_meant(call) || --fault.left != 0) {
        return false;
    }
    fault.happened = true;
    if (fault.before != NULL) {
        fault.before(fault.context);
        return false;
    }
    errno = fault.error;
    return true;
}

#define FAULTY(type, failure, name, parameters, arguments)       \
    type __real_##name parameters;                               \
    type __wrap_##name parameters;                               \
    type __wrap_##name parameters                                \
    {                                                            \
        return fails(#name) ? failure : __real_##name arguments; \
    }

FAULTY(void *, NULL, calloc, (size_t count, size_t bytes), (count, bytes))
FAULTY(DIR *, NULL, fdopendir, (int fd), (fd))
FAULTY(int, -1, flock, (int fd, int operation), (fd, operation))
FAULTY(size_t, 0, fread, (void *data, size_t bytes, size_t count, FILE *file),
       (data, bytes, count, file))
FAULTY(int, -1, fstat, (int fd, struct stat *info), (fd, info))
FAULTY(int, -1, fsync, (int fd), (fd))
FAULTY(void *, NULL, malloc, (size_t bytes), (bytes))
FAULTY(int, -1, mkdir, (const char *path, mode_t mode), (path, mode))
FAULTY(void *, MAP_FAILED, mmap,
       (void *at, size_t bytes, int access, int flags, int fd, off_t from),
       (at, bytes, access, flags, fd, from))
FAULTY(int, errno, posix_fallocate, (int fd, off_t from, off_t bytes),
       (fd, from, bytes))
FAULTY(int, errno, pthread_create,
       (pthread_t * thread, const pthread_attr_t *attributes,
        void *(*body)(void *), void *argument),
       (thread, attributes, body, argument))
FAULTY(ssize_t, -1, pread, (int fd, void *data, size_t bytes, off_t from),
       (fd, data, bytes, from))
FAULTY(int, -1, renameat, (int from, const char *old, int to, const char *name),
       (from, old, to, name))
FAULTY(int, -1, sigaction,
       (int number, const struct sigaction *set, struct sigaction *old),
       (number, set, old))
FAULTY(char *, NULL, strdup, (const char *text), (text))
FAULTY(int, -1, unlinkat, (int folder, const char *name, int flags),
       (folder, name, flags))
FAULTY(ssize_t, -1, write, (int fd, const void *data, size_t bytes),
       (fd, data, bytes))

/* Those whose last argument may be missing. */
int __real_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...);
int __real_openat(int folder, const char *path, int flags, ...);
int __wrap_openat(int folder, const char *path, int flags, ...);
int __real_fcntl(int fd, int command, ...);
int __wrap_fcntl(int fd, int command, ...);

int __wrap_open(const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    mode_t mode = (flags & O_CREAT) != 0 ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return fails("open") ? -1 : __real_open(path, flags, mode);
}

int __wrap_openat(int folder, const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    mode_t mode = (flags & O_CREAT) != 0 ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return fails("openat") ? -1 : __real_openat(folder, path, flags, mode);
}

/* Only ever with a lock. */
int __wrap_fcntl(int fd, int command, ...)
{
    va_list rest;
    va_start(rest, command);
    struct flock *lock = va_arg(rest, struct flock *);
    va_end(rest);
    return fails("fcntl") ? -1 : __real_fcntl(fd, command, lock);
}
