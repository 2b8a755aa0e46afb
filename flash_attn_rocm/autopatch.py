"""`import flash_attn_rocm.autopatch` is patch() in one line.

SPDX-License-Identifier: BSD-3-Clause
"""

from ._shim import patch

patch()
