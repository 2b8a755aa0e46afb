/* module.c: flash_attn_rocm._C, as if it were Python:
 *
 *   class Error(ValueError): "an argument that configure() or plan() refuses"
 *
 *   def configure(code_dir, sim_library, mode, sim_arch, bf16="auto",
 *                 fp32="auto"):
 *       "Where code objects and the simulator lie, who runs what (auto, sim,
 *        standin, null, off), whom to ask for the simulated architecture,
 *        whether bfloat16 may go through fp16 (auto, strict), and whether
 *        float32 goes through float64 (auto: if small, fast: never, exact).
 *        Loads nothing; may be called again."
 *   def register_ops() -> bool:
 *       "Register the ops fwd, bwd and rotary from C.  False if this torch
 *        lacks the functions.  Raises RuntimeError with torch's own words."
 *   def forward(...), backward(...), rotary(...), workspace(...), load(...),
 *       plan(...): see calls.c
 *   def last_call() -> tuple | None:
 *       "This thread's last record: (backend, symbols, reason, device,
 *        wave_instructions, workgroups)."
 *   def record_fallback(reason):
 *       "Note that the stock function answers, and why."
 *   def counters() -> dict         fused, fallback, wave_instructions
 *   def reset_counters()
 *   def build_info() -> dict
 *   def variants() -> list[dict]   the rows of variants.def
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "python/guard.h"
#include "python/outcome.h"
#include "python/ops.h"
#include "python/state.h"

#include <string.h>

#ifndef FA_SANITIZE
#define FA_SANITIZE ""
#endif
#ifdef NDEBUG
static const bool is_debug = false;
#else
static const bool is_debug = true;
#endif

/* -- configuration and registration ---------------------------------------- */

static PyObject *module_configure(PyObject *module, PyObject *args)
{
    PyObject *code_dir = NULL; /* bytes */
    PyObject *sim_library = NULL;
    const char *mode = NULL;
    const char *bf16 = "auto";
    const char *fp32 = "auto";
    PyObject *sim_arch = NULL; /* borrowed */
    PyObject *result = NULL;
    fa_error error;
    if (!PyArg_ParseTuple(args, "O&O&sO|ss:configure", PyUnicode_FSConverter,
                          &code_dir, PyUnicode_FSConverter, &sim_library, &mode,
                          &sim_arch, &bf16, &fp32)) {
        goto done;
    }
    if (!PyCallable_Check(sim_arch)) {
        fa_fail(&error, FA_EINVAL,
                "sim_arch: expected a callable, got something else");
        fa_raise_error(module, &error);
        goto done;
    }
    if (fa_state_configure(PyBytes_AsString(code_dir),
                           PyBytes_AsString(sim_library), mode, sim_arch, bf16,
                           fp32, &error) != FA_OK) {
        fa_raise_error(module, &error);
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
        return fa_raise_runtime_error(&error);
    }
    return PyBool_FromLong(registered);
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

/* The names of the types that a row reads; new reference. */
static PyObject *reads_list(const fa_variant *v)
{
    PyObject *list = PyList_New(0);
    for (int dtype = FA_F16; list != NULL && dtype <= FA_F64; dtype++) {
        if ((v->reads >> dtype & 1) == 0) {
            continue;
        }
        PyObject *name = PyUnicode_FromString(fa_dtype_name((fa_dtype)dtype));
        if (name == NULL || PyList_Append(list, name)) {
            Py_DECREF(list);
            list = NULL;
        }
        Py_XDECREF(name);
    }
    return list;
}

static PyObject *variant_dict(const fa_variant *v)
{
    PyObject *reads = reads_list(v);
    return reads == NULL
               ? NULL
               : Py_BuildValue("{sssssssNsisssisisIsI}", "symbol", v->symbol,
                               "pass", fa_pass_name(v->pass), "arith",
                               fa_dtype_name(v->arith), "reads", reads, "dim",
                               (int)v->dim, "level", fa_level_name(v->level),
                               "rows", (int)v->rows, "steps", (int)v->steps,
                               "threads", (unsigned)v->threads, "lds_bytes",
                               (unsigned)v->lds_bytes);
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
    {"forward", FAST(fa_module_forward), METH_FASTCALL,
     "forward(...): the forward on addresses."},
    {"backward", FAST(fa_module_backward), METH_FASTCALL,
     "backward(...): the backward on addresses."},
    {"rotary", FAST(fa_module_rotary), METH_FASTCALL,
     "rotary(...): rotary positions on addresses."},
    {"workspace", FAST(fa_module_workspace), METH_FASTCALL,
     "workspace(dtype, q_size, k_size, v_size, wanted, features=None): bytes "
     "that forward() (wanted 0) or backward() needs."},
    {"load", FAST(fa_module_load), METH_FASTCALL,
     "load(device_type, device_index, arch, dtype=None): load what calls "
     "need."},
    {"plan", FAST(fa_module_plan), METH_FASTCALL,
     "plan(...): (symbols, grid, why, steps, workspace) of what would run."},
    {"last_call", module_last_call, METH_NOARGS,
     "last_call(): this thread's last record, or None."},
    {"record_fallback", module_record_fallback, METH_O,
     "record_fallback(reason): the stock function answers this call."},
    {"counters", module_counters, METH_NOARGS,
     "counters(): calls by kernel, fallbacks by reason, instructions."},
    {"reset_counters", module_reset_counters, METH_NOARGS,
     "reset_counters(): all counters to zero."},
    {"guard", FAST(fa_module_guard), METH_FASTCALL,
     "guard(mode, factor, floor_ms, cooldown_s, abort_on_hang, dir, dir_else): "
     "set the guard's policy."},
    {"guard_stop", fa_module_guard_stop, METH_NOARGS,
     "guard_stop(): end the watching thread."},
    {"guard_counts", fa_module_guard_counts, METH_NOARGS,
     "guard_counts(): missed deadlines, calls in flight, and so on."},
    {"keep", fa_module_keep, METH_O,
     "keep(things): what this thread's late call on addresses still uses."},
    {"last_failure", fa_module_last_failure, METH_NOARGS,
     "last_failure(): why this thread's last call failed, or \"\"."},
    {"breakers", fa_module_breakers, METH_NOARGS,
     "breakers(): kernels that may not be launched."},
    {"guard_device", FAST(fa_module_guard_device), METH_FASTCALL,
     "guard_device(device_type, device_index, arch): make it known."},
    {"breaker_trip", FAST(fa_module_breaker_trip), METH_FASTCALL,
     "breaker_trip(device, kernel, cause, cooldown_s=None): open one."},
    {"breaker_reset", fa_module_breaker_reset, METH_O,
     "breaker_reset(kernel): close it, or all (None)."},
    {"latency", fa_module_latency, METH_NOARGS,
     "latency(): how long calls took, by device and kernel."},
    {"identities", fa_module_identities, METH_NOARGS,
     "identities(): devices that are known, and their versions."},
    {"complaints", fa_module_complaints, METH_NOARGS,
     "complaints(): why a device's state is not kept on disk."},
    {"store_list", fa_module_store_list, METH_O,
     "store_list(dir): the breakers on disk, and how many files are bad."},
    {"store_reset", FAST(fa_module_store_reset), METH_FASTCALL,
     "store_reset(dir, kernel=None): remove them; sets bad files aside."},
    {"build_info", module_build_info, METH_NOARGS,
     "build_info(): version and build options."},
    {"variants", module_variants, METH_NOARGS,
     "variants(): one dict for each kernel."},
    {NULL, NULL, 0, NULL}};

static int module_exec(PyObject *module)
{
    fa_module_state *state = PyModule_GetState(module);
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
    fa_module_state *state = PyModule_GetState(module);
    if (state != NULL) {
        Py_VISIT(state->error);
    }
    return 0;
}

static int module_clear(PyObject *module)
{
    fa_module_state *state = PyModule_GetState(module);
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
    .m_size = sizeof(fa_module_state),
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
