/* parse.c: Python's objects as what C takes.  See parse.h.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "python/parse.h"

int fa_check_count(const char *function, Py_ssize_t got, Py_ssize_t least,
                   Py_ssize_t most)
{
    if (got < least || got > most) {
        PyErr_Format(PyExc_TypeError,
                     "%s: expected %zd positional arguments, got %zd", function,
                     got < least ? least : most, got);
        return -1;
    }
    return 0;
}

/* Says of which argument Python refused the conversion; what an argument's own
 * methods raised stays as it is. */
static int refuse(const char *name, const char *expected, PyObject *from)
{
    PyObject *const kinds[] = {PyExc_TypeError, PyExc_OverflowError};
    for (int i = 0; i < 2; i++) {
        if (PyErr_ExceptionMatches(kinds[i])) {
            PyErr_Format(kinds[i], "%s: expected %s, got %R", name, expected,
                         from);
            break;
        }
    }
    return -1;
}

int fa_parse_int64(const char *name, PyObject *from, int64_t *to)
{
    long long value = PyLong_AsLongLong(from);
    if (value == -1 && PyErr_Occurred()) {
        return refuse(name, "a whole number of 64 bits", from);
    }
    *to = value;
    return 0;
}

int fa_parse_int(const char *name, PyObject *from, int *to)
{
    long value = PyLong_AsLong(from);
    if (!PyErr_Occurred() && (value < INT32_MIN || value > INT32_MAX)) {
        PyErr_SetNone(PyExc_OverflowError);
    }
    if (PyErr_Occurred()) {
        return refuse(name, "a whole number of 32 bits", from);
    }
    *to = (int)value;
    return 0;
}

int fa_parse_double(const char *name, PyObject *from, double *to)
{
    *to = PyFloat_AsDouble(from);
    if (*to == -1.0 && PyErr_Occurred()) {
        return refuse(name, "a number", from);
    }
    return 0;
}

int fa_parse_pointer(PyObject *from, void **to)
{
    *to = PyLong_AsVoidPtr(from);
    return *to == NULL && PyErr_Occurred() ? -1 : 0;
}

int fa_parse_tuple(const char *name, PyObject *from, int count, int64_t *to)
{
    if (!PyTuple_Check(from) || PyTuple_Size(from) != count) {
        PyErr_Format(PyExc_TypeError,
                     "%s: expected a tuple of %d ints, got "
                     "%R",
                     name, count, from);
        return -1;
    }
    for (int i = 0; i < count; i++) {
        if (fa_parse_int64(name, PyTuple_GetItem(from, i), &to[i])) {
            return -1;
        }
    }
    return 0;
}

int fa_parse_dtype(PyObject *from, fa_dtype *to)
{
    int code = 0;
    if (fa_parse_int("dtype", from, &code)) {
        return -1;
    }
    if (code < FA_F16 || code > FA_F64) {
        PyErr_Format(PyExc_ValueError, "dtype: expected 0..3, got %d", code);
        return -1;
    }
    *to = (fa_dtype)code;
    return 0;
}

int fa_parse_wanted(PyObject *from, uint32_t *to)
{
    int wanted = 0;
    if (fa_parse_int("wanted", from, &wanted)) {
        return -1;
    }
    *to = (uint32_t)wanted;
    return 0;
}

int fa_parse_bool(PyObject *from, bool *to)
{
    const int value = PyObject_IsTrue(from);
    *to = value == 1;
    return value < 0 ? -1 : 0;
}

int fa_parse_shapes(PyObject *const *args, fa_dtype dtype, fa_problem *problem)
{
    static const char *const names[] = {"q_size",   "q_stride", "k_size",
                                        "k_stride", "v_size",   "v_stride"};
    fa_tensor *const tensors[] = {&problem->q, &problem->k, &problem->v};
    for (int i = 0; i < 3; i++) {
        tensors[i]->dtype = dtype;
        if (fa_parse_tuple(names[2 * i], args[2 * i], 4, tensors[i]->size) ||
            fa_parse_tuple(names[2 * i + 1], args[2 * i + 1], 4,
                           tensors[i]->stride)) {
            return -1;
        }
    }
    return 0;
}

int fa_parse_scale_causal(PyObject *const *args, fa_problem *problem)
{
    return fa_parse_double("scale", args[0], &problem->scale) ||
                   fa_parse_int("causal", args[1], &problem->causal)
               ? -1
               : 0;
}

/* None, or (address, dtype, sizes, strides) of up to four dimensions; *to gets
 * them as its first. */
static int parse_feature(const char *name, PyObject *from, fa_tensor *to)
{
    *to = (fa_tensor){.size = {1, 1, 1, 1}};
    if (from == Py_None) {
        return 0;
    }
    if (!PyTuple_Check(from) || PyTuple_Size(from) != 4 ||
        !PyTuple_Check(PyTuple_GetItem(from, 2)) ||
        PyTuple_Size(PyTuple_GetItem(from, 2)) > 4) {
        PyErr_Format(PyExc_TypeError,
                     "%s: expected None or (address, dtype, sizes, strides), "
                     "got %R",
                     name, from);
        return -1;
    }
    PyObject *const sizes = PyTuple_GetItem(from, 2);
    const int dims = (int)PyTuple_Size(sizes);
    return fa_parse_pointer(PyTuple_GetItem(from, 0), &to->data) ||
                   fa_parse_dtype(PyTuple_GetItem(from, 1), &to->dtype) ||
                   fa_parse_tuple(name, sizes, dims, to->size) ||
                   fa_parse_tuple(name, PyTuple_GetItem(from, 3), dims,
                                  to->stride)
               ? -1
               : 0;
}

int fa_parse_features(PyObject *from, fa_problem *problem)
{
    fa_features *f = &problem->features;
    fa_tensor seed;
    const struct {
        const char *name;
        fa_tensor *to;
    } tensors[] = {{"bias", &f->bias},        {"mask", &f->mask},
                   {"alibi", &f->alibi},      {"sink", &f->sink},
                   {"seed", &seed},           {"span_q", &f->span_q},
                   {"span_k", &f->span_k},    {"blocks", &f->blocks},
                   {"blocks_t", &f->blocks_t}};
    enum { TENSORS = sizeof tensors / sizeof tensors[0] };
    const struct {
        const char *name;
        double *to;
    } doubles[] = {{"softcap", &f->softcap}, {"dropout_p", &f->dropout_p}};
    const struct {
        const char *name;
        int64_t *to;
    } ints[] = {{"window_left", &problem->window_left},
                {"window_right", &problem->window_right},
                {"sink_keys", &f->sink_keys},
                {"block_q", &f->block_q},
                {"block_k", &f->block_k}};
    problem->window_left = problem->window_right = -1;
    if (from == Py_None) {
        return 0;
    }
    if (!PyTuple_Check(from) || PyTuple_Size(from) != TENSORS + 2 + 5) {
        PyErr_Format(PyExc_TypeError,
                     "features: expected None or a tuple of %d, got %R",
                     TENSORS + 2 + 5, from);
        return -1;
    }
    for (int i = 0; i < TENSORS; i++) {
        if (parse_feature(tensors[i].name, PyTuple_GetItem(from, i),
                          tensors[i].to)) {
            return -1;
        }
    }
    f->seed = seed.data;
    for (int i = 0; i < 2; i++) {
        if (fa_parse_double(doubles[i].name, PyTuple_GetItem(from, TENSORS + i),
                            doubles[i].to)) {
            return -1;
        }
    }
    for (int i = 0; i < 5; i++) {
        if (fa_parse_int64(ints[i].name, PyTuple_GetItem(from, TENSORS + 2 + i),
                           ints[i].to)) {
            return -1;
        }
    }
    return 0;
}

int fa_parse_arch(PyObject *from, char *arch, bool *given)
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

int fa_parse_time(const char *name, PyObject *from, double unit_ns, int64_t *to)
{
    const double most_ns = 1e18;
    double number = 0.0;
    if (fa_parse_double(name, from, &number)) {
        return -1;
    }
    if (!(number >= 0.0)) {
        PyErr_Format(PyExc_ValueError,
                     "%s: expected a number of at least 0, got %R", name, from);
        return -1;
    }
    *to = (int64_t)(number * unit_ns < most_ns ? number * unit_ns : most_ns);
    return 0;
}

int fa_parse_path(PyObject *from, PyObject **owner, const char **to)
{
    *to = NULL;
    if (from == Py_None) {
        return 0;
    }
    if (!PyUnicode_FSConverter(from, owner)) {
        return -1;
    }
    *to = PyBytes_AsString(*owner);
    return *to == NULL ? -1 : 0;
}

const char *fa_parse_text(const char *name, PyObject *from, PyObject **owner)
{
    if (!PyUnicode_Check(from)) {
        PyErr_Format(PyExc_TypeError, "%s: expected a str, got %R", name, from);
        return NULL;
    }
    *owner = PyUnicode_AsUTF8String(from);
    return *owner == NULL ? NULL : PyBytes_AsString(*owner);
}
