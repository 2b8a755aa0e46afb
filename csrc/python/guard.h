/* guard.h: the process's guard (host/guard.h), and its functions of _C.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_PYTHON_GUARD_H
#define FA_PYTHON_GUARD_H

#include "python/calls.h"

#include "host/guard.h"

/* NULL before the first guard().  Any thread. */
fa_guard *fa_state_guard(void);

/* Appends `item`, which is taken; NULL is a failure already. */
int fa_list_append(PyObject *list, PyObject *item);

/* guard_policy.c */
PyObject *fa_module_guard(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *fa_module_guard_stop(PyObject *, PyObject *);
PyObject *fa_module_guard_counts(PyObject *, PyObject *);

/* guard_devices.c */
PyObject *fa_module_breakers(PyObject *, PyObject *);
PyObject *fa_module_guard_device(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *fa_module_breaker_trip(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *fa_module_breaker_reset(PyObject *, PyObject *);
PyObject *fa_module_latency(PyObject *, PyObject *);
PyObject *fa_module_identities(PyObject *, PyObject *);
PyObject *fa_module_complaints(PyObject *, PyObject *);

/* guard_disk.c */
PyObject *fa_module_store_list(PyObject *, PyObject *);
PyObject *fa_module_store_reset(PyObject *, PyObject *const *, Py_ssize_t);

#endif
