/* options.h: process-wide settings (internal).
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_OPTIONS_H
#define HIPSIM_OPTIONS_H

#include <stdint.h>

typedef enum sim_option {
    SIM_OPTION_CHECK,   /* check level */
    SIM_OPTION_THREADS, /* per launch, 0 = all cores */
    SIM_OPTION_CPU,     /* 0 portable code, 1 best for this host */
    SIM_OPTION_BUDGET,  /* wave instructions per workgroup, 0 = none */
    SIM_OPTIONS
} sim_option;

/* The current value; the first call reads the environment. */
int64_t sim_option_get(sim_option option);

#endif
