/* device.h: the one simulated device (internal).
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_DEVICE_H
#define HIPSIM_DEVICE_H

/* An MI50 with 32 GiB; bytes. */
#define SIM_DEVICE_MEMORY (UINT64_C(32) << 30)

#endif
