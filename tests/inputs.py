# SPDX-License-Identifier: Apache-2.0
"""Inputs of a verification as an engine has them: views into poisoned arenas, ragged, null and padded rows.

Every tensor is a view into an arena of its own whose other bits are poison: what a kernel must not read spoils the
result, what it must not write is compared to the bit (``written``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from flashkda.geometry import VerifyGeometry

KINDS = ("random", "large_gate", "tiny_gate", "small", "zero")

# A NaN with a pattern of its own, or an index far outside every pool.
_POISON = {torch.bfloat16: 0x7FE5, torch.float32: 0x7FE5A5A5, torch.int32: 0x3FA5A5A5, torch.int64: 0x3FA5A5A5}
_BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}

# Random values are drawn once and repeated with this period, a prime: no two rows or slots of a large pool are equal,
# and a pool of gigabytes costs a copy.
_PERIOD = 1048583

# Poison before and after each view: 64 bytes or more, which keeps the view's base as aligned as the allocation.
_GUARD = 32

_WRITTEN = ("out", "corrections", "key_gate", "conv_state", "state")


class Case:
    """The tensors of one verification, by the contract's names (None: absent by the geometry), and their arenas."""

    def __init__(
        self,
        geometry: VerifyGeometry,
        lengths: Sequence[int],
        slots: Sequence[int],
        tensors: dict[str, Any],
        arenas: dict[str, Tensor],
    ) -> None:
        self.geometry = geometry
        self.lengths = tuple(lengths)
        self.slots = tuple(slots)
        self.tensors = tensors
        self.arenas = arenas

    def __repr__(self) -> str:
        return f"Case({self.geometry}, lengths={self.lengths}, slots={self.slots})"

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        assert isinstance(tensor, Tensor), f"{name} is absent by the geometry"
        return tensor

    @property
    def starts(self) -> list[int]:
        """The first row of each request, and the end of the last."""
        return torch.tensor((0, *self.lengths)).cumsum(0).tolist()

    def is_null(self, request: int) -> bool:
        """By the null rule or for a slot outside a pool."""
        pool = min(self["state"].shape[0], self["conv_state"].shape[0])
        return not max(self.geometry.null_slot, -1) < self.slots[request] < pool

    def record_row(self, request: int) -> int:
        """The row of the records that this request writes."""
        if self.geometry.records == "indices":
            return int(self["record_indices"][request])
        return self.slots[request] if self.geometry.records == "slot" else request


def make_case(
    geometry: VerifyGeometry,
    lengths: Sequence[int],
    *,
    seed: int,
    device: str | torch.device = "cpu",
    slots: Sequence[int] | None = None,
    pool_slots: int | tuple[int, int] | None = None,
    m_padding: int = 0,
    kind: str = "random",
    row_pads: tuple[int, int, int] | None = None,
    slot_pad: int | None = None,
    index_stride: int = 1,
    num_accepted: Sequence[int] | None = None,
    record_indices: Sequence[int] | None = None,
) -> Case:
    """Make the tensors of a verification of ``lengths`` tokens a request, with the same values on every device.

    slots          each request's slot, null ones included; default: valid, shuffled
    pool_slots     slots of both pools or (state, conv); default: a few more than are used
    m_padding      rows from query_start_loc[N] to M
    row_pads       elements from the end of a row to the next, of mixed_qkv, of raw_gate, and of output_gate and out;
                   default: none, or 7, 5 and 11 at alignment 2 (then every base is odd too). A large first pad makes
                   mixed_qkv a view of a wider projection
    slot_pad       the same for the slots of state and conv_state; default: none, or 17 at alignment 2
    index_stride   state_indices is a column of a table this wide
    num_accepted, record_indices   default: random, where the geometry has them

    Poisoned: all that must be written (out, corrections, key_gate), rows and slots that must not be read (null
    requests, padding, slots up to null_slot), and the space between and around the views.
    """
    assert kind in KINDS
    requests, odd = len(lengths), geometry.alignment == 2
    first_slot = max(geometry.null_slot, -1) + 1
    generator = torch.Generator().manual_seed(seed)
    if pool_slots is None:
        pool_slots = max(first_slot + requests + 2, 1 + max(slots or (0,)))
    state_slots, conv_slots = (pool_slots, pool_slots) if isinstance(pool_slots, int) else pool_slots
    if slots is None:
        usable = first_slot + torch.randperm(min(state_slots, conv_slots) - first_slot, generator=generator)
        slots = usable[:requests].tolist()
        assert len(slots) == requests, "too few slots"
    row_pads = row_pads if row_pads is not None else (7, 5, 11) if odd else (0, 0, 0)
    slot_pad = slot_pad if slot_pad is not None else 17 if odd else 0

    maker = _Maker(torch.device(device), generator)
    heads, dim, channels, columns = geometry.heads, geometry.head_dim, geometry.channels, geometry.conv_columns
    bf16, f32 = torch.bfloat16, torch.float32
    rows = sum(lengths) + m_padding
    lead = 1 if odd else 0
    zero = kind == "zero"
    qkv_scale = {"zero": 0.0, "small": 2.0**-8}.get(kind, 1.0)  # small: the norms' eps shows

    def row_tensor(name: str, inner: tuple[int, ...], pad: int, lead: int = lead) -> Tensor:
        return maker.new(name, (rows, *inner), bf16, gap=pad, lead=lead)

    normal = maker.normal
    maker.fill(row_tensor("mixed_qkv", (channels,), row_pads[0]), normal(qkv_scale))
    maker.fill(
        maker.new("conv_weight", (channels, geometry.conv_width), getattr(torch, geometry.conv_weight_dtype)),
        normal(0.5),
    )
    maker.fill(
        maker.new(
            "conv_state",
            (conv_slots, channels, columns),
            bf16,
            gap=slot_pad,
            lead=lead,
            inner_strides=(columns, 1) if geometry.conv_layout == "DS" else (1, channels),
        ),
        normal(qkv_scale),
    )
    maker.fill(row_tensor("raw_gate", (heads, dim), row_pads[1]), _gates(maker, kind))
    maker.fill(row_tensor("raw_beta", (heads,), 3 if odd else 0, 0), normal(0.0 if zero else 1.5))
    maker.fill(maker.new("A_log", (heads,), f32), normal(0.7))
    maker.fill(maker.new("dt_bias", (heads, dim), f32), normal(0.5))
    maker.fill(
        maker.new(
            "state", (state_slots, heads, dim, dim), getattr(torch, geometry.state_dtype), gap=slot_pad, lead=lead
        ),
        normal(0.5),
    )
    if geometry.norm:
        maker.fill(row_tensor("output_gate", (heads, dim), row_pads[2]), normal(0.0 if zero else 2.0))
        maker.fill(maker.new("norm_weight", (dim,), getattr(torch, geometry.norm_weight_dtype)), normal(1.0))
    else:
        maker.tensors.update(output_gate=None, norm_weight=None)

    index = getattr(torch, geometry.index_dtype)
    maker.integers("query_start_loc", [0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], torch.int32)
    maker.integers("state_indices", slots, index, stride=index_stride)
    if geometry.has_num_accepted:
        drawn = torch.randint(1, geometry.window + 1, (requests,), generator=generator).tolist()
        maker.integers("num_accepted", drawn if num_accepted is None else num_accepted, torch.int32)
    else:
        assert num_accepted is None
        maker.tensors["num_accepted"] = None

    records = {"slot": state_slots, "request": requests + 1, "indices": requests + 3}[geometry.records]
    if geometry.records == "indices":
        drawn = torch.randperm(records, generator=generator)[:requests].tolist()
        maker.integers("record_indices", drawn if record_indices is None else record_indices, index)
    else:
        assert record_indices is None
        maker.tensors["record_indices"] = None

    row_tensor("out", (heads, dim), row_pads[2])
    maker.new("corrections", (records, heads, geometry.window, dim), f32)
    maker.new("key_gate", (records, heads, geometry.window, 2 * dim), bf16)

    case = Case(geometry, lengths, slots, maker.tensors, maker.arenas)
    _poison_unread(case, first_slot)
    return case


def _gates(maker: _Maker, kind: str) -> Callable[[int], Tensor]:
    if kind == "large_gate":  # saturates either way: a key is kept whole or forgotten as fast as can be
        return lambda n: maker.normal(1.0)(n).sign() * (20 + 40 * maker.uniform(n))
    if kind == "tiny_gate":  # next to nothing is forgotten
        return lambda n: -(6 + 12 * maker.uniform(n))
    return maker.normal(0.0 if kind == "zero" else 1.5)


def _poison_unread(case: Case, first_slot: int) -> None:
    starts = case.starts
    unread = [slice(starts[n], starts[n + 1]) for n in range(len(case.lengths)) if case.is_null(n)]
    unread.append(slice(starts[-1], None))
    for name in ("mixed_qkv", "raw_gate", "raw_beta", "output_gate"):
        tensor = case.tensors[name]
        for rows in unread if tensor is not None else ():
            _poison(tensor[rows])
    for name in ("state", "conv_state"):
        _poison(case[name][:first_slot])


def _poison(view: Tensor) -> None:
    (view.view(_BITS[view.dtype]) if view.dtype in _BITS else view).fill_(_POISON[view.dtype])


class _Maker:
    """Makes views in poisoned arenas, and fills them."""

    def __init__(self, device: torch.device, generator: torch.Generator) -> None:
        self.device = device
        self.generator = generator
        self.tensors: dict[str, Any] = {}
        self.arenas: dict[str, Tensor] = {}

    def new(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        gap: int = 0,
        lead: int = 0,
        inner_strides: tuple[int, ...] | None = None,
    ) -> Tensor:
        """A poisoned view: ``gap`` elements between entries of the first dimension, its base ``lead`` elements on."""
        if inner_strides is None:
            inner_strides = tuple(prod(shape[i + 1 :]) for i in range(1, len(shape)))
        stride = prod(shape[1:]) + gap
        arena = torch.empty(_GUARD + lead + shape[0] * stride + _GUARD, dtype=dtype, device=self.device)
        _poison(arena)
        view = arena.as_strided(shape, (stride, *inner_strides), _GUARD + lead)
        self.arenas[name] = arena
        self.tensors[name] = view
        return view

    def integers(self, name: str, values: Sequence[int], dtype: torch.dtype, *, stride: int = 1) -> None:
        """A column of a poisoned table ``stride`` entries wide."""
        view = self.new(name, (len(values),), dtype, gap=stride - 1)
        view.copy_(torch.tensor(values, dtype=dtype))

    def fill(self, view: Tensor, draw: Callable[[int], Tensor]) -> None:
        """Fill a view, in the order of its indices whatever its layout, with ``draw(n)`` values, repeated."""
        total = view.numel()
        block = draw(min(total, _PERIOD)).to(view.dtype).to(self.device)
        if total > _PERIOD:
            block = block.repeat(-(-total // _PERIOD))[:total]
        view.copy_(block.view(view.shape))

    def normal(self, scale: float) -> Callable[[int], Tensor]:
        return lambda n: torch.randn(n, generator=self.generator) * scale

    def uniform(self, n: int) -> Tensor:
        return torch.rand(n, generator=self.generator)


def clone(case: Case) -> Case:
    """A deep copy with the same strides, offsets and poison."""
    arenas = {name: arena.clone() for name, arena in case.arenas.items()}
    tensors = {
        name: None if view is None else arenas[name].as_strided(view.shape, view.stride(), view.storage_offset())
        for name, view in case.tensors.items()
    }
    return Case(case.geometry, case.lengths, case.slots, tensors, arenas)


def bits(tensor: Tensor) -> Tensor:
    """A floating-point tensor's bits, as integers of its width: NaNs are equal, zeros differ by their sign."""
    return tensor.view(_BITS[tensor.dtype])


def written(case: Case) -> dict[str, Tensor]:
    """What two runs must agree on, to the bit: the whole arenas of what is written, and of the state, which is not."""
    return {name: bits(case.arenas[name]) for name in _WRITTEN}


def assert_same_bits(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Compare two results of ``written`` (or of any bits by name)."""
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        if not torch.equal(found[name], want):
            differ = (found[name] != want).nonzero()
            raise AssertionError(f"{name}: {len(differ)} of {want.numel()} differ, first at {differ[0].tolist()}")
