/* fa.h: what the host layer offers and the binding uses.
 *
 * A call goes: fa_problem (pointers, sizes, strides) -> fa_plan_make checks
 * everything and picks a kernel -> fa_forward launches it on one of four
 * backends.  Nothing here knows Python or PyTorch; how a backend is reached
 * is left to host/driver.h.
 *
 * Functions that can fail return fa_status and write the reason to *error,
 * which is left alone on success.  No function keeps state outside the
 * objects it is given, and all may be called from several threads.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_H
#define FA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/args.h" /* fa_dtype, fa_pass, fa_level, fa_load */

/* The build passes the one version number of the project. */
#ifndef FA_VERSION
#define FA_VERSION "unknown"
#endif

#if defined(__GNUC__)
#define FA_PRINTF(text, first) __attribute__((__format__(printf, text, first)))
#else
#define FA_PRINTF(text, first)
#endif

/* -- errors ---------------------------------------------------------------- */

typedef enum fa_status {
    FA_OK = 0,
    FA_EINVAL,       /* an argument is wrong; the text names it */
    FA_EUNSUPPORTED, /* a legal argument that no kernel serves */
    FA_ENOMEM,
    FA_ELIBRARY, /* a runtime library is missing or incomplete */
    FA_ECODE,    /* a code object is missing, corrupt, foreign, incomplete */
    FA_EDEVICE   /* the runtime or the simulator reported a failure */
} fa_status;

enum { FA_ERROR_CHARS = 1024 };
typedef struct fa_error {
    char text[FA_ERROR_CHARS]; /* "argument: expected ..., got ..." */
} fa_error;

/* Formats the reason and returns `status`; a long text is cut. */
fa_status fa_fail(fa_error *error, fa_status status, const char *format, ...)
    FA_PRINTF(3, 4);

/* -- kernels --------------------------------------------------------------- */

enum { FA_CAUSAL_NONE = 0, FA_CAUSAL_TOP_LEFT, FA_CAUSAL_BOTTOM_RIGHT };

/* One row of kernels/variants.def. */
typedef struct fa_variant {
    const char *symbol;
    fa_pass pass;
    fa_dtype dtype;
    int32_t dim; /* serves head dims 1..dim */
    fa_level level;
    fa_load load;
    int32_t rows; /* query rows of a workgroup */
    int32_t keys; /* keys of a step */
    uint32_t threads;
    uint32_t lds_bytes;
} fa_variant;

#define FA_VARIANT(...) +1
enum {
    FA_VARIANT_COUNT = 0
#include "kernels/variants.def"
};
#undef FA_VARIANT

extern const fa_variant fa_variants[FA_VARIANT_COUNT];

const char *fa_dtype_name(fa_dtype dtype); /* "float16", ... */
const char *fa_pass_name(fa_pass pass);    /* "forward" */
const char *fa_level_name(fa_level level); /* "plain" */
const char *fa_load_name(fa_load load);    /* "wide", "narrow" */

/* -- a problem and its plan ------------------------------------------------ */

/* Element (b, h, i, d) lies at data + b * stride[0] + ... + d * stride[3];
 * strides in elements.  The stride of a dimension of size 1 means nothing. */
typedef struct fa_tensor {
    void *data;
    fa_dtype dtype;
    int64_t size[4];
    int64_t stride[4];
} fa_tensor;

/* out[b,h,i] = sum_j softmax_j(scale * q[b,h,i].k[b,h',j]) v[b,h',j] with
 * h' = h / (H / Hk); lse[b,h,i] = log(sum_j exp(scale * q.k)). */
typedef struct fa_problem {
    fa_tensor q;   /* (B, H, Sq, D) */
    fa_tensor k;   /* (B, Hk, Sk, D) */
    fa_tensor v;   /* (B, Hk, Sk, D) */
    fa_tensor out; /* like q; data may be NULL until the launch */
    float *lse;    /* (B, H, Sq) contiguous; likewise */
    double scale;
    int causal; /* FA_CAUSAL_NONE, _TOP_LEFT, _BOTTOM_RIGHT */
} fa_problem;

/* Why the plan is as it is; fa_plan_why makes a sentence of it. */
typedef enum fa_cause {
    FA_CAUSE_WIDE,
    FA_CAUSE_DIM,       /* head dim not a multiple of 8 */
    FA_CAUSE_BASE,      /* a base not 16-byte aligned */
    FA_CAUSE_STRIDE,    /* a stride not a multiple of 8 */
    FA_CAUSE_ROW,       /* a row stride too long for wide loads */
    FA_CAUSE_NO_OUTPUT, /* out has no elements: nothing to do */
    FA_CAUSE_NO_KEYS    /* out is 0 and lse -inf: no kernel needed */
} fa_cause;

typedef struct fa_plan {
    const fa_variant *variant; /* NULL: nothing to launch */
    uint32_t grid[3];          /* in workgroups */
    fa_cause cause;
    const char *tensor; /* which tensor and which axis, for the causes */
    const char *axis;   /* that have one; literals */
    int64_t value;
} fa_plan;

/* Sets size, dtype and stride of *out to those of torch.empty_like(q): q's
 * own strides where q is dense, else dense in q's order of dimensions; but
 * the head dim is innermost always.  data becomes NULL.  For sizes that
 * fa_plan_make would refuse the strides mean nothing. */
void fa_tensor_like(const fa_tensor *q, fa_tensor *out);

/* Checks every argument of `problem` and chooses kernel and grid.  Reads no
 * tensor data and needs no device.  On failure *plan is zero. */
fa_status fa_plan_make(const fa_problem *problem, fa_plan *plan,
                       fa_error *error);

enum { FA_WHY_CHARS = 128 };
void fa_plan_why(const fa_plan *plan, char text[FA_WHY_CHARS]);

/* -- running it ------------------------------------------------------------ */

typedef enum fa_backend {
    FA_HIP,     /* libamdhip64, the copy that the process has loaded */
    FA_SIM,     /* libhipsim: tensors in host memory, used in place */
    FA_STANDIN, /* libcuda with code objects made by nvcc */
    FA_NULL,    /* launches nothing; for measuring the host's own time */
    FA_BACKEND_COUNT
} fa_backend;

const char *fa_backend_name(fa_backend backend); /* "hip", "sim", ... */

typedef struct fa_target {
    fa_backend backend;
    int32_t device;   /* index in the runtime's order; 0 for FA_SIM */
    void *stream;     /* hipStream_t or CUstream; ignored by FA_SIM */
    const char *arch; /* "gfx906"; NULL asks the device (not for FA_SIM) */
} fa_target;

typedef struct fa_counts {
    uint64_t wave_instructions; /* counted by FA_SIM alone */
    uint64_t workgroups;
} fa_counts;

/* Drivers and code objects that belong to one configuration.  Both are
 * opened at the first launch that needs them and stay for the life of the
 * runtime; a failure is not remembered. */
typedef struct fa_runtime fa_runtime;

/* code_dir holds fa_<arch>.co, sim_library is the path of libhipsim.so; both
 * are copied and neither is looked at yet. */
fa_status fa_runtime_open(const char *code_dir, const char *sim_library,
                          fa_runtime **runtime, fa_error *error);
/* Unloads everything.  Accepts NULL.  No launch may be in progress. */
void fa_runtime_close(fa_runtime *runtime);
const char *fa_runtime_code_dir(const fa_runtime *runtime);
const char *fa_runtime_sim_library(const fa_runtime *runtime);

/* Opens and loads what fa_forward would on `target`, and launches nothing. */
fa_status fa_runtime_load(fa_runtime *runtime, const fa_target *target,
                          fa_error *error);

/* Runs `plan`, which fa_plan_make made for `problem`, on `target`.  out and
 * lse must have their memory now.  On FA_SIM the result is complete on
 * return; on a GPU it is ordered in the stream. */
fa_status fa_forward(fa_runtime *runtime, const fa_target *target,
                     const fa_problem *problem, const fa_plan *plan,
                     fa_counts *counts, fa_error *error);

/* -- libraries that are already loaded ------------------------------------- */

/* A handle of the loaded library whose file name starts with `stem`
 * ("libamdhip64", "libtorch_cpu.so"), or NULL.  Loads nothing.  The handle
 * is counted: dlclose it, or keep it. */
void *fa_library_find(const char *stem);

/* One function pointer to fill: where it lies in the table, and its name. */
typedef struct fa_symbol {
    size_t offset;
    const char *name;
    bool required;
} fa_symbol;

/* Fills function pointers of `table` by dlsym; absent optional ones become
 * NULL.  Returns the name of the first required one that is absent, or NULL
 * if the table is complete. */
const char *fa_library_fill(void *handle, const fa_symbol *symbols,
                            size_t count, void *table);

#endif
