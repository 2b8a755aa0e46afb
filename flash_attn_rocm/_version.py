"""The version and the oldest torch, written here and nowhere else.

setup.py reads this file as text and hands the version to C as FA_VERSION.

SPDX-License-Identifier: BSD-3-Clause
"""

__version__ = "0.1.0"

TORCH_MIN = (2, 4)
TORCH_MIN_TEXT = "torch {}.{} or later".format(*TORCH_MIN)
