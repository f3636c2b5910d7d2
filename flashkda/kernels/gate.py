# SPDX-License-Identifier: Apache-2.0
"""Forget gate of a key channel and the write strength beta.

bounded:  g = lower_bound * sigmoid(exp(A_log) * (raw_gate + dt_bias))
softplus: g = -exp(A_log) * softplus(raw_gate + dt_bias)
decay = exp(g), beta = sigmoid(raw_beta)
"""

from __future__ import annotations

from cutlass import Float32

from .numerics import add, exp, mul, sigmoid, softplus
from .traits import CommitTraits, Traits


def decay(traits: Traits | CommitTraits, rate, raw_gate, dt_bias):
    """exp(g) of each channel; ``rate`` = exp(A_log[head]), ``raw_gate`` and ``dt_bias`` lists of fp32 scalars."""
    result = []
    for gate, bias in zip(raw_gate, dt_bias, strict=True):
        x = add(gate, bias)
        if traits.gate == "bounded":
            g = mul(sigmoid(mul(rate, x)), Float32(traits.lower_bound))
        else:
            g = mul(softplus(x), -rate)
        result.append(exp(g))
    return result


def beta(raw_beta):
    """sigmoid(raw_beta)."""
    return sigmoid(raw_beta)
