/* tensors.h: the elements of a launch's tensors (internal).
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_TENSORS_H
#define HIPSIM_TENSORS_H

#include "hipsim.h"
#include "sim.h"

/* A tensor as nested runs of bytes: at begin + sum of index[d] * stride[d],
 * each `run` bytes long. A tensor whose strides do not nest (windows that
 * overlap) is one run over its whole range. */
typedef struct sim_tensor {
    uint64_t begin, end; /* of its range, gaps included */
    uint32_t access;
    uint64_t run;
    int32_t ndim;
    uint64_t size[HIPSIM_MAX_DIMS], stride[HIPSIM_MAX_DIMS]; /* bytes */
} sim_tensor;

typedef struct sim_tensor_list {
    sim_tensor *tensor;
    size_t count, capacity;
} sim_tensor_list;

typedef enum sim_elements {
    SIM_ELEMENTS_NONE, /* in the range of no tensor */
    SIM_ELEMENTS_ALL,  /* every byte is part of an element */
    SIM_ELEMENTS_GAP   /* some byte lies between elements */
} sim_elements;

/* `t` is known to make an address range, from `begin` to `end`. False: out of
 * memory. */
bool sim_tensors_add(sim_tensor_list *list, const hipsim_tensor *t,
                     uint64_t begin, uint64_t end);
void sim_tensors_free(sim_tensor_list *list);

/* Bytes from `address` on that are elements of one tensor with this access; 0:
 * it is in none. */
uint64_t sim_tensors_run(const sim_tensor_list *list, uint64_t address,
                         uint32_t access);

/* What [address, address + bytes) is to the tensors with this access. */
sim_elements sim_tensors_find(const sim_tensor_list *list, uint64_t address,
                              uint64_t bytes, uint32_t access);

#endif
