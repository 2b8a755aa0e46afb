/* scratch.c: see scratch.h.  SPDX-License-Identifier: BSD-3-Clause */
#define _XOPEN_SOURCE 700
#include "scratch.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { NOBODY = 65534 };

void scratch_folder(const test_run *run, char path[SCRATCH_CHARS])
{
    snprintf(path, SCRATCH_CHARS, "%.4000s/folderXXXXXX", run->scratch);
    if (mkdtemp(path) == NULL) {
        abort();
    }
}

const char *scratch_path(const char *folder, const char *name)
{
    static _Thread_local char paths[4][SCRATCH_CHARS];
    static _Thread_local int turn;
    char *path = paths[turn++ % 4];
    snprintf(path, SCRATCH_CHARS, "%.3000s/%.900s", folder, name);
    return path;
}

void scratch_write(const char *folder, const char *name, const void *bytes,
                   size_t count)
{
    int file = open(scratch_path(folder, name), O_WRONLY | O_CREAT | O_TRUNC,
                    S_IRUSR | S_IWUSR);
    if (file < 0 || write(file, bytes, count) != (ssize_t)count) {
        abort();
    }
    close(file);
}

long scratch_read(const char *folder, const char *name, char *text,
                  size_t capacity)
{
    FILE *file = fopen(scratch_path(folder, name), "rb");
    if (file == NULL) {
        return -1;
    }
    size_t count = fread(text, 1, capacity - 1, file);
    text[count] = '\0';
    fclose(file);
    return (long)count;
}

int scratch_count(const char *folder, const char *part)
{
    int count = 0;
    DIR *list = opendir(folder);
    if (list == NULL) {
        return 0;
    }
    for (struct dirent *entry; (entry = readdir(list)) != NULL;) {
        count += entry->d_name[0] != '.' && strstr(entry->d_name, part) != NULL;
    }
    closedir(list);
    return count;
}

int scratch_descriptors(void)
{
    return scratch_count("/proc/self/fd", "");
}

int scratch_start(int (*body)(void *), void *context)
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        const struct rlimit none = {0, 0};
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        setrlimit(RLIMIT_CORE, &none);
        int code = body(context);
        fflush(stdout);
        _exit(code);
    }
    if (child < 0) {
        abort();
    }
    return child;
}

int scratch_wait(int child)
{
    int status = -1;
    if (waitpid(child, &status, 0) != child) {
        abort();
    }
    return status;
}

int scratch_child(int (*body)(void *), void *context)
{
    return scratch_wait(scratch_start(body, context));
}

void scratch_drop_root(const char *folder)
{
    if (geteuid() == 0 &&
        (chown(folder, NOBODY, NOBODY) != 0 || setuid(NOBODY) != 0)) {
        abort();
    }
}
