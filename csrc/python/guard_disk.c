/* guard_disk.c: breakers on disk, whoever's they are, as functions of _C:
 *
 *   def store_list(dir) -> ([(identity, kernel, code_hash, failures, opened,
 *                            retry, cause)], unreadable):
 *   def store_reset(dir, kernel=None) -> int:
 *       "Raise Error."
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "python/guard.h"
#include "python/parse.h"

typedef struct listing {
    PyObject *list;
    int failed;
    PyThreadState *thread; /* its interpreter's lock is given up */
} listing;

static void visit_entry(void *context, const char *identity,
                        const fa_store_entry *e)
{
    listing *l = context;
    if (!l->failed) {
        PyEval_RestoreThread(l->thread);
        l->failed = fa_list_append(
            l->list, Py_BuildValue("(ssKILLs)", identity, e->kernel,
                                   (unsigned long long)e->code_hash,
                                   (unsigned)e->failures, (long long)e->opened,
                                   (long long)e->retry, e->cause));
        l->thread = PyEval_SaveThread();
    }
}

/* NULL with an exception set; *owner holds the path. */
static const char *parse_folder(PyObject *from, PyObject **owner)
{
    const char *path = NULL;
    if (fa_parse_path(from, owner, &path) == 0 && path == NULL) {
        PyErr_SetString(PyExc_TypeError, "dir: expected a path, got None");
    }
    return path;
}

PyObject *fa_module_store_list(PyObject *module, PyObject *dir)
{
    PyObject *owner = NULL;
    size_t unreadable = 0;
    fa_status status = FA_OK;
    fa_error error;
    const char *path = parse_folder(dir, &owner);
    listing l = {.failed = -1};
    if (path == NULL) {
        goto done;
    }
    l.list = PyList_New(0);
    if (l.list != NULL) {
        l.failed = 0;
        l.thread = PyEval_SaveThread();
        status = fa_store_list(path, visit_entry, &l, &unreadable, &error);
        PyEval_RestoreThread(l.thread);
        if (status != FA_OK) {
            (void)fa_raise_error(module, &error);
            l.failed = -1;
        }
    }

done:
    Py_XDECREF(owner);
    if (l.failed) {
        Py_XDECREF(l.list);
        return NULL;
    }
    return Py_BuildValue("(Nn)", l.list, (Py_ssize_t)unreadable);
}

PyObject *fa_module_store_reset(PyObject *module, PyObject *const *args,
                                Py_ssize_t count)
{
    PyObject *owner = NULL;
    PyObject *owner_kernel = NULL;
    PyObject *result = NULL;
    const char *kernel = NULL;
    size_t removed = 0;
    fa_status status = FA_OK;
    fa_error error;
    if (fa_check_count("store_reset", count, 1, 2)) {
        return NULL;
    }
    const char *path = parse_folder(args[0], &owner);
    if (path == NULL) {
        goto done;
    }
    if (count == 2 && args[1] != Py_None) {
        kernel = fa_parse_text("kernel", args[1], &owner_kernel);
        if (kernel == NULL) {
            goto done;
        }
    }
    Py_BEGIN_ALLOW_THREADS /* it may wait for the lock of the store */
    status = fa_store_reset(path, kernel, &removed, &error);
    Py_END_ALLOW_THREADS
    if (status == FA_OK) {
        result = PyLong_FromSize_t(removed);
    } else {
        (void)fa_raise_error(module, &error);
    }

done:
    Py_XDECREF(owner_kernel);
    Py_XDECREF(owner);
    return result;
}
