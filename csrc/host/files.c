/* files.c: opening, locking, replacing and listing what lies in a private
 * folder; see files.h for what is trusted.
 *
 * The lock is flock(2): unlike a POSIX lock it excludes threads of one process
 * from each other, and closing another descriptor of the file does not drop it.
 * A child forked while it is held shares it, so it is released by name, not by
 * closing.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "host/files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { PATH_CHARS = 4096, NAME_CHARS = 256, POLL_MS = 1 };

/* One name for all, since the lock admits one writer: what a killed one left
 * is in the way of the next, which removes it. */
static const char temporary[] = "replacement.tmp";

fa_status fa_file_fail(fa_error *error, const char *name, const char *what)
{
    return fa_fail(error, FA_EDEVICE, "%s: expected %s, got: %s", name, what,
                   strerror(errno));
}

static fa_status check_trust(int fd, const char *name, mode_t kind,
                             fa_error *error)
{
    struct stat info;
    if (fstat(fd, &info) != 0) {
        return fa_file_fail(error, name, "to see its owner and mode");
    }
    if ((info.st_mode & S_IFMT) != kind) { /* a folder was opened as one */
        return fa_fail(error, FA_EUNSUPPORTED,
                       "%s: expected a file, got something else (mode %06o)",
                       name, (unsigned)info.st_mode);
    }
    if (info.st_uid != geteuid()) {
        return fa_fail(error, FA_EUNSUPPORTED,
                       "%s: expected user %ld as its owner, got user %ld", name,
                       (long)geteuid(), (long)info.st_uid);
    }
    if ((info.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
        return fa_fail(error, FA_EUNSUPPORTED,
                       "%s: expected that others may not write it, got mode "
                       "%04o",
                       name, (unsigned)info.st_mode & 07777);
    }
    return FA_OK;
}

/* Makes each folder of the path that is missing. */
static fa_status make_folders(const char *path, fa_error *error)
{
    char part[PATH_CHARS];
    snprintf(part, sizeof part, "%s", path);
    for (char *at = part + 1;; at++) {
        const char here = *at;
        if (here == '/' || here == '\0') {
            *at = '\0';
            if (mkdir(part, S_IRWXU) != 0 && errno != EEXIST) {
                return fa_file_fail(error, part, "to make this folder");
            }
            *at = here;
        }
        if (here == '\0') {
            return FA_OK;
        }
    }
}

fa_status fa_folder_open(const char *dir, bool make, int *folder,
                         fa_error *error)
{
    const int flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
    char path[PATH_CHARS];
    size_t length = strlen(dir);
    *folder = -1;
    if (length == 0 || length >= sizeof path) {
        return fa_fail(error, FA_EINVAL,
                       "dir: expected a path of 1 to %d bytes, got %zu",
                       PATH_CHARS - 1, length);
    }
    memcpy(path, dir, length + 1);
    /* With a slash behind it a symbolic link would be followed. */
    while (length > 1 && path[length - 1] == '/') {
        path[--length] = '\0';
    }
    *folder = open(path, flags);
    if (*folder < 0 && errno == ENOENT) {
        if (!make) {
            return FA_OK;
        }
        fa_status status = make_folders(path, error);
        if (status != FA_OK) {
            return status;
        }
        *folder = open(path, flags);
    }
    if (*folder < 0 && (errno == ENOTDIR || errno == ELOOP)) {
        return fa_fail(error, FA_EUNSUPPORTED,
                       "%s: expected a folder, got a file or symbolic link",
                       path);
    }
    if (*folder < 0) {
        return fa_file_fail(error, path, "to open this folder");
    }
    fa_status status = check_trust(*folder, path, S_IFDIR, error);
    if (status != FA_OK) {
        close(*folder);
        *folder = -1;
    }
    return status;
}

fa_status fa_file_open(int folder, const char *name, int flags, int *file,
                       fa_error *error)
{
    /* O_NONBLOCK: a pipe of that name must not stop us. */
    *file = openat(folder, name, flags | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK,
                   S_IRUSR | S_IWUSR);
    if (*file < 0) {
        if (errno == ENOENT && (flags & O_CREAT) == 0) {
            return FA_OK;
        }
        if (errno == ELOOP) {
            return fa_fail(error, FA_EUNSUPPORTED,
                           "%s: expected a file, got a symbolic link", name);
        }
        return fa_file_fail(error, name, "to open it");
    }
    fa_status status = check_trust(*file, name, S_IFREG, error);
    if (status != FA_OK) {
        if ((flags & O_EXCL) != 0) {
            unlinkat(folder, name, 0); /* it is new */
        }
        close(*file);
        *file = -1;
    }
    return status;
}

fa_status fa_file_read(int file, const char *name, void *data, size_t capacity,
                       size_t *bytes, fa_error *error)
{
    *bytes = 0;
    while (*bytes < capacity) {
        ssize_t count = pread(file, (char *)data + *bytes, capacity - *bytes,
                              (off_t)*bytes);
        if (count < 0) {
            return fa_file_fail(error, name, "to read it");
        }
        if (count == 0) {
            break;
        }
        *bytes += (size_t)count;
    }
    return FA_OK;
}

static fa_status write_all(int file, const void *data, size_t bytes,
                           fa_error *error)
{
    const char *at = data;
    while (bytes != 0) {
        ssize_t count = write(file, at, bytes);
        if (count < 0) {
            return fa_file_fail(error, temporary, "to write it");
        }
        at += count;
        bytes -= (size_t)count;
    }
    /* Before the rename: else a power failure may leave an empty file under
     * the good name. */
    if (fsync(file) != 0) {
        return fa_file_fail(error, temporary, "to bring it to the disk");
    }
    return FA_OK;
}

/* A name that was changed is on the disk only when its folder is. */
static fa_status settle(int folder, const char *name, fa_error *error)
{
    if (fsync(folder) != 0) {
        return fa_file_fail(error, name, "to bring its folder to the disk");
    }
    return FA_OK;
}

fa_status fa_file_replace(int folder, const char *name, const void *data,
                          size_t bytes, fa_error *error)
{
    unlinkat(folder, temporary, 0);
    int file = -1;
    fa_status status = fa_file_open(folder, temporary,
                                    O_WRONLY | O_CREAT | O_EXCL, &file, error);
    if (status != FA_OK) {
        return status;
    }
    status = write_all(file, data, bytes, error);
    close(file);
    if (status == FA_OK && renameat(folder, temporary, folder, name) != 0) {
        status = fa_file_fail(error, name, "to replace it");
    }
    if (status != FA_OK) {
        unlinkat(folder, temporary, 0);
        return status;
    }
    return settle(folder, name, error);
}

fa_status fa_file_set_aside(int folder, const char *name, fa_error *error)
{
    char bad[NAME_CHARS];
    snprintf(bad, sizeof bad, "%s.bad", name);
    int failed = renameat(folder, name, folder, bad);
    if (failed != 0 && errno == ENOTDIR && unlinkat(folder, bad, 0) == 0) {
        /* A folder, which does not replace an earlier file. */
        failed = renameat(folder, name, folder, bad);
    }
    if (failed != 0) {
        return fa_file_fail(error, name, "to set it aside");
    }
    return settle(folder, name, error);
}

fa_status fa_file_remove(int folder, const char *name, fa_error *error)
{
    if (unlinkat(folder, name, 0) != 0) {
        return fa_file_fail(error, name, "to remove it");
    }
    return settle(folder, name, error);
}

fa_status fa_folder_lock(int folder, const char *name, int wait_ms, int *lock,
                         fa_error *error)
{
    const struct timespec pause = {.tv_nsec = POLL_MS * 1000000L};
    fa_status status =
        fa_file_open(folder, name, O_RDWR | O_CREAT, lock, error);
    if (status != FA_OK) {
        return status;
    }
    for (int waited = 0; flock(*lock, LOCK_EX | LOCK_NB) != 0;
         waited += POLL_MS) {
        if (errno != EWOULDBLOCK || waited >= wait_ms) {
            status = fa_file_fail(error, name, "to get this lock");
            close(*lock);
            *lock = -1;
            return status;
        }
        nanosleep(&pause, NULL);
    }
    return FA_OK;
}

void fa_folder_unlock(int lock)
{
    if (lock >= 0) {
        flock(lock, LOCK_UN);
        close(lock);
    }
}

fa_status fa_folder_list(int folder, const char *dir, const char *prefix,
                         fa_folder_visit *visit, void *context, fa_error *error)
{
    /* Opened anew, since a copy would share its position in the list. */
    int copy = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *list = copy < 0 ? NULL : fdopendir(copy);
    if (list == NULL) {
        fa_status status = fa_file_fail(error, dir, "to list it");
        if (copy >= 0) {
            close(copy);
        }
        return status;
    }
    for (struct dirent *entry; (entry = readdir(list)) != NULL;) {
        if (strncmp(entry->d_name, prefix, strlen(prefix)) == 0) {
            visit(context, entry->d_name);
        }
    }
    closedir(list);
    return FA_OK;
}
