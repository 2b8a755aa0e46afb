/* state.h: what the binding keeps for the whole process.
 *
 * Kernels of torch's dispatcher get no pointer of ours, so what they need
 * cannot live in the module object.  It is the configuration, and what ran:
 * one record per thread, and counters.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_PYTHON_STATE_H
#define FA_PYTHON_STATE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "fa.h"

/* -- configuration --------------------------------------------------------- */

/* Sets everything at once; needs the GIL.  `mode` is "auto", "sim",
 * "standin", "null" or "off", `bf16` "auto" or "strict", `fp32` "auto", "fast"
 * or "exact".  A thread that is inside a call finishes it with what it started
 * with: runtimes are never closed, and a configuration that was seen before
 * gets its runtime back. */
fa_status fa_state_configure(const char *code_dir, const char *sim_library,
                             const char *mode, PyObject *sim_arch,
                             const char *bf16, const char *fp32,
                             fa_error *error);

/* Sets what products are computed in now.  Any thread. */
void fa_state_set_arithmetic(fa_problem *problem);

/* Which runtime and backend serve tensors of this kind now.  Any thread,
 * with or without the GIL. */
fa_status fa_state_backend(bool is_cuda, fa_runtime **runtime,
                           fa_backend *backend, fa_error *error);

/* Copies the name of an architecture; one that is too long is refused. */
enum { FA_STATE_ARCH_CHARS = 64 };
fa_status fa_state_copy_arch(const char *name, char arch[FA_STATE_ARCH_CHARS],
                             fa_error *error);

/* Asks Python's sim_arch which architecture CPU tensors are simulated on in
 * this context; takes the GIL. */
fa_status fa_state_ask_arch(char arch[FA_STATE_ARCH_CHARS], fa_error *error);

/* The refusal of CPU tensors where nobody asked for the simulator. */
fa_status fa_state_no_arch(fa_error *error);

/* -- what ran -------------------------------------------------------------- */

/* Notes a served call for this thread and counts it.  device_index is that
 * of a CUDA tensor, negative for the CPU. */
void fa_state_record(fa_backend backend, int32_t device_index,
                     const fa_plan *plan, const fa_counts *counts);

/* The following need the GIL and return new references, or NULL with an
 * exception set.  Their meaning: module.c. */
PyObject *fa_state_record_fallback(PyObject *reason);
PyObject *fa_state_last_call(void);
PyObject *fa_state_counters(void);
void fa_state_reset_counters(void);

#endif
