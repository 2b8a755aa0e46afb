/* rig.h: a guard, a fake device and calls through both.
 *
 * The tests of the guard share it.  The deadline is the floor of the policy:
 * 20 ms unless a test says otherwise.
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_RIG_H
#define FA_RIG_H

#include "fake_runtime.h"
#include "host/flight.h"
#include "host/guard.h"
#include "scratch.h"

enum { RIG_ELEMENTS = 2048, RIG_DEADLINE_MS = 20 };

typedef struct rig_call {
    fa_problem p;
    fa_gradients g;
    fa_plan plan;
    fa_target target;
    fa_counts counts;
    fa_error error;
    _Alignas(16) char memory[5][RIG_ELEMENTS]; /* out out_lo dq dk dv */
    _Alignas(16) char lse[RIG_ELEMENTS];
    _Alignas(16) char workspace[RIG_ELEMENTS * 8];
} rig_call;

typedef struct rig {
    test_run *run;
    void *library;
    fake_state *fake;
    fa_runtime *runtime;
    fa_guard *guard;
    fa_policy policy;
    fa_error error;
    int stream;                 /* the caller's is its address */
    char folder[SCRATCH_CHARS]; /* of its state */
    rig_call *call;             /* the main thread's */
} rig;

/* A rig on fake HIP, CUDA, the fake simulator or nothing; nothing on disk if
 * `kept` is false.  Its folder is a new one. */
rig *rig_open(test_run *run, fa_backend backend, fa_guard_mode mode, bool kept);
/* Closes all and opens it anew on the same folder, as the next process
 * would. */
void rig_again(rig *r);
/* All is over first, so that nothing is lost. */
void rig_close(rig *r);
void rig_set_mode(rig *r, fa_guard_mode mode);

rig_call *rig_new_call(rig *r);
/* One kernel in fp16; several, which begin with FA_PREPARE. */
fa_status rig_forward(rig *r, rig_call *c);
fa_status rig_backward(rig *r, rig_call *c);
/* The symbols of those plans. */
const char *rig_forward_kernel(void);
const char *rig_step(rig *r, int step); /* of the last plan of r->call */

/* Whether the `at`-th operation on a stream was this one. */
bool rig_is_op(const rig *r, int at, int what, const void *stream);
/* Opens a kernel of the first device by hand. */
void rig_trip(rig *r, const char *kernel, int64_t cooldown_ns);

/* Waits, some seconds at most, for what the watching thread does; of a miss
 * with its folder also for the mark there. */
bool rig_waits_until_over(rig *r);
bool rig_waits_for_misses(rig *r, uint64_t misses);

fa_guard_counts rig_counts(rig *r);
/* The state of a kernel on the first device: fa_breaker_state, and the entry if
 * `entry` is not NULL. */
fa_breaker_state rig_state(rig *r, const char *kernel, fa_store_entry *entry);
uint64_t rig_latency_calls(rig *r, const char *kernel);
/* Slots of the flight files in the folder in this state. */
enum { RIG_FLYING = 2, RIG_LATE = 3 };
int rig_slots(rig *r, uint32_t state);

/* What goes to stderr in between, cut to `chars`. */
int rig_hide_stderr(rig *r);
void rig_show_stderr(rig *r, int hidden, char *text, size_t chars);

void rig_sleep_ms(int ms);

#endif
