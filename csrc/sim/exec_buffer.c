/* exec_buffer.c: MUBUF, memory through a buffer descriptor.
 *
 * Raw buffers are bounded by bytes, structured ones by the index; what lies
 * beyond reads zero and is not written. A swizzled descriptor that adds the
 * lane's number is the wave's scratch.
 *
 * Source: Vega ISA chapter 8.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "exec_memory.h"

/* The four dwords of a buffer descriptor. */
typedef struct descriptor {
    uint64_t base;
    uint32_t stride, records;
    bool scratch; /* swizzled and adds the lane number */
} descriptor;

static descriptor read_descriptor(const wave *w, unsigned at)
{
    descriptor d = {.base = pair(w, at) & UINT64_C(0xffffffffffff),
                    .stride = w->s[at + 1] >> 16 & 0x3fff,
                    .records = w->s[at + 2],
                    .scratch = w->s[at + 1] >> 31 != 0 &&
                               (w->s[at + 3] >> 23 & 1) != 0};
    return d;
}

/* Loads or stores the dwords that are within the buffer; the others read
 * zero or are dropped, as compilers expect. */
static void raw_buffer_lane(wave *w, const isa_row *row, const isa_info *info,
                            unsigned l, const descriptor *buffer,
                            uint64_t offset, uint64_t address)
{
    uint32_t unit = info->bytes < 4 ? info->bytes : 4;
    uint64_t limit = buffer->records;
    uint64_t inside = offset >= limit ? 0 : (limit - offset) / unit * unit;
    uint32_t bytes = inside < info->bytes ? (uint32_t)inside : info->bytes;
    place p = {.kind = PLACE_NONE};
    uint32_t word[4] = {0};

    if (info->access == M_ATOMIC && bytes < info->bytes) {
        bytes = 0;
    }
    if (bytes > 0 && !exec_global_place(w, info, l, address, bytes, &p)) {
        return;
    }
    if (bytes == info->bytes || bytes == 0) {
        exec_access_lane(w, row, info, l, &p);
    } else if (isa_is_store(info)) {
        for (unsigned k = 0; k < bytes / 4; k++) {
            word[k] = *reg(w, row->data + k, l);
        }
        deposit(&p, word, bytes);
    } else {
        fetch(&p, word, bytes);
        for (unsigned k = 0; k < info->bytes / 4u; k++) {
            *reg(w, row->dst + k, l) = word[k];
        }
    }
}

/* Tells the watchers of the lanes that are within the buffer. Those that are
 * partly inside follow, by the dwords that they move; atomics move all or
 * nothing. */
static bool watch_buffer(wave *w, const isa_row *row, const isa_info *info,
                         const descriptor *buffer, uint32_t soffset,
                         const uint32_t *index, const uint32_t *voffset)
{
    uint64_t part[4] = {0}; /* lanes of which so many dwords are inside */
    watch_access access = {
        .bytes = info->bytes,
        .kind = exec_access_bits(info),
        .space = buffer->scratch ? SPACE_SCRATCH : SPACE_GLOBAL,
        .reg = row->data,
    };

    for (uint64_t left = exec_mask(w); left != 0; left &= left - 1) {
        unsigned l = (unsigned)__builtin_ctzll(left);
        uint64_t offset = (uint64_t)voffset[l] + (uint32_t)row->offset;
        uint64_t raw = offset + soffset;

        if (buffer->scratch) {
            access.at[l] =
                exec_private_byte(w, buffer->base + soffset, (uint32_t)offset);
        } else if (buffer->stride != 0) {
            access.at[l] =
                buffer->base + raw + (uint64_t)index[l] * buffer->stride;
            if (index[l] >= buffer->records) {
                continue;
            }
        } else {
            access.at[l] = buffer->base + raw;
            if (raw >= buffer->records) {
                continue;
            }
            if (raw + info->bytes > buffer->records) {
                part[(buffer->records - raw) / 4] |= UINT64_C(1) << l;
                continue;
            }
        }
        access.lanes |= UINT64_C(1) << l;
    }
    /* Also without a lane inside: the others read zero. */
    bool good = watch_access_lanes(w, row, &access);
    for (unsigned d = 1; d < 4 && good && info->access != M_ATOMIC; d++) {
        access.bytes = 4 * d;
        access.lanes = part[d];
        good = part[d] == 0 || watch_access_lanes(w, row, &access);
    }
    return good;
}

void exec_mubuf(wave *w, const isa_row *row)
{
    const isa_info *info = &isa_ops[row->op];
    uint64_t exec = exec_mask(w);

    if (info->access == M_CACHE) {
        return;
    }
    descriptor buffer = read_descriptor(w, row->base);
    uint32_t soffset = (uint32_t)exec_operand(w, row, row->soffset, T_u32);
    const lane *v = w->v + (size_t)row->addr * SIM_LANES;
    uint32_t index[SIM_LANES] = {0}, voffset[SIM_LANES] = {0};

    for (unsigned l = 0; l < SIM_LANES; l++) {
        if (row->idxen) {
            index[l] = v[l].u;
        }
        if (row->offen) {
            voffset[l] = row->idxen ? v[SIM_LANES + l].u : v[l].u;
        }
    }
    if (w->group->watched &&
        (!watch_buffer(w, row, info, &buffer, soffset, index, voffset) ||
         !exec_watch_lds_targets(w, row, exec))) {
        return;
    }
    for (uint64_t left = exec; left != 0 && w->state == WAVE_RUNNING;
         left &= left - 1) {
        unsigned l = (unsigned)__builtin_ctzll(left);
        uint64_t offset = (uint64_t)voffset[l] + (uint32_t)row->offset;

        if (buffer.scratch) {
            place p = {.kind = PLACE_NONE};
            if (!exec_scratch_place(w, info, l, buffer.base + soffset,
                                    (uint32_t)offset, &p)) {
                return;
            }
            exec_access_lane(w, row, info, l, &p);
        } else if (buffer.stride == 0) {
            raw_buffer_lane(w, row, info, l, &buffer, offset + soffset,
                            buffer.base + soffset + offset);
        } else {
            /* Structured: one check on the index. */
            descriptor one = buffer;
            bool inside = index[l] < buffer.records;
            one.records = inside ? UINT32_MAX : 0;
            raw_buffer_lane(w, row, info, l, &one, offset,
                            buffer.base + soffset + offset +
                                (uint64_t)index[l] * buffer.stride);
        }
    }
}
