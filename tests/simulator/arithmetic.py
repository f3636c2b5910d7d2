# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of PTX on numpy arrays, with PTX's rounding."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any  # numpy arrays of any type, and numpy scalars where an operand is a constant


def fma(x: Array, y: Array, z: Array) -> Array:
    """x*y + z of float32 with one rounding.

    The product is exact in float64. The sum is rounded to odd there, so that the second rounding, to float32, sees
    whether anything was lost (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    product = x.astype(np.float64) * y.astype(np.float64)
    addend = z.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    inexact = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact, bits + step, bits).view(np.float64).astype(np.float32)


def flush(x: Array) -> Array:
    """Subnormal float32 to zero of the same sign, as .ftz has it."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def exp2(x: Array) -> Array:
    """ex2.approx.ftz.f32, but correctly rounded."""
    return flush(np.exp2(flush(x).astype(np.float64)).astype(np.float32))


def reciprocal(x: Array) -> Array:
    """rcp.approx.ftz.f32, but correctly rounded."""
    with np.errstate(divide="ignore"):
        return flush(np.float32(1) / flush(x))


def reciprocal_root(x: Array) -> Array:
    """rsqrt.approx.ftz.f32, but correctly rounded."""
    with np.errstate(divide="ignore"):
        return (1 / np.sqrt(flush(x).astype(np.float64))).astype(np.float32)


def to_bf16(x: Array) -> Array:
    """float32 to the bits of bf16, to nearest even; NaN becomes 0x7fff."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


def from_bf16(bits: Array) -> Array:
    """The bits of bf16 to float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_tf32(x: Array) -> Array:
    """float32 to tf32, to nearest, ties away from zero."""
    bits = (x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), bits, x.view(np.uint32)).view(np.float32)


def multiply_tiles(a: Array, b: Array, c: Array) -> Array:
    """c [W, 16, 8] + a [W, 16, 8] b [W, 8, 8] of tf32 in float32 of every warp. The hardware's order of summation is
    not documented: here the sum is taken in float64 and rounded once. Bits of a and b below tf32's are ignored."""

    def cut(x: Array) -> Array:
        return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)

    return (np.matmul(cut(a), cut(b)) + c.astype(np.float64)).astype(np.float32)
