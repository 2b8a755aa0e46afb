/* fuzz.h: what the fuzz targets and their driver share.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_FUZZ_H
#define HIPSIM_FUZZ_H

#include "sim/hipsim.h"

/* libFuzzer's entry: runs one input, returns 0. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

/* Those of HIP's functions that the targets call; hipsim.h has no prototypes
 * of them, since programs find them by dlsym. */
hipError_t hipMalloc(void **pointer, size_t bytes);
hipError_t hipModuleUnload(hipModule_t module);
hipError_t hipModuleGetFunction(hipFunction_t *function, hipModule_t module,
                                const char *name);
hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned grid_x,
                                 unsigned grid_y, unsigned grid_z,
                                 unsigned block_x, unsigned block_y,
                                 unsigned block_z, unsigned dynamic_lds_bytes,
                                 hipStream_t stream, void **params,
                                 void **extra);

#endif
