# SPDX-License-Identifier: Apache-2.0
"""Other cases that hold some of a case's requests or heads, and the bits to compare between them: for the laws."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.inputs import Case, bits, make_case

_ROWS = ("mixed_qkv", "raw_gate", "raw_beta", "output_gate")
_WEIGHTS = ("conv_weight", "A_log", "dt_bias", "norm_weight")


def regroup(
    case: Case,
    requests: Sequence[int],
    *,
    lengths: Sequence[int] | None = None,
    slots: Sequence[int] | None = None,
    seed: int = 0,
) -> Case:
    """A new case of some of the (valid) requests of ``case``, in this order, with the first tokens of each and other
    slots. Everything else in it is fresh: what the requests do not own differs."""
    if lengths is None:
        lengths = [case.lengths[n] for n in requests]
    new = make_case(case.geometry, lengths, slots=slots, seed=seed, device=case["out"].device)
    for name in _WEIGHTS:
        _copy(new, case, name)
    for i, n in enumerate(requests):
        rows, source = slice(new.starts[i], new.starts[i] + lengths[i]), case.starts[n]
        for name in _ROWS:
            if case.tensors[name] is not None:
                new[name][rows] = case[name][source : source + lengths[i]]
        for name in ("state", "conv_state"):
            new[name][new.slots[i]] = case[name][case.slots[n]]
        if case.geometry.has_num_accepted:
            new["num_accepted"][i] = case["num_accepted"][n]
    return new


def take_heads(case: Case, first: int, count: int) -> Case:
    """The same requests as another rank sees them: ``count`` heads from ``first`` on."""
    geometry = case.geometry.replace(heads=count)
    pools = (case["state"].shape[0], case["conv_state"].shape[0])
    new = make_case(
        geometry,
        case.lengths,
        slots=case.slots,
        pool_slots=pools,
        m_padding=case["out"].shape[0] - case.starts[-1],
        seed=0,
        device=case["out"].device,
    )
    heads = slice(first, first + count)
    for name in ("raw_gate", "raw_beta", "output_gate", "state"):
        if case.tensors[name] is not None:
            new[name].copy_(case[name][:, heads])
    for name in ("A_log", "dt_bias"):
        new[name].copy_(case[name][heads])
    channels = torch.arange(case.geometry.channels, device=case["out"].device)
    channels = channels.view(3, case.geometry.heads, -1)[:, heads].reshape(-1)
    new["mixed_qkv"].copy_(case["mixed_qkv"][:, channels])
    new["conv_weight"].copy_(case["conv_weight"][channels])
    new["conv_state"].copy_(case["conv_state"][:, channels])
    for name in ("norm_weight", "query_start_loc", "num_accepted", "record_indices"):
        _copy(new, case, name)
    return new


def _copy(new: Case, case: Case, name: str) -> None:
    if case.tensors[name] is not None:
        new[name].copy_(case[name])


def outcome(case: Case, request: int, *, tokens: int | None = None, heads: slice = slice(None)) -> dict[str, Tensor]:
    """The bits a verification gave a request: of its first ``tokens``, and of some heads."""
    geometry = case.geometry
    length = case.lengths[request] if tokens is None else tokens
    start, row = case.starts[request], case.record_row(request)
    columns = length + geometry.conv_width - 2
    conv = case["conv_state"][case.slots[request]].unflatten(0, (3, geometry.heads, -1))
    return {
        "out": bits(case["out"][start : start + length, heads]),
        "corrections": bits(case["corrections"][row, heads, :length]),
        "key_gate": bits(case["key_gate"][row, heads, :length]),
        "conv_state": bits(conv[:, heads, :, :columns]),
    }
