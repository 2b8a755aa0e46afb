/* hipsim.h: what libhipsim.so exports.
 *
 * Two groups. The hip* functions have the names, signatures and error codes
 * of the HIP runtime (5.4 subset), so that a host program which finds HIP by
 * dlsym runs on the simulator unchanged. The hipsim* functions are ours.
 * A launch runs to its end before the call returns; streams and events are
 * therefore bookkeeping. Safe from any thread; threads live for one launch,
 * so a forked child can use the library too.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_H
#define HIPSIM_H

#include <stddef.h>
#include <stdint.h>

/* The library is built with -fvisibility=hidden; this marks its exports. */
#define HIPSIM_API __attribute__((visibility("default")))

/* hipError_t values used here; the numbers are HIP's. */
enum {
    hipSuccess = 0,
    hipErrorInvalidValue = 1,
    hipErrorOutOfMemory = 2,
    hipErrorInvalidDevice = 101,
    hipErrorInvalidImage = 200,
    hipErrorNoBinaryForGpu = 209,
    hipErrorFileNotFound = 301,
    hipErrorInvalidHandle = 400,
    hipErrorNotFound = 500,
    hipErrorNotReady = 600,
    hipErrorIllegalAddress = 700,
    hipErrorLaunchTimeOut = 702,
    hipErrorLaunchFailure = 719
};
typedef int hipError_t;
typedef struct hipsim_module *hipModule_t;
typedef struct hipsim_function *hipFunction_t;
typedef struct hipsim_stream *hipStream_t;
typedef struct hipsim_event *hipEvent_t;

/* A tensor that a launch may touch, used in place. Sizes and strides are in
 * elements; ndim 0 means one element. The whole range from the lowest to past
 * the highest element is allowed, gaps between rows included; at check level 2
 * an access to such a gap is a fault. */
enum { HIPSIM_READ = 1, HIPSIM_WRITE = 2, HIPSIM_MAX_DIMS = 6 };
typedef struct hipsim_tensor {
    const void *data;
    int32_t element_bytes;
    int32_t ndim;
    int64_t size[HIPSIM_MAX_DIMS];
    int64_t stride[HIPSIM_MAX_DIMS];
    uint32_t access; /* HIPSIM_READ | HIPSIM_WRITE */
} hipsim_tensor;

typedef struct hipsim_stats {
    uint64_t wave_instructions; /* executed, one for all lanes of a wave */
    uint64_t waves;
    uint64_t workgroups;
    uint64_t misaligned; /* vector and LDS accesses; counted from level 1 on */
} hipsim_stats;

/* hipModuleLaunchKernel with the launch's own memory: only `tensors`, the
 * code object and hipMalloc'ed memory may be touched. grid in workgroups.
 * stats may be NULL. On a fault: hipErrorLaunchFailure or
 * hipErrorIllegalAddress, and hipsimLastReport() tells all. */
HIPSIM_API hipError_t hipsimLaunch(hipFunction_t function,
                                   const uint32_t grid[3],
                                   const uint32_t block[3],
                                   uint32_t dynamic_lds_bytes, void **params,
                                   const hipsim_tensor *tensors,
                                   size_t tensor_count, hipsim_stats *stats);

/* The same with a deadline: a workgroup that has executed `deadline` wave
 * instructions and has not ended makes the launch fail with
 * hipErrorLaunchTimeOut. 0: none. At level 2 more than 100 million count as
 * that. Option "budget" holds as well. */
HIPSIM_API hipError_t hipsimLaunchWithin(
    hipFunction_t function, const uint32_t grid[3], const uint32_t block[3],
    uint32_t dynamic_lds_bytes, void **params, const hipsim_tensor *tensors,
    size_t tensor_count, uint64_t deadline, hipsim_stats *stats);

/* hipModuleLoadData for an image of known size: nothing beyond `bytes` is
 * read, however corrupt the headers are. */
HIPSIM_API hipError_t hipsimModuleLoad(hipModule_t *module, const void *image,
                                       size_t bytes);

/* Why the calling thread's last hip* or hipsim* call failed: one line with
 * kernel, pc, instruction, workgroup, wave, lane, address; at check level 2 more
 * lines follow a fault, the wave's last instructions. "" if it did not fail.
 * Valid until the thread's next call (asking for error codes and their names
 * does not count). */
HIPSIM_API const char *hipsimLastReport(void);

/* Options, their values and what they do:
 *
 *   check           0 to 2, the check level
 *   threads         per launch, 0 all cores
 *   cpu             0 portable code, 1 best for this host
 *   budget          wave instructions per workgroup, 0 none (at level 2:
 *                   100 million)
 *   sample          workgroups of a launch that run, spread over the grid, 0
 *                   all. Results are incomplete, and a profile's counters;
 *                   its bounds and estimate scale to the grid, except that
 *                   caches see the sample alone
 *   seed            order of the waves: 0 in turn, else random
 *   dot2, ulp       what is not documented about v_dot2_f32_f16 and about the
 *                   estimates
 *   profile         1: launches are counted and timed
 *   profile_groups  workgroups of a profiled launch that are traced
 *   skip            leave out the instruction at this offset from the kernel's
 *                   entry, -1 none
 *   probe           report the s_waitcnt there if it waits for anything but
 *                   stores, -1 none; needs level 2
 *   mutated         skip and probe leave kernels alone whose code_bytes (of
 *                   hipsimObjectInfo) are not these, 0 none: an offset means
 *                   something else in each kernel of a call
 *
 * skip and probe are for tests that ask whether an instruction is needed. First
 * read from HIPSIM_CHECK, HIPSIM_THREADS, ... once; HIPSIM_DOT2 and HIPSIM_ULP
 * take words. */
HIPSIM_API hipError_t hipsimSetOption(const char *name, int64_t value);
HIPSIM_API hipError_t hipsimGetOption(const char *name, int64_t *value);

/* Failures for tests of programs that must survive them. `spec` is a list,
 * joined by ';', of kind:word=number,word=number; it replaces the list before.
 * NULL or "" clears it. Malformed: hipErrorInvalidValue, the report says what
 * was expected, the list before stays. HIPSIM_FAULT sets the first list; if
 * malformed it costs one warning and nothing fails.
 *
 *   launch    hipErrorLaunchFailure; the kernel does not run.
 *   slow      each instruction counts as factor=N (10) of them, in the stats
 *             and against the budget. The host's time does not change.
 *   endless   each workgroup runs after=N (0) instructions, or to its end if
 *             that is sooner, and then makes no progress until the instruction
 *             budget ends it, hipErrorLaunchFailure, or the launch's deadline,
 *             hipErrorLaunchTimeOut. The stats count all of it, but no host
 *             time passes. Without either it is 10^9 wave instructions per
 *             workgroup (at level 2 10^8).
 *   memory    access=N (1), the Nth vector memory instruction of workgroup
 *             group=N (0, linear index), or the first after it in which a lane
 *             reaches for global memory, faults: hipErrorIllegalAddress.
 *   lds-flip  bits=N (1; at most 64) different bits of one workgroup's LDS
 *             flip, once, before the workgroup's instruction number at=N (from
 *             0; in the order of execution) in workgroup group=N. seed=N (0)
 *             chooses the bits, and what is not given: the workgroup, and the
 *             instruction among the first within=N (1024). Nothing happens if
 *             the workgroup ends sooner or has no LDS.
 *   alloc     hipMalloc returns hipErrorOutOfMemory.
 *
 * All take nth=N (1): the Nth launch (allocation) from now on is struck, and
 * every=N: so is each Nth after it (every=1: all). All but alloc take
 * kernel=NAME: only launches of that kernel count. Launches that are refused
 * for their arguments do not count, nor do allocations of 0 bytes. Example:
 * "launch:nth=3;slow:factor=100,every=1,kernel=fa_fwd". If one launch is struck
 * twice by the same kind, the later entry holds. */
HIPSIM_API hipError_t hipsimSetFault(const char *spec);

/* How often faults of this kind ("launch", ...; NULL: of any kind) have
 * happened since the list was set: a launch counts once, and memory and
 * lds-flip only if they took effect. */
HIPSIM_API hipError_t hipsimFaultsFired(const char *kind, uint64_t *count);

/* JSON text about the launches that completed under option "profile" since
 * the last call, which are then forgotten. Keys: version (1), device,
 * constants [{name, value, unit, source, grade}] of the cost model,
 * launches_dropped (only the last 64 are told one by one), kernels (sums over
 * all launches by name), launches [{kernel, code_hash (as of hipsimObjectInfo), grid, block, lds_bytes, vgprs,
 * sgprs, waves_per_simd, groups_per_cu, groups_total, groups_executed,
 * groups_traced, groups_traced_in_part, instructions_traced, incomplete (host
 * memory ran out: something is missing), schedule {cu_cycles of the traced
 * workgroups on one CU, cycles of the grid at that pace, timeline_until},
 * wave_instructions, flops, hbm_bytes, units {unit: instructions}, counters
 * {name: value}, estimated, modelled, not_on_gfx906 (names of counters),
 * derived {name: value}, bounds [{unit, cycles, seconds, share}] largest
 * first, estimate {cycles {low, middle, high}, seconds {...}, error, overlap,
 * lds_cycles, valu_cycles_slow_conversions}, instructions [{offset from the
 * kernel's entry, count, lds_conflict_cycles, stall_cycles in the traced
 * executions, traced (executions), lanes (mean)}], timeline [{simd, group,
 * wave, events [[what, begin, end], ...]}]}].
 * All figures are simulated. *json is malloc'ed; release with hipsimFree. If
 * memory runs out (hipErrorOutOfMemory) the launches are kept. */
HIPSIM_API hipError_t hipsimTakeProfile(char **json);

/* JSON text about a code object: target, arch, flags (e_flags), abi, kernels
 * [{name, vgprs, agprs, sgprs, lds_bytes, private_bytes, vgpr_spills,
 * sgpr_spills, code_bytes, code_hash, kernarg_bytes, max_threads, wave_size, metadata
 * (false: no note, so some of these are 0), args [{name, offset, size,
 * kind}]}].
 * Works for every AMDGPU architecture (only running needs code that gfx906
 * runs: its own, or gfx9-generic).
 * *json is malloc'ed; release with hipsimFree. */
HIPSIM_API hipError_t hipsimObjectInfo(const void *image, size_t bytes,
                                       char **json);

/* Disassembly of one kernel, or of all if kernel is NULL; hipsimFree it. For
 * code that gfx906 runs. */
HIPSIM_API hipError_t hipsimDisassemble(const void *image, size_t bytes,
                                        const char *kernel, char **text);

/* The same with a line "; file.hip:12" before the first instruction of each
 * source line, and "; no line" where there is none any more, if the object was
 * built with -g. */
HIPSIM_API hipError_t hipsimDisassembleLines(const void *image, size_t bytes,
                                             const char *kernel, char **text);

/* Releases what these functions return; accepts NULL. */
HIPSIM_API void hipsimFree(void *memory);

/* The HIP subset is exported under HIP's own names and signatures, to be
 * found by dlsym, and is not declared here. It is defined in runtime.c
 * (modules, launches), heap.c (memory), stream.c (streams, events), device.c
 * and report.c (error codes): hipInit, hipGetDeviceCount, hipSetDevice,
 * hipGetDevice, hipGetDeviceProperties(R0600), hipDriverGetVersion,
 * hipRuntimeGetVersion, hipMalloc, hipFree, hipMemcpy(Async),
 * hipMemset(Async), hipModuleLoad, hipModuleLoadData, hipModuleUnload,
 * hipModuleGetFunction, hipModuleLaunchKernel, hipStreamCreate(WithFlags),
 * hipStreamDestroy, hipStreamSynchronize, hipStreamQuery,
 * hipStreamWaitEvent, hipStreamIsCapturing, hipEventCreate(WithFlags),
 * hipEventRecord, hipEventQuery, hipEventSynchronize, hipEventElapsedTime,
 * hipEventDestroy, hipDeviceSynchronize, hipGetLastError,
 * hipPeekAtLastError, hipGetErrorName, hipGetErrorString. */

#endif
