/* tensors.c: which bytes are elements of a launch's tensors.
 *
 * A view's range has gaps: other heads of a packed projection, padding at the
 * end of rows. They belong to somebody else, and a kernel that touches them is
 * wrong although the memory is there.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "tensors.h"

#include <stdlib.h>

/* Dimensions with more than one element and a stride, longest stride first. */
static void sort_dimensions(const hipsim_tensor *t, sim_tensor *out)
{
    for (int32_t d = 0; d < t->ndim; d++) {
        int64_t step = t->stride[d] < 0 ? -t->stride[d] : t->stride[d];
        uint64_t stride = (uint64_t)step * (uint64_t)t->element_bytes;
        int32_t at = out->ndim;
        if (t->size[d] <= 1 || stride == 0) {
            continue;
        }
        for (; at > 0 && out->stride[at - 1] < stride; at--) {
            out->stride[at] = out->stride[at - 1];
            out->size[at] = out->size[at - 1];
        }
        out->stride[at] = stride;
        out->size[at] = (uint64_t)t->size[d];
        out->ndim++;
    }
}

bool sim_tensors_add(sim_tensor_list *list, const hipsim_tensor *t,
                     uint64_t begin, uint64_t end)
{
    sim_tensor new = {.begin = begin,
                      .end = end,
                      .access = t->access,
                      .run = (uint64_t)t->element_bytes};

    sort_dimensions(t, &new);
    while (new.ndim > 0 && new.stride[new.ndim - 1] == new.run) {
        new.run *= new.size[--new.ndim];
    }
    uint64_t inner = new.run; /* first to last byte of the inner dimensions */
    for (int32_t d = new.ndim; d-- > 0;) {
        if (new.stride[d] < inner) {
            new.ndim = 0;
            new.run = end - begin;
            break;
        }
        inner += (new.size[d] - 1) * new.stride[d];
    }
    if (list->count == list->capacity) {
        size_t capacity = list->capacity != 0 ? 2 * list->capacity : 8;
        sim_tensor *grown =
            realloc(list->tensor, capacity * sizeof list->tensor[0]);
        if (grown == NULL) {
            return false;
        }
        list->tensor = grown;
        list->capacity = capacity;
    }
    list->tensor[list->count++] = new;
    return true;
}

void sim_tensors_free(sim_tensor_list *list)
{
    free(list->tensor);
    *list = (sim_tensor_list){0};
}

/* Bytes from `address` to the end of the run that holds it, 0 if none does. */
static uint64_t bytes_left(const sim_tensor *t, uint64_t address)
{
    uint64_t offset = address - t->begin;

    if (address < t->begin || address >= t->end) {
        return 0;
    }
    for (int32_t d = 0; d < t->ndim; d++) {
        uint64_t index = offset / t->stride[d];
        index = index < t->size[d] ? index : t->size[d] - 1;
        offset -= index * t->stride[d];
    }
    return offset < t->run ? t->run - offset : 0;
}

uint64_t sim_tensors_run(const sim_tensor_list *list, uint64_t address,
                         uint32_t access)
{
    uint64_t most = 0;

    for (size_t i = 0; i < list->count; i++) {
        const sim_tensor *t = &list->tensor[i];
        if ((t->access & access) == access) {
            uint64_t left = bytes_left(t, address);
            most = left > most ? left : most;
        }
    }
    return most;
}

static bool in_a_range(const sim_tensor_list *list, uint64_t address)
{
    bool within = false;

    for (size_t i = 0; i < list->count; i++) {
        const sim_tensor *t = &list->tensor[i];
        within = within || (address >= t->begin && address < t->end);
    }
    return within;
}

sim_elements sim_tensors_find(const sim_tensor_list *list, uint64_t address,
                              uint64_t bytes, uint32_t access)
{
    bool within = false;
    uint64_t done = 0;

    while (done < bytes) {
        uint64_t run = sim_tensors_run(list, address + done, access);
        within = within || in_a_range(list, address + done);
        if (run == 0) {
            return within ? SIM_ELEMENTS_GAP : SIM_ELEMENTS_NONE;
        }
        done += run;
    }
    return SIM_ELEMENTS_ALL;
}
