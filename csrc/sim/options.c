/* options.c: process-wide settings, from the environment and by call.
 *
 * State: one number per option. The environment is read once, by whichever
 * call comes first; a malformed value costs one warning on stderr and gives
 * the default.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "options.h"
#include "report.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A value spelled as a word; several may be joined by commas, but not one
 * twice, nor two that are alternatives. */
typedef struct option_word {
    const char *text;
    int64_t value;
    bool alternative;
} option_word;

typedef struct option_row {
    const char *name, *variable;
    int64_t initial, lowest, highest;
    const option_word *words; /* NULL: numbers only; the first is `initial` */
    const char *expected;     /* for messages, if there are words */
} option_row;

static const option_word dot2_words[] = {
    {"lohi", SIM_DOT2_LOHI, true},        {"hilo", SIM_DOT2_HILO, true},
    {"fused", SIM_DOT2_FUSED, true},      {"keep32", SIM_DOT2_KEEP32, false},
    {"flush16", SIM_DOT2_FLUSH16, false}, {NULL, 0, false},
};
static const option_word ulp_words[] = {
    {"nearest", 0, true},
    {"adversarial", 1, true},
    {NULL, 0, false},
};

static const option_row rows[SIM_OPTIONS] = {
    [SIM_OPTION_CHECK] = {"check", "HIPSIM_CHECK", 0, 0, 2, NULL, NULL},
    [SIM_OPTION_THREADS] = {"threads", "HIPSIM_THREADS", 0, 0, 1024, NULL,
                            NULL},
    [SIM_OPTION_CPU] = {"cpu", "HIPSIM_CPU", 1, 0, 1, NULL, NULL},
    [SIM_OPTION_BUDGET] = {"budget", "HIPSIM_BUDGET", 0, 0, INT64_MAX, NULL,
                           NULL},
    [SIM_OPTION_SAMPLE] = {"sample", "HIPSIM_SAMPLE", 0, 0, INT64_MAX, NULL,
                           NULL},
    [SIM_OPTION_SEED] = {"seed", "HIPSIM_SEED", 0, 0, INT64_MAX, NULL, NULL},
    [SIM_OPTION_DOT2] = {"dot2", "HIPSIM_DOT2", 0, 0, 15, dot2_words,
                         "lohi, hilo or fused, then keep32, flush16"},
    [SIM_OPTION_ULP] = {"ulp", "HIPSIM_ULP", 0, 0, 1, ulp_words,
                        "nearest or adversarial"},
    [SIM_OPTION_PROFILE] = {"profile", "HIPSIM_PROFILE", 0, 0, 1, NULL, NULL},
    [SIM_OPTION_TRACED] = {"profile_groups", "HIPSIM_PROFILE_GROUPS", 16, 0,
                           4096, NULL, NULL},
    [SIM_OPTION_SKIP] = {"skip", "HIPSIM_SKIP", -1, -1, INT64_MAX, NULL, NULL},
    [SIM_OPTION_PROBE] = {"probe", "HIPSIM_PROBE", -1, -1, INT64_MAX, NULL,
                          NULL},
    [SIM_OPTION_MUTATED] = {"mutated", "HIPSIM_MUTATED", 0, 0, INT64_MAX, NULL,
                            NULL},
};

static _Atomic int64_t values[SIM_OPTIONS];
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* The words of `text`, joined by commas, as one number. */
static bool parse_words(const option_word *words, const char *text,
                        int64_t *value)
{
    bool chosen = false;

    *value = 0;
    for (;;) {
        size_t length = strcspn(text, ",");
        const option_word *word = words;
        while (word->text != NULL && (strlen(word->text) != length ||
                                      strncmp(word->text, text, length) != 0)) {
            word++;
        }
        if (word->text == NULL ||
            (word->alternative ? chosen : (*value & word->value) != 0)) {
            return false;
        }
        chosen |= word->alternative;
        *value |= word->value;
        if (text[length] == '\0') {
            return true;
        }
        text += length + 1;
    }
}

/* Digits alone, behind a minus sign or nothing; strtoll takes more. */
static bool parse_number(const char *text, int64_t *value)
{
    char *end;

    if (text[text[0] == '-'] < '0' || text[text[0] == '-'] > '9') {
        return false;
    }
    errno = 0;
    long long number = strtoll(text, &end, 10);
    *value = number;
    return errno == 0 && *end == '\0';
}

static bool fits(sim_option option, int64_t value)
{
    const option_row *row = &rows[option];

    return value >= row->lowest && value <= row->highest &&
           (option != SIM_OPTION_DOT2 ||
            (value & SIM_DOT2_ORDER) != SIM_DOT2_ORDER);
}

/* What row accepts, for messages. */
static const char *expected(const option_row *row, char *text, size_t size)
{
    if (row->words != NULL) {
        return row->expected;
    }
    (void)snprintf(text, size, "a number from %lld to %lld",
                   (long long)row->lowest, (long long)row->highest);
    return text;
}

static void read_environment(void)
{
    for (int i = 0; i < SIM_OPTIONS; i++) {
        const option_row *row = &rows[i];
        const char *text = getenv(row->variable);
        int64_t value = row->initial;
        if (text != NULL && text[0] != '\0') {
            int64_t given;
            bool known =
                (row->words != NULL && parse_words(row->words, text, &given)) ||
                parse_number(text, &given);
            if (known && fits((sim_option)i, given)) {
                value = given;
            } else {
                char range[64];
                char initial[24];
                (void)snprintf(initial, sizeof initial, "%lld",
                               (long long)row->initial);
                (void)fprintf(
                    stderr, "hipsim: %s=%s: expected %s, using %s\n",
                    row->variable, text, expected(row, range, sizeof range),
                    row->words != NULL ? row->words[0].text : initial);
            }
        }
        atomic_store(&values[i], value);
    }
}

int64_t sim_option_get(sim_option option)
{
    (void)pthread_once(&once, read_environment);
    return atomic_load(&values[option]);
}

static hipError_t find_option(const char *name, sim_option *option)
{
    *option = SIM_OPTION_CHECK;
    for (int i = 0; name != NULL && i < SIM_OPTIONS; i++) {
        if (strcmp(rows[i].name, name) == 0) {
            *option = (sim_option)i;
            return hipSuccess;
        }
    }
    return sim_fail(hipErrorInvalidValue, "option: no option is called %s",
                    name != NULL ? name : "NULL");
}

HIPSIM_API hipError_t hipsimSetOption(const char *name, int64_t value)
{
    sim_option option;

    sim_report_clear();
    hipError_t status = find_option(name, &option);
    if (status != hipSuccess) {
        return status;
    }
    if (!fits(option, value)) {
        char range[64];
        return sim_fail(
            hipErrorInvalidValue, "option %s: expected %s, got %lld", name,
            expected(&rows[option], range, sizeof range), (long long)value);
    }
    (void)sim_option_get(option); /* the environment first, then the call */
    atomic_store(&values[option], value);
    return hipSuccess;
}

HIPSIM_API hipError_t hipsimGetOption(const char *name, int64_t *value)
{
    sim_option option;

    sim_report_clear();
    hipError_t status = find_option(name, &option);
    if (status == hipSuccess && value == NULL) {
        status =
            sim_fail(hipErrorInvalidValue, "option %s: value is NULL", name);
    }
    if (status == hipSuccess) {
        *value = sim_option_get(option);
    }
    return status;
}
