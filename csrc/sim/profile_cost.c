/* profile_cost.c: unit, clocks and flops of an instruction; occupancy.
 *
 * Classes follow from the names in the lists, so that a new row needs nothing
 * here unless it is slow in a way of its own.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "profile_model.h"

#include <string.h>

const profile_constant profile_table[PROFILE_CONSTANTS] = {
#define CONSTANT(name, value, unit, grade, source) \
    [PROFILE_##name] = {#name, value, unit, grade, source},
#include "profile_table.h"
};

const profile_counter profile_counters[PROFILE_COUNTERS] = {
#define COUNTER(name, kind, card, meaning) \
    [COUNTER_##name] = {#name, KIND_##kind, CARD_##card, meaning},
#include "profile_counters.h"
};

const char *const profile_unit_names[PROFILE_UNITS] = {
    "valu", "salu",   "smem",    "vmem",     "lds",
    "flat", "branch", "message", "internal",
};

/* ---- vector ALU --------------------------------------------------------- */

static bool starts_with(const char *name, const char *start)
{
    return strncmp(name, start, strlen(start)) == 0;
}

/* True if one of the NULL-terminated starts fits. */
static bool starts_with_any(const char *name, const char *const *start)
{
    for (; *start != NULL; start++) {
        if (starts_with(name, *start)) {
            return true;
        }
    }
    return false;
}

static bool is_double(const isa_info *info)
{
    return info->type[0] == T_f64 || info->type[1] == T_f64 ||
           strstr(info->name, "_f64") != NULL;
}

static void valu_clocks(const isa_info *info, profile_cost *cost)
{
    static const char *const estimates[] = {
        "v_exp_",  "v_log_", "v_rcp_", "v_rsq_",
        "v_sqrt_", "v_sin_", "v_cos_", NULL,
    };
    static const char *const multiplies[] = {
        "v_mul_lo_u32",  "v_mul_lo_i32",  "v_mul_hi_u32", "v_mul_hi_i32",
        "v_mad_u64_u32", "v_mad_i64_i32", NULL,
    };
    static const char *const shifts[] = {
        "v_lshlrev_b64",
        "v_lshrrev_b64",
        "v_ashrrev_i64",
        NULL,
    };
    const char *name = info->name;
    bool multiply_u24 = strstr(name, "24") != NULL;

    if (starts_with_any(name, estimates)) {
        cost->clocks =
            is_double(info) ? COUNT(VALU_DOUBLE_QUARTER) : COUNT(VALU_QUARTER);
    } else if (!multiply_u24 && starts_with_any(name, multiplies)) {
        cost->clocks = COUNT(VALU_QUARTER);
    } else if (starts_with(name, "v_div_")) {
        cost->clocks = COUNT(VALU_DIVIDE);
    } else if (starts_with_any(name, shifts)) {
        cost->clocks = COUNT(VALU_SHIFT64);
    } else if (is_double(info)) {
        cost->clocks = COUNT(VALU_DOUBLE);
    } else {
        cost->clocks = starts_with(name, "v_cvt_") ? COUNT(VALU_CONVERT)
                                                   : COUNT(VALU_FULL);
    }
    cost->slow = starts_with(name, "v_cvt_") ? COUNT(VALU_CONVERT_SLOW) : 0;
    cost->slow = cost->slow > cost->clocks ? cost->slow : cost->clocks;
}

/* Floating-point operations per lane; a fused multiply-add is two. */
static uint32_t flops_of(const isa_info *info)
{
    static const char *const fused[] = {
        "v_fma_",  "v_mad_f",  "v_mad_legacy_f", "v_mac_",
        "v_fmac_", "v_madmk_", "v_madak_",       NULL,
    };
    static const char *const simple[] = {
        "v_add_f", "v_sub_f", "v_subrev_f", "v_mul_f", "v_mul_legacy_f", NULL,
    };
    const char *name = info->name;

    if (starts_with(name, "v_dot2_f32") || starts_with(name, "v_pk_fma_")) {
        return 4;
    }
    if (starts_with(name, "v_pk_add_f") || starts_with(name, "v_pk_mul_f") ||
        starts_with_any(name, fused)) {
        return 2;
    }
    return starts_with_any(name, simple) ? 1 : 0;
}

/* ---- all units ---------------------------------------------------------- */

static profile_unit program_unit(unsigned op)
{
    switch (op) {
    case ISA_s_branch:
    case ISA_s_cbranch_scc0:
    case ISA_s_cbranch_scc1:
    case ISA_s_cbranch_vccz:
    case ISA_s_cbranch_vccnz:
    case ISA_s_cbranch_execz:
    case ISA_s_cbranch_execnz:
        return UNIT_BRANCH;
    case ISA_s_sendmsg:
        return UNIT_MESSAGE;
    default:
        return UNIT_INTERNAL;
    }
}

static void memory_directions(const isa_row *row, const isa_info *info,
                              profile_cost *cost)
{
    bool returns = (info->flags & ISA_RETURN) != 0 || row->glc != 0;

    cost->writes = isa_is_store(info) || (info->access == M_ATOMIC && !returns);
    cost->reads = info->access != M_CACHE && !cost->writes;
}

profile_cost profile_cost_of(const isa_row *row)
{
    const isa_info *info = &isa_ops[row->op];
    profile_cost cost = {.unit = UNIT_INTERNAL};

    switch (row->issue) {
    case ISSUE_VALU:
        cost.unit = UNIT_VALU;
        cost.flops = flops_of(info);
        valu_clocks(info, &cost);
        break;
    case ISSUE_SCALAR:
        cost.unit = row->format == F_SOPP ? program_unit(row->op) : UNIT_SALU;
        break;
    case ISSUE_SMEM:
        cost.unit = UNIT_SMEM;
        cost.clocks = info->bytes > 32   ? COUNT(SMEM_ISSUE16)
                      : info->bytes > 16 ? COUNT(SMEM_ISSUE8)
                                         : COUNT(SMEM_ISSUE);
        break;
    case ISSUE_DS:
        cost.unit = UNIT_LDS;
        memory_directions(row, info, &cost);
        break;
    case ISSUE_FLAT:
        cost.unit = row->format == F_FLAT ? UNIT_FLAT : UNIT_VMEM;
        memory_directions(row, info, &cost);
        break;
    case ISSUE_MUBUF:
        cost.unit = UNIT_VMEM;
        memory_directions(row, info, &cost);
        break;
    default:
        break;
    }
    return cost;
}

/* ---- occupancy ---------------------------------------------------------- */

static uint32_t smaller(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static uint32_t round_up(uint32_t value, uint32_t granule)
{
    return (value + granule - 1) / granule * granule;
}

profile_occupancy profile_occupancy_of(const sim_dispatch *dispatch)
{
    uint32_t rsrc1 = dispatch->descriptor.rsrc1;
    uint32_t items =
        dispatch->block[0] * dispatch->block[1] * dispatch->block[2];
    profile_occupancy o = {
        .vgprs = COUNT(VGPR_GRANULE) * ((rsrc1 & 63) + 1),
        .sgprs = round_up(8 * ((rsrc1 >> 6 & 15) + 1), COUNT(SGPR_GRANULE)),
        .lds_bytes = round_up(dispatch->lds_bytes, COUNT(LDS_GRANULE)),
        .group_waves = (items + SIM_LANES - 1) / SIM_LANES,
        .groups = (uint64_t)dispatch->groups[0] * dispatch->groups[1] *
                  dispatch->groups[2],
    };
    uint32_t waves = smaller(COUNT(WAVES), COUNT(VGPRS) / o.vgprs);

    waves = smaller(waves, COUNT(SGPRS) / o.sgprs);
    uint32_t slots = waves * COUNT(SIMDS);
    o.groups_per_cu = slots / o.group_waves;
    if (o.group_waves > 1) {
        o.groups_per_cu = smaller(o.groups_per_cu, COUNT(GROUPS));
    }
    if (o.lds_bytes > 0) {
        o.groups_per_cu =
            smaller(o.groups_per_cu, COUNT(LDS_BYTES) / o.lds_bytes);
    }
    /* A workgroup that does not fit would not start; here it runs alone. */
    o.groups_per_cu = o.groups_per_cu > 0 ? o.groups_per_cu : 1;
    o.waves_per_simd =
        smaller(waves, (o.groups_per_cu * o.group_waves + COUNT(SIMDS) - 1) /
                           COUNT(SIMDS));
    uint64_t most = (o.groups + COUNT(CUS) - 1) / COUNT(CUS);
    o.busiest = o.groups > 0 ? (double)most / (double)o.groups : 0;
    o.resident = most < o.groups_per_cu ? (uint32_t)most : o.groups_per_cu;
    return o;
}
