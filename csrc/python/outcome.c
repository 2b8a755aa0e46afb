/* outcome.c: how this thread's last call ended, as functions of _C:
 *
 *   def keep(things):
 *       "What this thread's last call on addresses, which was late, may still
 *        write to: stays alive until its kernel is over."
 *   def last_failure() -> str:
 *       "Why this thread's last call failed: "breaker", "late", "once",
 *        "device" or "other"; "" if it did not."
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "python/outcome.h"
#include "python/guard.h"

static _Thread_local fa_status outcome;
static _Thread_local fa_pending *late_call;

void fa_outcome_set(fa_status status)
{
    outcome = status;
}

void fa_outcome_set_late(fa_pending *late)
{
    late_call = late;
}

/* On a thread of torch's, perhaps without the GIL. */
static void release_object(void *object)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    Py_DECREF((PyObject *)object);
    PyGILState_Release(gil);
}

PyObject *fa_module_keep(PyObject *module, PyObject *things)
{
    fa_pending *late = late_call;
    void *thing = things;
    (void)module;
    late_call = NULL;
    if (late != NULL) {
        Py_INCREF(things);
        fa_guard_keep(fa_state_guard(), late, &thing, 1, release_object);
    }
    Py_RETURN_NONE;
}

PyObject *fa_module_last_failure(PyObject *module, PyObject *unused)
{
    const char *word = "other";
    const fa_status last = outcome;
    (void)module;
    (void)unused;
    outcome = FA_OK; /* it is about one call */
    switch (last) {
    case FA_OK:
        word = "";
        break;
    case FA_EOPEN:
        word = "breaker";
        break;
    case FA_ELATE:
        word = "late";
        break;
    case FA_EONCE:
        word = "once";
        break;
    case FA_EDEVICE:
        word = "device";
        break;
    default:
        break;
    }
    return PyUnicode_FromString(word);
}
