# SPDX-License-Identifier: Apache-2.0
"""Gated RMSNorm of a head: out = o * rsqrt(mean(o^2) + eps) * norm_weight * sigmoid(output_gate) -> bf16.

The sum of squares has one order: four adjacent rows in a chain, then a binary tree over the 32 quads, neighbours
first. A CTA that owns some of the rows owns a subtree, so that splitting a head changes no bits.
"""

from __future__ import annotations

from cutlass import Float32

from .numerics import add, butterfly, fma, mul, rsqrt, sigmoid
from .traits import HEAD_DIM, QUAD, Traits


def subtree_sum(values, quads):
    """Sum of squares over ``quads`` neighbouring lanes that hold four rows each; all of them end with it."""
    total = mul(values[0], values[0])
    for i in range(1, QUAD):
        total = fma(values[i], values[i], total)
    return butterfly(total, [1 << i for i in range(quads.bit_length() - 1)])


def join_subtrees(sums):
    """The upper levels of the tree, from the sums of the CTAs of a cluster in rank order."""
    while len(sums) > 1:
        sums = [add(sums[i], sums[i + 1]) for i in range(0, len(sums), 2)]
    return sums[0]


def gate_factor(weight, gate):
    """norm_weight * sigmoid(output_gate) of each row; what of the output does not wait for the rule."""
    return [mul(w, sigmoid(z)) for w, z in zip(weight, gate, strict=True)]


def finish(traits: Traits, values, total, factor):
    """The outputs of a quad before their rounding to bf16: (o * rsqrt(mean + eps)) * ``gate_factor``."""
    scale = rsqrt(fma(total, Float32(1.0 / HEAD_DIM), Float32(traits.norm_eps)))
    return [mul(mul(o, scale), f) for o, f in zip(values, factor, strict=True)]
