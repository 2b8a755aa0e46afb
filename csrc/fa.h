/* fa.h: what the host layer offers and the binding uses.
 *
 * A call goes: fa_problem (pointers, sizes, strides) -> fa_plan_forward or
 * fa_plan_backward checks everything and lists the kernels to launch ->
 * fa_forward or fa_backward launches them on one of four backends.  Nothing
 * here knows Python or PyTorch; how a backend is reached is left to
 * host/driver.h.
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

#include "kernels/args.h" /* fa_dtype, fa_pass, fa_level */

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
    FA_EDEVICE,  /* the runtime or the simulator reported a failure */
    FA_EOPEN,    /* a breaker refused: nothing was launched (host/guard.h) */
    FA_ELATE,    /* the deadline has passed: answer the call by other means */
    FA_EONCE     /* it failed half-way and must not be repeated */
} fa_status;

enum { FA_ERROR_CHARS = 1024 };
typedef struct fa_error {
    char text[FA_ERROR_CHARS]; /* "argument: expected ..., got ..." */
} fa_error;

/* Formats the reason and returns `status`; a long text is cut. */
fa_status fa_fail(fa_error *error, fa_status status, const char *format, ...)
    FA_PRINTF(3, 4);

/* -- kernels --------------------------------------------------------------- */

/* Where row i's own key lies, at i or at i + Sk - Sq, and whether later keys
 * are out of its sight.  Without a mask only windows and ALiBi ask where. */
enum {
    FA_CAUSAL_NONE = 0, /* bottom-right */
    FA_CAUSAL_TOP_LEFT,
    FA_CAUSAL_BOTTOM_RIGHT,
    FA_CAUSAL_NONE_TOP_LEFT
};

/* One row of kernels/variants.def. */
typedef struct fa_variant {
    const char *symbol;
    fa_pass pass;
    fa_dtype arith; /* of the products; also says in which code object */
    uint32_t reads; /* FA_READS_*: the types of q, k, v, out and dout */
    int32_t dim;    /* serves head dims 1..dim */
    fa_level level;
    int32_t rows;  /* rows that a workgroup owns: queries or keys */
    int32_t steps; /* rows of a step through the others */
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
size_t fa_dtype_bytes(fa_dtype dtype);
bool fa_dtype_is_half(fa_dtype dtype); /* one of 16 bits */
/* The type of sums over elements of `dtype`, such as lse: FA_F32 or FA_F64. */
fa_dtype fa_dtype_of_sums(fa_dtype dtype);
const char *fa_pass_name(fa_pass pass);    /* "forward", "backward_kv", ... */
const char *fa_level_name(fa_level level); /* "plain", "full" */

/* -- a problem and its plan ------------------------------------------------ */

/* Element (b, h, i, d) lies at data + b * stride[0] + ... + d * stride[3];
 * strides in elements.  The stride of a dimension of size 1 means nothing. */
typedef struct fa_tensor {
    void *data;
    fa_dtype dtype;
    int64_t size[4];
    int64_t stride[4];
} fa_tensor;

/* What may be wanted beside; all zero: nothing.  A tensor whose data is NULL is
 * absent.  In this order: scores are scaled, capped, get ALiBi's part and the
 * bias, and what is not seen gets -inf. */
typedef struct fa_features {
    fa_tensor bias;  /* (B, H, Sq, Sk), each may be 1; type of q, or float */
    fa_tensor mask;  /* likewise, bytes: 0 is not seen; its dtype is not read */
    fa_tensor alibi; /* (B or 1, H) slopes in size[0] and [1], type of lse,
                      * contiguous: - slope * |distance| */
    fa_tensor sink; /* (H) in size[0], type of lse, contiguous: the score of one
                      * more key whose value is 0 */
    double softcap; /* scores become c tanh(s / c); 0: they do not */
    double dropout_p;    /* of weights; 0 <= p < 1 */
    const int64_t *seed; /* seed and offset, where the kernel can read them */
    int64_t sink_keys;   /* first keys that window_left never hides */
    fa_tensor span_q;    /* (Sq, 4) int32 in size[0] and [1], contiguous,
                           * fa_span_of_row; dtype not read */
    fa_tensor span_k;   /* (Sk, 2) likewise, fa_span_of_key; for the backward */
    fa_tensor blocks;   /* (B, H, ceil(Sq / block_q), 1 + M) int32 contiguous,
                           * the first two may be 1: the blocks of keys that a
                           * block of rows needs, a count and so many indices */
    fa_tensor blocks_t; /* (B, H, ceil(Sk / block_k), 1 + M) likewise, the
                           * reverse; for the backward */
    int64_t block_q;    /* rows of a block, a multiple of 128 */
    int64_t block_k;    /* keys of a block, likewise */
} fa_features;

/* Which of them a problem has, in the sense that a kernel must know of it. */
enum {
    FA_HAS_BIAS = 1 << 0,
    FA_HAS_MASK = 1 << 1,
    FA_HAS_ALIBI = 1 << 2,
    FA_HAS_SINK = 1 << 3,
    FA_HAS_SOFTCAP = 1 << 4,
    FA_HAS_DROPOUT = 1 << 5,
    FA_HAS_SINK_KEYS = 1 << 6, /* and a window that could hide them */
    FA_HAS_SPANS = 1 << 7,
    FA_HAS_BLOCKS = 1 << 8
};

/* What products of float32 are computed in. */
typedef enum fa_fp32 {
    FA_FP32_AUTO, /* double in small problems, see fa_is_exact32, else float */
    FA_FP32_FAST, /* float */
    FA_FP32_EXACT /* double */
} fa_fp32;

/* out[b,h,i] = sum_j softmax_j(scale * q[b,h,i].k[b,h',j]) v[b,h',j] with
 * h' = h / (H / Hk); lse[b,h,i] = log(sum_j exp(scale * q.k)), both over the
 * keys that a row sees and with `features`.
 * q, k, v and out have one type; lse is float, or double where they are. */
typedef struct fa_problem {
    fa_tensor q;   /* (B, H, Sq, D) */
    fa_tensor k;   /* (B, Hk, Sk, D) */
    fa_tensor v;   /* (B, Hk, Sk, Dv) */
    fa_tensor out; /* (B, H, Sq, Dv); data may be NULL until the launch */
    void *out_lo;  /* the residue, see fa_residue_floats; aligned to 16 bytes;
                    * NULL: not wanted */
    void *lse;     /* (B, H, Sq) contiguous; NULL until the launch */
    double scale;
    int causal;           /* FA_CAUSAL_* */
    int64_t window_left;  /* keys before its own that a row sees; -1: all */
    int64_t window_right; /* and behind it; a causal mask allows none */
    bool strict_bf16;     /* products of bfloat16 in float, never in fp16 */
    fa_fp32 fp32;
    fa_features features;
} fa_problem;

enum {
    FA_WANT_DQ = 1,
    FA_WANT_DK = 2,
    FA_WANT_DV = 4,
    FA_WANT_DBIAS = 8,
    FA_WANT_DSINK = 16
};

/* What the backward gets and gives beside the problem, whose out and lse it
 * reads.  Gradients have the type of q, or all float where q is of 16 bits;
 * one that is not in `wanted` is not looked at.  Their data may be NULL until
 * the launch. */
typedef struct fa_gradients {
    fa_tensor dout;  /* (B, H, Sq, Dv) */
    fa_tensor dlse;  /* (B, H, Sq, 1), type of lse; data NULL: zero */
    fa_tensor dq;    /* like q */
    fa_tensor dk;    /* like k */
    fa_tensor dv;    /* like v */
    fa_tensor dbias; /* like features.bias, of its type */
    fa_tensor dsink; /* (B, H, Sq, 1) contiguous, type of lse: the gradient of
                      * sink from each query */
    uint32_t wanted; /* FA_WANT_* */
} fa_gradients;

enum {
    FA_MAX_STEPS = 7, /* of bfloat16 with dbias */
    FA_TENSORS = 8    /* as many as there are FA_SET_* bits, in their order */
};

/* One launch. */
typedef struct fa_step {
    const fa_variant *variant;
    uint32_t grid[3];    /* in workgroups */
    uint32_t prepare;    /* FA_SET_* that FA_PREPARE looks at; else 0 */
    uint32_t only_unfit; /* as in fa_args */
    bool row_sums;       /* as in fa_args */
    bool dq_follows; /* FA_BACKWARD_Q: a later step makes dq, not this one */
    double products; /* multiply-adds, without regard to what is hidden */
} fa_step;

/* Where arrays lie in the workspace: bytes from its start, or FA_NOWHERE for
 * an array that no step needs and whose pointer in fa_args is NULL. */
#define FA_NOWHERE SIZE_MAX
typedef struct fa_workspace {
    size_t bytes; /* 0: none is needed */
    size_t rows;  /* FA_ROW_NUMBERS for each query */
    size_t scale_of[FA_PREPARED];
    size_t block_of[FA_PREPARED];
} fa_workspace;

/* Why a tensor cannot be accessed 16 bytes at a time. */
typedef enum fa_cause {
    FA_CAUSE_WIDE,   /* it can, or the call has no such tensor */
    FA_CAUSE_DIM,    /* head dim not a whole number of granules */
    FA_CAUSE_LAST,   /* elements of a row not next to each other */
    FA_CAUSE_BASE,   /* base not 16-byte aligned */
    FA_CAUSE_STRIDE, /* a stride not a multiple of 16 bytes */
    FA_CAUSE_ROW,    /* a row stride too long for 32-bit offsets in a tile */
    FA_CAUSE_ROTARY  /* a granule is turned in part */
} fa_cause;

typedef struct fa_narrow {
    fa_cause cause;
    int32_t axis;  /* for the causes that have one */
    int32_t limit; /* elements of a granule; of FA_CAUSE_ROW log2(limit), of
                    * FA_CAUSE_ROTARY as many as are turned together */
    int64_t value; /* the head dim, stride or rotary dim */
} fa_narrow;

typedef enum fa_work {
    FA_WORK_STEPS,  /* launch the steps */
    FA_WORK_NONE,   /* no output has an element */
    FA_WORK_NO_KEYS /* nothing is seen: fill out with 0 and lse with -inf,
                     * gradients with 0; then launch the steps, if any */
} fa_work;

/* A plan holds for any addresses; `narrow` tells of those it was made for. */
typedef struct fa_plan {
    fa_work work;
    bool backward;
    int32_t count;
    fa_step step[FA_MAX_STEPS]; /* in the order of the stream */
    fa_workspace workspace;
    uint32_t features; /* FA_HAS_*; if any, the level is FA_FULL */
    uint32_t tensors;  /* FA_SET_* that the call has */
    fa_narrow narrow[FA_TENSORS];
} fa_plan;

/* The residue: what rounding took from the results of a forward, which an exact
 * backward needs beside them.  One array of floats, of which double has none:
 *   lse_lo  what it took from lse, (B, H, Sq, 1) contiguous;
 *   out_lo  of 16-bit types what it took from out, (B, H, Sq, Dv) contiguous
 *           in q's type, from the next multiple of 16 bytes on; of float16
 *           times 2^11, since it would be lost below the smallest number.
 * What lies between and behind them is 0.  The sizes must be such as a plan
 * accepts. */
int64_t fa_residue_floats(const fa_problem *problem);
/* The parts of problem->out_lo; data NULL for one that is not there. */
void fa_residue_parts(const fa_problem *problem, fa_tensor *lse_lo,
                      fa_tensor *out_lo);

/* Sets sizes, type and strides of *out to those of torch.empty_like(like),
 * but with `head_dim` as the last size: like's own strides where it is dense
 * and has that head dim, else dense in like's order of dimensions, with the
 * head dim innermost where its stride in `like` is 1.  data becomes NULL.
 * For sizes that a plan would refuse the strides mean nothing. */
void fa_tensor_like(const fa_tensor *like, int64_t head_dim, fa_tensor *out);
/* Sets dq, dk and dv to the like of q, k and v; `in_float`: to float where
 * those are of 16 bits.  dbias and dsink become contiguous; without a bias the
 * former means nothing. */
void fa_gradients_like(const fa_problem *problem, bool in_float,
                       fa_gradients *gradients);

/* Check every argument and choose kernels, grids and workspace.  They read no
 * tensor data and need no device.  On failure *plan is zero. */
fa_status fa_plan_forward(const fa_problem *problem, fa_plan *plan,
                          fa_error *error);
fa_status fa_plan_backward(const fa_problem *problem,
                           const fa_gradients *gradients, fa_plan *plan,
                           fa_error *error);

/* Rotary positions: of q and k the first 2 n channels of a head are turned in
 * pairs by the angles of their token, of which cos and sin have n columns; the
 * rest is copied.  Dimensions as torch has them here, (B, S, H, D). */
typedef struct fa_rotary {
    fa_tensor q;     /* (B, S, H, D) */
    fa_tensor k;     /* (B, S, Hk, D), type of q; either may have no heads */
    fa_tensor out_q; /* like them; data may be NULL until the launch */
    fa_tensor out_k;
    fa_tensor cos;    /* (B or 1, S, 1, n), type of q or of sums over it */
    fa_tensor sin;    /* like cos */
    bool interleaved; /* pairs (2i, 2i + 1); else (i, i + n) */
    bool inverse; /* by the negative angles: undoes it, and is its gradient */
} fa_rotary;

/* Likewise; the plan has one step at most, and its `tensors` and `narrow` are
 * of q, k, cos and sin. */
fa_status fa_plan_rotary(const fa_rotary *problem, fa_plan *plan,
                         fa_error *error);

/* Whether a step is one that calls are reported by: not FA_PREPARE, and not
 * the strict kernel behind a fast one, and not what makes sums only. */
bool fa_step_is_main(const fa_step *step);

/* The symbols of those steps, or of FA_PREPARE if it is all, joined by "+". */
enum { FA_SYMBOLS_CHARS = 256 };
void fa_plan_symbols(const fa_plan *plan, char text[FA_SYMBOLS_CHARS]);

enum { FA_WHY_CHARS = 640 };
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
    struct fa_guard *guard; /* host/guard.h; NULL: none */
    bool once; /* it writes in place: once begun it must not be repeated */
} fa_target;

typedef struct fa_counts {
    uint64_t wave_instructions; /* counted by FA_SIM alone */
    uint64_t workgroups;
    struct fa_pending *late; /* on failure: see fa_guard_keep; else NULL */
} fa_counts;

/* Drivers and code objects that belong to one configuration.  Both are
 * opened at the first launch that needs them and stay for the life of the
 * runtime; a failure is not remembered. */
typedef struct fa_runtime fa_runtime;

/* code_dir holds fa_<arch>_<unit>.co, sim_library is the path of libhipsim.so;
 * both are copied and neither is looked at yet. */
fa_status fa_runtime_open(const char *code_dir, const char *sim_library,
                          fa_runtime **runtime, fa_error *error);
/* Unloads everything.  Accepts NULL.  No launch may be in progress. */
void fa_runtime_close(fa_runtime *runtime);
const char *fa_runtime_code_dir(const fa_runtime *runtime);
const char *fa_runtime_sim_library(const fa_runtime *runtime);

/* Opens and loads what forward and backward of these types would on `target`,
 * and launches nothing.  `dtypes` is a set of FA_READS_*. */
fa_status fa_runtime_load(fa_runtime *runtime, const fa_target *target,
                          uint32_t dtypes, fa_error *error);

/* Makes the device known to target->guard before its first call. */
fa_status fa_runtime_know(fa_runtime *runtime, const fa_target *target,
                          fa_error *error);

/* Run `plan`, which was made for `problem` (and `gradients`), on `target`.
 * Outputs must have their memory now, and `workspace` the bytes that the plan
 * asks for, aligned to 16; nothing in it is read before it is written.  On
 * FA_SIM the result is complete on return; on a GPU it is ordered in the
 * stream, until which the workspace must stay.  *counts is a sum over the
 * steps. */
fa_status fa_forward(fa_runtime *runtime, const fa_target *target,
                     const fa_problem *problem, const fa_plan *plan,
                     void *workspace, fa_counts *counts, fa_error *error);
fa_status fa_backward(fa_runtime *runtime, const fa_target *target,
                      const fa_problem *problem, const fa_gradients *gradients,
                      const fa_plan *plan, void *workspace, fa_counts *counts,
                      fa_error *error);

fa_status fa_run_rotary(fa_runtime *runtime, const fa_target *target,
                        const fa_rotary *problem, const fa_plan *plan,
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
