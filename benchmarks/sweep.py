# SPDX-License-Identifier: Apache-2.0
"""No cliff: the time of the fused verify per byte of state, over requests, heads, windows and types of the state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.points import Point

REQUESTS = (8, 32, 128, 512)
HEADS = (6, 12, 24, 96)
WINDOWS = (4, 16)
IMPL = "flashkda-fused"
#: From this many heads in flight on, a point should be within LIMIT of the best.
LOAD, LIMIT = 400, 1.5


def points(state_dtypes: Sequence[str]) -> list[Point]:
    """The grid."""
    return [Point(n, t, h, dtype) for dtype in state_dtypes for t in WINDOWS for h in HEADS for n in REQUESTS]


def ratios(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], float, float]]:
    """(row, picoseconds per byte of state, ratio to the best point of its window and type) of the fused verify.

    The best is sought among points of LOAD or more.
    """
    chosen = [row for row in rows if row["impl"] == IMPL]
    best: dict[tuple[int, str], float] = {}
    for row in chosen:
        if row["N"] * row["H"] >= LOAD:
            key = row["T"], row["state_dtype"]
            best[key] = min(best.get(key, float("inf")), _per_byte(row))
    for row in chosen:
        least = best.get((row["T"], row["state_dtype"]))
        if least is not None:
            yield row, _per_byte(row), _per_byte(row) / least


def _per_byte(row: dict[str, Any]) -> float:
    point = Point(row["N"], row["T"], row["H"], row["state_dtype"])
    return float(row["us_per_layer"]) * 1e6 / point.state_bytes


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line a point."""
    lines = [
        "| | N x H | us a layer | ps a byte of state | to the best of its T and type |",
        "|---|---|---|---|---|",
    ]
    for row, per_byte, ratio in ratios(rows):
        load = row["N"] * row["H"]
        name = f"N{row['N']} T{row['T']} H{row['H']} {row['state_dtype']}"
        verdict = "" if load < LOAD or ratio <= LIMIT else " **over**"
        lines.append(f"| {name} | {load} | {row['us_per_layer']:.2f} | {per_byte:.3f} | {ratio:.2f}{verdict} |")
    return "\n".join(lines)
