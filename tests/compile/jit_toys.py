# SPDX-License-Identifier: Apache-2.0
"""Keys and recipes of small kernels, for the tests of the compiler and its cache. Imports the DSL when one is made."""

from __future__ import annotations

from flashkda.errors import KernelBuildError
from flashkda.jit.key import KernelKey


def axpy(bias: bool = False, arch: str = "sm_90a", tag: int = 0):
    """Key and recipe of y = a*x (+ bias, where the geometry has one). Arguments: x, a, bias or None, y, stream."""
    return KernelKey("toy_axpy", (("bias", bias), ("tag", tag)), arch), lambda: _kernels().axpy(bias)


def rotate(values: int, shared: int, arch: str = "sm_90a"):
    """Key and recipe of a kernel with ``values`` live registers a thread and ``shared`` floats of shared memory."""
    return KernelKey("toy_rotate", (("shared", shared), ("values", values)), arch), lambda: _kernels().rotate(
        values, shared
    )


def refused():
    """Key and recipe of a kernel that the DSL refuses."""
    return KernelKey("toy_refused", (), "sm_90a"), lambda: _kernels().refused()


def fails(text: str):
    """A spec that cannot even name its kernel."""
    raise KernelBuildError(text)


def _kernels():
    from tests.compile import jit_toy_kernels

    return jit_toy_kernels
