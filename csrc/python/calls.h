/* calls.h: functions of the module that parse a call.  See calls.c.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_PYTHON_CALLS_H
#define FA_PYTHON_CALLS_H

#include "python/ops.h"
#include "python/state.h"

/* Stable since Python 3.7, but shown by the headers of the limited API only
 * from 3.10 on. */
#ifndef METH_FASTCALL
#define METH_FASTCALL 0x0080
#endif
typedef PyObject *(*fast_function)(PyObject *, PyObject *const *, Py_ssize_t);

typedef struct fa_module_state {
    PyObject *error; /* the class Error */
} fa_module_state;

/* Set Error or RuntimeError; both return NULL. */
PyObject *fa_raise_error(PyObject *module, const fa_error *error);
PyObject *fa_raise_runtime_error(const fa_error *error);

PyObject *fa_module_forward(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *fa_module_backward(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *fa_module_rotary(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *fa_module_workspace(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *fa_module_load(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *fa_module_plan(PyObject *, PyObject *const *, Py_ssize_t);

#endif
