/* profile_table.h: every constant of the cost model.
 *
 *   CONSTANT(name, value, unit, grade, source)
 *
 * A list to include with CONSTANT defined, several times if need be.
 *
 * Grade A: vendor text or measured on gfx906. B: measured on other GCN or CDNA
 * parts. C: compiler writers' tables or plain guesses. Nothing else in
 * profile*.c is a number of the hardware. Clocks are per wave instruction.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
/* clang-format off */
/* the chip */
CONSTANT(CUS, 60, "CU", "A", "MI50 and Radeon VII product data; MI60 has 64")
CONSTANT(SIMDS, 4, "SIMD/CU", "A", "Vega 7nm ISA")
CONSTANT(CLOCK_MHZ, 1725, "MHz", "A", "MI50 product data; sustained is lower")
CONSTANT(PEAK_DOT2, 26.5, "TFLOPS", "A", "60 CU x 4 SIMD x 16 lanes x 2 MAC x 2 x 1.725 GHz")
/* occupancy */
CONSTANT(WAVES, 10, "waves/SIMD", "A", "CLRX GcnTimings, rocprofiler-compute")
CONSTANT(GROUPS, 16, "groups/CU", "C", "barrier slots; groups of one wave have none")
CONSTANT(VGPRS, 256, "registers", "A", "Vega 7nm ISA 3.6.4")
CONSTANT(VGPR_GRANULE, 4, "registers", "A", "Vega 7nm ISA 3.6.4")
CONSTANT(SGPRS, 800, "registers/SIMD", "A", "Vega 7nm ISA 3.6")
CONSTANT(SGPR_GRANULE, 16, "registers", "A", "Vega 7nm ISA 3.6")
CONSTANT(LDS_BYTES, 65536, "bytes/CU", "A", "Vega 7nm ISA 2.2.1")
CONSTANT(LDS_GRANULE, 512, "bytes", "A", "Vega 7nm ISA")
/* issue */
CONSTANT(ISSUE, 4, "clocks", "A", "rocprofiler-compute: each clock one SIMD, one instruction per wave")
CONSTANT(BRANCH_TAKEN, 20, "clocks", "B", "CLRX GcnTimings; LLVM and Mesa guess 8 to 32")
CONSTANT(BARRIER, 8, "clocks", "C", "arrival skew comes on top; LLVM guesses 500")
CONSTANT(SLEEP, 64, "clocks", "A", "Vega 7nm ISA, s_sleep")
/* vector ALU */
CONSTANT(VALU_FULL, 4, "clocks", "A", "64 lanes on 16; relative rates measured on gfx906")
CONSTANT(VALU_QUARTER, 16, "clocks", "B", "CLRX, LLVM and Mesa agree: exp log rcp rsq sqrt sin cos, mul_lo mul_hi, mad_u64")
CONSTANT(VALU_DIVIDE, 16, "clocks", "B", "CLRX; LLVM lists div_scale, div_fmas, div_fixup cheaper")
CONSTANT(VALU_DOUBLE, 8, "clocks", "A", "half rate by product data")
CONSTANT(VALU_DOUBLE_QUARTER, 32, "clocks", "C", "quarter of the double rate: rcp, rsq, sqrt")
CONSTANT(VALU_SHIFT64, 8, "clocks", "C", "LLVM; CLRX says 4 x double factor")
CONSTANT(VALU_CONVERT, 4, "clocks", "B", "CLRX; in conflict with the next row")
CONSTANT(VALU_CONVERT_SLOW, 16, "clocks", "C", "LLVM and Mesa; enters the upper end of the estimate")
/* LDS */
CONSTANT(LDS_BANKS, 32, "banks", "A", "Vega 7nm ISA 10.1, 4 bytes each")
CONSTANT(LDS_PORT, 64, "bytes/clock", "A", "rocprofiler-compute: one port each way per pair of SIMDs")
CONSTANT(LDS_PAIRS, 2, "pairs of SIMDs", "A", "rocprofiler-compute")
CONSTANT(LDS_ADDRESS, 4, "clocks", "A", "64 addresses of 4 bytes on the input port: store b32 8, b128 20")
CONSTANT(LDS_LATENCY, 64, "clocks", "C", "after addresses and banks; no gfx906 figure is known, LLVM says 2 to 64 issue slots")
CONSTANT(LDS_QUEUE, 32, "clocks", "C", "work ahead of banks and ports before issue stalls")
/* vector memory */
CONSTANT(TA_LINEAR, 4, "clocks", "A", "perftest, Vega 20 included: dword loads, linear or uniform")
CONSTANT(TA_OTHER, 16, "clocks", "A", "perftest: 4 lanes per clock")
CONSTANT(TA_ODD, 32, "clocks", "A", "perftest: 12-byte and unaligned loads twice as slow")
CONSTANT(TA_STORE, 16, "clocks", "B", "CLRX issue cycles")
CONSTANT(TA_ATOMIC, 16, "clocks", "B", "CLRX issue cycles, 16 to 32")
CONSTANT(TA_ATOMIC64, 32, "clocks", "B", "CLRX issue cycles, 16 to 32")
CONSTANT(TA_QUEUE, 64, "clocks", "C", "work ahead of the address unit before issue stalls")
CONSTANT(L1_BYTES, 16384, "bytes/CU", "A", "Linux kernel, Vega 20 cache table")
CONSTANT(L1_WAYS, 4, "ways", "C", "GCN in general")
CONSTANT(L1_LATENCY, 120, "clocks", "B", "MI210 at 1.7 GHz: 125")
CONSTANT(L1_LINE_CLOCKS, 1, "clocks/line", "A", "64 bytes per clock, lines of 64 bytes")
CONSTANT(SCALAR_BYTES, 16384, "bytes", "A", "Linux kernel, Vega 20 cache table")
CONSTANT(SCALAR_CUS, 3, "CU", "A", "CUs that share a scalar cache; same source")
CONSTANT(SCALAR_WAYS, 4, "ways", "C", "GCN in general")
CONSTANT(SCALAR_LATENCY, 50, "clocks", "C", "placeholder; s_memtime takes about 41 on Vega")
CONSTANT(SMEM_ISSUE, 4, "clocks", "B", "CLRX: s_load up to x4")
CONSTANT(SMEM_ISSUE8, 8, "clocks", "B", "CLRX: s_load x8")
CONSTANT(SMEM_ISSUE16, 20, "clocks", "B", "CLRX: s_load x16, 16 to 24")
CONSTANT(L2_BYTES, 4194304, "bytes", "A", "product data; the kernel's table says 8 MB")
CONSTANT(L2_WAYS, 16, "ways", "C", "GCN in general")
CONSTANT(L2_CHANNELS, 16, "lines/clock", "C", "16 channels of 64 bytes per clock")
CONSTANT(L2_LATENCY, 275, "clocks", "B", "MI210: 237, 290 to 315 near capacity")
CONSTANT(HBM_GBS, 1024, "GB/s", "A", "product data, peak")
CONSTANT(HBM_REACHED, 860, "GB/s", "A", "reported with wide loads on MI50; 630 with dword loads")
CONSTANT(HBM_LATENCY, 600, "clocks", "B", "MI210: 530 to 572, 655 with TLB misses")
/* the estimate */
CONSTANT(OVERLAP, 0.675, "LDS clocks not hidden", "A", "fitted: scripts/fit_overlap.py")
CONSTANT(ERROR, 0.6, "of the time", "B", "uncalibrated models of this kind are off by 29 to 60 % on average")
/* clang-format on */
#undef CONSTANT
