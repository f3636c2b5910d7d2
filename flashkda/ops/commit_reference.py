# SPDX-License-Identifier: Apache-2.0
"""The commit in plain torch: the ``reference`` backend, and the place to read its rules.

For each layer and request, with m accepted tokens, by the functions that the verify's rule is made of::

    S <- S * exp(g) + u k^T      for the first m records, in order, in fp32

The state is rounded to its pool's type once, at the end, so with an fp32 pool the bits are those of decoding.
Metadata is read on the host: this backend synchronizes, and cannot be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashkda.ops.reference import decay, normalize_key, update_state

if TYPE_CHECKING:
    from flashkda.commit import CommitGeometry


class Fold(NamedTuple):
    """What a request asks for: the slot it reads, its record row, its accepted count, the slot for its new state and,
    where a checkpoint is due, that one's slot and token count. None: nothing is written there."""

    n: int
    source: int
    row: int
    accepted: int
    target: int | None
    boundary: tuple[int, int] | None


def folds(
    geometry: CommitGeometry, metadata: Mapping[str, Tensor | None], *, slots: int, records: int | None
) -> list[Fold]:
    """What each request that takes part asks for, in batch order.

    ``metadata``: the request tensors of ``commit``. A request whose slot is null or outside the pool of ``slots``, or
    whose record row is outside the ``records``, takes no part. A count is clamped to 0..T, and is 0 where
    accepted_indices points outside. With 0 accepted only a checkpoint of 0 tokens is written. A destination that is
    null or outside the pool is not written. ``records`` None: records of any row.
    """
    verify = geometry.verify
    lists = {name: tensor.tolist() for name, tensor in metadata.items() if tensor is not None}

    def usable(slot: int) -> bool:
        return max(verify.null_slot, -1) < slot < slots

    result = []
    for n, source in enumerate(lists["state_indices"]):
        entry = lists["accepted_indices"][n] if geometry.has_accepted_indices else n
        known = 0 <= entry < len(lists["accepted"])
        count = min(max(lists["accepted"][entry], 0), verify.window) if known else 0
        row = {"slot": source, "request": n}.get(verify.records)
        row = lists["record_indices"][n] if row is None else row
        if not usable(source) or row < 0 or (records is not None and row >= records):
            continue
        target = lists["dst_indices"][n] if geometry.has_dst else source
        boundary = None
        if geometry.has_boundary:
            slot, length = lists["boundary_indices"][n], lists["boundary_length"][n]
            boundary = (slot, length) if usable(slot) and 0 <= length <= count else None
        result.append(Fold(n, source, row, count, target if count and usable(target) else None, boundary))
    return result


@torch.no_grad()
def commit(
    geometry: CommitGeometry,
    *,
    state: Sequence[Tensor],
    corrections: Sequence[Tensor],
    key_gate: Sequence[Tensor],
    conv_state: Sequence[Tensor] | None = None,
    A_log: Sequence[Tensor],
    dt_bias: Sequence[Tensor],
    accepted: Tensor,
    accepted_indices: Tensor | None = None,
    state_indices: Tensor,
    dst_indices: Tensor | None = None,
    record_indices: Tensor | None = None,
    boundary_length: Tensor | None = None,
    boundary_indices: Tensor | None = None,
) -> None:
    """Fold the accepted records of each request into its state, in every layer.

    Reads, for each layer, ``corrections`` [R, H, T, V] fp32, ``key_gate`` [R, H, T, 2K] bf16, ``A_log`` [H] and
    ``dt_bias`` [H, K]; and the request tensors of docs/commit.md. Mutates ``state`` [slots, H, V, K] (the slots of
    destinations and checkpoints) and, with ``geometry.compact``, their windows in ``conv_state`` [slots, C, T+2].
    """
    metadata: dict[str, Any] = {
        "accepted": accepted,
        "accepted_indices": accepted_indices,
        "state_indices": state_indices,
        "dst_indices": dst_indices,
        "record_indices": record_indices,
        "boundary_length": boundary_length,
        "boundary_indices": boundary_indices,
    }
    asked = folds(geometry, metadata, slots=state[0].shape[0], records=corrections[0].shape[0])
    for layer in range(geometry.layers):
        for fold in asked:
            _fold_state(geometry, fold, state[layer], corrections[layer], key_gate[layer], A_log[layer], dt_bias[layer])
            if geometry.compact:
                assert conv_state is not None
                _compact_window(fold, conv_state[layer], geometry.verify.conv_width - 1)


def _fold_state(
    geometry: CommitGeometry,
    fold: Fold,
    state: Tensor,
    corrections: Tensor,
    key_gate: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
) -> None:
    verify = geometry.verify
    key, gate = key_gate[fold.row, :, : fold.accepted].transpose(0, 1).chunk(2, dim=-1)
    key_hat = normalize_key(key)
    decays = decay(gate, A_log, dt_bias, gate=verify.gate, lower_bound=verify.lower_bound)
    running = state[fold.source].float()
    for token in range(fold.accepted + 1):  # running is the state after `token` tokens
        if fold.boundary is not None and fold.boundary[1] == token:
            state[fold.boundary[0]] = running
        if token < fold.accepted:
            running = update_state(running, decays[token], key_hat[token], corrections[fold.row, :, token])
    if fold.target is not None:
        state[fold.target] = running


def _compact_window(fold: Fold, conv_state: Tensor, history: int) -> None:
    """Move the history after the accepted tokens, and after the checkpoint's, to the front of their slots' windows.

    A checkpoint of 0 tokens has none: the verify has overwritten the oldest column. A slot outside this pool, which may
    be smaller than the state's, has no window.
    """
    slots = conv_state.shape[0]
    moves = []
    for slot, tokens in ((fold.target, fold.accepted), fold.boundary or (None, 0)):
        if slot is not None and tokens and max(slot, fold.source) < slots:
            moves.append((slot, conv_state[fold.source, :, tokens - 1 : tokens - 1 + history].clone()))
    for slot, columns in moves:
        conv_state[slot, :, :history] = columns
