# SPDX-License-Identifier: Apache-2.0
"""The verification in plain torch: the ``reference`` backend, for the CPU and any GPU, and the place to read the math.

For each request, token after token, in fp32 (N requests, T window, H heads, K = V = D = head_dim, C = 3*H*D)::

    conv    y  = silu(w0*h0 + w1*h1 + w2*h2 + w3*x)                          -> bf16   h: the three inputs before x
    norm    k^ = k * rsqrt(sum k^2 + 1e-6)
            q^ = q * rsqrt(sum q^2 + 1e-6) * D^-0.5
    gate    g  = lower_bound * sigmoid(exp(A_log) * (raw_gate + dt_bias))              bounded
            g  = -exp(A_log) * softplus(raw_gate + dt_bias)                            softplus, linear above 20
    rule    S <- S * exp(g) per key;  u = sigmoid(raw_beta) * (v - S k^);  S <- S + u k^T
            o  = S q^                                                        -> bf16
    out     out = o * rsqrt(mean(o^2) + eps) * norm_weight * sigmoid(output_gate)  -> bf16
    record  u (fp32), k (bf16, before its norm), raw_gate (bf16)

Four functions do it: ``short_conv``, ``record``, ``gated_rms_norm``, and ``verify``, which is the three in a row. They
write in place, like the kernels, and leave every other bit alone. The small functions under them (``decay``,
``normalize_key``, ``update_state``, ...) are the rule itself, for whoever replays or decodes.

A request's bits depend on its own tokens only, never on the batch, its slot, later drafts, or how many heads this rank
holds: products and sums are elementwise, sums over a dimension are a fixed tree (no matmul, whose order of summation
depends on the shape), and transcendentals go through ``pointwise``. The bits are torch's on the device in use; the
kernels' bits are their own.

The metadata is read on the host: this backend synchronizes, and cannot be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from flashkda.geometry import VerifyGeometry

QK_NORM_EPS = 1e-6
SOFTPLUS_LINEAR_ABOVE = 20.0

# Whole vectors of any CPU torch is built for, and less than the 32768 elements from which torch splits over threads.
_CPU_VECTOR = 64
_CPU_BLOCK = 16384


# --- arithmetic whose bits depend on values alone -------------------------------------------------------------------


def pointwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function(x)`` elementwise, with bits that depend on each element's value and not on its place in ``x``.

    On a CPU torch takes whole vectors through one routine, and the leftover and strided tensors through another one
    that rounds differently (sigmoid and softplus differ for one value in twenty). So a value's bits would depend on
    how many values come with it. Padded contiguous blocks, each small enough for one thread, know one routine only.
    """
    if x.device.type != "cpu":
        return function(x)
    flat = functional.pad(x.reshape(-1), (0, -x.numel() % _CPU_VECTOR))
    return torch.cat([function(block) for block in flat.split(_CPU_BLOCK)])[: x.numel()].view(x.shape)


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, kept with size 1, in an order set by its length alone: fold it in half until one
    element is left."""
    while x.shape[-1] > 1:
        x = functional.pad(x, (0, x.shape[-1] % 2))
        low, high = x.chunk(2, dim=-1)
        x = low + high
    return x


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) in fp32."""
    return pointwise(torch.sigmoid, x.float())


# --- the stages' math -----------------------------------------------------------------------------------------------


def causal_conv(stream: Tensor, weight: Tensor) -> Tensor:
    """Depthwise causal conv and SiLU: the last tap of ``weight`` [C, W] multiplies the current token.

    ``stream`` [C, W-1+L] holds the W-1 inputs before the first token, then L tokens. Returns bf16 [C, L].
    """
    weight, stream = weight.float(), stream.float()
    taps = weight.shape[1]
    length = stream.shape[1] - taps + 1
    total = weight[:, :1] * stream[:, :length]
    for tap in range(1, taps):
        total = total + weight[:, tap : tap + 1] * stream[:, tap : tap + length]
    return (total * sigmoid(total)).bfloat16()


def normalize_key(key: Tensor) -> Tensor:
    """``key`` [..., K] over its L2 norm, fp32."""
    key = key.float()
    return key * pointwise(torch.rsqrt, tree_sum(key * key) + QK_NORM_EPS)


def normalize_query(query: Tensor) -> Tensor:
    """``query`` [..., K] over its L2 norm, times K^-0.5, fp32."""
    return normalize_key(query) * (1 / math.sqrt(query.shape[-1]))


def log_decay(raw_gate: Tensor, A_log: Tensor, dt_bias: Tensor, *, gate: str, lower_bound: float | None) -> Tensor:
    """The gate g <= 0 of ``raw_gate`` [..., H, K], with ``A_log`` [H] and ``dt_bias`` [H, K] fp32. Returns fp32."""
    rate = pointwise(torch.exp, A_log)[:, None]
    x = raw_gate.float() + dt_bias
    if gate == "bounded":
        assert lower_bound is not None
        return lower_bound * sigmoid(rate * x)
    return -rate * pointwise(lambda v: functional.softplus(v, threshold=SOFTPLUS_LINEAR_ABOVE), x)


def decay(raw_gate: Tensor, A_log: Tensor, dt_bias: Tensor, *, gate: str, lower_bound: float | None) -> Tensor:
    """exp(g): the factor of each key of the state, in [0, 1]. Shapes as for ``log_decay``."""
    return pointwise(torch.exp, log_decay(raw_gate, A_log, dt_bias, gate=gate, lower_bound=lower_bound))


def decay_state(state: Tensor, decays: Tensor) -> Tensor:
    """S * exp(g): ``state`` [H, V, K], ``decays`` [H, K]."""
    return state * decays[:, None, :]


def read_state(state: Tensor, key: Tensor) -> Tensor:
    """S k: ``state`` [H, V, K], ``key`` [H, K]. Returns [H, V]."""
    return tree_sum(state * key[:, None, :]).squeeze(-1)


def add_correction(state: Tensor, correction: Tensor, key: Tensor) -> Tensor:
    """S + u k^T: ``state`` [H, V, K], ``correction`` [H, V], ``key`` [H, K] normalized."""
    return state + correction[:, :, None] * key[:, None, :]


def update_state(state: Tensor, decays: Tensor, key: Tensor, correction: Tensor) -> Tensor:
    """One recorded token folded into the state: S * exp(g) + u k^T, with the bits that ``delta_rule`` gave it."""
    return add_correction(decay_state(state, decays), correction, key)


def delta_rule(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, decays: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One token of the gated delta rule, fp32, nothing mutated.

    ``state`` [H, V, K]; ``query`` and ``key`` [H, K] normalized; ``value`` [H, V]; ``decays`` [H, K]; ``beta`` [H],
    after its sigmoid. Returns the next state, the correction u [H, V] and the output o [H, V].
    """
    decayed = decay_state(state, decays)
    correction = beta[:, None] * (value - read_state(decayed, key))
    state = add_correction(decayed, correction, key)
    return state, correction, read_state(state, query)


# state [H, V, K]; query, key [L, H, K]; value [L, H, V]; decays [L, H, K]; beta [L, H] -> u and o, both [L, H, V].
WindowRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def token_by_token(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, decays: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """``delta_rule`` over a window, a ``WindowRule``: the exact mode."""
    corrections, outputs = [], []
    for token in zip(query, key, value, decays, beta, strict=True):
        state, correction, output = delta_rule(state, *token)
        corrections.append(correction)
        outputs.append(output)
    return torch.stack(corrections), torch.stack(outputs)


def gated_norm(o: Tensor, output_gate: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of each head of ``o`` [..., D], times ``norm_weight`` [D] and sigmoid(``output_gate``). Returns bf16."""
    o = o.float()
    inverse_rms = pointwise(torch.rsqrt, tree_sum(o * o) / o.shape[-1] + eps)
    return (o * inverse_rms * norm_weight.float() * sigmoid(output_gate)).bfloat16()


# --- who takes part -------------------------------------------------------------------------------------------------


class Request(NamedTuple):
    """A request that takes part: its place in the batch, its state slot, its token rows."""

    n: int
    slot: int
    rows: slice

    @property
    def length(self) -> int:
        """Tokens in the window."""
        return int(self.rows.stop - self.rows.start)


def live_requests(
    geometry: VerifyGeometry, query_start_loc: Tensor, state_indices: Tensor, *, rows: int, slots: int | None = None
) -> list[Request]:
    """The requests that take part, in batch order; the others have nothing written and zero output rows.

    Null (slot <= null_slot) and empty requests take no part, nor does one whose slot lies outside a pool of ``slots``
    or whose tokens lie outside the ``rows`` packed rows: a broken promise that must not reach a valid request. A
    length is clamped to the window.
    """
    starts = query_start_loc.tolist()
    live = []
    for n, slot in enumerate(state_indices.tolist()):
        start = starts[n]
        length = min(starts[n + 1] - start, geometry.window)
        usable = slot >= 0 and slot > geometry.null_slot and (slots is None or slot < slots)
        if usable and length > 0 and 0 <= start <= rows - length:
            live.append(Request(n, slot, slice(start, start + length)))
    return live


# --- the four functions ---------------------------------------------------------------------------------------------


@torch.no_grad()
def short_conv(
    geometry: VerifyGeometry,
    *,
    mixed_qkv: Tensor,
    conv_weight: Tensor,
    conv_state: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
    num_accepted: Tensor | None = None,
    qkv: Tensor,
) -> None:
    """Convolve q|k|v over each request's window and roll its conv history.

    Reads ``mixed_qkv`` [M, C] bf16, ``conv_weight`` [C, 4], ``query_start_loc`` [N+1], ``state_indices`` [N] and
    ``num_accepted`` [N]. Mutates ``qkv`` [M, C] bf16 (rows of requests that take part) and ``conv_state``
    [slots, C, T+2] bf16 of either layout: history is read from column clamp(num_accepted, 1, T) - 1 (0 without
    num_accepted) on; then columns 0 and 1 hold its last two inputs and column r+2 token r's raw input.
    """
    live = live_requests(geometry, query_start_loc, state_indices, rows=mixed_qkv.shape[0], slots=conv_state.shape[0])
    accepted = None if num_accepted is None else num_accepted.tolist()
    history = conv_weight.shape[1] - 1
    for request in live:
        first = 0 if accepted is None else min(max(accepted[request.n], 1), geometry.window) - 1
        window = conv_state[request.slot]
        stream = torch.cat((window[:, first : first + history], mixed_qkv[request.rows].T), dim=1)
        qkv[request.rows] = causal_conv(stream, conv_weight).T
        window[:, : stream.shape[1] - 1] = stream[:, 1:]


@torch.no_grad()
def record(
    geometry: VerifyGeometry,
    *,
    qkv: Tensor,
    raw_gate: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
    record_indices: Tensor | None = None,
    o: Tensor,
    corrections: Tensor,
    key_gate: Tensor,
    window_rule: WindowRule = token_by_token,
) -> None:
    """Run the gated delta rule over each window from its committed state, and record what a commit needs.

    Reads ``qkv`` [M, C] bf16, ``raw_gate`` [M, H, K] bf16, ``raw_beta`` [M, H] bf16, ``A_log`` [H], ``dt_bias`` [H, K],
    ``state`` [slots, H, V, K] fp32 or bf16, and the metadata. Mutates ``o`` [M, H, V] bf16 (every row: zero where no
    request takes part) and, for a request's tokens alone, ``corrections`` [R, H, T, V] fp32 and ``key_gate``
    [R, H, T, 2K] bf16, in the row that ``geometry.records`` says. A record row outside them is not written.
    ``window_rule`` is the numerics mode's.
    """
    live = live_requests(geometry, query_start_loc, state_indices, rows=qkv.shape[0], slots=state.shape[0])
    indices = None if record_indices is None else record_indices.tolist()
    heads, key_dim = raw_gate.shape[1:]
    o.zero_()
    for request in live:
        query, key, value = qkv[request.rows].unflatten(-1, (3, heads, key_dim)).unbind(1)
        gate = raw_gate[request.rows]
        query_hat, key_hat = normalize_query(query), normalize_key(key)
        decays = decay(gate, A_log, dt_bias, gate=geometry.gate, lower_bound=geometry.lower_bound)
        beta = sigmoid(raw_beta[request.rows])

        recorded, o[request.rows] = window_rule(
            state[request.slot].float(), query_hat, key_hat, value.float(), decays, beta
        )
        row = indices[request.n] if indices is not None else _record_row(geometry, request)
        if 0 <= row < corrections.shape[0]:
            corrections[row, :, : request.length] = recorded.transpose(0, 1)
            key_gate[row, :, : request.length, :key_dim] = key.transpose(0, 1)
            key_gate[row, :, : request.length, key_dim:] = gate.transpose(0, 1)


def _record_row(geometry: VerifyGeometry, request: Request) -> int:
    return request.slot if geometry.records == "slot" else request.n


@torch.no_grad()
def gated_rms_norm(
    geometry: VerifyGeometry,
    *,
    o: Tensor,
    output_gate: Tensor,
    norm_weight: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
    out: Tensor,
) -> None:
    """Norm and gate each head. Reads ``o`` and ``output_gate`` [M, H, D] bf16 and ``norm_weight`` [D]. Mutates ``out``
    [M, H, D] bf16, every row: zero where no request takes part."""
    live = live_requests(geometry, query_start_loc, state_indices, rows=o.shape[0])
    out.zero_()
    for request in live:
        out[request.rows] = gated_norm(o[request.rows], output_gate[request.rows], norm_weight, geometry.norm_eps)


@torch.no_grad()
def verify(
    geometry: VerifyGeometry,
    *,
    mixed_qkv: Tensor,
    conv_weight: Tensor,
    conv_state: Tensor,
    raw_gate: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    output_gate: Tensor | None = None,
    norm_weight: Tensor | None = None,
    query_start_loc: Tensor,
    state_indices: Tensor,
    num_accepted: Tensor | None = None,
    record_indices: Tensor | None = None,
    out: Tensor,
    corrections: Tensor,
    key_gate: Tensor,
    window_rule: WindowRule = token_by_token,
) -> None:
    """``short_conv``, ``record`` and ``gated_rms_norm`` in a row; without ``geometry.norm``, o itself is ``out``.

    Mutates ``out``, ``corrections``, ``key_gate`` and ``conv_state``. ``state`` keeps its bits.
    """
    rule = partial(
        record, record_indices=record_indices, corrections=corrections, key_gate=key_gate, window_rule=window_rule
    )
    in_a_row(
        geometry,
        rule,
        mixed_qkv=mixed_qkv,
        conv_weight=conv_weight,
        conv_state=conv_state,
        gates={"raw_gate": raw_gate, "raw_beta": raw_beta, "A_log": A_log, "dt_bias": dt_bias},
        state=state,
        output_gate=output_gate,
        norm_weight=norm_weight,
        query_start_loc=query_start_loc,
        state_indices=state_indices,
        num_accepted=num_accepted,
        out=out,
    )


def in_a_row(
    geometry: VerifyGeometry,
    rule: Callable[..., None],
    *,
    mixed_qkv: Tensor,
    conv_weight: Tensor,
    conv_state: Tensor,
    gates: Mapping[str, Tensor],
    state: Tensor,
    output_gate: Tensor | None,
    norm_weight: Tensor | None,
    query_start_loc: Tensor,
    state_indices: Tensor,
    num_accepted: Tensor | None,
    out: Tensor,
) -> None:
    """The conv, ``rule`` (``record`` or a decode's) and the norm. Mutates what they do."""
    # One verdict for the three stages: a slot that either pool lacks is null in all of them.
    slots = min(state.shape[0], conv_state.shape[0])
    state_indices = torch.where(state_indices < slots, state_indices, geometry.null_slot)
    batch = {"query_start_loc": query_start_loc, "state_indices": state_indices}
    qkv = torch.empty(mixed_qkv.shape, dtype=mixed_qkv.dtype, device=mixed_qkv.device)
    o = torch.empty(out.shape, dtype=out.dtype, device=out.device) if geometry.norm else out
    inputs = {"mixed_qkv": mixed_qkv, "conv_weight": conv_weight, "conv_state": conv_state}
    short_conv(geometry, **inputs, **batch, num_accepted=num_accepted, qkv=qkv)
    rule(geometry, qkv=qkv, **gates, state=state, **batch, o=o)
    if geometry.norm:
        assert output_gate is not None and norm_weight is not None
        gated_rms_norm(geometry, o=o, output_gate=output_gate, norm_weight=norm_weight, **batch, out=out)
