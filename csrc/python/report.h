/* report.h: what the guard reports goes to stderr; a fatal report ends the
 * process.
 *
 * The host layer does neither by itself.  Without Python, which may be gone or
 * busy when a queue hangs, and so tested with the host layer (tests/c).
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_PYTHON_REPORT_H
#define FA_PYTHON_REPORT_H

#include <stdbool.h>

/* An fa_guard_report (host/guard.h). */
void fa_report_to_stderr(const char *text, bool fatal);

#endif
