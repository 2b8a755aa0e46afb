/* parse.h: arguments of the module's functions, one at a time.
 *
 * Every function returns 0, or -1 with an exception set, but for the last.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_PYTHON_PARSE_H
#define FA_PYTHON_PARSE_H

#include "python/state.h"

/* That `function` got between `least` and `most` arguments. */
int fa_check_count(const char *function, Py_ssize_t got, Py_ssize_t least,
                   Py_ssize_t most);

int fa_parse_int64(const char *name, PyObject *from, int64_t *to);
int fa_parse_int(const char *name, PyObject *from, int *to);
int fa_parse_double(const char *name, PyObject *from, double *to);
int fa_parse_bool(PyObject *from, bool *to);
int fa_parse_pointer(PyObject *from, void **to);
/* A tuple of exactly `count` ints. */
int fa_parse_tuple(const char *name, PyObject *from, int count, int64_t *to);
int fa_parse_dtype(PyObject *from, fa_dtype *to);
/* FA_WANT_*; a number that is negative becomes one that the plan refuses. */
int fa_parse_wanted(PyObject *from, uint32_t *to);
/* q_size, q_stride, k_size, ... from six arguments in a row. */
int fa_parse_shapes(PyObject *const *args, fa_dtype dtype, fa_problem *problem);
int fa_parse_scale_causal(PyObject *const *args, fa_problem *problem);
/* Windows and features from None or a tuple, see calls.c; all else of the
 * problem is left alone. */
int fa_parse_features(PyObject *from, fa_problem *problem);
/* Fills arch (room for FA_STATE_ARCH_CHARS) from a str or None. */
int fa_parse_arch(PyObject *from, char *arch, bool *given);
/* A number of `unit_ns`, at least 0; more than 30 years are as many. */
int fa_parse_time(const char *name, PyObject *from, double unit_ns,
                  int64_t *to);
/* The bytes of a path, or NULL for None; *owner, NULL before, holds them. */
int fa_parse_path(PyObject *from, PyObject **owner, const char **to);
/* The UTF-8 of a str, NULL with an exception set; *owner, likewise. */
const char *fa_parse_text(const char *name, PyObject *from, PyObject **owner);

#endif
