/* report.c: see report.h.  SPDX-License-Identifier: BSD-3-Clause */
#include "python/report.h"

#include <stdio.h>
#include <stdlib.h>

void fa_report_to_stderr(const char *text, bool fatal)
{
    (void)fprintf(stderr, "flash_attn_rocm: %s%s\n", text,
                  fatal ? "; ending the process" : "");
    if (fatal) {
        abort(); /* exit() would wait for the device that hangs */
    }
}
