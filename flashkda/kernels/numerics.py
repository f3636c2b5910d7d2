# SPDX-License-Identifier: Apache-2.0
"""Arithmetic whose bits are the same in every kernel.

The compiler contracts ``x*y + z`` into an fma where it likes, depending on what else uses the product. Everything that
reaches a result is therefore written with an explicit rounding: ``mul`` and ``add`` emit ``mul.rn``/``add.rn``, which
are never contracted, and ``fma`` is the only fused form. Transcendentals are single approximate instructions plus
explicit arithmetic, chosen here once for all stages.
"""

from __future__ import annotations

import math

import cutlass.cute as cute
from cutlass import BFloat16, Float32
from cutlass.cute.math import RoundingMode
from cutlass.cutlass_dsl import select_

_RN = RoundingMode.NEAREST_EVEN
LOG2_E = math.log2(math.e)


def fma(x, y, z):
    """``x*y + z`` with one rounding."""
    return cute.math.fma(x, y, z, rounding=_RN)


def mul(x, y):
    """``x*y``, rounded to nearest, never contracted."""
    return cute.math.mul(x, y, rounding=_RN)


def add(x, y):
    """``x+y``, rounded to nearest, never contracted."""
    return cute.math.add(x, y, rounding=_RN)


def sub(x, y):
    """``x-y``; the DSL's ``sub`` takes no rounding, so the negation is added (exact)."""
    return add(x, -y)


def select(condition, x, y):
    """``x`` where the condition holds, else ``y``, without a branch."""
    return select_(condition, x, y)


def exp(x):
    """e^x as ``ex2.approx.ftz(x * log2(e))``: one rounding and 2 ulp."""
    return cute.math.exp2(mul(x, Float32(LOG2_E)), approx=True, ftz=True)


def sigmoid(x):
    """1 / (1 + e^-x); 0 and 1 at the ends, without overflow to NaN."""
    return cute.math.rcp(add(exp(-x), Float32(1.0)), approx=True, ftz=True)


def silu(x):
    """x * sigmoid(x)."""
    return mul(x, sigmoid(x))


def rsqrt(x):
    """1 / sqrt(x), approximate to 1 ulp."""
    return cute.math.rsqrt(x, approx=True, ftz=True)


def softplus(x):
    """log(1 + e^x) = max(x, 0) + log1p(e^-|x|), equal to x in fp32 from about 17 on (so linear above 20).

    log1p(e) = 2 atanh(e / (2 + e)); the odd series to degree 15 is below half an ulp of its sum for e <= 1.
    """
    magnitude = select(x < 0.0, -x, x)
    e = exp(-magnitude)
    s = mul(e, cute.math.rcp(add(e, Float32(2.0)), approx=True, ftz=True))
    s2 = mul(s, s)
    series = Float32(1.0 / 15.0)
    for degree in (13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0):
        series = fma(series, s2, Float32(1.0 / degree))
    log1p = mul(mul(s, Float32(2.0)), series)
    positive = select(x < 0.0, Float32(0.0), x)
    return add(positive, log1p)


def to_bf16_and_back(x):
    """The contract's rounding point: fp32 -> bf16 (nearest even) -> fp32."""
    return x.to(BFloat16).to(Float32)


def butterfly(x, offsets):
    """Sum over lanes by a fixed butterfly; every participating lane ends with the same bits."""
    for offset in offsets:
        x = add(x, cute.arch.shuffle_sync_bfly(x, offset))
    return x
