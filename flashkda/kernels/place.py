# SPDX-License-Identifier: Apache-2.0
"""Where a thread of the rule stands, and how a tile without spare registers remembers it."""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Int32, Int64

from .traits import WARP, Traits
from .window import Window

STASH = 7


class Place(NamedTuple):
    """Where a thread stands: its head, the CTA's first row ``row0`` of it, its own first row within the CTA (of the
    rule); ``channels`` = H * D, ``window`` = T."""

    head: Int32
    rank: Int32
    row0: Int32
    tid: Int32
    warp: Int32
    lane: Int32
    key_lane: Int32
    local_row: Int32
    channels: Int32
    window: Int32


def here(traits: Traits, tid, head, rank, channels, window) -> Place:
    """The thread's place."""
    lane = tid % WARP
    return Place(
        head=head,
        rank=rank,
        row0=rank * traits.rows,
        tid=tid,
        warp=tid // WARP,
        lane=lane,
        key_lane=lane & (traits.key_lanes - 1),
        local_row=tid // traits.key_lanes * traits.rows_per_thread,
        channels=channels,
        window=window,
    )


def stash(shared, request: Window, place: Place):
    """Leaves in shared memory (``STASH`` Int64) what the end of a kernel needs, for tiles whose rule has no register to
    spare."""
    kept = (request.start, request.length, request.slot, request.record, place.head, place.rank, 0)
    for i, value in enumerate(kept):
        (shared + i).store(Int64(value))


def stashed(traits: Traits, shared, request: Window, place: Place) -> tuple[Window, Place]:
    """What ``stash`` left. The thread's number plus a zero that the compiler does not know makes it compute anew what
    follows from it, where it would have kept it."""
    start, length, slot, record, head, rank, zero = ((shared + i).load() for i in range(STASH))
    request = request._replace(start=Int32(start), length=Int32(length), slot=slot, record=record)
    return request, here(traits, place.tid + Int32(zero), Int32(head), Int32(rank), place.channels, place.window)
