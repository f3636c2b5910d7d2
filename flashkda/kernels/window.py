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


class Metadata(NamedTuple):
    """A request's entries as they stand in memory."""

    first: Int32
    end: Int32
    padding: Int32
    slot: Int64
    num_accepted: Int32
    record: Int64


class Window(NamedTuple):
    """Rows ``start .. start+length`` of a request, its state ``slot`` and ``record`` row, the first ``column`` of its
    conv history; ``live`` is false for a null request."""

    start: Int32
    length: Int32
    slot: Int64
    record: Int64
    column: Int32
    live: cutlass.Boolean


def _clamp(x, low, high):
    x = select(x < low, low, x)
    return select(x > high, high, x)


def read_metadata(
    traits: Traits, n, requests, query_start_loc, state_indices, num_accepted=None, record_indices=None
) -> Metadata:
    """Issues the loads of request ``n``'s metadata and of the first row that belongs to no request."""

    def index(tensor):
        return Int64(at(tensor, Int64(n) * tensor.stride[0]).load())

    slot = index(state_indices)
    record = {"slot": slot, "request": Int64(n)}.get(traits.records)
    return Metadata(
        first=query_start_loc[n],
        end=query_start_loc[n + 1],
        padding=_clamp(query_start_loc[requests], Int32(0), Int32(2**31 - 1)),
        slot=slot,
        num_accepted=num_accepted[n] if num_accepted is not None else Int32(1),
        record=index(record_indices) if record is None and record_indices is not None else record,
    )


def request_window(traits: Traits, metadata: Metadata, window, total_rows, slots, records=None) -> Window:
    """The request's window. ``slots`` is the smaller pool's size, ``records`` the number of record rows.

    Lengths are clamped to the window T, rows to the tensors, and the history starts at clamp(num_accepted, 1, T) - 1. A
    slot or record outside its pool counts as null. So a broken entry can spoil its own request only.
    """
    start = _clamp(metadata.first, Int32(0), total_rows)
    length = _clamp(metadata.end, start, total_rows) - start
    capacity = Int32(1) if traits.decode else window
    length = select(length > capacity, capacity, length)
    live = (metadata.slot > Int64(traits.null_slot)) & (metadata.slot < Int64(slots))
    if records is not None:
        live = live & (metadata.record >= Int64(0)) & (metadata.record < Int64(records))
    column = _clamp(metadata.num_accepted, Int32(1), window) - 1
    return Window(start, length, metadata.slot, metadata.record, column, live)


def tokens_to_fold(metadata: Metadata, window):
    """How many tokens of the window before were accepted, 0..T."""
    return _clamp(metadata.num_accepted, Int32(0), window)


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
