# SPDX-License-Identifier: Apache-2.0
"""Which rows, state slot and record row belong to a request, and the rows that belong to none."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64

from .memory import at, store
from .numerics import select
from .traits import HEAD_DIM, QUAD, Traits


class Window(NamedTuple):
    """Rows ``start .. start+length`` of request n, its state ``slot``; ``live`` is false for a null request."""

    start: Int32
    length: Int32
    slot: Int64
    live: cutlass.Boolean


def _clamp(x, low, high):
    x = select(x < low, low, x)
    return select(x > high, high, x)


def request_window(traits: Traits, n, window, query_start_loc, state_indices, slots, total_rows) -> Window:
    """Reads the metadata of request ``n``.

    Lengths are clamped to the window and rows to the tensors, and a slot outside the pool counts as null, so that a
    broken entry can spoil its own request only.
    """
    start = _clamp(query_start_loc[n], Int32(0), total_rows)
    end = _clamp(query_start_loc[n + 1], start, total_rows)
    length = select(end - start > window, window, end - start)
    slot = Int64(at(state_indices, Int64(n) * state_indices.stride[0]).load())
    live = (slot > Int64(traits.null_slot)) & (slot < Int64(slots))
    return Window(start, length, slot, live)


def record_row(traits: Traits, n, slot, record_indices):
    """Row of corrections and key_gate: by the geometry the slot, the request's number, or an index tensor."""
    if traits.records == "slot":
        return slot
    if traits.records == "request":
        return Int64(n)
    return Int64(at(record_indices, Int64(n) * record_indices.stride[0]).load())


def history_column(traits: Traits, n, window, num_accepted):
    """First column of the conv history: clamp(num_accepted, 1, T) - 1, or 0 where no count is kept."""
    if not traits.has_num_accepted:
        return Int32(0)
    return _clamp(num_accepted[n], Int32(1), window) - 1


@cute.jit
def zero_rows(
    out: cute.Tensor,
    head: Int32,
    first: Int32,
    end: Int32,
    step: Int32,
    row0: Int32,
    tid: Int32,
    rows: cutlass.Constexpr,
    threads: cutlass.Constexpr,
    vector: cutlass.Constexpr,
):
    """Zeroes channels row0 .. row0+rows of one head in rows first, first+step, ... < end of ``out``."""
    quads = rows // QUAD
    lane = tid % quads
    row = first + (tid // quads) * step
    while row < end:
        pointer = at(out, Int64(row) * out.stride[0] + head * HEAD_DIM + row0 + lane * QUAD)
        store(pointer, [BFloat16(0.0)] * QUAD, vector)
        row = row + (threads // quads) * step
