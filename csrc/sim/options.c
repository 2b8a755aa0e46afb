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
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct option_row {
    const char *name, *variable;
    int64_t initial, lowest, highest;
} option_row;

static const option_row rows[SIM_OPTIONS] = {
    [SIM_OPTION_CHECK] = {"check", "HIPSIM_CHECK", 0, 0, 1},
    [SIM_OPTION_THREADS] = {"threads", "HIPSIM_THREADS", 0, 0, 1024},
    [SIM_OPTION_CPU] = {"cpu", "HIPSIM_CPU", 1, 0, 1},
    [SIM_OPTION_BUDGET] = {"budget", "HIPSIM_BUDGET", 0, 0, INT64_MAX},
};

static _Atomic int64_t values[SIM_OPTIONS];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void read_environment(void)
{
    for (int i = 0; i < SIM_OPTIONS; i++) {
        const option_row *row = &rows[i];
        const char *text = getenv(row->variable);
        int64_t value = row->initial;
        if (text != NULL && text[0] != '\0') {
            char *end;
            errno = 0;
            long long number = strtoll(text, &end, 10);
            if (errno == 0 && *end == '\0' && number >= row->lowest &&
                number <= row->highest) {
                value = number;
            } else {
                (void)fprintf(stderr,
                              "hipsim: %s=%s: expected a number from %lld to "
                              "%lld, using %lld\n",
                              row->variable, text, (long long)row->lowest,
                              (long long)row->highest, (long long)row->initial);
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
    return sim_fail(hipErrorInvalidValue,
                    "option: expected check, threads, cpu or budget, got %s",
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
    if (value < rows[option].lowest || value > rows[option].highest) {
        return sim_fail(hipErrorInvalidValue,
                        "option %s: expected %lld to %lld, got %lld", name,
                        (long long)rows[option].lowest,
                        (long long)rows[option].highest, (long long)value);
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
