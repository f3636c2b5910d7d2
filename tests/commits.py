# SPDX-License-Identifier: Apache-2.0
"""Inputs of a commit: several layers with pools of their own, filled records, and what the rules make of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashkda.commit import CommitGeometry
from flashkda.geometry import VerifyGeometry
from flashkda.ops import reference
from tests.inputs import Case, bits, make_case

SMALL = VerifyGeometry(2, 3, head_dim=8, null_slot=0)
LAYERED = ("state", "corrections", "key_gate", "conv_state", "A_log", "dt_bias")
WRITTEN = ("state", "conv_state")


class CommitCase:
    """The tensors of a commit by name, a list a layer for those in LAYERED, and the cases whose arenas they are in."""

    def __init__(self, geometry: CommitGeometry, layers: list[Case], requests: dict[str, Any]) -> None:
        self.geometry, self.layers = geometry, layers
        self.requests: dict[str, Any] = requests
        self.tensors: dict[str, Any] = {
            **{name: [layer[name] for layer in layers] for name in LAYERED if name != "conv_state" or geometry.compact},
            **requests,
        }

    def bits(self) -> dict[str, Tensor]:
        """A copy of all bits of every layer's arenas."""
        return {
            f"{name}[{i}]": bits(layer.arenas[name]).clone() for i, layer in enumerate(self.layers) for name in LAYERED
        }

    def after(self, layer: int, n: int, tokens: int) -> Tensor:
        """The state of request n after that many of its recorded tokens, fp32, one token after the other."""
        case, verify = self.layers[layer], self.geometry.verify
        row = self.row(n)
        state = case["state"][int(self.requests["state_indices"][n])].float().clone()
        for t in range(tokens):
            key, gate = case["key_gate"][row, :, t].chunk(2, dim=-1)
            decays = reference.decay(
                gate, case["A_log"], case["dt_bias"], gate=verify.gate, lower_bound=verify.lower_bound
            )
            key = reference.normalize_key(key)
            state = reference.update_state(state, decays, key, case["corrections"][row, :, t])
        return state

    def row(self, n: int) -> int:
        """The row of request n's records."""
        if self.geometry.verify.records == "indices":
            return int(self.requests["record_indices"][n])
        return n if self.geometry.verify.records == "request" else int(self.requests["state_indices"][n])


def make_commit(
    geometry: CommitGeometry,
    accepted: Sequence[int],
    *,
    slots: Sequence[int] | None = None,
    pool: int = 12,
    seed: int = 0,
    dst: Sequence[int] | None = None,
    boundary: Sequence[tuple[int, int]] | None = None,
    accepted_indices: Sequence[int] | None = None,
    record_indices: Sequence[int] | None = None,
) -> CommitCase:
    """``accepted`` counts, for as many requests as there are ``slots`` (default: one each, slots 1, 2, ...).
    ``boundary``: (length, slot) of each request. Pools have ``pool`` slots; null slots hold poison."""
    verify = geometry.verify
    slots = list(range(1, len(accepted) + 1)) if slots is None else list(slots)
    draw = torch.Generator().manual_seed(seed)
    layers = []
    for layer in range(geometry.layers):
        source = verify.replace(records="slot")  # as many rows as slots, whichever way they are found
        case = make_case(source, [1] * len(slots), slots=slots, pool_slots=pool, seed=seed * 101 + layer)
        case["corrections"].copy_(torch.randn(case["corrections"].shape, generator=draw))
        case["key_gate"].copy_(torch.randn(case["key_gate"].shape, generator=draw))
        layers.append(case)
    index = getattr(torch, verify.index_dtype)

    def integers(values: Sequence[int] | None, dtype: torch.dtype) -> Tensor | None:
        return None if values is None else torch.tensor(values, dtype=dtype)

    requests = {
        "accepted": integers(accepted, torch.int32),
        "accepted_indices": integers(accepted_indices, index),
        "state_indices": integers(slots, index),
        "dst_indices": integers(dst, index),
        "record_indices": integers(record_indices, index),
        "boundary_length": integers(None if boundary is None else [b for b, _ in boundary], torch.int32),
        "boundary_indices": integers(None if boundary is None else [s for _, s in boundary], index),
    }
    return CommitCase(geometry, layers, {name: tensor for name, tensor in requests.items() if tensor is not None})
