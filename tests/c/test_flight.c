/* test_flight.c: the next process blames what was in flight at an abort or was
 * late, and nothing else; owners are children that end in every way.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include "faults.h"
#include "host/flight.h"
#include "scratch.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static const char identity[] = "hip gfx906 at 0000:03:00.0 driver 1 runtime 2";
static const uint64_t code = UINT64_C(0xfedcba9876543210);

typedef enum ending {
    BY_ABORT,
    BY_ABORT_UNNOTED, /* fa_flight_note_aborts was not called */
    BY_KILL,
    BY_TERM,
    BY_INT,
    BY_EXIT,
    BY_CLOSE,
    BY_WAITING /* until it is killed */
} ending;

typedef struct fixture {
    char folder[SCRATCH_CHARS];
    fa_error error;
    ending ending;
    bool late;    /* so is the launch */
    bool over;    /* it was cleared before the end */
    int ready[2]; /* a pipe: the owner is in flight */
    /* What the sweeps told: */
    int count;
    char kernel[256];
    char cause[64];
    bool exact; /* the hashes were those of the mark */
    bool known[FA_FLIGHT_SLOTS];
} fixture;

static void set_up(const test_run *run, fixture *f)
{
    memset(f, 0, sizeof *f);
    scratch_folder(run, f->folder);
    if (pipe(f->ready) != 0) {
        abort();
    }
}

static void tear_down(fixture *f)
{
    close(f->ready[0]);
    close(f->ready[1]);
}

static int device_in(fa_flight *flight)
{
    return fa_flight_device(flight, identity);
}

static void blame(void *context, const char *whose, const char *kernel,
                  uint64_t code_hash, const char *cause)
{
    fixture *f = context;
    int number = 0;
    f->count++;
    f->exact = strcmp(whose, identity) == 0 && code_hash == code;
    snprintf(f->kernel, sizeof f->kernel, "%s", kernel);
    snprintf(f->cause, sizeof f->cause, "%s", cause);
    if (sscanf(kernel, "kernel_%d", &number) == 1) {
        f->known[number] = true;
    }
}

static int sweep(test_run *run, fixture *f)
{
    f->count = 0;
    CHECK(run, fa_flight_sweep(f->folder, blame, f, &f->error) == FA_OK);
    return f->count;
}

static int files(const fixture *f)
{
    return scratch_count(f->folder, "flight-");
}

/* The one file, as it lies; read by another process, since to close it here
 * would drop its lock. */
static size_t content(const fixture *f, unsigned char *bytes, size_t capacity)
{
    char command[SCRATCH_CHARS + 64];
    snprintf(command, sizeof command, "cat '%s'/flight-*", f->folder);
    FILE *output = popen(command, "r");
    if (output == NULL) {
        abort();
    }
    size_t count = fread(bytes, 1, capacity, output);
    pclose(output);
    return count;
}

/* -- how an owner ends ----------------------------------------------------- */

static int own(void *context)
{
    fixture *f = context;
    fa_flight *flight = NULL;
    if (fa_flight_open(f->folder, &flight, &f->error) != FA_OK ||
        (f->ending != BY_ABORT_UNNOTED &&
         fa_flight_note_aborts(flight, &f->error) != FA_OK)) {
        return 1;
    }
    int other = fa_flight_mark(flight, device_in(flight), "other", code);
    int slot = fa_flight_mark(flight, device_in(flight), "fwd_f16_d64", code);
    fa_flight_clear(flight, other);
    if (f->late) {
        fa_flight_late(flight, slot);
    }
    if (f->over) {
        fa_flight_clear(flight, slot);
    }
    if (write(f->ready[1], "", 1) != 1) {
        return 1;
    }
    switch (f->ending) {
    case BY_ABORT:
    case BY_ABORT_UNNOTED:
        abort();
    case BY_KILL:
        return raise(SIGKILL);
    case BY_TERM:
        return raise(SIGTERM);
    case BY_INT:
        return raise(SIGINT);
    case BY_CLOSE:
        fa_flight_close(flight);
        return 0;
    case BY_EXIT:
        return 0;
    case BY_WAITING:
        break;
    }
    for (;;) {
        pause();
    }
}

static int start_owner(fixture *f, ending how)
{
    char byte;
    f->ending = how;
    int child = scratch_start(own, f);
    if (read(f->ready[0], &byte, 1) != 1) {
        abort();
    }
    return child;
}

static void flight_blames_what_was_in_flight_at_an_abort(test_run *run)
{
    fixture f;
    set_up(run, &f);
    int status = scratch_wait(start_owner(&f, BY_ABORT));
    CHECK(run, WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    CHECK(run, files(&f) == 1);
    CHECK(run, sweep(run, &f) == 1 && f.exact);
    CHECK_TEXT(run, f.kernel, "fwd_f16_d64");
    CHECK_TEXT(run, f.cause, "in flight when its process aborted");
    CHECK(run, files(&f) == 0 && sweep(run, &f) == 0);
    tear_down(&f);
}

static void flight_blames_what_was_late_however_its_owner_ended(test_run *run)
{
    static const ending endings[] = {BY_KILL, BY_TERM,  BY_INT,
                                     BY_EXIT, BY_ABORT, BY_ABORT_UNNOTED};
    fixture f;
    set_up(run, &f);
    f.late = true;
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++) {
        scratch_wait(start_owner(&f, endings[i]));
        CHECK(run, sweep(run, &f) == 1 && f.exact);
        CHECK_TEXT(run, f.cause, "late when its process ended");
        CHECK(run, files(&f) == 0);
    }
    tear_down(&f);
}

static void flight_blames_nothing_after_kill_interrupt_or_exit(test_run *run)
{
    static const ending endings[] = {BY_KILL, BY_TERM,  BY_INT,
                                     BY_EXIT, BY_CLOSE, BY_ABORT_UNNOTED};
    fixture f;
    set_up(run, &f);
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++) {
        scratch_wait(start_owner(&f, endings[i]));
        CHECK(run, files(&f) == (endings[i] == BY_CLOSE ? 0 : 1));
        CHECK(run, sweep(run, &f) == 0);
        CHECK(run, files(&f) == 0);
    }
    tear_down(&f);
}

static void flight_blames_nothing_that_was_over(test_run *run)
{
    fixture f;
    set_up(run, &f);
    f.over = true;
    for (int late = 0; late < 2; late++) {
        f.late = late == 1;
        scratch_wait(start_owner(&f, BY_ABORT));
        CHECK(run, sweep(run, &f) == 0);
    }
    /* An orderly end takes what was late with it. */
    f.over = false;
    scratch_wait(start_owner(&f, BY_CLOSE));
    CHECK(run, sweep(run, &f) == 0);
    tear_down(&f);
}

static void flight_leaves_live_siblings_alone(test_run *run)
{
    fixture f;
    set_up(run, &f);
    f.late = true;
    int sibling = start_owner(&f, BY_WAITING);
    CHECK(run, sweep(run, &f) == 0 && files(&f) == 1);
    scratch_wait(start_owner(&f, BY_ABORT));
    CHECK(run, sweep(run, &f) == 1 && files(&f) == 1);
    kill(sibling, SIGKILL);
    scratch_wait(sibling);
    CHECK(run, sweep(run, &f) == 1 && files(&f) == 0);
    tear_down(&f);
}

static int sweep_as_another(void *context)
{
    fixture *f = context;
    f->count = 0;
    return fa_flight_sweep(f->folder, blame, f, &f->error) == FA_OK ? f->count
                                                                    : 100;
}

static void flight_keeps_its_own_file_and_lock_in_a_sweep(test_run *run)
{
    fixture f;
    fa_flight *flight = NULL;
    set_up(run, &f);
    CHECK(run, fa_flight_open(f.folder, &flight, &f.error) == FA_OK);
    fa_flight_late(flight,
                   fa_flight_mark(flight, device_in(flight), "k", code));
    CHECK(run, sweep(run, &f) == 0 && files(&f) == 1);
    /* Another process still sees that it lives. */
    CHECK(run, scratch_child(sweep_as_another, &f) == 0);
    CHECK(run, files(&f) == 1);
    fa_flight_close(flight);
    fa_flight_close(NULL);
    CHECK(run, files(&f) == 0);
    tear_down(&f);
}

/* -- fork ------------------------------------------------------------------ */

typedef struct family {
    fixture *f;
    bool forgets;  /* the child calls fa_flight_forked */
    bool own_file; /* and opens its own */
    fa_flight *flight;
} family;

static int abort_in_child(void *context)
{
    family *a = context;
    if (a->forgets) {
        fa_flight_forked(a->flight);
    }
    if (a->own_file) {
        return own(a->f);
    }
    abort();
}

/* Has a launch in flight while its child aborts, and is killed. */
static int have_a_child_that_aborts(void *context)
{
    family *a = context;
    if (fa_flight_open(a->f->folder, &a->flight, &a->f->error) != FA_OK ||
        fa_flight_note_aborts(a->flight, &a->f->error) != FA_OK) {
        return 1;
    }
    fa_flight_mark(a->flight, device_in(a->flight), "parent", code);
    int status = scratch_child(abort_in_child, a);
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGABRT) {
        return 1;
    }
    /* While the parent lives: the child's own launch at most. */
    const int expected = a->own_file ? 1 : 0;
    if (scratch_child(sweep_as_another, a->f) != expected << 8 ||
        files(a->f) != 1) {
        return 2;
    }
    return raise(SIGKILL);
}

static void flight_of_a_parent_is_not_blamed_for_its_child(test_run *run)
{
    for (int i = 0; i < 3; i++) {
        fixture f;
        set_up(run, &f);
        family a = {.f = &f, .forgets = i >= 1, .own_file = i == 2};
        f.ending = BY_ABORT;
        int status = scratch_child(have_a_child_that_aborts, &a);
        CHECK(run, WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        CHECK(run, sweep(run, &f) == 0 && files(&f) == 0);
        tear_down(&f);
    }
}

/* -- slots ----------------------------------------------------------------- */

static int fill(void *context)
{
    fixture *f = context;
    fa_flight *flight = NULL;
    char name[300];
    if (fa_flight_open(f->folder, &flight, &f->error) != FA_OK) {
        return 1;
    }
    for (int i = 0; i < FA_FLIGHT_SLOTS; i++) {
        snprintf(name, sizeof name, "kernel_%d", i);
        int slot = fa_flight_mark(flight, device_in(flight), name, code);
        if (slot < 0 || slot >= FA_FLIGHT_SLOTS) {
            return 1;
        }
        fa_flight_late(flight, slot);
    }
    int none = fa_flight_mark(flight, device_in(flight), "one_more", code);
    fa_flight_late(flight, none);
    fa_flight_clear(flight, none);
    if (none != -1) {
        return 1;
    }
    /* One that becomes free is taken again, by a name that is too long. */
    memset(name, 'x', sizeof name);
    name[sizeof name - 1] = '\0';
    fa_flight_clear(flight, 77);
    if (fa_flight_mark(flight, device_in(flight), name, code) != 77) {
        return 1;
    }
    fa_flight_late(flight, 77);
    return 0;
}

static void flight_has_256_slots(test_run *run)
{
    fixture f;
    int known = 0;
    set_up(run, &f);
    CHECK(run, scratch_child(fill, &f) == 0);
    CHECK(run, sweep(run, &f) == FA_FLIGHT_SLOTS);
    for (int i = 0; i < FA_FLIGHT_SLOTS; i++) {
        known += f.known[i];
    }
    CHECK(run, known == FA_FLIGHT_SLOTS - 1 && !f.known[77]);
    tear_down(&f);
}

enum { THREADS = 8, ROUNDS = 3000, HELD = 40 };

typedef struct marker {
    fa_flight *flight;
    int device;
    atomic_int *owner; /* of each slot; 0: nobody's */
    int number;
    int wrong;
} marker;

/* 8 threads of 40 slots each want more than there are. */
static void *mark_and_clear(void *context)
{
    marker *m = context;
    int held[HELD];
    for (int i = 0; i < HELD; i++) {
        held[i] = -1;
    }
    for (int i = 0; i < ROUNDS; i++) {
        int *slot = &held[i % HELD];
        if (*slot >= 0) {
            m->wrong += atomic_exchange(&m->owner[*slot], 0) != m->number;
            fa_flight_clear(m->flight, *slot);
        }
        *slot = fa_flight_mark(m->flight, m->device, "k", code);
        if (*slot >= 0) {
            m->wrong += atomic_exchange(&m->owner[*slot], m->number) != 0;
        }
    }
    return NULL;
}

static void flight_gives_a_slot_to_one_of_many_threads(test_run *run)
{
    fixture f;
    fa_flight *flight = NULL;
    atomic_int owner[FA_FLIGHT_SLOTS] = {0};
    marker m[THREADS];
    pthread_t thread[THREADS];
    set_up(run, &f);
    CHECK(run, fa_flight_open(f.folder, &flight, &f.error) == FA_OK);
    const int device = device_in(flight); /* one thread at a time */
    for (int i = 0; i < THREADS; i++) {
        m[i] = (marker){.flight = flight,
                        .device = device,
                        .owner = owner,
                        .number = i + 1};
        if (pthread_create(&thread[i], NULL, mark_and_clear, &m[i]) != 0) {
            abort();
        }
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(thread[i], NULL);
        CHECK(run, m[i].wrong == 0);
    }
    fa_flight_close(flight);
    tear_down(&f);
}

/* -- handlers of SIGABRT --------------------------------------------------- */

enum { EARLIER_EXITS = 41, LATER_EXITS = 42 };

static void exit_from_handler(int number)
{
    _exit(number == SIGABRT ? EARLIER_EXITS : 1);
}

static void exit_with_information(int number, siginfo_t *info, void *context)
{
    _exit(number == SIGABRT && info->si_pid == getpid() && context != NULL
              ? EARLIER_EXITS
              : 1);
}

static void return_from_handler(int number)
{
    (void)number;
}

static struct sigaction below;

/* As Python's faulthandler does. */
static void run_below(int number)
{
    sigaction(number, &below, NULL);
    raise(number);
}

typedef enum arrangement {
    EARLIER,
    EARLIER_WITH_INFORMATION,
    EARLIER_RETURNS,
    EARLIER_IGNORES,
    LATER_CHAINS,
    LATER_CHAINS_AND_TWICE,
    REMOVED_AND_AGAIN,
    ARRANGEMENTS
} arrangement;

typedef struct stage {
    fixture *f;
    arrangement how;
} stage;

static void set_handler(void (*handler)(int))
{
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_NODEFER};
    sigaction(SIGABRT, &action, &below);
}

static int abort_with_handlers(void *context)
{
    stage *s = context;
    fixture *f = s->f;
    fa_flight *flight = NULL;
    struct sigaction information = {.sa_sigaction = exit_with_information,
                                    .sa_flags = SA_SIGINFO};
    if (s->how == EARLIER_WITH_INFORMATION) {
        sigaction(SIGABRT, &information, NULL);
    } else if (s->how == EARLIER_RETURNS) {
        set_handler(return_from_handler);
    } else if (s->how == EARLIER_IGNORES) {
        set_handler(SIG_IGN);
    } else {
        set_handler(exit_from_handler);
    }
    if (fa_flight_open(f->folder, &flight, &f->error) != FA_OK ||
        fa_flight_note_aborts(flight, &f->error) != FA_OK) {
        return 1;
    }
    if (s->how == LATER_CHAINS || s->how == LATER_CHAINS_AND_TWICE) {
        set_handler(run_below);
    }
    if (s->how == REMOVED_AND_AGAIN) {
        set_handler(SIG_DFL);
    }
    if (s->how >= LATER_CHAINS_AND_TWICE &&
        fa_flight_note_aborts(flight, &f->error) != FA_OK) {
        return 1;
    }
    fa_flight_mark(flight, device_in(flight), "k", code);
    abort();
}

static void flight_notes_aborts_and_runs_the_other_handlers(test_run *run)
{
    static const int exits[ARRANGEMENTS] = {EARLIER_EXITS, EARLIER_EXITS, 0, 0,
                                            EARLIER_EXITS, EARLIER_EXITS, 0};
    for (int i = 0; i < ARRANGEMENTS; i++) {
        fixture f;
        set_up(run, &f);
        stage s = {.f = &f, .how = (arrangement)i};
        int status = scratch_child(abort_with_handlers, &s);
        if (exits[i] != 0) {
            CHECK(run, WIFEXITED(status) && WEXITSTATUS(status) == exits[i]);
        } else {
            CHECK(run, WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
        }
        CHECK(run, sweep(run, &f) == 1);
        tear_down(&f);
    }
}

static sigjmp_buf back;

static void jump(int number)
{
    siglongjmp(back, number);
}

/* Lives on after an abort, goes on launching, and is killed. */
static int survive(void *context)
{
    fixture *f = context;
    fa_flight *flight = NULL;
    set_handler(jump);
    if (fa_flight_open(f->folder, &flight, &f->error) != FA_OK ||
        fa_flight_note_aborts(flight, &f->error) != FA_OK) {
        return 1;
    }
    int slot = fa_flight_mark(flight, device_in(flight), "k", code);
    if (sigsetjmp(back, 1) == 0) {
        abort();
    }
    fa_flight_clear(flight, slot);
    fa_flight_mark(flight, device_in(flight), "k", code);
    return raise(SIGKILL);
}

static void flight_forgives_an_abort_that_was_survived(test_run *run)
{
    fixture f;
    set_up(run, &f);
    int status = scratch_child(survive, &f);
    CHECK(run, WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    CHECK(run, sweep(run, &f) == 0);
    tear_down(&f);
}

/* What a sweep would tell if this process ended now, by a copy of its file. */
static int sweep_copy(test_run *run, fixture *f)
{
    static unsigned char bytes[65536];
    const size_t count = content(f, bytes, sizeof bytes);
    scratch_write(f->folder, "flight-1-2-0", bytes, count);
    return sweep(run, f);
}

static void flight_notes_an_abort_until_the_launch_is_over(test_run *run)
{
    fixture f;
    struct sigaction before;
    fa_flight *flight = NULL;
    volatile int jumps = 0;
    set_up(run, &f);
    sigaction(SIGABRT, NULL, &before);
    set_handler(jump);
    CHECK(run, fa_flight_open(f.folder, &flight, &f.error) == FA_OK);
    CHECK(run, fa_flight_note_aborts(flight, &f.error) == FA_OK);
    CHECK(run, fa_flight_note_aborts(flight, &f.error) == FA_OK);
    int slot = fa_flight_mark(flight, device_in(flight), "k", code);
    CHECK(run, sweep_copy(run, &f) == 0);
    if (sigsetjmp(back, 1) == 0) {
        raise(SIGABRT);
    } else {
        jumps = jumps + 1;
    }
    CHECK(run, jumps == 1 && sweep_copy(run, &f) == 1);
    fa_flight_mark(flight, device_in(flight), "later", code);
    CHECK(run, sweep_copy(run, &f) == 1);
    fa_flight_clear(flight, slot);
    CHECK(run, sweep_copy(run, &f) == 0 && files(&f) == 1);
    fa_flight_close(flight);
    sigaction(SIGABRT, &before, NULL);
    tear_down(&f);
}

static void flight_says_when_a_handler_is_refused(test_run *run)
{
    fixture f;
    fa_flight *flight = NULL;
    set_up(run, &f);
    CHECK(run, fa_flight_open(f.folder, &flight, &f.error) == FA_OK);
    for (int nth = 1; nth <= 2; nth++) {
        fault_set("sigaction", nth, EINVAL);
        CHECK(run, fa_flight_note_aborts(flight, &f.error) == FA_EDEVICE);
        CHECK(run, fault_happened());
        CHECK_TEXT(run, f.error.text,
                   nth == 1 ? "SIGABRT: expected to read its handler"
                            : "SIGABRT: expected to set its handler");
    }
    fa_flight_close(flight);
    tear_down(&f);
}

static void flight_is_forgotten_without_touching_its_file(test_run *run)
{
    fixture f;
    fa_flight *flight = NULL;
    set_up(run, &f);
    const int before = scratch_descriptors();
    CHECK(run, fa_flight_open(f.folder, &flight, &f.error) == FA_OK);
    fa_flight_forked(flight);
    fa_flight_forked(NULL);
    CHECK(run, files(&f) == 1 && scratch_descriptors() == before);
    tear_down(&f);
}

/* -- sweeps ---------------------------------------------------------------- */

enum { DEAD = 12, SWEEPERS = 4 };

static void count_in_shared_memory(void *context, const char *whose,
                                   const char *kernel, uint64_t code_hash,
                                   const char *cause)
{
    (void)whose, (void)kernel, (void)code_hash, (void)cause;
    atomic_fetch_add((atomic_int *)context, 1);
}

typedef struct race {
    const char *folder;
    atomic_int *blamed;
} race;

static int sweep_in_race(void *context)
{
    race *r = context;
    fa_error error;
    return fa_flight_sweep(r->folder, count_in_shared_memory, r->blamed,
                           &error) == FA_OK
               ? 0
               : 1;
}

static void *sweep_in_thread(void *context)
{
    return sweep_in_race(context) == 0 ? context : NULL;
}

static void flight_sweeps_at_once_blame_once(test_run *run)
{
    fixture f;
    race r;
    int child[SWEEPERS];
    pthread_t thread[SWEEPERS];
    set_up(run, &f);
    r.folder = f.folder;
    r.blamed = mmap(NULL, sizeof *r.blamed, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (r.blamed == MAP_FAILED) {
        abort();
    }
    for (int threads = 0; threads < 2; threads++) {
        atomic_store(r.blamed, 0);
        for (int i = 0; i < DEAD; i++) {
            scratch_wait(start_owner(&f, BY_ABORT));
        }
        for (int i = 0; i < SWEEPERS; i++) {
            if (threads == 0) {
                child[i] = scratch_start(sweep_in_race, &r);
            } else if (pthread_create(&thread[i], NULL, sweep_in_thread, &r)) {
                abort();
            }
        }
        for (int i = 0; i < SWEEPERS; i++) {
            void *good = &r;
            if (threads == 0) {
                CHECK(run, scratch_wait(child[i]) == 0);
            } else {
                pthread_join(thread[i], &good);
            }
            CHECK(run, good != NULL);
        }
        CHECK(run, atomic_load(r.blamed) == DEAD);
        CHECK(run, files(&f) == 0);
    }
    munmap(r.blamed, sizeof *r.blamed);
    tear_down(&f);
}

/* Where in `bytes` this text is. */
static size_t find(const unsigned char *bytes, size_t count, const char *text)
{
    const size_t length = strlen(text);
    for (size_t i = 0; i + length <= count; i++) {
        if (memcmp(bytes + i, text, length) == 0) {
            return i;
        }
    }
    abort();
}

static void flight_sweeps_malformed_files_away(test_run *run)
{
    static unsigned char bytes[65536];
    static unsigned char copy[65536];
    static const char name[] = "flight-1-2-0";
    fixture f;
    set_up(run, &f);
    scratch_wait(start_owner(&f, BY_ABORT));
    const size_t count = content(&f, bytes, sizeof bytes);
    const size_t kernel = find(bytes, count, "fwd_f16_d64");
    const size_t state = kernel - 16; /* before device and hash */
    const size_t device = find(bytes, count, identity);
    CHECK(run, sweep(run, &f) == 1);
    CHECK(run, count > 128 * 256 && count < sizeof bytes);
    for (int i = 0; i < 17; i++) {
        size_t length = count;
        memcpy(copy, bytes, sizeof copy);
        switch (i) {
        case 0: /* as it was: the test itself is right */
            break;
        case 1:
            length = 0;
            break;
        case 2:
            length = count - 1;
            break;
        case 3:
            copy[0] ^= 1;
            break;
        case 4:
            copy[7]++; /* another version */
            break;
        case 5:
            copy[8]++; /* another size */
            break;
        case 6:
            copy[state] = 200;
            break;
        case 7:
            copy[state + 3] = 1;
            break;
        case 8:
            copy[kernel] = '\0';
            break;
        case 9:
            copy[kernel + 1] = '\n';
            break;
        case 10:
            copy[kernel + 1] = 0xff;
            break;
        case 11:
            memset(copy + kernel, 'x', 128); /* no end */
            break;
        case 12:
            copy[state + 4] = FA_FLIGHT_DEVICES;
            break;
        case 13:
            copy[state + 4] = 1; /* a device that nobody registered */
            break;
        case 14:
            copy[device + 1] = '\n';
            break;
        case 15:
            copy[device + 1] = 0xff;
            break;
        default:
            memset(copy + device, 'x', FA_IDENTITY_CHARS); /* no end */
        }
        scratch_write(f.folder, name, copy, length);
        CHECK(run, sweep(run, &f) == (i == 0));
        CHECK(run, files(&f) == 0);
    }
    tear_down(&f);
}

static void
flight_numbers_devices_by_identity_as_far_as_it_has_room(test_run *run)
{
    fixture f;
    fa_flight *flight = NULL;
    char name[FA_IDENTITY_CHARS];
    set_up(run, &f);
    CHECK(run, fa_flight_open(f.folder, &flight, &f.error) == FA_OK);
    for (int twice = 0; twice < 2; twice++) {
        for (int i = 0; i < FA_FLIGHT_DEVICES; i++) {
            snprintf(name, sizeof name, "device %d", i);
            CHECK(run, fa_flight_device(flight, name) == i);
        }
    }
    CHECK(run, fa_flight_device(flight, "one more") == -1);
    CHECK(run, fa_flight_mark(flight, -1, "k", code) == -1);
    fa_flight_close(flight);
    tear_down(&f);
}

static void flight_trusts_no_file_that_others_write(test_run *run)
{
    static unsigned char bytes[65536];
    static const char name[] = "flight-1-2-0";
    fixture f, real;
    fa_flight *flight = (fa_flight *)run;
    set_up(run, &f);
    set_up(run, &real);
    scratch_wait(start_owner(&f, BY_ABORT));
    const size_t count = content(&f, bytes, sizeof bytes);
    CHECK(run, sweep(run, &f) == 1);
    scratch_write(f.folder, name, bytes, count);
    const char *path = scratch_path(f.folder, name);
    chmod(path, 0620);
    CHECK(run, sweep(run, &f) == 0 && files(&f) == 1);
    chmod(path, 0602);
    CHECK(run, sweep(run, &f) == 0 && files(&f) == 1);
    unlink(path);
    scratch_write(real.folder, name, bytes, count);
    CHECK(run, symlink(scratch_path(real.folder, name), path) == 0);
    CHECK(run, sweep(run, &f) == 0 && files(&f) == 1 && files(&real) == 1);
    unlink(path);
    CHECK(run, mkdir(path, 0700) == 0);
    CHECK(run, sweep(run, &f) == 0 && files(&f) == 1);
    chmod(real.folder, 0770);
    CHECK(run, fa_flight_sweep(real.folder, blame, &real, &real.error) ==
                   FA_EUNSUPPORTED);
    CHECK(run,
          fa_flight_open(real.folder, &flight, &real.error) == FA_EUNSUPPORTED);
    CHECK(run, flight == NULL && files(&real) == 1 && real.count == 0);
    CHECK_TEXT(run, real.error.text, "expected that others may not write it");
    tear_down(&f);
    tear_down(&real);
}

static void flight_sweep_of_no_folder_finds_nothing(test_run *run)
{
    fixture f;
    set_up(run, &f);
    const char *absent = scratch_path(f.folder, "absent");
    CHECK(run, fa_flight_sweep(absent, blame, &f, &f.error) == FA_OK);
    CHECK(run, f.count == 0 && scratch_count(f.folder, "") == 0);
    tear_down(&f);
}

/* -- what the system refuses ----------------------------------------------- */

static void flight_opens_whole_or_not_at_all(test_run *run)
{
    bool happened = true;
    int nth = 0;
    int failed = 0; /* all but that to unlock */
    while (happened) {
        fixture f;
        fa_flight *flight = (fa_flight *)run;
        set_up(run, &f);
        const int before = scratch_descriptors();
        fault_set(NULL, ++nth, ENOSPC);
        fa_status status = fa_flight_open(f.folder, &flight, &f.error);
        happened = fault_happened();
        CHECK(run, happened || status == FA_OK);
        CHECK(run, (flight == NULL) == (status != FA_OK));
        CHECK(run, files(&f) == (status == FA_OK ? 1 : 0));
        failed += status != FA_OK;
        fa_flight_close(flight);
        CHECK(run, scratch_descriptors() == before && files(&f) == 0);
        tear_down(&f);
    }
    CHECK(run, failed > 10);
}

static void flight_sweeps_that_fail_lose_no_blame(test_run *run)
{
    bool happened = true;
    int nth = 0;
    while (happened) {
        fixture f;
        set_up(run, &f);
        scratch_wait(start_owner(&f, BY_ABORT));
        const int before = scratch_descriptors();
        fault_set(NULL, ++nth, EIO);
        fa_flight_sweep(f.folder, blame, &f, &f.error);
        happened = fault_happened();
        CHECK(run, scratch_descriptors() == before);
        const int first = f.count;
        CHECK(run, first + sweep(run, &f) >= 1 && files(&f) == 0);
        tear_down(&f);
    }
    CHECK(run, nth > 7);
}

static void flight_says_what_the_system_refused(test_run *run)
{
    static const struct {
        const char *call;
        int nth;
        const char *message;
    } cases[] = {
        {"calloc", 1, "flight: out of memory"},
        {"open", 1, "to open this folder, got: No space"},
        {"openat", 1, "flight.lock: expected to open it, got: No space"},
        {"open", 2, "/proc/self/stat: expected to open it, got: No space"},
        {"pread", 1, "/proc/self/stat: expected to read it, got: No space"},
        {"openat", 2, "-0: expected to open it, got: No space"},
        {"fcntl", 1, "-0: expected to lock it, got: No space"},
        {"posix_fallocate", 1, "-0: expected space for it, got: No space"},
        {"mmap", 1, "-0: expected to map it, got: No space"},
    };
    fixture f;
    fa_flight *flight = NULL;
    set_up(run, &f);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fault_set(cases[i].call, cases[i].nth, ENOSPC);
        CHECK(run, fa_flight_open(f.folder, &flight, &f.error) != FA_OK);
        CHECK(run, fault_happened() && flight == NULL);
        CHECK_TEXT(run, f.error.text, cases[i].message);
    }
    fault_set("fdopendir", 1, EMFILE);
    CHECK(run, fa_flight_sweep(f.folder, blame, &f, &f.error) == FA_EDEVICE);
    CHECK_TEXT(run, f.error.text, "expected to list it, got: Too many open");
    CHECK_TEXT(run, f.error.text, f.folder);
    CHECK(run, fault_happened());
    tear_down(&f);
}

static int open_beyond_the_file_size(void *context)
{
    fixture *f = context;
    fa_flight *flight = NULL;
    const struct rlimit limit = {1000, 1000};
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    return fa_flight_open(f->folder, &flight, &f->error) == FA_EDEVICE &&
                   strstr(f->error.text, "File too large") != NULL
               ? 0
               : 1;
}

static void flight_takes_its_space_when_it_opens(test_run *run)
{
    fixture f;
    set_up(run, &f);
    CHECK(run, scratch_child(open_beyond_the_file_size, &f) == 0);
    CHECK(run, files(&f) == 0);
    tear_down(&f);
}

static void flight_opens_up_to_16_files_of_a_process(test_run *run)
{
    fixture f;
    fa_flight *flight[17];
    set_up(run, &f);
    for (int i = 0; i < 16; i++) {
        CHECK(run, fa_flight_open(f.folder, &flight[i], &f.error) == FA_OK);
    }
    CHECK(run, fa_flight_open(f.folder, &flight[16], &f.error) == FA_EDEVICE);
    CHECK_TEXT(run, f.error.text, "got: File exists");
    CHECK(run, flight[16] == NULL && files(&f) == 16);
    for (int i = 0; i < 16; i++) {
        fa_flight_close(flight[i]);
    }
    CHECK(run, files(&f) == 0);
    tear_down(&f);
}

void test_flight(test_run *run)
{
    RUN(run, flight_blames_what_was_in_flight_at_an_abort);
    RUN(run, flight_blames_what_was_late_however_its_owner_ended);
    RUN(run, flight_blames_nothing_after_kill_interrupt_or_exit);
    RUN(run, flight_blames_nothing_that_was_over);
    RUN(run, flight_leaves_live_siblings_alone);
    RUN(run, flight_keeps_its_own_file_and_lock_in_a_sweep);
    RUN(run, flight_of_a_parent_is_not_blamed_for_its_child);
    RUN(run, flight_has_256_slots);
    RUN(run, flight_numbers_devices_by_identity_as_far_as_it_has_room);
    RUN(run, flight_gives_a_slot_to_one_of_many_threads);
    RUN(run, flight_notes_aborts_and_runs_the_other_handlers);
    RUN(run, flight_forgives_an_abort_that_was_survived);
    RUN(run, flight_notes_an_abort_until_the_launch_is_over);
    RUN(run, flight_says_when_a_handler_is_refused);
    RUN(run, flight_is_forgotten_without_touching_its_file);
    RUN(run, flight_sweeps_at_once_blame_once);
    RUN(run, flight_sweeps_malformed_files_away);
    RUN(run, flight_trusts_no_file_that_others_write);
    RUN(run, flight_sweep_of_no_folder_finds_nothing);
    RUN(run, flight_opens_whole_or_not_at_all);
    RUN(run, flight_sweeps_that_fail_lose_no_blame);
    RUN(run, flight_says_what_the_system_refused);
    RUN(run, flight_takes_its_space_when_it_opens);
    RUN(run, flight_opens_up_to_16_files_of_a_process);
}
