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
    SIM_OPTION_SAMPLE,  /* workgroups to run of a launch, 0 = all */
    SIM_OPTION_SEED,    /* order of the waves: 0 in turn, else random */
    SIM_OPTION_DOT2,    /* SIM_DOT2_* */
    SIM_OPTION_ULP,     /* 1: estimates are off by up to one ulp */
    SIM_OPTION_PROFILE, /* 1: count and time launches */
    SIM_OPTION_TRACED,  /* workgroups whose schedule a profile tells */
    SIM_OPTION_SKIP,    /* leave out the instruction at this offset */
    SIM_OPTION_PROBE,   /* report the s_waitcnt there if it has an effect */
    SIM_OPTION_MUTATED, /* code bytes of the kernel that both are for, 0 any */
    SIM_OPTIONS
} sim_option;

/* What v_dot2_f32_f16 does inside; no document says. */
enum {
    SIM_DOT2_LOHI = 0,   /* low product first, each sum rounded */
    SIM_DOT2_HILO = 1,   /* high product first */
    SIM_DOT2_FUSED = 2,  /* both products and the sum, rounded once */
    SIM_DOT2_ORDER = 3,  /* mask of the three above */
    SIM_DOT2_KEEP32 = 4, /* float denormals are kept, not flushed */
    SIM_DOT2_FLUSH16 = 8 /* half denormals are flushed, not kept */
};

/* The current value; the first call reads the environment. */
int64_t sim_option_get(sim_option option);

#endif
