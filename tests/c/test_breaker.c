/* test_breaker.c: the states of one device's breakers, in memory and on disk.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _XOPEN_SOURCE 700
#include "faults.h"
#include "host/breaker.h"
#include "scratch.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

static const char identity[] = "hip gfx906 at 0000:03:00.0 driver 5 runtime 6";
static const uint64_t code = UINT64_C(0xabcdef0123456789);
static const int64_t second = INT64_C(1000000000);

enum { ROW = 3, OTHER = 5 };

typedef struct fixture {
    char folder[SCRATCH_CHARS];
    fa_breaker breaker;
    fa_store_entry entries[FA_STORE_MAX];
    bool half_open[FA_STORE_MAX];
    fa_error error;
} fixture;

static fixture *set_up(const test_run *run)
{
    fixture *f = calloc(1, sizeof *f);
    if (f == NULL) {
        abort();
    }
    scratch_folder(run, f->folder);
    fa_breaker_init(&f->breaker, identity, f->folder);
    return f;
}

static void tear_down(fixture *f)
{
    fa_breaker_clear(&f->breaker);
    free(f);
}

/* As the next process would. */
static void again(fixture *f)
{
    fa_breaker_clear(&f->breaker);
    fa_breaker_init(&f->breaker, identity, f->folder);
}

static fa_status ask(fixture *f, ptrdiff_t row, bool *probe)
{
    return fa_breaker_ask(&f->breaker, row, code, probe, &f->error);
}

/* Whether a row is not closed, without a try. */
static bool is_listed(fixture *f, ptrdiff_t row, fa_store_entry *entry)
{
    const size_t count =
        fa_breaker_list(&f->breaker, f->entries, f->half_open, FA_STORE_MAX);
    for (size_t i = 0; i < count; i++) {
        if (strcmp(f->entries[i].kernel, fa_variants[row].symbol) == 0) {
            *entry = f->entries[i];
            return true;
        }
    }
    return false;
}

/* What is on disk of a row; failures 0: nothing. */
static fa_store_entry stored(test_run *run, fixture *f, ptrdiff_t row)
{
    size_t count = 0;
    CHECK(run, fa_store_read(f->folder, identity, f->entries, FA_STORE_MAX,
                             &count, &f->error) == FA_OK);
    for (size_t i = 0; i < count; i++) {
        if (strcmp(f->entries[i].kernel, fa_variants[row].symbol) == 0) {
            return f->entries[i];
        }
    }
    return (fa_store_entry){.failures = 0};
}

static void breaker_doubles_its_cooldown_up_to_an_hour(test_run *run)
{
    static const int64_t seconds[] = {60,   120,  240,  480, 960,
                                      1920, 3600, 3600, 3600};
    bool probe = false;
    fixture *f = set_up(run);
    CHECK(run, ask(f, ROW, &probe) == FA_OK && !probe);
    for (uint32_t i = 0; i < sizeof seconds / sizeof seconds[0]; i++) {
        fa_breaker_trip(&f->breaker, ROW, 60 * second, "a cause");
        const fa_store_entry e = stored(run, f, ROW);
        CHECK(run, e.failures == i + 1 && e.code_hash == code);
        CHECK(run, e.retry - e.opened == seconds[i] + (seconds[i] != 0));
        CHECK(run, llabs((long long)(time(NULL) - e.opened)) <= 2);
        CHECK(run, strcmp(e.cause, "a cause") == 0);
    }
    CHECK(run, ask(f, ROW, &probe) == FA_EOPEN && !probe);
    CHECK_TEXT(run, f->error.text, "breaker open after 9 failures: a cause");
    CHECK(run, ask(f, OTHER, &probe) == FA_OK);
    tear_down(f);
}

/* Parts of a second count as one; one that is longer than an hour stays so. */
static void breaker_cooldown_is_whole_seconds(test_run *run)
{
    static const struct {
        int64_t ns;
        int64_t seconds;
    } cases[] = {
        {0, 0}, {1, 1}, {1000000001, 2}, {INT64_C(1) << 60, 1152921505}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fixture *f = set_up(run);
        fa_breaker_trip(&f->breaker, ROW, cases[i].ns, "");
        const fa_store_entry e = stored(run, f, ROW);
        CHECK(run,
              e.retry - e.opened == cases[i].seconds + (cases[i].seconds != 0));
        tear_down(f);
    }
}

static void breaker_lets_one_call_try(test_run *run)
{
    bool probe = false;
    fa_store_entry e;
    fixture *f = set_up(run);
    fa_breaker_trip(&f->breaker, ROW, 0, "cause");
    for (int i = 0; i < 2; i++) {
        CHECK(run, ask(f, ROW, &probe) == FA_OK && probe);
        CHECK(run, ask(f, ROW, &probe) == FA_EOPEN && !probe);
        CHECK_TEXT(run, f->error.text, "half open after 1 failure: cause");
        CHECK(run, is_listed(f, ROW, &e) && f->half_open[0]);
        fa_breaker_return(&f->breaker, ROW);
        CHECK(run, is_listed(f, ROW, &e) && !f->half_open[0]);
    }
    CHECK(run, ask(f, ROW, &probe) == FA_OK && probe);
    CHECK(run, stored(run, f, ROW).failures == 1);
    fa_breaker_settle(&f->breaker, ROW);
    CHECK(run, !is_listed(f, ROW, &e) && stored(run, f, ROW).failures == 0);
    CHECK(run, ask(f, ROW, &probe) == FA_OK && !probe);
    /* In a row means without a success between. */
    fa_breaker_trip(&f->breaker, ROW, 0, "cause");
    CHECK(run, stored(run, f, ROW).failures == 1);
    /* One that was not tried cannot settle it, nor give anything back. */
    fa_breaker_settle(&f->breaker, ROW);
    CHECK(run, is_listed(f, ROW, &e));
    fa_breaker_reset(&f->breaker, NULL);
    fa_breaker_return(&f->breaker, ROW);
    CHECK(run, !is_listed(f, ROW, &e));
    tear_down(f);
}

static void breaker_is_open_in_the_next_process(test_run *run)
{
    bool probe = false;
    fixture *f = set_up(run);
    CHECK(run, ask(f, ROW, &probe) == FA_OK);
    fa_breaker_trip(&f->breaker, ROW, 60 * second, "cause");
    again(f);
    CHECK(run, ask(f, ROW, &probe) == FA_EOPEN);
    CHECK_TEXT(run, f->error.text, "open after 1 failure: cause");
    again(f);
    /* Of other code it says nothing. */
    CHECK(run, fa_breaker_ask(&f->breaker, ROW, code + 1, &probe, &f->error) ==
                       FA_OK &&
                   !probe);
    tear_down(f);
}

/* The clock was set back: else it would stay open for as long as that. */
static void breaker_opened_in_the_future_is_tried(test_run *run)
{
    bool probe = false;
    fixture *f = set_up(run);
    fa_store_entry e = {.code_hash = code,
                        .failures = 1,
                        .opened = (int64_t)time(NULL) + 90000,
                        .retry = (int64_t)time(NULL) + 90060,
                        .cause = "then"};
    snprintf(e.kernel, sizeof e.kernel, "%s", fa_variants[ROW].symbol);
    CHECK(run, fa_store_put(f->folder, identity, &e, &f->error) == FA_OK);
    again(f);
    CHECK(run, ask(f, ROW, &probe) == FA_OK && probe);
    tear_down(f);
}

/* What is tripped after a reset, or by hand before any call, must count for the
 * next process, too: that goes by the hash of the code. */
static void breaker_knows_its_code_after_a_reset(test_run *run)
{
    bool probe = false;
    fixture *f = set_up(run);
    fa_breaker_reset(&f->breaker, NULL);
    CHECK(run, ask(f, ROW, &probe) == FA_OK && !probe);
    fa_breaker_trip(&f->breaker, ROW, 60 * second, "cause");
    CHECK(run, stored(run, f, ROW).code_hash == code);
    again(f);
    CHECK(run, ask(f, ROW, &probe) == FA_EOPEN);
    tear_down(f);
    f = set_up(run);
    fa_breaker_trip(&f->breaker, ROW, 0, "by hand");
    CHECK(run, ask(f, ROW, &probe) == FA_OK && probe);
    fa_breaker_trip(&f->breaker, ROW, 60 * second, "cause");
    CHECK(run, stored(run, f, ROW).code_hash == code);
    again(f);
    CHECK(run, ask(f, ROW, &probe) == FA_EOPEN);
    tear_down(f);
}

/* Nothing was launched yet, so the hash of the code is not known. */
static void breaker_opened_by_hand_before_any_call_is_kept(test_run *run)
{
    bool probe = false;
    fixture *f = set_up(run);
    fa_breaker_trip(&f->breaker, ROW, 60 * second, "by hand");
    again(f);
    CHECK(run, ask(f, ROW, &probe) == FA_EOPEN && !probe);
    CHECK_TEXT(run, f->error.text, "open after 1 failure: by hand");
    /* What failed before counts as well. */
    fa_breaker_trip(&f->breaker, ROW, 60 * second, "failed");
    CHECK(run, stored(run, f, ROW).code_hash == code);
    again(f);
    fa_breaker_trip(&f->breaker, ROW, 60 * second, "by hand");
    const fa_store_entry e = stored(run, f, ROW);
    CHECK(run, e.failures == 3 && e.retry - e.opened == 241);
    again(f);
    CHECK(run, ask(f, ROW, &probe) == FA_EOPEN);
    /* It is blamed for more: in a row. */
    fa_breaker_blame(f->folder, identity, fa_variants[ROW].symbol, code,
                     60 * second, "died");
    CHECK(run, stored(run, f, ROW).failures == 4);
    /* Closed by hand, it still has to learn its code. */
    again(f);
    fa_breaker_trip(&f->breaker, ROW, 60 * second, "by hand");
    fa_breaker_reset(&f->breaker, NULL);
    CHECK(run, ask(f, ROW, &probe) == FA_OK && !probe);
    fa_breaker_trip(&f->breaker, ROW, 60 * second, "failed");
    CHECK(run, stored(run, f, ROW).failures == 1);
    CHECK(run, stored(run, f, ROW).code_hash == code);
    tear_down(f);
}

static void breaker_reset_forgets_what_the_disk_said(test_run *run)
{
    for (int all = 0; all < 2; all++) {
        bool probe = false;
        fixture *f = set_up(run);
        CHECK(run, ask(f, ROW, &probe) == FA_OK);
        CHECK(run, ask(f, OTHER, &probe) == FA_OK);
        fa_breaker_trip(&f->breaker, ROW, 60 * second, "cause");
        fa_breaker_trip(&f->breaker, OTHER, 60 * second, "cause");
        again(f); /* nobody has asked when it is reset */
        fa_breaker_reset(&f->breaker, all ? NULL : fa_variants[ROW].symbol);
        CHECK(run, stored(run, f, ROW).failures == 0);
        CHECK(run, stored(run, f, OTHER).failures == (all ? 0 : 1));
        CHECK(run, ask(f, ROW, &probe) == FA_OK && !probe);
        CHECK(run, ask(f, OTHER, &probe) == (all ? FA_OK : FA_EOPEN));
        tear_down(f);
    }
}

static void breaker_blames_on_disk_for_those_to_come(test_run *run)
{
    bool probe = false;
    fixture *f = set_up(run);
    for (uint32_t i = 1; i < 4; i++) {
        fa_breaker_blame(f->folder, identity, fa_variants[ROW].symbol, code,
                         60 * second, "died");
        const fa_store_entry e = stored(run, f, ROW);
        CHECK(run, e.failures == i && e.retry - e.opened == (30 << i) + 1);
    }
    /* Of other code: not in a row. */
    fa_breaker_blame(f->folder, identity, fa_variants[ROW].symbol, code + 1,
                     60 * second, "died");
    CHECK(run, stored(run, f, ROW).failures == 1);
    CHECK(run, ask(f, ROW, &probe) == FA_OK); /* read at the start */
    tear_down(f);
}

/* A disk that fails costs the record and leaves a complaint. */
static void breaker_works_without_the_disk(test_run *run)
{
    char text[FA_ERROR_CHARS];
    bool probe = false;
    fixture *f = set_up(run);
    fault_set("renameat", 1, EIO);
    fa_breaker_trip(&f->breaker, ROW, 60 * second, "cause");
    CHECK(run, fault_happened());
    fa_breaker_complaint(&f->breaker, text);
    CHECK_TEXT(run, text, strerror(EIO));
    CHECK(run, ask(f, ROW, &probe) == FA_EOPEN);
    again(f);
    fa_breaker_complaint(&f->breaker, text);
    CHECK(run, text[0] == '\0');
    fa_breaker_trip(&f->breaker, ROW, 60 * second, "cause");
    fault_set("flock", 1, EIO);
    fa_breaker_reset(&f->breaker, NULL);
    CHECK(run, fault_happened());
    fa_breaker_complaint(&f->breaker, text);
    CHECK_TEXT(run, text, strerror(EIO));
    CHECK(run, ask(f, ROW, &probe) == FA_OK);
    /* Others may write there: not used at all. */
    CHECK(run, chmod(f->folder, 0777) == 0);
    again(f);
    fa_breaker_complaint(&f->breaker, text);
    CHECK(run, text[0] != '\0' && f->breaker.dir == NULL);
    fa_breaker_trip(&f->breaker, OTHER, 60 * second, "cause");
    CHECK(run, ask(f, OTHER, &probe) == FA_EOPEN);
    CHECK(run, chmod(f->folder, 0700) == 0);
    CHECK(run, stored(run, f, OTHER).failures == 0);
    tear_down(f);
}

static void breaker_sets_a_bad_file_aside_and_goes_on(test_run *run)
{
    char text[FA_ERROR_CHARS];
    char command[SCRATCH_CHARS + 64];
    fixture *f = set_up(run);
    fa_breaker_trip(&f->breaker, ROW, 60 * second, "cause");
    snprintf(command, sizeof command,
             "cd '%s'; for f in *; do echo x >> $f; done", f->folder);
    CHECK(run, system(command) == 0);
    again(f);
    fa_breaker_complaint(&f->breaker, text);
    CHECK(run, text[0] != '\0' && f->breaker.dir != NULL);
    fa_breaker_trip(&f->breaker, OTHER, 60 * second, "cause");
    CHECK(run, stored(run, f, OTHER).failures == 1);
    tear_down(f);
}

static void breaker_lists_no_more_than_is_asked_for(test_run *run)
{
    fixture *f = set_up(run);
    fa_breaker_trip(&f->breaker, ROW, 60 * second, "cause");
    fa_breaker_trip(&f->breaker, OTHER, 60 * second, "cause");
    CHECK(run, fa_breaker_list(&f->breaker, f->entries, f->half_open, 1) == 1);
    CHECK(run, fa_breaker_list(&f->breaker, f->entries, f->half_open, 9) == 2);
    tear_down(f);
}

void test_breaker(test_run *run)
{
    RUN(run, breaker_doubles_its_cooldown_up_to_an_hour);
    RUN(run, breaker_cooldown_is_whole_seconds);
    RUN(run, breaker_lets_one_call_try);
    RUN(run, breaker_is_open_in_the_next_process);
    RUN(run, breaker_opened_in_the_future_is_tried);
    RUN(run, breaker_knows_its_code_after_a_reset);
    RUN(run, breaker_opened_by_hand_before_any_call_is_kept);
    RUN(run, breaker_reset_forgets_what_the_disk_said);
    RUN(run, breaker_blames_on_disk_for_those_to_come);
    RUN(run, breaker_works_without_the_disk);
    RUN(run, breaker_sets_a_bad_file_aside_and_goes_on);
    RUN(run, breaker_lists_no_more_than_is_asked_for);
}
