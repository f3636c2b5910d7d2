# SPDX-License-Identifier: Apache-2.0
"""Checks of device metadata, for FLASHKDA_DEBUG_CHECKS=1 and check_metadata=True. They synchronize.

Without them the values of the index tensors are the caller's promise: the kernels then keep a bad entry away from the
other requests, but say nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flashkda.errors import MetadataError
from flashkda.geometry import VerifyGeometry


def check_metadata(
    geometry: VerifyGeometry, tensors: Mapping[str, torch.Tensor | None], rows: int, most_tokens: int | None = None
) -> None:
    """Read the index tensors on the host and raise MetadataError for the first bad entry; mutates nothing.

    tensors: query_start_loc [N+1] and state_indices [N]; num_accepted and record_indices [N] where the geometry has
    them; state, conv_state and corrections of those bindings that have them, for the sizes of the pools.
    rows: M, the packed token rows. most_tokens: of one request, where that is not the window.

    query_start_loc starts at 0, does not fall, gives a request at most T tokens and ends at M or before. Of the
    requests that take part (a slot above null_slot and at least one token): the slot is inside both pools and no
    other's, the record row is inside the records and no other's, and num_accepted is in 0..T.
    """
    starts = _values(tensors, "query_start_loc") or [0]
    _check_starts(starts, most_tokens or geometry.window, rows)
    slots = _values(tensors, "state_indices") or []
    live = [n for n, slot in enumerate(slots) if slot > geometry.null_slot and starts[n + 1] > starts[n]]
    for pool in ("state", "conv_state"):
        if (tensor := tensors.get(pool)) is not None:
            _check_range("state_indices", slots, live, tensor.shape[0], f"a slot of {pool}")
    _check_unique("state_indices", slots, live, "a slot")
    records, indices = tensors.get("corrections"), _values(tensors, "record_indices")
    if records is not None and indices is not None:
        _check_range("record_indices", indices, live, records.shape[0], "a row of the records")
        _check_unique("record_indices", indices, live, "a row")
    if (accepted := _values(tensors, "num_accepted")) is not None:
        _check_range("num_accepted", accepted, live, geometry.window + 1, "an accepted count of the window")


def _values(tensors: Mapping[str, torch.Tensor | None], name: str) -> list[int] | None:
    tensor = tensors.get(name)
    return None if tensor is None else list(map(int, tensor.tolist()))


def _check_starts(starts: list[int], window: int, rows: int) -> None:
    if starts[0] != 0:
        raise MetadataError("query_start_loc", 0, "0", starts[0])
    for index in range(1, len(starts)):
        last, start = starts[index - 1], starts[index]
        if not 0 <= start - last <= window:
            expected = f"{last}..{last + window} (0..{window} tokens for request {index - 1})"
            raise MetadataError("query_start_loc", index, expected, start)
        if start > rows:
            raise MetadataError("query_start_loc", index, f"at most {rows}, the rows given", start)


def _check_range(name: str, values: list[int], live: list[int], size: int, what: str) -> None:
    for n in live:
        if not 0 <= values[n] < size:
            raise MetadataError(name, n, f"{what}, 0..{size - 1}", values[n])


def _check_unique(name: str, values: list[int], live: list[int], what: str) -> None:
    owner: dict[int, int] = {}
    for n in live:
        if (first := owner.setdefault(values[n], n)) != n:
            raise MetadataError(name, n, f"{what} of its own", f"{values[n]}, which is request {first}'s")
