/* profile_spans.c: the timeline of a schedule.
 *
 * A wave's consecutive instructions of one unit make one span. At most
 * SPAN_LIMIT spans are kept, the first to be complete.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "profile_spans.h"

#include <stdlib.h>

/* Clocks between two instructions of a unit that do not end its span. */
enum { SPAN_GAP = 16 };

static void store(profile_schedule *schedule, const profile_span *span)
{
    if (span->end == span->begin || span->filler) {
        return;
    }
    if (schedule->spans < SPAN_LIMIT) {
        schedule->span[schedule->spans++] = *span;
        schedule->spans_until = span->end > schedule->spans_until
                                    ? span->end
                                    : schedule->spans_until;
    } else if (span->begin < schedule->spans_until) {
        schedule->spans_until = span->begin;
    }
}

void profile_span_add(profile_schedule *schedule, profile_span *open,
                      uint8_t what, uint64_t begin, uint64_t end)
{
    if (open->what == what && begin <= open->end + SPAN_GAP &&
        open->end > open->begin) {
        open->end = end;
        return;
    }
    /* A wait or barrier may have been opened as the instruction it is. */
    if (open->end > begin) {
        open->end = begin;
    }
    store(schedule, open);
    open->what = what;
    open->begin = begin;
    open->end = end;
}

void profile_span_end(profile_schedule *schedule, profile_span *open)
{
    store(schedule, open);
}

static int compare(const void *left, const void *right)
{
    const profile_span *a = left, *b = right;

    if (a->group != b->group) {
        return a->group < b->group ? -1 : 1;
    }
    if (a->wave != b->wave) {
        return a->wave < b->wave ? -1 : 1;
    }
    return (a->begin > b->begin) - (a->begin < b->begin);
}

void profile_spans_sort(profile_schedule *schedule)
{
    qsort(schedule->span, schedule->spans, sizeof schedule->span[0], compare);
}
