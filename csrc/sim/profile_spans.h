/* profile_spans.h: the timeline of a schedule (internal to profile*.c).
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_PROFILE_SPANS_H
#define HIPSIM_PROFILE_SPANS_H

#include "profile_model.h"

/* A wave did `what` from begin to end: lengthens its open span, or stores that
 * and opens another. */
void profile_span_add(profile_schedule *schedule, profile_span *open,
                      uint8_t what, uint64_t begin, uint64_t end);
/* The wave has ended. */
void profile_span_end(profile_schedule *schedule, profile_span *open);

/* By workgroup, wave and time. */
void profile_spans_sort(profile_schedule *schedule);

#endif
