/* profile_counters.h: what is counted, under rocprof's names.
 *
 *   COUNTER(name, kind, card, meaning)
 *
 * A list to include with COUNTER defined, several times if need be.
 *
 * kind: EXACT follows from the instructions alone; MODEL also from the cost
 * table, the LDS phases or the cache tags; ESTIMATE from the timing. card:
 * GFX906 if rocprof has the counter there, else LATER: later cards have it.
 * Names without an instance number are sums over all instances.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
/* clang-format off */
COUNTER(SQ_WAVES, EXACT, GFX906, "waves started")
COUNTER(SQ_INSTS_VALU, EXACT, GFX906, "vector ALU instructions")
COUNTER(SQ_INSTS_SALU, EXACT, GFX906, "scalar ALU instructions, program control excluded")
COUNTER(SQ_INSTS_SMEM, EXACT, GFX906, "scalar memory instructions")
COUNTER(SQ_INSTS_VMEM_RD, EXACT, GFX906, "vector memory reads and atomics with a result, flat ones included")
COUNTER(SQ_INSTS_VMEM_WR, EXACT, GFX906, "vector memory writes and other atomics, flat ones included")
COUNTER(SQ_INSTS_FLAT, EXACT, GFX906, "flat_ instructions; global_ and scratch_ are not counted here")
COUNTER(SQ_INSTS_FLAT_LDS_ONLY, EXACT, GFX906, "flat_ instructions whose lanes all go to the LDS")
COUNTER(SQ_INSTS_LDS, EXACT, GFX906, "LDS instructions, flat ones to the LDS alone included")
COUNTER(SQ_INSTS_GDS, EXACT, GFX906, "global data share instructions")
COUNTER(SQ_INSTS_BRANCH, EXACT, LATER, "branches, taken or not")
COUNTER(SQ_INSTS_SENDMSG, EXACT, LATER, "messages")
COUNTER(SQ_ACTIVE_INST_VALU, MODEL, GFX906, "quad-cycles of the vector ALUs")
COUNTER(SQ_INST_CYCLES_SALU, MODEL, GFX906, "quad-cycles of the scalar ALU")
COUNTER(SQ_THREAD_CYCLES_VALU, MODEL, GFX906, "SQ_ACTIVE_INST_VALU times active lanes")
COUNTER(SQ_LDS_BANK_CONFLICT, MODEL, GFX906, "LDS cycles beyond the least for the access")
COUNTER(SQ_LDS_IDX_ACTIVE, MODEL, LATER, "LDS cycles of indexed accesses")
COUNTER(SQ_WAIT_INST_LDS, ESTIMATE, GFX906, "quad-cycles that waves wait to issue to the LDS")
COUNTER(TA_FLAT_READ_WAVEFRONTS, EXACT, GFX906, "flat_, global_ and scratch_ reads in the address unit")
COUNTER(TA_FLAT_WRITE_WAVEFRONTS, EXACT, GFX906, "flat_, global_ and scratch_ writes in the address unit")
COUNTER(TA_TA_BUSY, MODEL, GFX906, "clocks of the address units")
COUNTER(TCP_TOTAL_CACHE_ACCESSES, MODEL, LATER, "lines that vector memory instructions touch in L1")
COUNTER(TCP_TCC_READ_REQ, MODEL, LATER, "lines that L1 reads from L2")
COUNTER(TCP_TCC_WRITE_REQ, MODEL, LATER, "lines that L1 writes to L2")
COUNTER(TCP_TCC_ATOMIC_REQ, MODEL, LATER, "lines of atomics sent to L2")
COUNTER(SQC_DCACHE_HITS, MODEL, LATER, "lines found in the scalar cache")
COUNTER(SQC_DCACHE_MISSES, MODEL, LATER, "lines that the scalar cache reads from L2")
COUNTER(TCC_HIT, MODEL, GFX906, "L2 hits")
COUNTER(TCC_MISS, MODEL, GFX906, "L2 misses")
COUNTER(TCC_EA_RDREQ, MODEL, GFX906, "reads of memory, first interface")
COUNTER(TCC_EA_RDREQ_32B, MODEL, GFX906, "those of 32 bytes")
COUNTER(TCC_EA_WRREQ, MODEL, GFX906, "writes of memory, first interface")
COUNTER(TCC_EA_WRREQ_64B, MODEL, GFX906, "those of 64 bytes")
COUNTER(TCC_EA1_RDREQ, MODEL, GFX906, "reads of memory, second interface")
COUNTER(TCC_EA1_RDREQ_32B, MODEL, GFX906, "those of 32 bytes")
COUNTER(TCC_EA1_WRREQ, MODEL, GFX906, "writes of memory, second interface")
COUNTER(TCC_EA1_WRREQ_64B, MODEL, GFX906, "those of 64 bytes")
COUNTER(GRBM_COUNT, ESTIMATE, GFX906, "clocks")
COUNTER(GRBM_GUI_ACTIVE, ESTIMATE, GFX906, "clocks with work")
/* clang-format on */
#undef COUNTER
