"""Builds the kernels: clang for AMD targets, nvcc for the stand-in.

Standard library only, so that setup.py can import it in an isolated build.

    compilers.py      finds clang, decides which architectures it can serve
    products.py       files in the output folder, manifest.json, content hashes
    code_objects.py   fa_<arch>_<unit>.co for AMD, the gate, the table; the command
    standin.py        fa_sm_<n>_<unit>.cubin for NVIDIA

SPDX-License-Identifier: BSD-3-Clause
"""
