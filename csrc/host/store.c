/* store.c: reading and changing files of breakers.
 *
 * A change is read, made and written under the folder's lock, so that writers
 * do not undo each other's; readers need none, since a file is replaced whole.
 * What may be opened, and how a file is replaced, is left to files.c; the text
 * to store_text.c.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "host/files.h"
#include "host/store_text.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    NAME_CHARS = 256, /* as many as file systems allow */
    LOCK_MS = 2000    /* a writer holds it for some milliseconds */
};

static const char prefix[] = "breakers-";
static const char suffix[] = ".txt";
static const char lock_name[] = "breakers.lock";

static void name_of(const char *identity, char name[NAME_CHARS])
{
    snprintf(name, NAME_CHARS, "%s%016" PRIx64 "%s", prefix,
             fa_store_hash(identity, strlen(identity)), suffix);
}

/* No such file: none, and an empty text. */
static fa_status load(int folder, const char *name, fa_store_file *file,
                      fa_error *error)
{
    int fd = -1;
    file->count = 0;
    file->bytes = 0;
    fa_status status = fa_file_open(folder, name, O_RDONLY, &fd, error);
    if (fd < 0) {
        return status;
    }
    status = fa_file_read(fd, name, file->text, sizeof file->text, &file->bytes,
                          error);
    close(fd);
    if (status == FA_OK) {
        status = fa_store_parse(file, name, error);
    }
    if (status != FA_OK) {
        return status;
    }
    /* A file under another's name would otherwise speak for that device. */
    char own[NAME_CHARS];
    name_of(file->identity, own);
    if (strcmp(own, name) != 0) {
        file->count = 0;
        return fa_fail(error, FA_EINVAL,
                       "%s: expected the name that goes with its device, "
                       "\"%s\", got another",
                       name, file->identity);
    }
    return FA_OK;
}

/* Under the lock.  *bad: there was one that could not be read, and it is out of
 * the way; *error then says why. */
static fa_status load_or_set_aside(int folder, const char *name,
                                   fa_store_file *file, bool *bad,
                                   fa_error *error)
{
    fa_status status = load(folder, name, file, error);
    *bad = status == FA_EINVAL;
    if (*bad) {
        fa_error refused;
        status = fa_file_set_aside(folder, name, &refused);
        if (status != FA_OK) {
            *error = refused;
        }
    }
    return status;
}

/* Under the lock. */
static fa_status save(int folder, const char *name, fa_store_file *file,
                      fa_error *error)
{
    if (file->count == 0) {
        return fa_file_remove(folder, name, error);
    }
    fa_store_format(file);
    return fa_file_replace(folder, name, file->text, file->bytes, error);
}

/* A folder that is open, and room for one of its files. */
typedef struct store {
    int folder; /* -1: there is none */
    int lock;   /* -1: not locked */
    fa_store_file *file;
} store;

static void close_store(store *s)
{
    fa_folder_unlock(s->lock);
    free(s->file);
    close(s->folder);
    *s = (store){-1, -1, NULL};
}

/* On failure, and with FA_OK where there is no folder and it was not to be
 * made, the folder is -1 and there is nothing to close. */
static fa_status open_store(const char *dir, bool make, store *s,
                            fa_error *error)
{
    *s = (store){-1, -1, NULL};
    fa_status status = fa_folder_open(dir, make, &s->folder, error);
    if (s->folder < 0) {
        return status;
    }
    s->file = calloc(1, sizeof *s->file);
    if (s->file == NULL) {
        close_store(s);
        return fa_fail(error, FA_ENOMEM, "breakers: out of memory");
    }
    return FA_OK;
}

static fa_status lock_store(store *s, fa_error *error)
{
    return fa_folder_lock(s->folder, lock_name, LOCK_MS, &s->lock, error);
}

fa_status fa_store_read(const char *dir, const char *identity,
                        fa_store_entry *entries, size_t capacity, size_t *count,
                        fa_error *error)
{
    char name[NAME_CHARS];
    store s;
    *count = 0;
    fa_status status = fa_store_check_identity(identity, error);
    if (status != FA_OK) {
        return status;
    }
    status = open_store(dir, false, &s, error);
    if (s.folder < 0) {
        return status;
    }
    name_of(identity, name);
    fa_error reason;
    status = load(s.folder, name, s.file, &reason);
    if (status == FA_EINVAL) {
        /* Again under the lock: a writer may have put a good one there.  A
         * folder that cannot be written keeps the bad one. */
        bool bad = true;
        fa_error second;
        if (lock_store(&s, &second) == FA_OK) {
            status = load_or_set_aside(s.folder, name, s.file, &bad, &second);
        }
        if (bad) {
            status = FA_EINVAL;
        } else {
            reason = second;
        }
    }
    if (status != FA_OK) {
        *error = reason;
    }
    *count = s.file->count < capacity ? s.file->count : capacity;
    memcpy(entries, s.file->entry, *count * sizeof *entries);
    close_store(&s);
    return status;
}

/* Changes `file` to have `entry`; whether that is a change. */
static fa_status change(fa_store_file *file, const fa_store_entry *entry,
                        bool *changed, fa_error *error)
{
    size_t i = 0;
    while (i < file->count &&
           strcmp(file->entry[i].kernel, entry->kernel) != 0) {
        i++;
    }
    *changed = entry->failures != 0 || i < file->count;
    if (entry->failures == 0) {
        if (*changed) {
            file->entry[i] = file->entry[--file->count];
        }
        return FA_OK;
    }
    if (i == FA_STORE_MAX) {
        return fa_fail(error, FA_EINVAL,
                       "kernel: expected at most %d with a breaker, got %s "
                       "beside them",
                       FA_STORE_MAX, entry->kernel);
    }
    if (i == file->count) {
        file->count++;
    }
    file->entry[i] = *entry;
    return FA_OK;
}

fa_status fa_store_put(const char *dir, const char *identity,
                       const fa_store_entry *entry, fa_error *error)
{
    char name[NAME_CHARS];
    store s;
    bool bad = false;
    bool changed = false;
    fa_status status = fa_store_check_identity(identity, error);
    if (status == FA_OK) {
        status = fa_store_check_entry(entry, error);
    }
    if (status != FA_OK) {
        return status;
    }
    status = open_store(dir, entry->failures != 0, &s, error);
    if (s.folder < 0) {
        return status;
    }
    name_of(identity, name);
    status = lock_store(&s, error);
    if (status == FA_OK) {
        fa_error reason;
        status = load_or_set_aside(s.folder, name, s.file, &bad, &reason);
        if (status != FA_OK) {
            *error = reason;
        }
    }
    if (status == FA_OK) {
        status = change(s.file, entry, &changed, error);
    }
    if (status == FA_OK && changed) {
        snprintf(s.file->identity, sizeof s.file->identity, "%s", identity);
        status = save(s.folder, name, s.file, error);
    }
    close_store(&s);
    return status;
}

/* -- all files of a folder ------------------------------------------------- */

typedef struct walk {
    store s;
    fa_store_visit *visit; /* NULL: reset */
    void *context;
    const char *kernel;
    size_t count; /* of files that cannot be read, or of entries removed */
    fa_status status;
    fa_error *error; /* of the first that failed */
} walk;

static bool is_name(const char *name)
{
    const size_t length = sizeof prefix - 1 + 16 + sizeof suffix - 1;
    return strlen(name) == length &&
           strcmp(name + length - (sizeof suffix - 1), suffix) == 0;
}

static void list_one(void *context, const char *name)
{
    walk *w = context;
    fa_error reason;
    if (!is_name(name)) {
        return;
    }
    if (load(w->s.folder, name, w->s.file, &reason) != FA_OK) {
        w->count++;
        return;
    }
    for (size_t i = 0; i < w->s.file->count; i++) {
        w->visit(w->context, w->s.file->identity, &w->s.file->entry[i]);
    }
}

/* A folder, a pipe or a link: nobody's breakers, whoever put it there. */
static bool is_no_file(int folder, const char *name)
{
    struct stat info;
    return fstatat(folder, name, &info, AT_SYMLINK_NOFOLLOW) == 0 &&
           !S_ISREG(info.st_mode);
}

static void reset_one(void *context, const char *name)
{
    walk *w = context;
    fa_store_file *file = w->s.file;
    fa_error reason;
    bool bad = false;
    if (!is_name(name)) {
        return;
    }
    fa_status status =
        load_or_set_aside(w->s.folder, name, file, &bad, &reason);
    if (status == FA_EUNSUPPORTED && is_no_file(w->s.folder, name)) {
        status = fa_file_set_aside(w->s.folder, name, &reason);
    }
    const size_t before = file->count;
    size_t kept = 0;
    for (size_t i = 0; i < before; i++) {
        if (w->kernel != NULL &&
            strcmp(file->entry[i].kernel, w->kernel) != 0) {
            file->entry[kept++] = file->entry[i];
        }
    }
    file->count = kept;
    if (kept != before) {
        status = save(w->s.folder, name, file, &reason);
        w->count += status == FA_OK ? before - kept : 0;
    }
    if (status != FA_OK && w->status == FA_OK) {
        w->status = status;
        *w->error = reason;
    }
}

static fa_status walk_folder(const char *dir, walk *w, fa_error *error)
{
    const bool reset = w->visit == NULL;
    fa_status status = open_store(dir, false, &w->s, error);
    if (w->s.folder < 0) {
        return status;
    }
    w->error = error;
    status = reset ? lock_store(&w->s, error) : FA_OK;
    if (status == FA_OK) {
        status = fa_folder_list(w->s.folder, dir, prefix,
                                reset ? reset_one : list_one, w, error);
    }
    close_store(&w->s);
    return status == FA_OK ? w->status : status;
}

fa_status fa_store_list(const char *dir, fa_store_visit *visit, void *context,
                        size_t *unreadable, fa_error *error)
{
    walk w = {.visit = visit, .context = context};
    fa_status status = walk_folder(dir, &w, error);
    *unreadable = w.count;
    return status;
}

fa_status fa_store_reset(const char *dir, const char *kernel, size_t *removed,
                         fa_error *error)
{
    walk w = {.kernel = kernel};
    fa_status status = walk_folder(dir, &w, error);
    *removed = w.count;
    return status;
}
