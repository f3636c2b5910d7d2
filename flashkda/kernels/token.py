# SPDX-License-Identifier: Apache-2.0
"""What the delta rule needs of one token of one head, prepared by one warp: a lane holds four adjacent keys.

k^ = k * rsqrt(sum k^2 + 1e-6),  q^ = q * rsqrt(sum q^2 + 1e-6) * 128^-0.5,  k^.q^, decay and beta.
"""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Float32

from .memory import store_shared
from .numerics import add, butterfly, fma, mul, rsqrt
from .traits import HEAD_DIM, QUAD

_L2_EPS = 1e-6
_LANES = (16, 8, 4, 2, 1)


class TokenStore(NamedTuple):
    """Shared memory of the window: key, query, decay [capacity, 128]; key_dot_query, beta [capacity]; all fp32."""

    key: object
    query: object
    decay: object
    key_dot_query: object
    beta: object


def _dot(x, y):
    total = mul(x[0], y[0])
    for i in range(1, QUAD):
        total = fma(x[i], y[i], total)
    return butterfly(total, _LANES)


def key_scale(key):
    """rsqrt(sum k^2 + 1e-6) of the head, from this lane's four keys."""
    return rsqrt(add(_dot(key, key), Float32(_L2_EPS)))


def prepare_token(shared: TokenStore, token, lane, query, key, decay, beta):
    """Normalizes this lane's quad of q and k and leaves the token's operands in shared memory."""
    scale_k = key_scale(key)
    scale_q = mul(rsqrt(add(_dot(query, query), Float32(_L2_EPS))), Float32(HEAD_DIM**-0.5))
    dot = mul(mul(_dot(key, query), scale_k), scale_q)
    at = token * HEAD_DIM + lane * QUAD
    store_shared(shared.key + at, [mul(k, scale_k) for k in key])
    store_shared(shared.query + at, [mul(q, scale_q) for q in query])
    store_shared(shared.decay + at, decay)
    # Every lane holds the same two scalars; equal stores to one word need no predicate.
    (shared.key_dot_query + token).store(dot)
    (shared.beta + token).store(beta)
