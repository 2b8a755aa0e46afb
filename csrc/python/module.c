/* module.c: flash_attn_rocm._C, as if it were Python:
 *
 *   class Error(ValueError): "an argument that configure() or plan() refuses"
 *
 *   def configure(code_dir, sim_library, mode, sim_arch):
 *       "Where code objects and the simulator lie, who runs what (auto, sim,
 *        standin, null, off), and whom to ask for the simulated architecture.
 *        Loads nothing; may be called again."
 *   def register_ops() -> bool:
 *       "Register flash_attn_rocm::fwd from C.  False if this torch lacks
 *        the functions.  Raises RuntimeError with torch's own words."
 *   def forward(device_type, device_index, stream, arch, dtype, q_ptr, k_ptr,
 *               v_ptr, out_ptr, lse_ptr, q_size, q_stride, k_size, k_stride,
 *               v_size, v_stride, out_stride, scale, causal):
 *       "The op on addresses, for kernels registered from Python.  Raises
 *        RuntimeError."
 *   def load(device_type, device_index, arch):
 *       "Open and load what forward() would, launch nothing.  Raises
 *        RuntimeError."
 *   def plan(dtype, q_align, k_align, v_align, q_size, q_stride, k_size,
 *            k_stride, v_size, v_stride, scale, causal) -> (symbol, grid, why):
 *       "What would run; raises Error.  The alignments are those of the
 *        tensors' addresses in bytes; out counts as aligned."
 *   def last_call() -> tuple | None:
 *       "This thread's last record: (backend, symbol, reason, device,
 *        wave_instructions, workgroups)."
 *   def record_fallback(reason):
 *       "Note that the stock function answers, and why."
 *   def counters() -> dict         fused, fallback, wave_instructions
 *   def reset_counters()
 *   def build_info() -> dict
 *   def variants() -> list[dict]   the rows of variants.def
 *
 * Parsing is all that happens here.  Sizes and strides are tuples of four.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "python/ops.h"
#include "python/state.h"

#include <string.h>

/* Stable since Python 3.7, but shown by the headers of the limited API only
 * from 3.10 on. */
#ifndef METH_FASTCALL
#define METH_FASTCALL 0x0080
#endif
typedef PyObject *(*fast_function)(PyObject *, PyObject *const *, Py_ssize_t);

#ifndef FA_SANITIZE
#define FA_SANITIZE ""
#endif
#ifdef NDEBUG
static const bool is_debug = false;
#else
static const bool is_debug = true;
#endif

typedef struct module_state {
    PyObject *error; /* the class Error */
} module_state;

/* -- parsing --------------------------------------------------------------- */

static int check_count(const char *function, Py_ssize_t got,
                       Py_ssize_t expected)
{
    if (got != expected) {
        PyErr_Format(PyExc_TypeError,
                     "%s: expected %zd positional arguments, got %zd", function,
                     expected, got);
        return -1;
    }
    return 0;
}

/* 0, or -1 with an exception set, like all of these. */
static int parse_int64(PyObject *from, int64_t *to)
{
    long long value = PyLong_AsLongLong(from);
    if (value == -1 && PyErr_Occurred()) {
        return -1;
    }
    *to = value;
    return 0;
}

static int parse_int(PyObject *from, int *to)
{
    long value = PyLong_AsLong(from);
    if (value == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (value < -0x7fffffffL || value > 0x7fffffffL) {
        PyErr_Format(PyExc_OverflowError,
                     "expected a number of 32 bits, got %ld", value);
        return -1;
    }
    *to = (int)value;
    return 0;
}

static int parse_pointer(PyObject *from, void **to)
{
    *to = PyLong_AsVoidPtr(from);
    return *to == NULL && PyErr_Occurred() ? -1 : 0;
}

static int parse_four(const char *name, PyObject *from, int64_t to[4])
{
    if (!PyTuple_Check(from) || PyTuple_Size(from) != 4) {
        PyErr_Format(PyExc_TypeError,
                     "%s: expected a tuple of 4 ints, got "
                     "%R",
                     name, from);
        return -1;
    }
    for (Py_ssize_t i = 0; i < 4; i++) {
        if (parse_int64(PyTuple_GetItem(from, i), &to[i])) {
            return -1;
        }
    }
    return 0;
}

static int parse_dtype(PyObject *from, fa_dtype *to)
{
    int code = 0;
    if (parse_int(from, &code)) {
        return -1;
    }
    if (code < FA_F16 || code > FA_F64) {
        PyErr_Format(PyExc_ValueError, "dtype: expected 0..3, got %d", code);
        return -1;
    }
    *to = (fa_dtype)code;
    return 0;
}

/* q_size, q_stride, k_size, ... from six arguments in a row. */
static int parse_shapes(PyObject *const *args, fa_dtype dtype,
                        fa_problem *problem)
{
    static const char *const names[] = {"q_size",   "q_stride", "k_size",
                                        "k_stride", "v_size",   "v_stride"};
    fa_tensor *const tensors[] = {&problem->q, &problem->k, &problem->v};
    for (int i = 0; i < 3; i++) {
        tensors[i]->dtype = dtype;
        if (parse_four(names[2 * i], args[2 * i], tensors[i]->size) ||
            parse_four(names[2 * i + 1], args[2 * i + 1], tensors[i]->stride)) {
            return -1;
        }
    }
    return 0;
}

static int parse_scale_causal(PyObject *const *args, fa_problem *problem)
{
    problem->scale = PyFloat_AsDouble(args[0]);
    if (problem->scale == -1.0 && PyErr_Occurred()) {
        return -1;
    }
    return parse_int(args[1], &problem->causal);
}

/* -- configuration and registration ---------------------------------------- */

static PyObject *raise_error(PyObject *module, const fa_error *error)
{
    const module_state *state = PyModule_GetState(module);
    PyErr_SetString(state->error, error->text);
    return NULL;
}

static PyObject *raise_runtime_error(const fa_error *error)
{
    PyErr_SetString(PyExc_RuntimeError, error->text);
    return NULL;
}

static PyObject *module_configure(PyObject *module, PyObject *args)
{
    PyObject *code_dir = NULL; /* bytes */
    PyObject *sim_library = NULL;
    const char *mode = NULL;
    PyObject *sim_arch = NULL; /* borrowed */
    PyObject *result = NULL;
    fa_error error;
    if (!PyArg_ParseTuple(args, "O&O&sO:configure", PyUnicode_FSConverter,
                          &code_dir, PyUnicode_FSConverter, &sim_library, &mode,
                          &sim_arch)) {
        goto done;
    }
    if (!PyCallable_Check(sim_arch)) {
        fa_fail(&error, FA_EINVAL,
                "sim_arch: expected a callable, got something else");
        raise_error(module, &error);
        goto done;
    }
    if (fa_state_configure(PyBytes_AsString(code_dir),
                           PyBytes_AsString(sim_library), mode, sim_arch,
                           &error) != FA_OK) {
        raise_error(module, &error);
        goto done;
    }
    Py_INCREF(Py_None);
    result = Py_None;

done:
    Py_XDECREF(sim_library);
    Py_XDECREF(code_dir);
    return result;
}

static PyObject *module_register_ops(PyObject *module, PyObject *unused)
{
    bool registered = false;
    fa_error error;
    (void)module;
    (void)unused;
    if (fa_ops_register(&registered, &error) != FA_OK) {
        return raise_runtime_error(&error);
    }
    return PyBool_FromLong(registered);
}

/* -- calls ----------------------------------------------------------------- */

/* Fills arch (room for FA_STATE_ARCH_CHARS) from a str or None. */
static int parse_arch(PyObject *from, char *arch, bool *given)
{
    *given = from != Py_None;
    if (!*given) {
        return 0;
    }
    PyObject *bytes = PyUnicode_AsUTF8String(from);
    const char *text = bytes == NULL ? NULL : PyBytes_AsString(bytes);
    int failed = text == NULL ? -1 : 0;
    fa_error error;
    if (!failed && fa_state_copy_arch(text, arch, &error) != FA_OK) {
        PyErr_SetString(PyExc_RuntimeError, error.text);
        failed = -1;
    }
    Py_XDECREF(bytes);
    return failed;
}

static PyObject *module_forward(PyObject *module, PyObject *const *args,
                                Py_ssize_t count)
{
    enum {
        DEVICE_TYPE,
        DEVICE_INDEX,
        STREAM,
        ARCH,
        DTYPE,
        Q_PTR,
        K_PTR,
        V_PTR,
        OUT_PTR,
        LSE_PTR,
        Q_SIZE,
        OUT_STRIDE = Q_SIZE + 6,
        SCALE,
        CAUSAL,
        ARGS
    };
    fa_problem problem;
    fa_plan plan;
    fa_target target = {0};
    fa_counts counts;
    fa_runtime *runtime = NULL;
    fa_dtype dtype = FA_F16;
    fa_error error;
    fa_status status = FA_OK;
    char arch[FA_STATE_ARCH_CHARS];
    bool arch_given = false;
    void *lse = NULL;
    int device_type = 0;
    (void)module;

    if (check_count("forward", count, ARGS) ||
        parse_int(args[DEVICE_TYPE], &device_type) ||
        parse_int(args[DEVICE_INDEX], &target.device) ||
        parse_pointer(args[STREAM], &target.stream) ||
        parse_arch(args[ARCH], arch, &arch_given) ||
        parse_dtype(args[DTYPE], &dtype) ||
        parse_pointer(args[Q_PTR], &problem.q.data) ||
        parse_pointer(args[K_PTR], &problem.k.data) ||
        parse_pointer(args[V_PTR], &problem.v.data) ||
        parse_shapes(args + Q_SIZE, dtype, &problem)) {
        return NULL;
    }
    problem.out = problem.q;
    if (parse_pointer(args[OUT_PTR], &problem.out.data) ||
        parse_pointer(args[LSE_PTR], &lse) ||
        parse_four("out_stride", args[OUT_STRIDE], problem.out.stride) ||
        parse_scale_causal(args + SCALE, &problem)) {
        return NULL;
    }
    problem.lse = lse;
    target.arch = arch_given ? arch : NULL;
    if (device_type != 0 && device_type != 1) {
        fa_fail(&error, FA_EINVAL,
                "device_type: expected 0 (CPU) or 1 (CUDA), got %d",
                device_type);
        return raise_runtime_error(&error);
    }

    Py_BEGIN_ALLOW_THREADS
    status = fa_plan_make(&problem, &plan, &error);
    if (status == FA_OK) {
        status = fa_state_backend(device_type == 1, &runtime, &target.backend,
                                  &error);
    }
    if (status == FA_OK && target.backend == FA_SIM && !arch_given) {
        status = fa_state_no_arch(&error);
    }
    if (status == FA_OK) {
        status = fa_forward(runtime, &target, &problem, &plan, &counts, &error);
    }
    Py_END_ALLOW_THREADS
    if (status != FA_OK) {
        return raise_runtime_error(&error);
    }
    fa_state_record(target.backend, device_type == 1 ? target.device : -1,
                    &plan, &counts);
    Py_RETURN_NONE;
}

static PyObject *module_load(PyObject *module, PyObject *const *args,
                             Py_ssize_t count)
{
    fa_target target = {0};
    fa_runtime *runtime = NULL;
    fa_error error;
    fa_status status = FA_OK;
    char arch[FA_STATE_ARCH_CHARS];
    bool arch_given = false;
    int device_type = 0;
    (void)module;

    if (check_count("load", count, 3) || parse_int(args[0], &device_type) ||
        parse_int(args[1], &target.device) ||
        parse_arch(args[2], arch, &arch_given)) {
        return NULL;
    }
    target.arch = arch_given ? arch : NULL;
    Py_BEGIN_ALLOW_THREADS
    status =
        fa_state_backend(device_type == 1, &runtime, &target.backend, &error);
    if (status == FA_OK) {
        status = fa_runtime_load(runtime, &target, &error);
    }
    Py_END_ALLOW_THREADS
    if (status != FA_OK) {
        return raise_runtime_error(&error);
    }
    Py_RETURN_NONE;
}

static PyObject *module_plan(PyObject *module, PyObject *const *args,
                             Py_ssize_t count)
{
    enum {
        DTYPE,
        Q_ALIGN,
        K_ALIGN,
        V_ALIGN,
        Q_SIZE,
        SCALE = Q_SIZE + 6,
        CAUSAL,
        ARGS
    };
    fa_problem problem;
    fa_plan plan;
    fa_dtype dtype = FA_F16;
    fa_error error;
    char why[FA_WHY_CHARS];

    /* An address that equals its alignment has that alignment. */
    if (check_count("plan", count, ARGS) || parse_dtype(args[DTYPE], &dtype) ||
        parse_pointer(args[Q_ALIGN], &problem.q.data) ||
        parse_pointer(args[K_ALIGN], &problem.k.data) ||
        parse_pointer(args[V_ALIGN], &problem.v.data) ||
        parse_shapes(args + Q_SIZE, dtype, &problem) ||
        parse_scale_causal(args + SCALE, &problem)) {
        return NULL;
    }
    fa_tensor_like(&problem.q, &problem.out);
    if (fa_plan_make(&problem, &plan, &error) != FA_OK) {
        return raise_error(module, &error);
    }
    fa_plan_why(&plan, why);
    return Py_BuildValue("s(III)s",
                         plan.variant == NULL ? "" : plan.variant->symbol,
                         (unsigned)plan.grid[0], (unsigned)plan.grid[1],
                         (unsigned)plan.grid[2], why);
}

/* -- records --------------------------------------------------------------- */

static PyObject *module_last_call(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return fa_state_last_call();
}

static PyObject *module_record_fallback(PyObject *module, PyObject *reason)
{
    (void)module;
    return fa_state_record_fallback(reason);
}

static PyObject *module_counters(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return fa_state_counters();
}

static PyObject *module_reset_counters(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    fa_state_reset_counters();
    Py_RETURN_NONE;
}

/* -- facts ----------------------------------------------------------------- */

/* A list of what `make_item` makes of each variant; new reference. */
static PyObject *list_variants(PyObject *(*make_item)(const fa_variant *))
{
    PyObject *list = PyList_New(FA_VARIANT_COUNT);
    for (Py_ssize_t i = 0; list != NULL && i < FA_VARIANT_COUNT; i++) {
        PyObject *item = make_item(&fa_variants[i]);
        if (item == NULL || PyList_SetItem(list, i, item)) {
            Py_DECREF(list);
            list = NULL;
        }
    }
    return list;
}

static PyObject *variant_symbol(const fa_variant *v)
{
    return PyUnicode_FromString(v->symbol);
}

static PyObject *variant_dict(const fa_variant *v)
{
    return Py_BuildValue(
        "{sssssssisssssisisIsI}", "symbol", v->symbol, "pass",
        fa_pass_name(v->pass), "dtype", fa_dtype_name(v->dtype), "dim",
        (int)v->dim, "level", fa_level_name(v->level), "load",
        fa_load_name(v->load), "rows", (int)v->rows, "keys", (int)v->keys,
        "threads", (unsigned)v->threads, "lds_bytes", (unsigned)v->lds_bytes);
}

static PyObject *module_variants(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return list_variants(variant_dict);
}

static PyObject *module_build_info(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    PyObject *symbols = list_variants(variant_symbol);
    return symbols == NULL
               ? NULL
               : Py_BuildValue(
                     "{sssOsssNsOss}", "version", FA_VERSION, "torch_abi",
                     fa_ops_have_torch_abi() ? Py_True : Py_False, "python_abi",
                     "abi3, Python 3.9 and later", "variants", symbols, "debug",
                     is_debug ? Py_True : Py_False, "sanitize", FA_SANITIZE);
}

/* -- the module ------------------------------------------------------------ */

/* Through void (*)(void), the one detour that compilers accept silently. */
#define FAST(function) (PyCFunction)(void (*)(void))(fast_function)(function)

static PyMethodDef methods[] = {
    {"configure", module_configure, METH_VARARGS,
     "configure(code_dir, sim_library, mode, sim_arch): set what the first "
     "launch loads."},
    {"register_ops", module_register_ops, METH_NOARGS,
     "register_ops(): register the ops from C; False if torch is too old."},
    {"forward", FAST(module_forward), METH_FASTCALL,
     "forward(...): the forward on addresses."},
    {"load", FAST(module_load), METH_FASTCALL,
     "load(device_type, device_index, arch): load what forward() needs."},
    {"plan", FAST(module_plan), METH_FASTCALL,
     "plan(...): (symbol, grid, why) of what would run."},
    {"last_call", module_last_call, METH_NOARGS,
     "last_call(): this thread's last record, or None."},
    {"record_fallback", module_record_fallback, METH_O,
     "record_fallback(reason): the stock function answers this call."},
    {"counters", module_counters, METH_NOARGS,
     "counters(): calls by kernel, fallbacks by reason, instructions."},
    {"reset_counters", module_reset_counters, METH_NOARGS,
     "reset_counters(): all counters to zero."},
    {"build_info", module_build_info, METH_NOARGS,
     "build_info(): version and build options."},
    {"variants", module_variants, METH_NOARGS,
     "variants(): one dict for each kernel."},
    {NULL, NULL, 0, NULL}};

static int module_exec(PyObject *module)
{
    module_state *state = PyModule_GetState(module);
    state->error = PyErr_NewExceptionWithDoc(
        "flash_attn_rocm._C.Error",
        "An argument that configure() or plan() refuses; the text says why.",
        PyExc_ValueError, NULL);
    if (state->error == NULL) {
        return -1;
    }
    Py_INCREF(state->error); /* AddObject takes one, the state keeps one */
    if (PyModule_AddObject(module, "Error", state->error)) {
        Py_DECREF(state->error);
        return -1;
    }
    return 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    module_state *state = PyModule_GetState(module);
    if (state != NULL) {
        Py_VISIT(state->error);
    }
    return 0;
}

static int module_clear(PyObject *module)
{
    module_state *state = PyModule_GetState(module);
    if (state != NULL) {
        Py_CLEAR(state->error);
    }
    return 0;
}

/* As Py_mod_exec is a void pointer slot, a function must become one. */
static PyModuleDef_Slot slots[] = {{Py_mod_exec, NULL}, /* set by PyInit__C */
#ifdef Py_mod_gil
                                   {Py_mod_gil, Py_MOD_GIL_USED},
#endif
                                   {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "flash_attn_rocm._C",
    .m_doc = "Kernels of flash_attn_rocm: plan, launch, records.",
    .m_size = sizeof(module_state),
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
};

PyMODINIT_FUNC PyInit__C(void)
{
    int (*exec)(PyObject *) = module_exec;
    memcpy(&slots[0].value, &exec, sizeof exec);
    return PyModuleDef_Init(&definition);
}
