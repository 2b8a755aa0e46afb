/* fake_runtime.h: what the fake GPU runtime remembers and is told to do.
 *
 * The library exports the functions of HIP and of the CUDA driver that the
 * host layer looks up, and `fake`.  It is built once and copied to the names
 * that the host layer searches for, so each copy has its own state.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FAKE_RUNTIME_H
#define FAKE_RUNTIME_H

#include "kernels/args.h"

#include <stdbool.h>

enum { FAKE_LAUNCHES = 8, FAKE_TENSORS = 21, FAKE_OPS = 32 };

enum { FAKE_UNKNOWN = 999 }; /* an error that the runtime has no words for */

/* What was put into a stream, in order. */
typedef struct fake_op {
    enum { FAKE_LAUNCH, FAKE_RECORD, FAKE_WAIT } what;
    const void *stream;
    const void *event; /* of the last two */
} fake_op;

/* What one launch was given. */
typedef struct fake_launch {
    const char *symbol;
    unsigned grid[3];
    unsigned threads;
    unsigned lds_bytes;
    void *stream;
    fa_args args;
    fa_rotary_args rotary; /* instead, of kernels that are called so */
    int tensor_count;      /* of hipsimLaunch */
    const void *tensor_data[FAKE_TENSORS];
    int64_t tensor_stride0[FAKE_TENSORS];
    uint32_t tensor_access[FAKE_TENSORS];
    int32_t tensor_bytes[FAKE_TENSORS]; /* of an element */
} fake_launch;

typedef struct fake_state {
    /* told */
    int device_count;
    const char *arch_r0600; /* gcnArchName, NULL: the call fails */
    const char *arch_r0000;
    int cc_major;
    int cc_minor;
    _Atomic(const char *) failing_call; /* this one returns `code`, once */
    _Atomic int failing_after;          /* so many calls of it */
    int code;
    const char *report; /* hipsimLastReport() */
    bool slow;          /* loading takes a while, so that threads meet */
    float elapsed_ms;   /* between any two events */
    bool capturing;     /* every stream is */
    _Atomic bool hangs; /* events recorded from now on are not over, until
                         * false */
    _Atomic(const char *) hanging; /* launching this kernel sets `hangs` */
    void (*at_launch)(void);
    uint64_t deadline_cost; /* of a simulated launch: more than its deadline
                             * is hipErrorLaunchTimeOut */

    /* remembered */
    _Atomic int device; /* current; -1 is CUDA without a context */
    int device_at_launch;
    _Atomic int retained; /* primary contexts held */
    _Atomic int loads;
    _Atomic int unloads;
    _Atomic int lookups;
    int launches;
    int errors_cleared; /* hipGetLastError calls before the last launch */
    fake_launch launch[FAKE_LAUNCHES]; /* the first ones */
    int allowed_lds;                   /* cuFuncSetAttribute */
    void *stream;                      /* of the last launch or fill */
    _Atomic int events;                /* created and not destroyed */
    _Atomic int streams;               /* likewise */
    _Atomic int records;
    _Atomic int waits;   /* of streams for events */
    void *waiting;       /* the stream of the last one */
    _Atomic int relaxed; /* threads that leave captures alone */
    uint64_t deadline;   /* of the last simulated launch */
    int ops;             /* in all; the first ones are in `op` */
    fake_op op[FAKE_OPS];
} fake_state;

#endif
