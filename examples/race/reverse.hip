/* Reverses each 128 numbers by way of LDS; a workgroup does two such tiles. The
 * barrier at the end of the loop is missing, so that a wave may write the next
 * tile before the other has read this one: hipsim finds that, see README.md.
 *
 * SPDX-License-Identifier: BSD-3-Clause */

/* What HIP's headers would define; none is needed to compile this. */
#define GLOBAL extern "C" __attribute__((global))
#define DEVICE __attribute__((device))
#define SHARED __attribute__((shared))

DEVICE static void barrier()
{
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

GLOBAL void reverse(float *out, const float *in)
{
    SHARED float line[128];
    unsigned lane = __builtin_amdgcn_workitem_id_x();
    unsigned tile = 2 * __builtin_amdgcn_workgroup_id_x();

    for (unsigned end = tile + 2; tile != end; tile++) {
        line[lane] = in[128 * tile + lane];
        barrier();
        out[128 * tile + lane] = line[127 - lane];
#ifdef MENDED
        barrier();
#endif
    }
}
