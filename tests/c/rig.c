/* rig.c: see rig.h.  SPDX-License-Identifier: BSD-3-Clause */
#define _XOPEN_SOURCE 700
#include "rig.h"
#include "python/report.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { WANTED = FA_WANT_DQ | FA_WANT_DK | FA_WANT_DV, PATIENCE_MS = 10000 };

/* Code objects of the kind that the fake runtimes understand. */
static void write_code(const rig *r, uint16_t machine)
{
    static const char *const units[] = {"gfx906_f16.co", "gfx906_f32.co",
                                        "gfx906_f64.co", "sm_80_f16.cubin",
                                        "sm_80_f32.cubin"};
    unsigned char bytes[67] = {0x7f, 'E', 'L', 'F', 2};
    memcpy(bytes + 18, &machine, sizeof machine);
    memcpy(bytes + 64, "ok", 3);
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++) {
        char name[64];
        snprintf(name, sizeof name, "fa_%s", units[i]);
        scratch_write(r->run->scratch, name, bytes, sizeof bytes);
    }
}

static void open_runtime(rig *r)
{
    char sim[SCRATCH_CHARS];
    snprintf(sim, sizeof sim, "%.4000s/libfakesim.so", r->run->fakes);
    if (fa_runtime_open(r->run->scratch, sim, &r->runtime, &r->error) !=
        FA_OK) {
        abort();
    }
}

static void open_guard(rig *r)
{
    if (!CHECK(r->run,
               fa_guard_open(&r->policy, &r->guard, &r->error) == FA_OK)) {
        abort();
    }
    r->call->target.guard = r->guard;
}

rig *rig_open(test_run *run, fa_backend backend, fa_guard_mode mode, bool kept)
{
    static const char *const names[] = {"libamdhip64.so.6", "libfakesim.so",
                                        "libcuda.so.1"};
    rig *r = calloc(1, sizeof *r);
    if (r == NULL) {
        abort();
    }
    r->run = run;
    scratch_folder(run, r->folder);
    if (backend != FA_NULL) {
        r->library = test_load_fake(run, names[backend], &r->fake);
        r->fake->arch_r0600 = "gfx906";
        r->fake->cc_major = 8;
        r->fake->device = backend == FA_STANDIN ? -1 : 0;
    }
    write_code(r, backend == FA_STANDIN ? 190 : 224);
    open_runtime(r);
    r->policy = (fa_policy){.mode = mode,
                            .factor = 1e-9,
                            .floor_ns = RIG_DEADLINE_MS * 1000000,
                            .cooldown_ns = INT64_C(60000000000),
                            .dir = kept ? r->folder : NULL,
                            .report = fa_report_to_stderr};
    r->policy.dir_else = r->policy.dir;
    r->call = rig_new_call(r);
    r->call->target.backend = backend;
    r->call->target.arch = backend == FA_SIM ? "gfx906" : NULL;
    open_guard(r);
    return r;
}

void rig_again(rig *r)
{
    if (r->fake != NULL) {
        r->fake->hangs = false;
        r->fake->hanging = NULL;
    }
    rig_waits_until_over(r);
    fa_guard_close(r->guard);
    fa_runtime_close(r->runtime);
    open_runtime(r);
    open_guard(r);
}

void rig_close(rig *r)
{
    if (r->fake != NULL) {
        r->fake->hangs = false;
    }
    CHECK(r->run, rig_waits_until_over(r));
    fa_guard_close(r->guard);
    fa_runtime_close(r->runtime);
    if (r->fake != NULL) {
        CHECK(r->run, r->fake->events == 0 && r->fake->streams == 0);
        dlclose(r->library);
    }
    free(r->call);
    free(r);
}

void rig_set_mode(rig *r, fa_guard_mode mode)
{
    r->policy.mode = mode;
    fa_guard_set(r->guard, &r->policy);
}

/* -- calls ----------------------------------------------------------------- */

rig_call *rig_new_call(rig *r)
{
    rig_call *c = calloc(1, sizeof *c);
    if (c == NULL) {
        abort();
    }
    c->p = test_problem(1, 2, 1, 4, 4, 64);
    c->p.out.data = c->memory[0];
    c->p.lse = c->lse;
    if (r->call != NULL) {
        c->target = r->call->target;
    }
    c->target.stream = &r->stream;
    c->target.guard = r->guard;
    return c;
}

fa_status rig_forward(rig *r, rig_call *c)
{
    fa_status status = fa_plan_forward(&c->p, &c->plan, &c->error);
    return status != FA_OK ? status
                           : fa_forward(r->runtime, &c->target, &c->p, &c->plan,
                                        c->workspace, &c->counts, &c->error);
}

fa_status rig_backward(rig *r, rig_call *c)
{
    const bool sink = c->p.features.sink.data != NULL;
    c->g = test_gradients(&c->p, WANTED | (sink ? FA_WANT_DSINK : 0));
    c->g.dout.data = c->memory[0];
    c->g.dsink.data = c->memory[1];
    c->g.dq.data = c->memory[2];
    c->g.dk.data = c->memory[3];
    c->g.dv.data = c->memory[4];
    fa_status status = fa_plan_backward(&c->p, &c->g, &c->plan, &c->error);
    return status != FA_OK
               ? status
               : fa_backward(r->runtime, &c->target, &c->p, &c->g, &c->plan,
                             c->workspace, &c->counts, &c->error);
}

const char *rig_forward_kernel(void)
{
    return "fa_fwd_f16_d64_plain";
}

const char *rig_step(rig *r, int step)
{
    return r->call->plan.step[step].variant->symbol;
}

bool rig_is_op(const rig *r, int at, int what, const void *stream)
{
    const fake_op *op = &r->fake->op[at];
    return at < r->fake->ops && (int)op->what == what && op->stream == stream;
}

void rig_trip(rig *r, const char *kernel, int64_t cooldown_ns)
{
    fa_policy policy = r->policy;
    policy.cooldown_ns = cooldown_ns;
    fa_guard_set(r->guard, &policy);
    CHECK(r->run, fa_guard_trip(r->guard, r->call->target.backend, 0, kernel,
                                "by a test", -1, &r->error) == FA_OK);
    fa_guard_set(r->guard, &r->policy);
}

/* -- waiting --------------------------------------------------------------- */

void rig_sleep_ms(int ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000,
                                 .tv_nsec = ms % 1000 * 1000000L},
              NULL);
}

bool rig_waits_until_over(rig *r)
{
    for (int i = 0; i < PATIENCE_MS && rig_counts(r).outstanding != 0; i++) {
        rig_sleep_ms(1);
    }
    fa_guard_reap(r->guard);
    return rig_counts(r).outstanding == 0;
}

bool rig_waits_for_misses(rig *r, uint64_t misses)
{
    for (int i = 0; i < PATIENCE_MS && rig_counts(r).misses < misses; i++) {
        rig_sleep_ms(1);
    }
    /* What the thread does after it has counted, the disk first. */
    for (int i = 0; i < PATIENCE_MS / 10 && r->policy.dir != NULL &&
                    rig_slots(r, RIG_LATE) == 0;
         i++) {
        rig_sleep_ms(1);
    }
    return rig_counts(r).misses == misses;
}

/* -- what is known --------------------------------------------------------- */

fa_guard_counts rig_counts(rig *r)
{
    fa_guard_counts counts;
    fa_guard_count(r->guard, &counts);
    return counts;
}

static ptrdiff_t row_of(const char *kernel)
{
    ptrdiff_t row = 0;
    while (strcmp(fa_variants[row].symbol, kernel) != 0) {
        row++;
    }
    return row;
}

fa_breaker_state rig_state(rig *r, const char *kernel, fa_store_entry *entry)
{
    static fa_store_entry entries[FA_STORE_MAX];
    bool half_open[FA_STORE_MAX];
    fa_station *station = fa_guard_station(r->guard, 0);
    if (station == NULL) {
        return FA_BREAKER_UNKNOWN;
    }
    const size_t count =
        fa_breaker_list(&station->breaker, entries, half_open, FA_STORE_MAX);
    for (size_t i = 0; i < count; i++) {
        if (strcmp(entries[i].kernel, kernel) == 0) {
            if (entry != NULL) {
                *entry = entries[i];
            }
            return half_open[i] ? FA_BREAKER_HALF_OPEN : FA_BREAKER_OPEN;
        }
    }
    return FA_BREAKER_CLOSED;
}

uint64_t rig_latency_calls(rig *r, const char *kernel)
{
    const fa_station *station = fa_guard_station(r->guard, 0);
    return station == NULL ? 0 : station->latency[row_of(kernel)].calls;
}

/* As flight.c lays it out; read by another process, since to close the file
 * here would drop our lock. */
int rig_slots(rig *r, uint32_t state)
{
    enum { HEADER = 16, SLOT = 144 };
    char command[SCRATCH_CHARS + 64];
    unsigned char slot[SLOT];
    int count = 0;
    snprintf(command, sizeof command, "tail -qc +%d '%s'/flight-*",
             HEADER + FA_FLIGHT_DEVICES * FA_IDENTITY_CHARS + 1, r->folder);
    FILE *output = popen(command, "r");
    if (output == NULL) {
        abort();
    }
    while (fread(slot, 1, sizeof slot, output) == sizeof slot) {
        uint32_t found = 0;
        memcpy(&found, slot, sizeof found);
        count += found == state;
    }
    pclose(output);
    return count;
}

int rig_hide_stderr(rig *r)
{
    const int hidden = dup(STDERR_FILENO);
    const int file = open(scratch_path(r->folder, "stderr"),
                          O_WRONLY | O_CREAT | O_TRUNC, S_IRUSR | S_IWUSR);
    if (hidden < 0 || file < 0 || dup2(file, STDERR_FILENO) < 0) {
        abort();
    }
    close(file);
    return hidden;
}

void rig_show_stderr(rig *r, int hidden, char *text, size_t chars)
{
    fflush(stderr);
    dup2(hidden, STDERR_FILENO);
    close(hidden);
    text[0] = '\0';
    scratch_read(r->folder, "stderr", text, chars);
}
