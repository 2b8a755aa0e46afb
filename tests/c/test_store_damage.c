/* test_store_damage.c: no damage to a file of breakers passes for entries, or
 * stops the next write: it is set aside and said once.
 *
 * Files are written with a checksum computed here.
 * SPDX-License-Identifier: BSD-3-Clause */
#define _XOPEN_SOURCE 700
#include "faults.h"
#include "host/store.h"
#include "scratch.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const char device[] = "gfx906 driver 6.3 runtime 5.7";
static const char file_name[] = "breakers-e45d3d8407def234.txt";
static const char bad_name[] = "breakers-e45d3d8407def234.txt.bad";

enum { TEXT_CHARS = 300000 };

typedef struct fixture {
    char folder[SCRATCH_CHARS];
    fa_error error;
    size_t count;
    fa_store_entry entry[FA_STORE_MAX];
    char text[TEXT_CHARS];
    size_t length;
} fixture;

static fa_status put(fixture *f, const char *kernel)
{
    fa_store_entry e = {.failures = 1, .opened = 5, .retry = 6};
    snprintf(e.kernel, sizeof e.kernel, "%s", kernel);
    return fa_store_put(f->folder, device, &e, &f->error);
}

static fa_status get(fixture *f)
{
    return fa_store_read(f->folder, device, f->entry, FA_STORE_MAX, &f->count,
                         &f->error);
}

/* With two entries, whose text is in it. */
static fixture *set_up(test_run *run)
{
    fixture *f = calloc(1, sizeof *f);
    if (f == NULL) {
        abort();
    }
    scratch_folder(run, f->folder);
    CHECK(run, put(f, "fwd_f16_d64") == FA_OK);
    CHECK(run, put(f, "bwd_f16_d64") == FA_OK);
    f->length =
        (size_t)scratch_read(f->folder, file_name, f->text, sizeof f->text);
    return f;
}

/* That these bytes are no file of breakers; `writes`: also to a put. */
static bool is_bad(fixture *f, const void *bytes, size_t length, bool writes)
{
    char before[64] = "";
    char after[64] = "";
    scratch_write(f->folder, file_name, bytes, length);
    scratch_read(f->folder, file_name, before, sizeof before);
    f->count = 9;
    bool good = get(f) == FA_EINVAL && f->count == 0;
    good = good && strncmp(f->error.text, file_name, strlen(file_name)) == 0;
    /* It is aside, as it was, and all is as if there had been none. */
    scratch_read(f->folder, bad_name, after, sizeof after);
    good = good && memcmp(before, after, sizeof after) == 0;
    good = good && scratch_count(f->folder, file_name) == 1;
    good = good && get(f) == FA_OK && f->count == 0;
    if (good && writes) {
        /* A write does so by itself. */
        scratch_write(f->folder, file_name, bytes, length);
        good = put(f, "later") == FA_OK && get(f) == FA_OK && f->count == 1;
    }
    return good;
}

/* Adds a checksum to the text. */
static void seal(fixture *f)
{
    uint64_t hash = UINT64_C(14695981039346656037);
    for (size_t i = 0; i < f->length; i++) {
        hash ^= (unsigned char)f->text[i];
        hash *= UINT64_C(1099511628211);
    }
    f->length += (size_t)snprintf(f->text + f->length, 64,
                                  "checksum %016" PRIx64 "\n", hash);
}

static void write_sealed(fixture *f, const char *title, const char *line,
                         const char *rest)
{
    f->length = (size_t)snprintf(f->text, sizeof f->text, "%s\n%s\n%s", title,
                                 line, rest);
    seal(f);
}

static const char title[] = "flash_attn_rocm breakers 1";
static const char line_of_device[] = "device gfx906 driver 6.3 runtime 5.7";

static void store_notices_each_byte_that_changed(test_run *run)
{
    fixture *f = set_up(run);
    for (size_t i = 0; i < f->length; i++) {
        f->text[i] ^= 1;
        CHECK(run, is_bad(f, f->text, f->length, i % 16 == 0));
        f->text[i] ^= 1;
    }
    scratch_write(f->folder, file_name, f->text, f->length);
    CHECK(run, get(f) == FA_OK && f->count == 2);
    free(f);
}

static void store_notices_each_length_that_is_cut(test_run *run)
{
    fixture *f = set_up(run);
    for (size_t i = 0; i < f->length; i++) {
        CHECK(run, is_bad(f, f->text, i, i % 16 == 0));
    }
    f->text[f->length] = '\n';
    CHECK(run, is_bad(f, f->text, f->length + 1, true));
    free(f);
}

static void store_sets_garbage_aside(test_run *run)
{
    fixture *f = set_up(run);
    uint64_t state = 1;
    for (int round = 0; round < 50; round++) {
        const size_t length = (size_t)(round * 17);
        for (size_t i = 0; i < length; i++) {
            f->text[i] = (char)(test_random(&state) * 60.0);
        }
        CHECK(run, is_bad(f, f->text, length, round % 10 == 0));
    }
    memset(f->text, 0, 1000);
    CHECK(run, is_bad(f, f->text, 1000, true));
    free(f);
}

static void store_sets_files_aside_that_are_too_long(test_run *run)
{
    fixture *f = set_up(run);
    memset(f->text, 'x', sizeof f->text);
    CHECK(run, is_bad(f, f->text, sizeof f->text, true));
    CHECK(run, is_bad(f, f->text, 128 * 1024, true));
    /* More kernels than there may be, with a right checksum. */
    f->length = (size_t)sprintf(f->text, "%s\n%s\n", title, line_of_device);
    for (int i = 0; i < FA_STORE_MAX + 1; i++) {
        if (i == FA_STORE_MAX) {
            fixture *full = set_up(run);
            memcpy(full->text, f->text, f->length);
            full->length = f->length;
            seal(full);
            scratch_write(full->folder, file_name, full->text, full->length);
            CHECK(run, get(full) == FA_OK && full->count == FA_STORE_MAX);
            free(full);
        }
        f->length += (size_t)sprintf(f->text + f->length,
                                     "kernel k%d 0123456789abcdef 1 2 3 \n", i);
    }
    seal(f);
    CHECK(run, is_bad(f, f->text, f->length, true));
    CHECK(run, put(f, "later") == FA_OK);
    free(f);
}

static void store_looks_at_each_field_behind_a_right_checksum(test_run *run)
{
    static const char *const bad[] = {
        "kernel fwd 0123456789abcdef 1 2 3",              /* no cause */
        "kernel  0123456789abcdef 1 2 3 late",            /* no symbol */
        "kernel f\x01 0123456789abcdef 1 2 3 late",       /* control */
        "kernel f\xc3 0123456789abcdef 1 2 3 late",       /* not ASCII */
        "kernel fwd 0123456789abcde 1 2 3 late",          /* 15 digits */
        "kernel fwd 0123456789abcdef0 1 2 3 late",        /* 17 */
        "kernel fwd 0123456789abcdeF 1 2 3 late",         /* upper case */
        "kernel fwd 0123456789abcdeg 1 2 3 late",         /* no digit */
        "kernel fwd 0123456789abcdef 0 2 3 late",         /* no failures */
        "kernel fwd 0123456789abcdef -1 2 3 late",        /* sign */
        "kernel fwd 0123456789abcdef +1 2 3 late",        /* sign */
        "kernel fwd 0123456789abcdef  1 2 3 late",        /* two spaces */
        "kernel fwd 0123456789abcdef 4294967296 2 3 l",   /* 2^32 */
        "kernel fwd 0123456789abcdef 1 -2 3 late",        /* before 1970 */
        "kernel fwd 0123456789abcdef 1 0x2 3 late",       /* hexadecimal */
        "kernel fwd 0123456789abcdef 1 3 2 late",         /* retry first */
        "kernel fwd 0123456789abcdef 1 2 253402300800 l", /* year 10000 */
        "kernel fwd 0123456789abcdef 1 2 99999999999999999999999 late",
        "kernel fwd 0123456789abcdef 1 2 3 a\tb",  /* control */
        "kernel fwd 0123456789abcdef 1 2 3 a\x7f", /* control */
        "kernel fwd 0123456789abcdef 1 2 3 a\n",   /* empty line */
        "kernel fwd 0123456789abcdef 1 2 3 a\nkernel fwd 0123456789abcdef 1 2 "
        "3 twice",
        "kernels fwd 0123456789abcdef 1 2 3 late",
        "path /etc/passwd",
    };
    fixture *f = set_up(run);
    char lengthy[600];
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        snprintf(lengthy, sizeof lengthy, "%s\n", bad[i]);
        write_sealed(f, title, line_of_device, lengthy);
        if (!CHECK(run, is_bad(f, f->text, f->length, i % 8 == 0))) {
            printf("  %s\n", bad[i]);
        }
    }
    /* The longest that fit, and one more. */
    for (int more = 0; more < 2; more++) {
        for (int which = 0; which < 2; which++) {
            snprintf(lengthy, sizeof lengthy,
                     "kernel %0*d 0123456789abcdef 1 2 3 %0*d\n",
                     127 + (which == 0 ? more : 0), 0,
                     191 + (which == 1 ? more : 0), 0);
            write_sealed(f, title, line_of_device, lengthy);
            if (more == 1) {
                CHECK(run, is_bad(f, f->text, f->length, true));
            } else {
                scratch_write(f->folder, file_name, f->text, f->length);
                CHECK(run, get(f) == FA_OK && f->count == 1);
            }
        }
    }
    free(f);
}

static void store_looks_at_title_and_device(test_run *run)
{
    static const char *const bad[][2] = {
        {"flash_attn_rocm breakers 2", line_of_device},
        {"flash_attn_rocm breakers 11", line_of_device},
        {"", line_of_device},
        {title, "device "},
        {title, "device a\x01"},
        {title, "device another"},
        {title, "driver gfx906 driver 6.3 runtime 5.7"},
    };
    fixture *f = set_up(run);
    char lengthy[400];
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        write_sealed(f, bad[i][0], bad[i][1], "");
        CHECK(run, is_bad(f, f->text, f->length, true));
    }
    snprintf(lengthy, sizeof lengthy, "device %0256d", 0);
    write_sealed(f, title, lengthy, "");
    CHECK(run, is_bad(f, f->text, f->length, true));
    /* The device's line without an end. */
    f->length = (size_t)sprintf(f->text, "%s\ndevice gfx906", title);
    seal(f);
    CHECK(run, is_bad(f, f->text, f->length, true));
    /* And the file that would have been right. */
    write_sealed(f, title, line_of_device, "");
    scratch_write(f->folder, file_name, f->text, f->length);
    CHECK(run, get(f) == FA_OK && f->count == 0);
    free(f);
}

static void store_keeps_the_newest_bad_file(test_run *run)
{
    fixture *f = set_up(run);
    CHECK(run, is_bad(f, "first", 5, false));
    CHECK(run, is_bad(f, "second", 6, false));
    CHECK(run, scratch_count(f->folder, ".bad") == 1);
    scratch_read(f->folder, bad_name, f->text, sizeof f->text);
    CHECK_TEXT(run, f->text, "second");
    free(f);
}

static void store_says_when_a_bad_file_cannot_be_set_aside(test_run *run)
{
    fixture *f = set_up(run);
    size_t removed = 0;
    CHECK(run, mkdir(scratch_path(f->folder, bad_name), 0700) == 0);
    scratch_write(f->folder, file_name, "bad", 3);
    CHECK(run, get(f) == FA_EINVAL && f->count == 0);
    CHECK_TEXT(run, f->error.text, "expected another first line, got 3 bytes");
    CHECK(run, put(f, "later") == FA_EDEVICE);
    CHECK_TEXT(run, f->error.text, ".txt: expected to set it aside, got: Is a");
    CHECK(run,
          fa_store_reset(f->folder, NULL, &removed, &f->error) == FA_EDEVICE);
    free(f);
}

static void put_a_good_one(void *context)
{
    fixture *f = context;
    scratch_write(f->folder, file_name, f->text, f->length);
}

static void store_does_not_set_aside_what_a_writer_just_repaired(test_run *run)
{
    fixture *f = set_up(run);
    scratch_write(f->folder, file_name, "bad", 3);
    snprintf(f->error.text, sizeof f->error.text, "untouched");
    fault_set_before("flock", 1, put_a_good_one, f);
    CHECK(run, get(f) == FA_OK && f->count == 2);
    CHECK(run, fault_happened());
    CHECK_TEXT(run, f->error.text, "untouched");
    CHECK(run, scratch_count(f->folder, ".bad") == 0);
    free(f);
}

void test_store_damage(test_run *run)
{
    RUN(run, store_notices_each_byte_that_changed);
    RUN(run, store_notices_each_length_that_is_cut);
    RUN(run, store_sets_garbage_aside);
    RUN(run, store_sets_files_aside_that_are_too_long);
    RUN(run, store_looks_at_each_field_behind_a_right_checksum);
    RUN(run, store_looks_at_title_and_device);
    RUN(run, store_keeps_the_newest_bad_file);
    RUN(run, store_says_when_a_bad_file_cannot_be_set_aside);
    RUN(run, store_does_not_set_aside_what_a_writer_just_repaired);
}
