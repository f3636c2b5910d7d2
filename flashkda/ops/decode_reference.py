# SPDX-License-Identifier: Apache-2.0
"""A decode in plain torch: one token a request, the state written in place. See ops/reference.py for the math."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashkda.ops.reference import (
    decay,
    delta_rule,
    in_a_row,
    live_requests,
    normalize_key,
    normalize_query,
    sigmoid,
)

if TYPE_CHECKING:
    from flashkda.geometry import VerifyGeometry


@torch.no_grad()
def decode_rule(
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
    o: Tensor,
) -> None:
    """One step of the gated delta rule for each request that has a token. Tensors as of ``reference.record``.

    Mutates ``state`` (slots of requests that take part) and ``o`` (every row: zero where no request takes part).
    """
    live = live_requests(geometry, query_start_loc, state_indices, rows=qkv.shape[0], slots=state.shape[0])
    heads, key_dim = raw_gate.shape[1:]
    o.zero_()
    for request in live:
        row = request.rows.start
        query, key, value = qkv[row].unflatten(-1, (3, heads, key_dim)).unbind(0)
        decays = decay(raw_gate[row], A_log, dt_bias, gate=geometry.gate, lower_bound=geometry.lower_bound)
        after, _, output = delta_rule(
            state[request.slot].float(),
            normalize_query(query),
            normalize_key(key),
            value.float(),
            decays,
            sigmoid(raw_beta[row]),
        )
        state[request.slot] = after
        o[row] = output


@torch.no_grad()
def decode(
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
    out: Tensor,
) -> None:
    """``short_conv``, ``decode_rule`` and ``gated_rms_norm`` in a row; without ``geometry.norm``, o itself is ``out``.

    Mutates ``out`` (every row), ``state`` and ``conv_state``.
    """
    in_a_row(
        geometry,
        decode_rule,
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
