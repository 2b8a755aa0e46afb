"""The entries of an offload bundle by name; the library unpacks them.

Source: LLVM, ClangOffloadBundler documentation.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import struct

_MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"


def bundle_entries(image: bytes) -> list[str]:
    """The triples of a bundle that the library has read; [] if it is none."""
    if not image.startswith(_MAGIC):
        return []
    at = len(_MAGIC)
    (count,) = struct.unpack_from("<Q", image, at)
    at += 8
    names = []
    for _ in range(count):
        _, _, length = struct.unpack_from("<QQQ", image, at)
        at += 24 + length
        names.append(image[at - length : at].decode("ascii", "backslashreplace"))
    return names
