/* flight.c: marks of launches in a mapped file, and what is read from those of
 * the dead.
 *
 * A slot is FREE, TAKEN (being filled), FLYING, LATE or ABORTED.  An abort is
 * noted in the slots, not for the file: if the process lives on (an outer
 * handler may jump away), clearing a slot withdraws it.
 * Liveness is the lock alone, never a process id, which is used anew; ids are
 * in the names only so that a process knows its own files without opening them:
 * closing a second descriptor would drop its lock.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _XOPEN_SOURCE 700 /* SA_ONSTACK */
#include "host/flight.h"
#include "host/files.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { NAME_CHARS = 256 /* as file systems allow */ };

/* Sweeping calls back, to write some breakers to the disk: tens of ms each. */
enum { LOCK_MS = 10000 };

/* Files of one process: this image's, and those that it left behind an exec. */
enum { FILES_OF_PROCESS = 16 };

enum { FREE, TAKEN, FLYING, LATE, ABORTED };

typedef struct slot {
    _Atomic uint32_t state;
    uint32_t device; /* in image.identity */
    uint64_t code_hash;
    char kernel[FA_KERNEL_CHARS];
} slot;

typedef struct image {
    char magic[8]; /* the last digit is the version */
    uint64_t bytes;
    char identity[FA_FLIGHT_DEVICES][FA_IDENTITY_CHARS]; /* "": none */
    slot slot[FA_FLIGHT_SLOTS];
} image;

static const char magic[8] = {'F', 'A', 'F', 'L', 'I', 'G', 'H', '2'};
static const char prefix[] = "flight-";
static const char lock_name[] = "flight.lock";

/* In a signal handler, and between processes, only lock-free ones work. */
_Static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_POINTER_LOCK_FREE == 2,
               "atomics must be free of locks");

struct fa_flight {
    int folder;
    int file;
    pid_t owner;
    image *map;
    _Atomic uint32_t next; /* where to look for a free slot first */
    char name[NAME_CHARS];
};

/* -- SIGABRT --------------------------------------------------------------- */

/* A handler has no argument but the signal, hence this state. */
static struct {
    _Atomic(fa_flight *) flight; /* NULL: nothing to note */
    atomic_bool installed;       /* and not yet run */
    struct sigaction before;
} aborts;

static void forget(fa_flight *flight)
{
    atomic_compare_exchange_strong(&aborts.flight, &flight, NULL);
}

static void note_abort(int number)
{
    const int saved = errno;
    fa_flight *flight = atomic_load(&aborts.flight);
    if (flight != NULL && flight->owner == getpid()) {
        for (int i = 0; i < FA_FLIGHT_SLOTS; i++) {
            uint32_t flying = FLYING;
            atomic_compare_exchange_strong(&flight->map->slot[i].state, &flying,
                                           ABORTED);
        }
    }
    /* The signal is blocked until this handler is left: the earlier one runs
     * then, on this thread, with the flags it was set up with. */
    sigaction(number, &aborts.before, NULL);
    atomic_store(&aborts.installed, false);
    raise(number);
    errno = saved;
}

fa_status fa_flight_note_aborts(fa_flight *flight, fa_error *error)
{
    struct sigaction now;
    struct sigaction ours = {.sa_handler = note_abort, .sa_flags = SA_ONSTACK};
    sigemptyset(&ours.sa_mask);
    if (sigaction(SIGABRT, NULL, &now) != 0) {
        return fa_file_fail(error, "SIGABRT", "to read its handler");
    }
    atomic_store(&aborts.flight, flight);
    /* Under a later handler, ours is still called by that one; to set it up
     * again above would make a circle. */
    const bool gone = now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN;
    if (atomic_load(&aborts.installed) && !gone) {
        return FA_OK;
    }
    aborts.before = now;
    if (sigaction(SIGABRT, &ours, NULL) != 0) {
        forget(flight);
        return fa_file_fail(error, "SIGABRT", "to set its handler");
    }
    atomic_store(&aborts.installed, true);
    return FA_OK;
}

/* -- the own file ---------------------------------------------------------- */

/* What the names of this process's files start with: also the time it began,
 * since in a container the next process may well get the same id. */
static fa_status own_prefix(char text[NAME_CHARS], fa_error *error)
{
    char fields[1024];
    size_t bytes = 0;
    unsigned long long start = 0;
    const char *name = "/proc/self/stat";
    int file = open(name, O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        return fa_file_fail(error, name, "to open it");
    }
    fa_status status =
        fa_file_read(file, name, fields, sizeof fields - 1, &bytes, error);
    close(file);
    if (status != FA_OK) {
        return status;
    }
    fields[bytes] = '\0';
    /* Field 22; field 2 is the program's name in brackets, with anything. */
    const char *at = strrchr(fields, ')');
    for (int field = 2; field < 22 && at != NULL; field++) {
        at = strchr(at + 1, ' ');
    }
    if (at != NULL) {
        start = strtoull(at + 1, NULL, 10);
    }
    snprintf(text, NAME_CHARS, "%s%ld-%llu-", prefix, (long)getpid(), start);
    return FA_OK;
}

/* A write lock on all of it; false: another process has one, or errno says. */
static bool lock_file(int file)
{
    struct flock all = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    return fcntl(file, F_SETLK, &all) == 0;
}

static bool is_taken(int folder, const char *name)
{
    struct stat info;
    return fstatat(folder, name, &info, AT_SYMLINK_NOFOLLOW) == 0;
}

/* Under the folder's lock: a sweep must not see the file before its owner
 * holds the lock of it. */
static fa_status create(fa_flight *flight, fa_error *error)
{
    char own[NAME_CHARS];
    fa_status status = own_prefix(own, error);
    if (status != FA_OK) {
        return status;
    }
    char name[NAME_CHARS];
    int number = 0;
    do {
        snprintf(name, sizeof name, "%.200s%d", own, number++);
    } while (number < FILES_OF_PROCESS && is_taken(flight->folder, name));
    status = fa_file_open(flight->folder, name, O_RDWR | O_CREAT | O_EXCL,
                          &flight->file, error);
    if (status != FA_OK) {
        return status;
    }
    memcpy(flight->name, name, sizeof name); /* ours to remove */
    if (!lock_file(flight->file)) {
        return fa_file_fail(error, flight->name, "to lock it");
    }
    /* Space for all of it now: where there is none, a later store would be a
     * SIGBUS. */
    errno = posix_fallocate(flight->file, 0, sizeof(image));
    if (errno != 0) {
        return fa_file_fail(error, flight->name, "space for it");
    }
    void *map = mmap(NULL, sizeof(image), PROT_READ | PROT_WRITE, MAP_SHARED,
                     flight->file, 0);
    if (map == MAP_FAILED) {
        return fa_file_fail(error, flight->name, "to map it");
    }
    flight->map = map;
    flight->map->bytes = sizeof(image);
    memcpy(flight->map->magic, magic, sizeof magic);
    return FA_OK;
}

/* Accepts one that is half open; `remove`: its file, too. */
static void release(fa_flight *flight, bool remove)
{
    if (flight == NULL) {
        return;
    }
    forget(flight);
    if (flight->map != NULL) {
        munmap(flight->map, sizeof *flight->map);
    }
    if (remove && flight->name[0] != '\0') {
        unlinkat(flight->folder, flight->name, 0);
    }
    if (flight->file >= 0) {
        close(flight->file);
    }
    if (flight->folder >= 0) {
        close(flight->folder);
    }
    free(flight);
}

fa_status fa_flight_open(const char *dir, fa_flight **flight, fa_error *error)
{
    int lock = -1;
    *flight = NULL;
    fa_flight *f = calloc(1, sizeof *f);
    if (f == NULL) {
        return fa_fail(error, FA_ENOMEM, "flight: out of memory");
    }
    f->file = -1;
    f->owner = getpid();
    fa_status status = fa_folder_open(dir, true, &f->folder, error);
    if (status == FA_OK) {
        status = fa_folder_lock(f->folder, lock_name, LOCK_MS, &lock, error);
    }
    if (status == FA_OK) {
        status = create(f, error);
    }
    if (status != FA_OK) {
        release(f, true);
        f = NULL;
    }
    fa_folder_unlock(lock);
    *flight = f;
    return status;
}

void fa_flight_retire(fa_flight *flight)
{
    if (flight != NULL) {
        forget(flight);
        unlinkat(flight->folder, flight->name, 0);
    }
}

void fa_flight_close(fa_flight *flight)
{
    release(flight, true);
}

void fa_flight_forked(fa_flight *flight)
{
    release(flight, false);
}

int fa_flight_device(fa_flight *flight, const char *identity)
{
    for (int i = 0; i < FA_FLIGHT_DEVICES; i++) {
        char *place = flight->map->identity[i];
        if (place[0] == '\0') {
            (void)snprintf(place, FA_IDENTITY_CHARS, "%s", identity);
            return i;
        }
        if (strcmp(place, identity) == 0) {
            return i;
        }
    }
    return -1;
}

int fa_flight_mark(fa_flight *flight, int device, const char *kernel,
                   uint64_t code_hash)
{
    const uint32_t first =
        atomic_fetch_add_explicit(&flight->next, 1, memory_order_relaxed);
    for (uint32_t i = 0; i < FA_FLIGHT_SLOTS && device >= 0; i++) {
        const uint32_t index = (first + i) % FA_FLIGHT_SLOTS;
        slot *s = &flight->map->slot[index];
        uint32_t free_one = FREE;
        if (!atomic_compare_exchange_strong_explicit(
                &s->state, &free_one, TAKEN, memory_order_acquire,
                memory_order_relaxed)) {
            continue;
        }
        const size_t length = strnlen(kernel, FA_KERNEL_CHARS - 1);
        memcpy(s->kernel, kernel, length);
        s->kernel[length] = '\0';
        s->device = (uint32_t)device;
        s->code_hash = code_hash;
        atomic_store_explicit(&s->state, FLYING, memory_order_release);
        return (int)index;
    }
    return -1;
}

void fa_flight_clear(fa_flight *flight, int slot_index)
{
    if (slot_index >= 0) {
        atomic_store_explicit(&flight->map->slot[slot_index].state, FREE,
                              memory_order_release);
    }
}

void fa_flight_late(fa_flight *flight, int slot_index)
{
    uint32_t flying = FLYING;
    if (slot_index >= 0) {
        atomic_compare_exchange_strong(&flight->map->slot[slot_index].state,
                                       &flying, LATE);
    }
}

/* -- the files of others --------------------------------------------------- */

typedef struct sweep {
    int folder;
    char own[NAME_CHARS];
    fa_flight_blame *blame;
    void *context;
} sweep;

/* Whether a slot names a kernel and a device as this library writes them. */
static bool is_whole(const image *content, const slot *one)
{
    if (one->device >= FA_FLIGHT_DEVICES) {
        return false;
    }
    const char *identity = content->identity[one->device];
    return fa_store_is_kernel(one->kernel,
                              strnlen(one->kernel, FA_KERNEL_CHARS)) &&
           fa_store_is_identity(identity, strnlen(identity, FA_IDENTITY_CHARS));
}

/* Whether it is done with.  Read rather than mapped: a file that was cut short
 * gives fewer bytes, not a SIGBUS. */
static bool blame_file(const sweep *s, int file, const char *name)
{
    image content;
    size_t bytes = 0;
    fa_error ignored;
    if (fa_file_read(file, name, &content, sizeof content, &bytes, &ignored) !=
        FA_OK) {
        return false;
    }
    if (bytes != sizeof content || content.bytes != sizeof content ||
        memcmp(content.magic, magic, sizeof magic) != 0) {
        return true;
    }
    for (int i = 0; i < FA_FLIGHT_SLOTS; i++) {
        const slot *one = &content.slot[i];
        const uint32_t state = one->state;
        if ((state == LATE || state == ABORTED) && is_whole(&content, one)) {
            s->blame(s->context, content.identity[one->device], one->kernel,
                     one->code_hash,
                     state == LATE ? "late when its process ended"
                                   : "in flight when its process aborted");
        }
    }
    return true;
}

static void sweep_one(void *context, const char *name)
{
    const sweep *s = context;
    fa_error ignored;
    int file = -1;
    if (strncmp(name, s->own, strlen(s->own)) == 0) {
        return;
    }
    if (fa_file_open(s->folder, name, O_RDWR, &file, &ignored) != FA_OK ||
        file < 0) {
        return;
    }
    if (lock_file(file) && blame_file(s, file, name)) {
        unlinkat(s->folder, name, 0);
    }
    close(file);
}

fa_status fa_flight_sweep(const char *dir, fa_flight_blame *blame,
                          void *context, fa_error *error)
{
    int lock = -1;
    sweep s = {.blame = blame, .context = context};
    fa_status status = fa_folder_open(dir, false, &s.folder, error);
    if (s.folder < 0) {
        return status;
    }
    status = own_prefix(s.own, error);
    if (status == FA_OK) {
        status = fa_folder_lock(s.folder, lock_name, LOCK_MS, &lock, error);
    }
    if (status == FA_OK) {
        status = fa_folder_list(s.folder, dir, prefix, sweep_one, &s, error);
    }
    fa_folder_unlock(lock);
    close(s.folder);
    return status;
}
