/* guard.h: the process's guard (host/guard.h), and its functions of _C.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_PYTHON_GUARD_H
#define FA_PYTHON_GUARD_H

#include "python/calls.h"

#include "host/guard.h"

/* NULL before the first guard().  Any thread. */
fa_guard *fa_state_guard(void);

/* How this thread's last call of an op ended; FA_OK if it was served. */
void fa_state_set_outcome(fa_status status);

/* What a late call left, until keep() says which memory it needs; a second one
 * before that stays for good.  For calls on addresses, which know no tensors. */
void fa_state_set_late(fa_late *late);

PyObject *fa_module_guard(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *fa_module_guard_stop(PyObject *, PyObject *);
PyObject *fa_module_guard_counts(PyObject *, PyObject *);
PyObject *fa_module_keep(PyObject *, PyObject *);
PyObject *fa_module_last_failure(PyObject *, PyObject *);
PyObject *fa_module_breakers(PyObject *, PyObject *);
PyObject *fa_module_guard_device(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *fa_module_breaker_trip(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *fa_module_breaker_reset(PyObject *, PyObject *);
PyObject *fa_module_latency(PyObject *, PyObject *);
PyObject *fa_module_identities(PyObject *, PyObject *);
PyObject *fa_module_complaints(PyObject *, PyObject *);
PyObject *fa_module_store_list(PyObject *, PyObject *);
PyObject *fa_module_store_reset(PyObject *, PyObject *const *, Py_ssize_t);

#endif
