/* wide.c: which tensors can be accessed 16 bytes at a time, and in words why
 * the others cannot, and why a plan has the kernels that it has.
 *
 * Every kernel takes either kind; a narrow tensor only costs time.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "host/plan.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { GRANULE_BYTES = 16 };

/* Kernels hold byte offsets inside a tile in 32 bits, which leaves row strides
 * below 2^24 bytes. */
static int32_t row_limit_log2(int32_t element_bytes)
{
    return element_bytes == 2 ? 23 : element_bytes == 4 ? 22 : 21;
}

void fa_list_tensors(const fa_problem *p, const fa_gradients *g,
                     const fa_tensor *list[FA_TENSORS])
{
    const fa_tensor *all[FA_TENSORS] = {&p->q,   &p->k, &p->v, NULL,
                                        &p->out, NULL,  NULL,  NULL};
    if (g != NULL) {
        all[3] = &g->dout;
        all[5] = (g->wanted & FA_WANT_DQ) != 0 ? &g->dq : NULL;
        all[6] = (g->wanted & FA_WANT_DK) != 0 ? &g->dk : NULL;
        all[7] = (g->wanted & FA_WANT_DV) != 0 ? &g->dv : NULL;
    }
    memcpy(list, all, sizeof all);
}

fa_narrow fa_why_narrow(const fa_tensor *t)
{
    const int32_t bytes = (int32_t)fa_dtype_bytes(t->dtype);
    fa_narrow why = {.limit = GRANULE_BYTES / bytes, .value = t->size[3]};
    if (t->size[3] % why.limit != 0) {
        why.cause = FA_CAUSE_DIM;
        return why;
    }
    if (t->stride[3] != 1) { /* the size is a granule or more */
        why.cause = FA_CAUSE_LAST;
        why.value = t->stride[3];
        return why;
    }
    if ((uintptr_t)t->data % GRANULE_BYTES != 0) {
        why.cause = FA_CAUSE_BASE;
        return why;
    }
    for (int d = 0; d < 3; d++) {
        if (t->size[d] == 1) {
            continue;
        }
        why.axis = d;
        why.value = t->stride[d];
        if (t->stride[d] % why.limit != 0) {
            why.cause = FA_CAUSE_STRIDE;
            return why;
        }
        if (d == 2 && t->stride[d] >> row_limit_log2(bytes) != 0) {
            why.cause = FA_CAUSE_ROW;
            why.limit = row_limit_log2(bytes);
            return why;
        }
    }
    return (fa_narrow){.cause = FA_CAUSE_WIDE};
}

/* -- words ----------------------------------------------------------------- */

/* Appends to a text of FA_WHY_CHARS; what does not fit is cut. */
FA_PRINTF(2, 3)
static void append(char *text, const char *format, ...)
{
    const size_t used = strlen(text);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + used, FA_WHY_CHARS - used, format, arguments);
    va_end(arguments);
}

static void append_cause(char *text, const fa_narrow *why)
{
    const char *axis = fa_axes[why->axis];
    const long long value = why->value;
    switch (why->cause) {
    case FA_CAUSE_WIDE:
        break;
    case FA_CAUSE_DIM:
        append(text, "head dim %lld is not a multiple of %d", value,
               (int)why->limit);
        break;
    case FA_CAUSE_LAST:
        append(text, "head dim stride %lld is not 1", value);
        break;
    case FA_CAUSE_BASE:
        append(text, "base is not 16-byte aligned");
        break;
    case FA_CAUSE_STRIDE:
        append(text, "%s stride %lld is not a multiple of %d", axis, value,
               (int)why->limit);
        break;
    case FA_CAUSE_ROTARY:
        append(text, "rotary dim %lld is not a multiple of %d", value,
               (int)why->limit);
        break;
    case FA_CAUSE_ROW:
        append(text, "%s stride %lld is not below 2^%d", axis, value,
               (int)why->limit);
        break;
    }
}

/* What a plan has beyond what FA_PLAIN knows, in the order of FA_HAS_*. */
static void append_features(char *text, uint32_t features)
{
    static const char *const names[] = {"bias",      "mask",    "alibi",
                                        "sink",      "softcap", "dropout",
                                        "sink keys", "spans",   "blocks"};
    const size_t count = sizeof names / sizeof names[0];
    bool first = true;
    for (size_t i = 0; i < count; i++) {
        if ((features >> i & 1) != 0) {
            append(text, "%s%s", first ? "full: " : ", ", names[i]);
            first = false;
        }
    }
    append(text, first ? "" : "; ");
}

static bool is_same(const fa_narrow *a, const fa_narrow *b)
{
    return a->cause == b->cause && a->axis == b->axis && a->limit == b->limit &&
           (a->value == b->value || a->cause == FA_CAUSE_BASE);
}

void fa_plan_why(const fa_plan *plan, char text[FA_WHY_CHARS])
{
    static const char *const of_attention[FA_TENSORS] = {
        "q", "k", "v", "dout", "out", "dq", "dk", "dv"};
    static const char *const of_rotary[] = {"q", "k", "cos", "sin"};
    const bool rotary =
        plan->count != 0 && plan->step[0].variant->pass == FA_ROTARY;
    const char *const *names = rotary ? of_rotary : of_attention;
    uint32_t left = 0;
    text[0] = '\0';
    if (plan->work != FA_WORK_STEPS) {
        append(text, "empty: %s",
               plan->backward ? plan->work == FA_WORK_NONE
                                    ? "no gradient has elements"
                                : plan->count == 0
                                    ? "the gradients are 0"
                                    : "the gradients are 0 but for that of sink"
               : plan->work == FA_WORK_NONE
                   ? "out has no elements"
                   : "no keys, so out is 0 and lse -inf");
        return;
    }
    for (int i = 0; i < FA_TENSORS; i++) {
        left |= plan->narrow[i].cause != FA_CAUSE_WIDE ? 1U << i : 0;
    }
    append_features(text, plan->features);
    append(text, left != 0 ? "narrow: "
                 : rotary  ? "wide: 16 bytes of q and k at a time"
                           : "wide: every load is 16 bytes");
    /* Tensors with the same reason are named together; a head dim that is
     * everybody's needs no names. */
    for (int i = 0; i < FA_TENSORS; i++) {
        if ((left >> i & 1) == 0) {
            continue;
        }
        uint32_t same = 0;
        for (int j = i; j < FA_TENSORS; j++) {
            if ((left >> j & 1) != 0 &&
                is_same(&plan->narrow[i], &plan->narrow[j])) {
                same |= 1U << j;
            }
        }
        left &= ~same;
        const bool everybody =
            plan->narrow[i].cause == FA_CAUSE_DIM && same == plan->tensors;
        for (int j = i; j < FA_TENSORS && !everybody; j++) {
            if ((same >> j & 1) != 0) {
                append(text, "%s%s", j == i ? "" : ", ", names[j]);
            }
        }
        append(text, everybody ? "" : " ");
        append_cause(text, &plan->narrow[i]);
        append(text, left != 0 ? "; " : "");
    }
}
