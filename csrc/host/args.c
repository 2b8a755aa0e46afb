/* args.c: what a launch is told, and which memory it touches.
 *
 * Each pass gets the fields of fa_args that are its own and nothing else, so
 * that a kernel that looked elsewhere would find NULL and the simulator, told
 * the same list, would stop it.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "host/plan.h"

#include <assert.h>
#include <math.h>
#include <string.h>

/* The stride of a dimension of size 1 can be anything, also out of range. */
static fa_view view_of(const fa_tensor *t)
{
    fa_view view = {.data = t->data};
    for (int d = 0; d < 4; d++) {
        view.stride[d] = t->size[d] == 1 ? 0 : t->stride[d];
    }
    return view;
}

/* -- what a row sees ------------------------------------------------------- */

/* A row's own key is at its number plus this. */
static int32_t own_diagonal(const fa_problem *p)
{
    const bool top_left =
        p->causal == FA_CAUSAL_TOP_LEFT || p->causal == FA_CAUSAL_NONE_TOP_LEFT;
    return top_left ? 0 : (int32_t)(p->k.size[2] - p->q.size[2]);
}

/* The last key that a row sees; all of them from Sk on. */
static int32_t last_diagonal(const fa_problem *p)
{
    const int64_t own = own_diagonal(p);
    const int64_t all = p->k.size[2];
    if (p->causal == FA_CAUSAL_TOP_LEFT ||
        p->causal == FA_CAUSAL_BOTTOM_RIGHT) {
        return (int32_t)own;
    }
    return p->window_right < 0 || p->window_right >= all - own
               ? (int32_t)all
               : (int32_t)(own + p->window_right);
}

/* The first one; all of them from -Sq down. */
static int32_t first_diagonal(const fa_problem *p)
{
    const int64_t own = own_diagonal(p);
    const int64_t all = -p->q.size[2];
    return p->window_left < 0 || p->window_left >= own - all
               ? (int32_t)all
               : (int32_t)(own - p->window_left);
}

/* -- memory ---------------------------------------------------------------- */

static void add_bytes(fa_call *call, const fa_tensor *t, int32_t element_bytes,
                      uint32_t access)
{
    assert(call->access_count < FA_MAX_ACCESSES);
    call->access[call->access_count++] = (fa_access){t, access, element_bytes};
}

static void add_access(fa_call *call, const fa_tensor *t, uint32_t access)
{
    add_bytes(call, t, (int32_t)fa_dtype_bytes(t->dtype), access);
}

/* Memory that is no tensor of the caller's; NULL is not touched. */
static void add_extra(fa_call *call, const fa_tensor *t, uint32_t access)
{
    if (t->data != NULL) {
        assert(call->extra_count < FA_EXTRAS);
        call->extra[call->extra_count] = *t;
        add_access(call, &call->extra[call->extra_count++], access);
    }
}

static void *place(void *workspace, size_t at)
{
    return at == FA_NOWHERE ? NULL : (char *)workspace + at;
}

/* lse or rows: so many numbers for each query. */
static void add_numbers(fa_call *call, const fa_problem *p, void *data,
                        fa_dtype dtype, int64_t count, uint32_t access)
{
    const fa_tensor t =
        fa_tensor_of_rows(data, dtype, &p->q, p->q.size[2], count);
    add_extra(call, &t, access);
}

/* What the backward knows of each query. */
static void add_rows(fa_call *call, const fa_problem *p, void *rows,
                     uint32_t access)
{
    call->args.rows = rows;
    add_numbers(call, p, rows, fa_dtype_of_rows(p), FA_ROW_NUMBERS, access);
}

/* The arrays of the tensors in `set`: those of blocks, and those of scales
 * where the kernel converts to fp16. */
static void add_arrays(fa_call *call, const fa_problem *p,
                       const fa_workspace *w, void *workspace, uint32_t set,
                       bool scales, uint32_t access)
{
    const fa_tensor *const of[FA_PREPARED] = {&p->q, &p->k, &p->v, &p->q};
    for (int i = 0; i < FA_PREPARED; i++) {
        if ((set >> i & 1) == 0) {
            continue;
        }
        const int64_t rows = of[i]->size[2];
        const int64_t blocks = (rows + FA_BLOCK_ROWS - 1) / FA_BLOCK_ROWS;
        void *const block = place(workspace, w->block_of[i]);
        void *const scale = scales ? place(workspace, w->scale_of[i]) : NULL;
        /* A fa_block is two words. */
        const fa_tensor block_array =
            fa_tensor_of_rows(block, FA_F32, of[i], blocks, 2);
        const fa_tensor scale_array =
            fa_tensor_of_rows(scale, FA_F32, of[i], rows, 1);
        call->args.block_of[i] = block;
        call->args.scale_of[i] = scale;
        add_extra(call, &block_array, access);
        add_extra(call, &scale_array, access);
    }
}

/* The caller's tensors in the sets, their views and their widths. */
static void add_tensors(fa_call *call, const fa_problem *p,
                        const fa_gradients *g, uint32_t reads, uint32_t writes)
{
    fa_args *args = &call->args;
    fa_view *const views[FA_TENSORS] = {&args->q,    &args->k,   &args->v,
                                        &args->dout, &args->out, &args->dq,
                                        &args->dk,   &args->dv};
    const fa_tensor *list[FA_TENSORS];
    fa_list_tensors(p, g, list);
    for (int i = 0; i < FA_TENSORS; i++) {
        if (list[i] == NULL || ((reads | writes) >> i & 1) == 0) {
            continue;
        }
        const uint32_t access = ((reads >> i & 1) != 0 ? FA_READ : 0) |
                                ((writes >> i & 1) != 0 ? FA_WRITE : 0);
        *views[i] = view_of(list[i]);
        /* Asked anew: the plan may be older than the memory. */
        if (fa_why_narrow(list[i]).cause == FA_CAUSE_WIDE) {
            args->wide |= 1U << i;
        }
        add_access(call, list[i], access);
    }
}

/* lse, and what rounding took from it and from out. */
static void add_sums(fa_call *call, const fa_problem *p, uint32_t access)
{
    fa_tensor lse_lo;
    fa_tensor out_lo;
    fa_residue_parts(p, &lse_lo, &out_lo);
    call->args.lse = p->lse;
    call->args.lse_lo = lse_lo.data;
    add_numbers(call, p, p->lse, fa_dtype_of_sums(p->q.dtype), 1, access);
    add_extra(call, &lse_lo, access);
    if (out_lo.data != NULL) {
        call->args.out_lo = view_of(&out_lo);
        add_extra(call, &out_lo, access);
    }
}

/* -- features -------------------------------------------------------------- */

/* `count` numbers in a row, which are read. */
static void add_list(fa_call *call, const void *data, int64_t count,
                     int32_t element_bytes)
{
    if (data != NULL) {
        assert(call->extra_count < FA_EXTRAS);
        call->extra[call->extra_count] =
            (fa_tensor){.data = (void *)(uintptr_t)data,
                        .size = {1, 1, 1, count},
                        .stride = {count, count, count, 1}};
        add_bytes(call, &call->extra[call->extra_count++], element_bytes,
                  FA_READ);
    }
}

static void add_scores(fa_call *call, const fa_features *f)
{
    if (f->bias.data != NULL) {
        call->args.bias = view_of(&f->bias);
        call->args.stored_bias = (int32_t)f->bias.dtype;
        add_access(call, &f->bias, FA_READ);
    }
    if (f->mask.data != NULL) {
        call->args.mask = view_of(&f->mask);
        add_bytes(call, &f->mask, 1, FA_READ);
    }
}

static void add_slopes(fa_call *call, const fa_problem *p)
{
    const fa_tensor *alibi = &p->features.alibi;
    const fa_dtype sums = fa_dtype_of_sums(p->q.dtype);
    if (alibi->data != NULL) {
        call->args.alibi = alibi->data;
        call->args.alibi_batch =
            alibi->size[0] == 1 ? 0 : (int32_t)alibi->size[1];
        add_list(call, alibi->data, alibi->size[0] * alibi->size[1],
                 (int32_t)fa_dtype_bytes(sums));
    }
}

static void add_sink(fa_call *call, const fa_problem *p)
{
    const fa_tensor *sink = &p->features.sink;
    const fa_dtype sums = fa_dtype_of_sums(p->q.dtype);
    call->args.sink = sink->data;
    add_list(call, sink->data, sink->size[0], (int32_t)fa_dtype_bytes(sums));
}

/* `of_keys`: what the pass owns is keys. */
static void add_blocks(fa_call *call, const fa_features *f, bool of_keys)
{
    const fa_tensor *t = of_keys ? &f->blocks_t : &f->blocks;
    if (t->data == NULL) {
        return;
    }
    const int64_t head = t->size[2] * t->size[3];
    call->args.blocks = (fa_blocks){
        .list = t->data,
        .batch = t->size[0] == 1 ? 0 : t->size[1] * head,
        .head = t->size[1] == 1 ? 0 : head,
        .width = (int32_t)(t->size[3] - 1),
        .own = (int32_t)(of_keys ? f->block_k : f->block_q),
        .walked = (int32_t)(of_keys ? f->block_q : f->block_k),
    };
    add_list(call, t->data, t->size[0] * t->size[1] * head, sizeof(int32_t));
}

/* What the weights of keys depend on, in every pass that makes them. */
static void add_features(fa_call *call, const fa_problem *p, bool of_keys)
{
    const fa_features *f = &p->features;
    add_scores(call, f);
    add_slopes(call, p);
    if (call->args.keep < FA_KEEP_ALL) {
        call->args.seed = f->seed;
        add_list(call, f->seed, 2, sizeof(int64_t));
    }
    call->args.span_q = f->span_q.data;
    add_list(call, f->span_q.data, f->span_q.size[0] * f->span_q.size[1],
             sizeof(int32_t));
    if (of_keys) {
        call->args.span_k = f->span_k.data;
        add_list(call, f->span_k.data, f->span_k.size[0] * f->span_k.size[1],
                 sizeof(int32_t));
    }
    add_blocks(call, f, of_keys);
}

/* What makes scores in base 2 the exponent of tanh: at most so much that the
 * factor on scores in their own units stays a finite float, because 0 times
 * infinity is NaN.  What that changes are products q.k below 2^-121, whose
 * capped score then follows them where it should jump. */
static double inverse_of(double softcap, double unit, fa_dtype dtype)
{
    const double exact = softcap > 0.0 ? 2.0 / softcap : 0.0;
    const double most = 0x1.fffffp127;
    return dtype != FA_F64 && exact * unit > most ? most / unit : exact;
}

/* Numbers that say nothing if a feature is absent. */
static void set_numbers(fa_args *args, const fa_problem *p)
{
    const fa_features *f = &p->features;
    const uint32_t keep = fa_keep_of(f->dropout_p);
    args->softcap = f->softcap;
    args->softcap_inverse =
        inverse_of(f->softcap, (double)args->scale_log2, p->q.dtype);
    args->diagonal = last_diagonal(p);
    args->first_diagonal = first_diagonal(p);
    args->alibi_diagonal = own_diagonal(p);
    args->sink_keys = p->window_left < 0 ? 0 : (int32_t)f->sink_keys;
    args->keep = keep;
    args->keep_scale = (double)FA_KEEP_ALL / keep;
    while (keep << args->keep_log2 < FA_KEEP_ALL) {
        args->keep_log2++;
    }
}

/* Of the scores: those of q.k, unless what is added to them would become too
 * large in those. */
static void set_units(fa_args *args, double scale)
{
    const double log2_e = 1.4426950408889634;
    args->in_log2 = fabs(scale) * log2_e < 0x1p-10;
    args->per_unit = args->in_log2 != 0 ? log2_e : 1.0 / fabs(scale);
}

/* -- passes ---------------------------------------------------------------- */

static void fill_forward(fa_call *call, const fa_problem *p)
{
    add_tensors(call, p, NULL, FA_SET_Q | FA_SET_K | FA_SET_V, FA_SET_OUT);
    add_sums(call, p, FA_WRITE);
    add_features(call, p, false);
    add_sink(call, p);
}

/* What FA_PREPARE makes for each query, or corrects. */
static void fill_rows(fa_call *call, const fa_problem *p, const fa_gradients *g,
                      void *rows, uint32_t access)
{
    if (g->dlse.data != NULL) {
        call->args.dlse = view_of(&g->dlse);
        add_access(call, &g->dlse, FA_READ);
    }
    add_sums(call, p, FA_READ);
    add_rows(call, p, rows, access);
    add_sink(call, p);
    if ((g->wanted & FA_WANT_DSINK) != 0) {
        call->args.dsink = g->dsink.data;
        add_access(call, &g->dsink, FA_WRITE);
    }
}

/* fa_args.apart of what the passes of a plan form dP with. */
static uint32_t granules_apart(const fa_plan *plan)
{
    for (int i = 0; i < plan->count; i++) {
        const fa_variant *row = plan->step[i].variant;
        if (row->pass == FA_BACKWARD_KV || row->pass == FA_BACKWARD_Q) {
            return row->arith == FA_F32 ? FA_APART_GRANULES(row->dim) : 0;
        }
    }
    return 0;
}

static void fill_prepare(fa_call *call, const fa_problem *p,
                         const fa_gradients *g, const fa_plan *plan,
                         const fa_step *step, void *rows)
{
    const uint32_t prepare = step->prepare;
    const bool makes_rows = (prepare & FA_SET_DOUT) != 0;
    call->args.prepare = prepare;
    call->args.prepare_blocks = step->grid[0] / FA_PREPARED;
    if (!step->row_sums) {
        call->args.apart = granules_apart(plan);
        add_tensors(call, p, g, makes_rows ? prepare | FA_SET_OUT : prepare, 0);
    }
    if (makes_rows) {
        fill_rows(call, p, g, rows,
                  step->row_sums ? FA_READ | FA_WRITE : FA_WRITE);
    }
}

static void fill_backward(fa_call *call, const fa_problem *p,
                          const fa_gradients *g, const fa_step *step,
                          uint32_t writes, void *rows)
{
    const uint32_t of_keys = writes & (FA_SET_DK | FA_SET_DV);
    /* float: long sums are put away there (FA_PUTS_AWAY). */
    const uint32_t kept =
        p->q.dtype == FA_F32 && !fa_is_exact32(p) ? of_keys : 0;
    add_tensors(call, p, g, FA_SET_Q | FA_SET_K | FA_SET_V | FA_SET_DOUT | kept,
                writes);
    add_rows(call, p, rows, step->row_sums ? FA_READ | FA_WRITE : FA_READ);
    add_features(call, p, of_keys != 0);
}

static void fill_bias(fa_call *call, const fa_problem *p, const fa_gradients *g,
                      const fa_step *step, void *rows)
{
    fill_backward(call, p, g, step, 0, rows);
    call->args.dbias = view_of(&g->dbias);
    add_access(call, &g->dbias, FA_WRITE);
}

static fa_dtype gradient_dtype(const fa_problem *p, const fa_gradients *g)
{
    return g == NULL                       ? p->q.dtype
           : (g->wanted & FA_WANT_DQ) != 0 ? g->dq.dtype
           : (g->wanted & FA_WANT_DK) != 0 ? g->dk.dtype
           : (g->wanted & FA_WANT_DV) != 0 ? g->dv.dtype
                                           : p->q.dtype;
}

void fa_call_fill(const fa_problem *p, const fa_gradients *g,
                  const fa_plan *plan, const fa_step *step, void *workspace,
                  fa_call *call)
{
    const double log2_e = 1.4426950408889634;
    const fa_workspace *w = &plan->workspace;
    void *const rows = place(workspace, w->rows);
    uint32_t arrays = FA_SET_Q | FA_SET_K | FA_SET_V;
    /* The strict kernels that follow a fast one ask what fits, no more. */
    bool scales = step->only_unfit == 0;
    uint32_t access = FA_READ;
    call->extra_count = 0;
    call->access_count = 0;
    call->args = (fa_args){
        .scale = p->scale,
        .scale_log2 = (float)(fabs(p->scale) * log2_e),
        .seqlen_q = (int32_t)p->q.size[2],
        .seqlen_k = (int32_t)p->k.size[2],
        .head_dim = (int32_t)p->q.size[3],
        .head_dim_v = (int32_t)p->v.size[3],
        .batches = (int32_t)p->q.size[0],
        .heads = (int32_t)p->q.size[1],
        .heads_k = (int32_t)p->k.size[1],
        .group = (int32_t)(p->q.size[1] / p->k.size[1]),
        .stored = (int32_t)p->q.dtype,
        .stored_grad = (int32_t)gradient_dtype(p, g),
        .only_unfit = step->only_unfit,
        .row_sums = step->row_sums,
    };
    set_numbers(&call->args, p);
    if (plan->features != 0) {
        set_units(&call->args, p->scale);
    }
    switch (step->variant->pass) {
    case FA_FORWARD:
        fill_forward(call, p);
        break;
    case FA_PREPARE:
        fill_prepare(call, p, g, plan, step, rows);
        arrays = step->row_sums ? 0 : step->prepare;
        scales = true;
        access = FA_WRITE;
        break;
    case FA_BACKWARD_KV:
        fill_backward(call, p, g, step, FA_SET_DK | FA_SET_DV, rows);
        arrays |= FA_SET_DOUT;
        break;
    case FA_BACKWARD_Q:
        fill_backward(call, p, g, step, step->dq_follows ? 0 : FA_SET_DQ, rows);
        arrays |= FA_SET_DOUT;
        /* It leaves out softcap's slope beside row sums: FA_SUMS_ROWS. */
        assert(!fa_is_exact32(p) || !step->row_sums ||
               call->args.dq.data == NULL);
        break;
    case FA_BACKWARD_BIAS:
        fill_bias(call, p, g, step, rows);
        arrays = 0; /* it converts nothing to fp16 */
        break;
    case FA_ROTARY: /* never a step of attention */
        assert(false);
        break;
    }
    add_arrays(call, p, w, workspace, arrays, scales, access);
}
