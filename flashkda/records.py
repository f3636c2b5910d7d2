# SPDX-License-Identifier: Apache-2.0
"""What the records of a speculative round take: the tensors to allocate, and their size beside kept states."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from flashkda.commit import CommitGeometry
from flashkda.errors import GeometryError, Problem
from flashkda.geometry import VerifyGeometry

_ITEMSIZE = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Allocation:
    """A tensor that an engine has to allocate."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Its size without padding."""
        return prod(self.shape) * _ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class RecordsSpec:
    """The records of one layer, and how many layers need them. No other tensor outlives a round."""

    layers: int
    corrections: Allocation
    key_gate: Allocation

    @property
    def bytes(self) -> int:
        """The records of all layers."""
        return self.layers * (self.corrections.bytes + self.key_gate.bytes)


def records_spec(
    geometry: VerifyGeometry | CommitGeometry, max_requests: int, *, slots: int | None = None
) -> RecordsSpec:
    """What an engine must allocate for the records: corrections [R, H, T, D] fp32 and key_gate [R, H, T, 2D] bf16.

    geometry      a CommitGeometry, or a VerifyGeometry for one layer
    max_requests  the most requests between a verify and its commit, >= 1
    slots         size of the state pool; default: the null slots and one slot a request

    R is `slots` for records by slot, else max_requests. Raises GeometryError.
    """
    verify, layers = _parts(geometry)
    problems: list[Problem] = []
    if isinstance(max_requests, bool) or not isinstance(max_requests, int) or max_requests < 1:
        problems.append(Problem("max_requests", "an int >= 1", repr(max_requests)))
    first_slot = verify.null_slot + 1
    if slots is not None and (isinstance(slots, bool) or not isinstance(slots, int) or slots <= first_slot):
        problems.append(Problem("slots", f"an int > {first_slot}", repr(slots)))
    if problems:
        raise GeometryError.of(problems)
    rows = max_requests
    if verify.records == "slot":
        rows = first_slot + max_requests if slots is None else slots
    shape = (rows, verify.heads, verify.window)
    return RecordsSpec(
        layers,
        corrections=Allocation((*shape, verify.head_dim), "float32"),
        key_gate=Allocation((*shape, 2 * verify.head_dim), "bfloat16"),
    )


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that one slot takes over all layers. str() is a table of them.

    state         the recurrent states
    records       what speculation adds by recording: T tokens of corrections, keys and gates
    conv          what the conv window takes beyond the columns that decoding needs
    kept_states   what keeping the state after each of T tokens would take in place of the records
    """

    layers: int
    window: int
    state: int
    records: int
    conv: int
    kept_states: int

    @property
    def saved(self) -> float:
        """How many times smaller the records are."""
        return self.kept_states / self.records

    def __str__(self) -> str:
        rows = {
            "state": self.state,
            f"records of {self.window} tokens": self.records,
            "wider conv window": self.conv,
            f"{self.window} states in place of records": self.kept_states,
        }
        lines = [f"{name:<32}{size / 2**20:>10.2f} MiB" for name, size in rows.items()]
        return "\n".join([f"bytes a slot, {self.layers} layers (records: {self.saved:.0f}x less than states)", *lines])


def memory_report(geometry: VerifyGeometry | CommitGeometry) -> MemoryReport:
    """What speculation costs per slot, against keeping a state for each token of the window. Raises GeometryError."""
    verify, layers = _parts(geometry)
    state = layers * verify.heads * verify.head_dim**2 * _ITEMSIZE[verify.state_dtype]
    return MemoryReport(
        layers=layers,
        window=verify.window,
        state=state,
        records=layers * verify.heads * verify.window * verify.head_dim * (4 + 2 * 2),
        conv=layers * verify.channels * (verify.window - 1) * 2,
        kept_states=verify.window * state,
    )


def _parts(geometry: Any) -> tuple[VerifyGeometry, int]:
    if isinstance(geometry, CommitGeometry):
        return geometry.verify, geometry.layers
    if isinstance(geometry, VerifyGeometry):
        return geometry, 1
    raise GeometryError("geometry", "a CommitGeometry or a VerifyGeometry", type(geometry).__name__)
