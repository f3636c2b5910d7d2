# SPDX-License-Identifier: Apache-2.0
"""Checks of a commit's device metadata, for FLASHKDA_DEBUG_CHECKS=1 and check_metadata=True. They synchronize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from flashkda.errors import MetadataError
from flashkda.ops.commit_reference import Fold, folds

if TYPE_CHECKING:
    from flashkda.commit import CommitGeometry

# Beyond any pool: with it, what lies outside one is found here, and not dropped.
_ANY = 2**62


def check_commit(
    geometry: CommitGeometry, tensors: Mapping[str, torch.Tensor], *, slots: int, conv_slots: int | None, records: int
) -> None:
    """Read the request tensors on the host and raise MetadataError for the first bad entry; mutates nothing.

    tensors: those of a commit by request, and query_start_loc [N+1] where it is at hand. slots, conv_slots, records:
    sizes of the pools (conv_slots None: windows are not touched).

    Of the requests whose slot is not null: accepted_indices lies in accepted, the count in 0..T (0..the length of its
    window, where query_start_loc is given), the slot and the slots that are written in the pools, the record row in
    the records. A checkpoint's slot is not the new state's; a slot that is written is no other request's, to read or
    to write.
    """
    pool = slots if conv_slots is None else min(slots, conv_slots)
    sources = tensors["state_indices"].tolist()
    taking_part = [n for n, slot in enumerate(sources) if slot > geometry.verify.null_slot]
    _check_counts(geometry, tensors, taking_part)
    _check_range("state_indices", tensors, taking_part, pool, "a slot of the pools")
    if "record_indices" in tensors:
        _check_range("record_indices", tensors, taking_part, records, "a row of the records")
    asked = folds(geometry, tensors, slots=_ANY, records=None)
    if geometry.has_dst:
        writing = [fold.n for fold in asked if fold.target is not None]
        _check_range("dst_indices", tensors, writing, pool, "a slot of the pools")
    if geometry.has_boundary:
        due = [fold.n for fold in asked if fold.boundary is not None]
        _check_range("boundary_indices", tensors, due, pool, "a slot of the pools")
    _check_owners(geometry, asked)


def _check_counts(geometry: CommitGeometry, tensors: Mapping[str, torch.Tensor], taking_part: list[int]) -> None:
    accepted = tensors["accepted"].tolist()
    starts = tensors["query_start_loc"].tolist() if "query_start_loc" in tensors else None
    entries = list(range(len(tensors["state_indices"])))
    if "accepted_indices" in tensors:
        _check_range("accepted_indices", tensors, taking_part, len(accepted), "an entry of accepted")
        entries = tensors["accepted_indices"].tolist()
    for n in taking_part:
        most, of = geometry.verify.window, "the window"
        if starts is not None:
            most, of = min(most, starts[n + 1] - starts[n]), f"the tokens of request {n}"
        if not 0 <= accepted[entries[n]] <= most:
            raise MetadataError("accepted", entries[n], f"a count of {of}, 0..{most}", accepted[entries[n]])


def _check_range(name: str, tensors: Mapping[str, torch.Tensor], requests: list[int], size: int, what: str) -> None:
    values = tensors[name].tolist()
    for n in requests:
        if not 0 <= values[n] < size:
            raise MetadataError(name, n, f"{what}, 0..{size - 1}", values[n])


def _check_owners(geometry: CommitGeometry, asked: list[Fold]) -> None:
    destination = "dst_indices" if geometry.has_dst else "state_indices"
    writers: dict[int, int] = {}
    for fold in asked:
        if fold.target is not None and fold.boundary is not None and fold.boundary[0] == fold.target:
            expected = f"another slot than the new state's, {fold.target}"
            raise MetadataError("boundary_indices", fold.n, expected, fold.boundary[0])
        writes = [(destination, fold.target), ("boundary_indices", fold.boundary[0] if fold.boundary else None)]
        for name, slot in writes:
            if slot is None:
                continue
            if (first := writers.setdefault(slot, fold.n)) != fold.n:
                raise MetadataError(name, fold.n, "a slot of its own", f"{slot}, which request {first} writes")
    for fold in asked:
        reads = fold.target is not None or fold.boundary is not None
        writer = writers.get(fold.source, fold.n)
        if reads and writer != fold.n:
            expected = "a slot that no other request writes"
            raise MetadataError("state_indices", fold.n, expected, f"{fold.source}, which request {writer} writes")
