/* report.h: why the calling thread's last call failed (internal).
 *
 * Every error is a hipError_t value and one line of text, both kept per
 * thread. SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_REPORT_H
#define HIPSIM_REPORT_H

#include "hipsim.h"

/* Forgets the report; every exported call that can fail starts with it. */
void sim_report_clear(void);

/* Stores the report and makes `code` the thread's last error; returns it. */
hipError_t sim_fail(hipError_t code, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#endif
