"""The version, written here and nowhere else.

setup.py reads this file as text and hands it to C as FA_VERSION.

SPDX-License-Identifier: BSD-3-Clause
"""

__version__ = "0.1.0"
