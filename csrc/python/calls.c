/* calls.c: the functions of _C that take a call apart, as if it were Python:
 *
 *   def forward(device_type, device_index, stream, arch, dtype,
 *               q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, out_lo_ptr,
 *               workspace_ptr, workspace_bytes,
 *               q_size, q_stride, k_size, k_stride, v_size, v_stride,
 *               out_stride, scale, causal, features=None):
 *   def backward(device_type, device_index, stream, arch, dtype, grads_fp32,
 *                wanted, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, out_lo_ptr,
 *                dout_ptr, dlse_ptr, dq_ptr, dk_ptr, dv_ptr,
 *                workspace_ptr, workspace_bytes,
 *                q_size, q_stride, k_size, k_stride, v_size, v_stride,
 *                out_stride, dout_stride, dlse_stride,
 *                dq_stride, dk_stride, dv_stride, scale, causal,
 *                features=None, dbias_ptr=0, dsink_ptr=0):
 *       "The ops on addresses, for kernels registered from Python; an address
 *        0 is an absent tensor, that of out_lo (fa.h: the residue) a multiple
 *        of 16.  Raise RuntimeError."
 *   def rotary(device_type, device_index, stream, arch, dtype, table_dtype,
 *              q_ptr, k_ptr, cos_ptr, sin_ptr, out_q_ptr, out_k_ptr,
 *              q_size, q_stride, k_size, k_stride, cos_size, cos_stride,
 *              sin_size, sin_stride, out_q_stride, out_k_stride,
 *              interleaved, inverse):
 *       "Likewise; sizes (batch, seqlen, heads, head dim), of tables
 *        (batch or 1, seqlen, 1, columns)."
 *   def workspace(dtype, q_size, k_size, v_size, wanted, features=None) -> int:
 *       "The bytes that the forward (wanted 0) or the backward needs.  Raises
 *        RuntimeError."
 *   def load(device_type, device_index, arch, dtype=None):
 *       "Open and load what calls of this dtype would, or of any; launch
 *        nothing.  Raises RuntimeError."
 *   def plan(dtype, q_align, k_align, v_align, q_size, q_stride, k_size,
 *            k_stride, v_size, v_stride, scale, causal, wanted=0,
 *            grads_fp32=False, features=None)
 *            -> (symbols, grid, why, steps, workspace):
 *       "What would run, of the forward (wanted 0) or the backward; raises
 *        Error.  The alignments are those of the tensors' addresses in bytes;
 *        all other tensors count as aligned and dense."
 *
 * Parsing is all that happens here.  Sizes and strides are tuples of four,
 * dlse_stride of three.  `features` is None or
 *   (bias, mask, alibi, sink, seed, span_q, span_k, blocks, blocks_t, softcap,
 *    dropout_p, window_left, window_right, sink_keys, block_q, block_k)
 * whose tensors are None or (address, dtype, sizes, strides), where alibi has
 * two sizes and a dtype that is none of ours is 0; dbias and dsink are
 * contiguous.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "python/guard.h"
#include "python/outcome.h"
#include "python/parse.h"

PyObject *fa_raise_error(PyObject *module, const fa_error *error)
{
    const fa_module_state *state = PyModule_GetState(module);
    PyErr_SetString(state->error, error->text);
    return NULL;
}

PyObject *fa_raise_runtime_error(const fa_error *error)
{
    PyErr_SetString(PyExc_RuntimeError, error->text);
    return NULL;
}

/* -- where a call goes ----------------------------------------------------- */

/* The first arguments of every call that launches. */
enum { DEVICE_TYPE, DEVICE_INDEX, STREAM, ARCH, DTYPE, WHERE };

typedef struct where {
    int device_type; /* 0 CPU, 1 CUDA */
    fa_target target;
    fa_dtype dtype;
    char arch[FA_STATE_ARCH_CHARS];
} where;

static int parse_where(PyObject *const *args, where *w)
{
    bool arch_given = false;
    fa_error error;
    *w = (where){0};
    if (fa_parse_int("device_type", args[DEVICE_TYPE], &w->device_type) ||
        fa_parse_int("device_index", args[DEVICE_INDEX], &w->target.device) ||
        fa_parse_pointer(args[STREAM], &w->target.stream) ||
        fa_parse_arch(args[ARCH], w->arch, &arch_given) ||
        fa_parse_dtype(args[DTYPE], &w->dtype)) {
        return -1;
    }
    if (w->device_type != 0 && w->device_type != 1) {
        fa_fail(&error, FA_EINVAL,
                "device_type: expected 0 (CPU) or 1 (CUDA), got %d",
                w->device_type);
        (void)fa_raise_runtime_error(&error);
        return -1;
    }
    w->target.arch = arch_given ? w->arch : NULL;
    return 0;
}

static fa_status choose_backend(where *w, fa_runtime **runtime, fa_error *error)
{
    w->target.guard = fa_state_guard();
    fa_status status = fa_state_backend(w->device_type == 1, runtime,
                                        &w->target.backend, error);
    return status == FA_OK && w->target.backend == FA_SIM &&
                   w->target.arch == NULL
               ? fa_state_no_arch(error)
               : status;
}

/* Runs a checked call; without the GIL.  `g` is NULL in a forward. */
static fa_status run(where *w, const fa_problem *p, const fa_gradients *g,
                     const fa_plan *plan, void *workspace, int64_t bytes,
                     fa_counts *counts, fa_error *error)
{
    fa_runtime *runtime = NULL;
    fa_target *target = &w->target;
    if ((uint64_t)bytes < plan->workspace.bytes) {
        return fa_fail(error, FA_EINVAL,
                       "workspace: expected %zu bytes, got %lld",
                       plan->workspace.bytes, (long long)bytes);
    }
    const fa_status status = choose_backend(w, &runtime, error);
    if (status != FA_OK) {
        return status;
    }
    return g == NULL
               ? fa_forward(runtime, target, p, plan, workspace, counts, error)
               : fa_backward(runtime, target, p, g, plan, workspace, counts,
                             error);
}

static PyObject *finish(const where *w, fa_status status, const fa_plan *plan,
                        const fa_counts *counts, const fa_error *error)
{
    fa_outcome_set(status);
    if (status != FA_OK) {
        fa_outcome_set_late(counts->late);
        return fa_raise_runtime_error(error);
    }
    fa_state_record(w->target.backend,
                    w->device_type == 1 ? w->target.device : -1, plan, counts);
    Py_RETURN_NONE;
}

/* out is like q with the head dim of v; its strides are given. */
static int parse_out(PyObject *out_stride, fa_problem *p)
{
    void *const data = p->out.data;
    p->out = p->q;
    p->out.data = data;
    p->out.size[3] = p->v.size[3];
    return fa_parse_tuple("out_stride", out_stride, 4, p->out.stride);
}

PyObject *fa_module_forward(PyObject *module, PyObject *const *args,
                            Py_ssize_t count)
{
    enum {
        Q_PTR = WHERE,
        K_PTR,
        V_PTR,
        OUT_PTR,
        LSE_PTR,
        OUT_LO_PTR,
        WORKSPACE_PTR,
        WORKSPACE_BYTES,
        Q_SIZE,
        OUT_STRIDE = Q_SIZE + 6,
        SCALE,
        CAUSAL,
        FEATURES,
        ARGS
    };
    where w;
    fa_problem p = {.lse = NULL};
    fa_plan plan;
    fa_counts counts = {.late = NULL};
    fa_error error;
    fa_status status = FA_OK;
    void *workspace = NULL;
    int64_t bytes = 0;
    (void)module;

    fa_state_set_arithmetic(&p);
    if (fa_check_count("forward", count, FEATURES, ARGS) ||
        parse_where(args, &w) || fa_parse_pointer(args[Q_PTR], &p.q.data) ||
        fa_parse_pointer(args[K_PTR], &p.k.data) ||
        fa_parse_pointer(args[V_PTR], &p.v.data) ||
        fa_parse_pointer(args[OUT_PTR], &p.out.data) ||
        fa_parse_pointer(args[LSE_PTR], &p.lse) ||
        fa_parse_pointer(args[OUT_LO_PTR], &p.out_lo) ||
        fa_parse_pointer(args[WORKSPACE_PTR], &workspace) ||
        fa_parse_int64("workspace_bytes", args[WORKSPACE_BYTES], &bytes) ||
        fa_parse_shapes(args + Q_SIZE, w.dtype, &p) ||
        parse_out(args[OUT_STRIDE], &p) ||
        fa_parse_scale_causal(args + SCALE, &p) ||
        fa_parse_features(count > FEATURES ? args[FEATURES] : Py_None, &p)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = fa_plan_forward(&p, &plan, &error);
    if (status == FA_OK) {
        status = run(&w, &p, NULL, &plan, workspace, bytes, &counts, &error);
    }
    Py_END_ALLOW_THREADS
    return finish(&w, status, &plan, &counts, &error);
}

/* Sizes and types of the tensors that a backward has beside its problem. */
static void shape_gradients(const fa_problem *p, bool grads_fp32,
                            fa_gradients *g)
{
    fa_tensor_like(&p->out, p->out.size[3], &g->dout);
    g->dlse = (fa_tensor){
        .dtype = fa_dtype_of_sums(p->q.dtype),
        .size = {p->q.size[0], p->q.size[1], p->q.size[2], 1},
    };
    fa_gradients_like(p, grads_fp32, g);
}

PyObject *fa_module_backward(PyObject *module, PyObject *const *args,
                             Py_ssize_t count)
{
    enum {
        GRADS_FP32 = WHERE,
        WANTED,
        Q_PTR,
        K_PTR,
        V_PTR,
        OUT_PTR,
        LSE_PTR,
        OUT_LO_PTR,
        DOUT_PTR,
        DLSE_PTR,
        DQ_PTR,
        DK_PTR,
        DV_PTR,
        WORKSPACE_PTR,
        WORKSPACE_BYTES,
        Q_SIZE,
        OUT_STRIDE = Q_SIZE + 6,
        DOUT_STRIDE,
        DLSE_STRIDE,
        DQ_STRIDE,
        DK_STRIDE,
        DV_STRIDE,
        SCALE,
        CAUSAL,
        FEATURES,
        DBIAS_PTR,
        DSINK_PTR,
        ARGS
    };
    where w;
    fa_problem p = {.lse = NULL};
    fa_gradients g = {.wanted = 0};
    fa_plan plan;
    fa_counts counts = {.late = NULL};
    fa_error error;
    fa_status status = FA_OK;
    void *workspace = NULL;
    int64_t bytes = 0;
    bool grads_fp32 = false;
    (void)module;

    fa_state_set_arithmetic(&p);
    if (fa_check_count("backward", count, FEATURES, ARGS) ||
        parse_where(args, &w) || fa_parse_bool(args[GRADS_FP32], &grads_fp32) ||
        fa_parse_wanted(args[WANTED], &g.wanted) ||
        fa_parse_pointer(args[Q_PTR], &p.q.data) ||
        fa_parse_pointer(args[K_PTR], &p.k.data) ||
        fa_parse_pointer(args[V_PTR], &p.v.data) ||
        fa_parse_pointer(args[OUT_PTR], &p.out.data) ||
        fa_parse_pointer(args[LSE_PTR], &p.lse) ||
        fa_parse_pointer(args[OUT_LO_PTR], &p.out_lo) ||
        fa_parse_pointer(args[WORKSPACE_PTR], &workspace) ||
        fa_parse_int64("workspace_bytes", args[WORKSPACE_BYTES], &bytes) ||
        fa_parse_shapes(args + Q_SIZE, w.dtype, &p) ||
        parse_out(args[OUT_STRIDE], &p) ||
        fa_parse_scale_causal(args + SCALE, &p) ||
        fa_parse_features(count > FEATURES ? args[FEATURES] : Py_None, &p)) {
        return NULL;
    }
    shape_gradients(&p, grads_fp32, &g);
    if (fa_parse_pointer(args[DOUT_PTR], &g.dout.data) ||
        fa_parse_pointer(args[DLSE_PTR], &g.dlse.data) ||
        fa_parse_pointer(args[DQ_PTR], &g.dq.data) ||
        fa_parse_pointer(args[DK_PTR], &g.dk.data) ||
        fa_parse_pointer(args[DV_PTR], &g.dv.data) ||
        fa_parse_tuple("dout_stride", args[DOUT_STRIDE], 4, g.dout.stride) ||
        fa_parse_tuple("dlse_stride", args[DLSE_STRIDE], 3, g.dlse.stride) ||
        fa_parse_tuple("dq_stride", args[DQ_STRIDE], 4, g.dq.stride) ||
        fa_parse_tuple("dk_stride", args[DK_STRIDE], 4, g.dk.stride) ||
        fa_parse_tuple("dv_stride", args[DV_STRIDE], 4, g.dv.stride) ||
        (count > DBIAS_PTR &&
         fa_parse_pointer(args[DBIAS_PTR], &g.dbias.data)) ||
        (count > DSINK_PTR &&
         fa_parse_pointer(args[DSINK_PTR], &g.dsink.data))) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = fa_plan_backward(&p, &g, &plan, &error);
    if (status == FA_OK) {
        status = run(&w, &p, &g, &plan, workspace, bytes, &counts, &error);
    }
    Py_END_ALLOW_THREADS
    return finish(&w, status, &plan, &counts, &error);
}

/* -- rotary positions ------------------------------------------------------ */

/* An address, sizes and strides, which lie at these places of `args`. */
static int parse_rotary(const char *name, PyObject *const *args, int ptr,
                        int size, fa_dtype dtype, fa_tensor *to)
{
    to->dtype = dtype;
    return fa_parse_pointer(args[ptr], &to->data) ||
                   fa_parse_tuple(name, args[size], 4, to->size) ||
                   fa_parse_tuple(name, args[size + 1], 4, to->stride)
               ? -1
               : 0;
}

static fa_status run_rotary(where *w, const fa_rotary *p, fa_plan *plan,
                            fa_counts *counts, fa_error *error)
{
    fa_runtime *runtime = NULL;
    fa_status status = fa_plan_rotary(p, plan, error);
    if (status == FA_OK) {
        status = choose_backend(w, &runtime, error);
    }
    return status == FA_OK
               ? fa_run_rotary(runtime, &w->target, p, plan, counts, error)
               : status;
}

PyObject *fa_module_rotary(PyObject *module, PyObject *const *args,
                           Py_ssize_t count)
{
    enum {
        TABLE_DTYPE = WHERE,
        Q_PTR,
        K_PTR,
        COS_PTR,
        SIN_PTR,
        OUT_Q_PTR,
        OUT_K_PTR,
        Q_SIZE,
        K_SIZE = Q_SIZE + 2,
        COS_SIZE = K_SIZE + 2,
        SIN_SIZE = COS_SIZE + 2,
        OUT_Q_STRIDE = SIN_SIZE + 2,
        OUT_K_STRIDE,
        INTERLEAVED,
        INVERSE,
        ARGS
    };
    where w;
    fa_rotary p = {.inverse = false};
    fa_dtype table = FA_F32;
    fa_plan plan;
    fa_counts counts = {.late = NULL};
    fa_error error;
    fa_status status = FA_OK;
    (void)module;

    if (fa_check_count("rotary", count, ARGS, ARGS) || parse_where(args, &w) ||
        fa_parse_dtype(args[TABLE_DTYPE], &table) ||
        parse_rotary("q", args, Q_PTR, Q_SIZE, w.dtype, &p.q) ||
        parse_rotary("k", args, K_PTR, K_SIZE, w.dtype, &p.k) ||
        parse_rotary("cos", args, COS_PTR, COS_SIZE, table, &p.cos) ||
        parse_rotary("sin", args, SIN_PTR, SIN_SIZE, table, &p.sin)) {
        return NULL;
    }
    p.out_q = p.q;
    p.out_k = p.k;
    if (fa_parse_pointer(args[OUT_Q_PTR], &p.out_q.data) ||
        fa_parse_pointer(args[OUT_K_PTR], &p.out_k.data) ||
        fa_parse_tuple("out_q", args[OUT_Q_STRIDE], 4, p.out_q.stride) ||
        fa_parse_tuple("out_k", args[OUT_K_STRIDE], 4, p.out_k.stride) ||
        fa_parse_bool(args[INTERLEAVED], &p.interleaved) ||
        fa_parse_bool(args[INVERSE], &p.inverse)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = run_rotary(&w, &p, &plan, &counts, &error);
    Py_END_ALLOW_THREADS
    return finish(&w, status, &plan, &counts, &error);
}

/* -- calls that launch nothing --------------------------------------------- */

PyObject *fa_module_load(PyObject *module, PyObject *const *args,
                         Py_ssize_t count)
{
    fa_target target = {0};
    fa_runtime *runtime = NULL;
    fa_error error;
    fa_status status = FA_OK;
    fa_dtype dtype = FA_F16;
    char arch[FA_STATE_ARCH_CHARS];
    bool arch_given = false;
    int device_type = 0;
    (void)module;

    if (fa_check_count("load", count, 3, 4) ||
        fa_parse_int("device_type", args[0], &device_type) ||
        fa_parse_int("device_index", args[1], &target.device) ||
        fa_parse_arch(args[2], arch, &arch_given)) {
        return NULL;
    }
    const bool any = count == 3 || args[3] == Py_None;
    if (!any && fa_parse_dtype(args[3], &dtype)) {
        return NULL;
    }
    target.arch = arch_given ? arch : NULL;
    Py_BEGIN_ALLOW_THREADS
    status =
        fa_state_backend(device_type == 1, &runtime, &target.backend, &error);
    if (status == FA_OK) {
        status = fa_runtime_load(runtime, &target,
                                 any ? UINT32_MAX : 1U << dtype, &error);
    }
    Py_END_ALLOW_THREADS
    if (status != FA_OK) {
        return fa_raise_runtime_error(&error);
    }
    Py_RETURN_NONE;
}

/* The plan of what q, k and v alone decide: the other tensors are as the op
 * makes them. */
static fa_status plan_alone(fa_problem *p, uint32_t wanted, bool grads_fp32,
                            fa_plan *plan, fa_error *error)
{
    fa_gradients g = {.wanted = wanted};
    fa_state_set_arithmetic(p);
    fa_tensor_like(&p->q, p->v.size[3], &p->out);
    if (wanted == 0) {
        return fa_plan_forward(p, plan, error);
    }
    shape_gradients(p, grads_fp32, &g);
    return fa_plan_backward(p, &g, plan, error);
}

PyObject *fa_module_workspace(PyObject *module, PyObject *const *args,
                              Py_ssize_t count)
{
    static const char *const names[] = {"q_size", "k_size", "v_size"};
    fa_problem p = {.scale = 1.0};
    fa_tensor *const tensors[] = {&p.q, &p.k, &p.v};
    fa_plan plan;
    fa_dtype dtype = FA_F16;
    fa_error error;
    uint32_t wanted = 0;
    (void)module;

    if (fa_check_count("workspace", count, 5, 6) ||
        fa_parse_dtype(args[0], &dtype) || fa_parse_wanted(args[4], &wanted) ||
        fa_parse_features(count > 5 ? args[5] : Py_None, &p)) {
        return NULL;
    }
    for (int i = 0; i < 3; i++) {
        tensors[i]->dtype = dtype;
        if (fa_parse_tuple(names[i], args[1 + i], 4, tensors[i]->size)) {
            return NULL;
        }
    }
    if (plan_alone(&p, wanted, false, &plan, &error) != FA_OK) {
        return fa_raise_runtime_error(&error);
    }
    return PyLong_FromSize_t(plan.workspace.bytes);
}

/* ((symbol, (x, y, z)), ...); new reference. */
static PyObject *steps_tuple(const fa_plan *plan)
{
    PyObject *steps = PyTuple_New(plan->count);
    for (int i = 0; steps != NULL && i < plan->count; i++) {
        const fa_step *step = &plan->step[i];
        PyObject *item = Py_BuildValue(
            "(s(III))", step->variant->symbol, (unsigned)step->grid[0],
            (unsigned)step->grid[1], (unsigned)step->grid[2]);
        if (item == NULL || PyTuple_SetItem(steps, i, item)) {
            Py_DECREF(steps);
            steps = NULL;
        }
    }
    return steps;
}

PyObject *fa_module_plan(PyObject *module, PyObject *const *args,
                         Py_ssize_t count)
{
    enum {
        PLAN_DTYPE,
        Q_ALIGN,
        K_ALIGN,
        V_ALIGN,
        Q_SIZE,
        SCALE = Q_SIZE + 6,
        CAUSAL,
        WANTED,
        GRADS_FP32,
        FEATURES,
        ARGS
    };
    static const fa_step none = {0};
    fa_problem p = {0};
    fa_plan plan;
    fa_dtype dtype = FA_F16;
    fa_error error;
    uint32_t wanted = 0;
    bool grads_fp32 = false;
    char symbols[FA_SYMBOLS_CHARS];
    char why[FA_WHY_CHARS];

    /* An address that equals its alignment has that alignment. */
    if (fa_check_count("plan", count, WANTED, ARGS) ||
        fa_parse_dtype(args[PLAN_DTYPE], &dtype) ||
        fa_parse_pointer(args[Q_ALIGN], &p.q.data) ||
        fa_parse_pointer(args[K_ALIGN], &p.k.data) ||
        fa_parse_pointer(args[V_ALIGN], &p.v.data) ||
        fa_parse_shapes(args + Q_SIZE, dtype, &p) ||
        fa_parse_scale_causal(args + SCALE, &p) ||
        (count > WANTED && fa_parse_wanted(args[WANTED], &wanted)) ||
        (count > GRADS_FP32 && fa_parse_bool(args[GRADS_FP32], &grads_fp32)) ||
        fa_parse_features(count > FEATURES ? args[FEATURES] : Py_None, &p)) {
        return NULL;
    }
    if (plan_alone(&p, wanted, grads_fp32, &plan, &error) != FA_OK) {
        return fa_raise_error(module, &error);
    }
    fa_plan_symbols(&plan, symbols);
    fa_plan_why(&plan, why);
    const fa_step *main_step = &none;
    for (int i = plan.count - 1; i >= 0; i--) {
        main_step = fa_step_is_main(&plan.step[i]) ? &plan.step[i] : main_step;
    }
    PyObject *steps = steps_tuple(&plan);
    return steps == NULL
               ? NULL
               : Py_BuildValue(
                     "s(III)sNn", symbols, (unsigned)main_step->grid[0],
                     (unsigned)main_step->grid[1], (unsigned)main_step->grid[2],
                     why, steps, (Py_ssize_t)plan.workspace.bytes);
}
