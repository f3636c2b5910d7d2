# SPDX-License-Identifier: Apache-2.0
"""Every pair of options, in a few geometries: fused = decomposed to the bit for each of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from flashkda.geometry import VerifyGeometry
from flashkda.planner import TILES, Tile, tile_fits
from tests.gpu.matrix import check_equal
from tests.gpu.setup import Check, Detail, Setup, describe

OPTIONS: Mapping[str, Sequence[Any]] = {
    "tile": TILES,
    "window": (1, 7, 16),
    "records": ("slot", "request", "indices"),
    "state_dtype": ("float32", "bfloat16"),
    "gate": ("bounded", "softplus"),
    "conv_layout": ("SD", "DS"),
    "norm": (True, False),
    "alignment": (16, 2),
    "has_num_accepted": (False, True),
    "index_dtype": ("int32", "int64"),
    "conv_weight_dtype": ("float32", "bfloat16"),
    "norm_weight_dtype": ("float32", "bfloat16"),
    "null_slot": (0, -1),
}
# Heads and requests do not change the kernels: each geometry is checked at all of these.
SIZES = ((1, 3), (6, 8), (12, 33), (96, 3))


class Row(NamedTuple):
    """One row of the covering array."""

    number: int
    geometry: VerifyGeometry  # at one head
    tile: Tile

    @property
    def name(self) -> str:
        return f"row {self.number}"


def pairs(row: Mapping[str, Any]) -> set[tuple[Any, ...]]:
    """The pairs of options that a row covers."""
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(OPTIONS, 2)}


def covering_array() -> list[dict[str, Any]]:
    """Rows that cover every pair of values of two options. Greedy: each takes first a pair that is still missing."""
    missing = {
        (a, x, b, y)
        for a, b in itertools.combinations(OPTIONS, 2)
        for x in OPTIONS[a]
        for y in OPTIONS[b]
        if together({a: x, b: y})
    }
    rows = []
    while missing:
        a, x, b, y = min(missing, key=str)
        row = {a: x, b: y}
        for name, values in OPTIONS.items():
            if name not in row:
                allowed = [value for value in values if together({**row, name: value})]
                row[name] = max(allowed, key=partial(_gain, missing, row, name))
        missing -= pairs(row)
        rows.append({name: row[name] for name in OPTIONS})
    return rows


def together(row: Mapping[str, Any]) -> bool:
    """Whether the tile of a row, as far as it is known, takes the row's geometry."""
    options = {name: row[name] for name in ("alignment", "conv_layout") if name in row}
    return "tile" not in row or tile_fits(row["tile"], VerifyGeometry(1, 4, **options), "sm_90a")


def _gain(missing: set[tuple[Any, ...]], row: Mapping[str, Any], name: str, value: Any) -> int:
    """Missing pairs that this value of one more option covers."""
    one = {(name, value, other, row[other]) for other in row}
    return len(missing & (one | {(b, y, a, x) for a, x, b, y in one}))


def table() -> list[Row]:
    """The covering array as geometries."""
    found = []
    for number, row in enumerate(covering_array()):
        options = {name: value for name, value in row.items() if name != "tile"}
        bound = -5.0 if row["gate"] == "bounded" else None
        found.append(Row(number, VerifyGeometry(1, lower_bound=bound, **options), row["tile"]))
    return found


def checks(setup: Setup) -> list[Check]:
    """One check a row."""
    rows = table() if not setup.small else table()[::5]
    found = []
    for row in rows:
        plans = setup.both(row.geometry, 1, row.tile)
        found.append(Check("pairwise", row.name, partial(_row, setup, row), plans))
    return found


def _row(setup: Setup, row: Row) -> Detail:
    sizes = SIZES if not setup.small else ((1, 3),)
    for heads, requests in sizes:
        try:
            check_equal(setup, row.geometry.replace(heads=heads), requests, seed=row.number + requests, tile=row.tile)
        except AssertionError as error:
            raise AssertionError(f"H={heads} N={requests}: {error}") from error
    return {"sizes": [list(size) for size in sizes], "tile": str(row.tile), **describe(row.geometry)}
