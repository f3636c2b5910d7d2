# SPDX-License-Identifier: Apache-2.0
"""The chunked numerics in plain torch: a window at once, from the state before it. docs/math.md has the equations.

With P(t, i) the product of the decays of tokens i+1 .. t and P(t) that of all up to t::

    p_t  = P(t) k^_t,  r_t = P(t) q^_t
    c_ti = sum k^_t P(t, i) k^_i,  d_ti = sum q^_t P(t, i) k^_i
    u_t  = beta_t (v_t - S p_t - sum_{i<t} c_ti u_i)
    o_t  = S r_t + sum_{i<=t} d_ti u_i

The reference of it for tests and for devices without kernels: it takes the fp32 products as they are, where the kernels
split them into tf32 parts. Prefix, batch and rank invariant to the bit, like flashkda.ops.reference; not lossless.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashkda.ops.reference import read_state, tree_sum


def chunk(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, decays: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """The rule over a window, a ``reference.WindowRule``. Nothing is mutated."""
    corrections: list[Tensor] = []
    outputs = []
    for t in range(query.shape[0]):
        p, r = key[t], query[t]
        c, d = [], []  # the token itself, then the ones before it, backwards
        for i in range(t, -1, -1):
            c.append(tree_sum(p * key[i]))
            d.append(tree_sum(r * key[i]))
            p, r = p * decays[i], r * decays[i]
        rest = value[t] - read_state(state, p)
        output = read_state(state, r)
        for i in range(t):
            rest = rest - c[t - i] * corrections[i]
            output = output + d[t - i] * corrections[i]
        corrections.append(beta[t][:, None] * rest)
        outputs.append(output + d[0] * corrections[t])
    return torch.stack(corrections), torch.stack(outputs)
