# SPDX-License-Identifier: Apache-2.0
"""Cases as tests.inputs makes them, drawn on the device: pools of gigabytes take milliseconds. What a run may touch.

The values differ from those of tests.inputs.make_case, the rules do not: every tensor is a view into a poisoned arena,
and what must not be read is poison as well.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from flashkda.geometry import VerifyGeometry
from tests.gpu.setup import require
from tests.inputs import Case, assert_same_bits, bits, written

WRITTEN = ("out", "corrections", "key_gate", "conv_state")

# NaNs with a pattern of their own.
_POISON = {torch.bfloat16: 0x7FE5, torch.float32: 0x7FE5A5A5}
_GUARD = 32  # elements before and after a view: at least 64 bytes
_SCALES = {
    **{"mixed_qkv": 1.0, "conv_weight": 0.5, "conv_state": 1.0, "raw_gate": 1.5, "raw_beta": 1.5, "A_log": 0.7},
    **{"dt_bias": 0.5, "state": 0.5, "output_gate": 2.0, "norm_weight": 1.0},
}


def poison(tensor: Tensor) -> None:
    """Overwrite with NaNs."""
    bits(tensor).fill_(_POISON[tensor.dtype])


def ragged(requests: int, window: int, seed: int) -> list[int]:
    """Lengths 0..window, at least one of them full."""
    draw = random.Random(seed)
    lengths = [draw.randint(0, window) for _ in range(requests)]
    if requests:
        lengths[draw.randrange(requests)] = window
    return lengths


def device_case(
    geometry: VerifyGeometry,
    lengths: Sequence[int],
    *,
    seed: int,
    device: str,
    slots: Sequence[int] | None = None,
    pool_slots: int | None = None,
    padding: int = 0,
    nulls: bool = False,
    fill_pools: bool = True,
    record_rows: int | None = None,
) -> Case:
    """A verification of ``lengths`` tokens a request.

    slots         each request's slot (default: random); nulls makes the slot of every fifth request a null one
    pool_slots    slots of the pools (default: a few more than requests)
    padding       rows behind the last request
    fill_pools    False: nothing is drawn into or poisoned in the pools and the records; the caller fills the slots
    record_rows   rows of the records where they are not slots
    """
    draw = random.Random(seed)
    requests, first = len(lengths), max(geometry.null_slot, -1) + 1
    pool_slots = pool_slots if pool_slots is not None else first + requests + 3
    if slots is None:
        slots = draw.sample(range(first, pool_slots), requests)
        if nulls:
            slots = [draw.randint(-1, first - 1) if n % 5 == 1 else slot for n, slot in enumerate(slots)]
    maker = _Maker(device, seed, 1 if geometry.alignment == 2 else 0)
    odd = geometry.alignment == 2
    heads, dim, channels, window = geometry.heads, geometry.head_dim, geometry.channels, geometry.window
    rows = sum(lengths) + padding

    maker.floats("mixed_qkv", (rows, channels), gap=7 if odd else 0)
    maker.floats("conv_weight", (channels, geometry.conv_width), geometry.conv_weight_dtype, odd=False)
    columns = geometry.conv_columns
    inner = (columns, 1) if geometry.conv_layout == "DS" else (1, channels)
    maker.floats(
        "conv_state", (pool_slots, channels, columns), gap=17 if odd else 0, inner_strides=inner, fill=fill_pools
    )
    maker.floats("raw_gate", (rows, heads, dim), gap=5 if odd else 0)
    maker.floats("raw_beta", (rows, heads), gap=3 if odd else 0)
    maker.floats("A_log", (heads,), "float32", odd=False)
    maker.floats("dt_bias", (heads, dim), "float32", odd=False)
    maker.floats("state", (pool_slots, heads, dim, dim), geometry.state_dtype, gap=17 if odd else 0, fill=fill_pools)
    if geometry.norm:
        maker.floats("output_gate", (rows, heads, dim), gap=11 if odd else 0)
        maker.floats("norm_weight", (dim,), geometry.norm_weight_dtype, odd=False)
    starts = [sum(lengths[:n]) for n in range(requests + 1)]
    maker.integers("query_start_loc", starts, "int32")
    maker.integers("state_indices", slots, geometry.index_dtype)
    if geometry.has_num_accepted:
        maker.integers("num_accepted", [draw.randint(0, window) for _ in range(requests)], "int32")
    records = pool_slots if geometry.records == "slot" else record_rows or requests + 3
    if geometry.records == "indices":
        maker.integers("record_indices", draw.sample(range(records), requests), geometry.index_dtype)
    maker.floats("out", (rows, heads, dim), gap=11 if odd else 0, draw=False)
    maker.floats("corrections", (records, heads, window, dim), "float32", draw=False, fill=fill_pools, odd=False)
    maker.floats("key_gate", (records, heads, window, 2 * dim), draw=False, fill=fill_pools, odd=False)

    optional = ("output_gate", "norm_weight", "num_accepted", "record_indices")
    tensors = {**dict.fromkeys(optional), **maker.tensors}
    case = Case(geometry, lengths, slots, tensors, maker.arenas)
    unread = [slice(starts[n], starts[n + 1]) for n in range(requests) if case.is_null(n)]
    for name in ("mixed_qkv", "raw_gate", "raw_beta", "output_gate"):
        for span in [*unread, slice(starts[-1], None)] if case.tensors[name] is not None else []:
            poison(case[name][span])
    for name in ("state", "conv_state"):
        poison(case[name][:first])
    return case


class _Maker:
    def __init__(self, device: str, seed: int, lead: int) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self.device, self.lead = device, lead
        self.tensors: dict[str, Tensor] = {}
        self.arenas: dict[str, Tensor] = {}

    def floats(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: str = "bfloat16",
        *,
        gap: int = 0,
        inner_strides: tuple[int, ...] | None = None,
        draw: bool = True,
        fill: bool = True,
        odd: bool = True,
    ) -> None:
        """A poisoned view, ``gap`` elements between its entries; at alignment 2 also at an odd address, if ``odd``."""
        if inner_strides is None:
            inner_strides = tuple(prod(shape[i + 1 :]) for i in range(1, len(shape)))
        lead, stride = _GUARD + (self.lead if odd else 0), prod(shape[1:]) + gap
        size = lead + shape[0] * stride + _GUARD
        arena = torch.empty(size, dtype=getattr(torch, dtype), device=self.device)
        view = arena.as_strided(shape, (stride, *inner_strides), lead)
        if fill:
            poison(arena)
            if draw and view.numel():
                view.normal_(0.0, _SCALES[name], generator=self.generator)
        self.arenas[name], self.tensors[name] = arena, view

    def integers(self, name: str, values: Sequence[int], dtype: str) -> None:
        tensor = torch.tensor(values, dtype=getattr(torch, dtype)).to(self.device)
        self.arenas[name] = self.tensors[name] = tensor


def fork(case: Case) -> Case:
    """A copy that shares with ``case`` all that a verification only reads."""
    arenas = {name: arena.clone() if name in WRITTEN else arena for name, arena in case.arenas.items()}
    tensors = dict(case.tensors)
    for name in WRITTEN:
        view = case[name]
        tensors[name] = arenas[name].as_strided(view.shape, view.stride(), view.storage_offset())
    return Case(case.geometry, case.lengths, case.slots, tensors, arenas)


def inputs_of(case: Case) -> dict[str, Tensor]:
    """A copy of the bits of all that a verification only reads."""
    return {name: _bits(arena).clone() for name, arena in case.arenas.items() if name not in WRITTEN}


def assert_inputs_kept(case: Case, before: dict[str, Tensor]) -> None:
    """Nothing that is only read has changed since ``inputs_of``."""
    assert_same_bits({name: _bits(case.arenas[name]) for name in before}, before)


def assert_only_touched(before: Case, after: Case) -> None:
    """All that had to be written is finite, rows of nobody are zero, and the rest has the bits it had."""
    wanted = fork(before)
    for name, mask in _touched(before).items():
        found, view = after[name], wanted[name]
        mask = mask.to(found.device)
        require(torch.where(mask, found, 0).isfinite().all(), f"{name}: something that had to be written is not finite")
        bits(view).copy_(torch.where(mask, bits(found), bits(view)))
    nobody = torch.ones(after["out"].shape[0], dtype=torch.bool)
    starts = before.starts
    for n, length in enumerate(before.lengths):
        if not before.is_null(n):
            nobody[starts[n] : starts[n] + length] = False
    require(not bits(after["out"])[nobody.to(after["out"].device)].any(), "out: rows of nobody are not zero")
    assert_same_bits(written(after), written(wanted))


def _touched(case: Case) -> dict[str, Tensor]:
    geometry = case.geometry
    rows = torch.zeros(case["corrections"].shape[0], geometry.window, dtype=torch.bool)
    columns = torch.zeros(case["conv_state"].shape[0], geometry.conv_columns, dtype=torch.bool)
    records = case["record_indices"].tolist() if geometry.records == "indices" else None
    for n, (length, slot) in enumerate(zip(case.lengths, case.slots, strict=True)):
        if length and not case.is_null(n):
            rows[records[n] if records is not None else case.record_row(n), :length] = True
            columns[slot, : length + geometry.conv_width - 2] = True
    return {
        "out": torch.ones(case["out"].shape[0], 1, 1, dtype=torch.bool),
        "corrections": rows[:, None, :, None],
        "key_gate": rows[:, None, :, None],
        "conv_state": columns[:, None, :],
    }


def _bits(tensor: Tensor) -> Tensor:
    return bits(tensor) if tensor.is_floating_point() else tensor
