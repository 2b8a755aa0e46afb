/* outcome.h: how this thread's last call ended, for those who hear of it only
 * by an exception's text.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_PYTHON_OUTCOME_H
#define FA_PYTHON_OUTCOME_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "fa.h"

/* Of a call of an op; FA_OK if it was served. */
void fa_outcome_set(fa_status status);

/* What a late call left, until keep() says which memory it needs; a second one
 * before that stays for good.  For calls on addresses, which know no
 * tensors. */
void fa_outcome_set_late(struct fa_pending *late);

PyObject *fa_module_keep(PyObject *, PyObject *);
PyObject *fa_module_last_failure(PyObject *, PyObject *);

#endif
