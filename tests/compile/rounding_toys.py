# SPDX-License-Identifier: Apache-2.0
"""Keys and recipes of kernels that the scans and the limits must judge. Imports the DSL when one is made."""

from __future__ import annotations

from flashkda.jit.key import KernelKey


def expression(name: str, arch: str = "sm_90a", vector: bool = False):
    """Key and recipe of a kernel that computes one expression of rounding_toy_kernels.EXPRESSIONS."""
    key = KernelKey("toy_expression", (("name", name), ("vector", vector)), arch)
    return key, lambda: _kernels().recipe(_kernels().Expression(name, vector))


def local_array(arch: str = "sm_90a"):
    """Key and recipe of a kernel with an array in local memory."""
    return KernelKey("toy_local_array", (), arch), lambda: _kernels().recipe(_kernels().LocalArray())


def _kernels():
    from tests.compile import rounding_toy_kernels

    return rounding_toy_kernels
