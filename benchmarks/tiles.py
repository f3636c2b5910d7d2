# SPDX-License-Identifier: Apache-2.0
"""Times of the fused verify by tile, for the planner's table flashkda/tiles.json: `python -m benchmarks.tiles`.

Every tile that the planner may pick, and some that it might, at a few requests and windows of a Kimi K3 rank. The file
has, for each point, the candidates from the fastest on; the table is written by hand from it, with few and plain rules.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import points
from benchmarks.points import Point
from benchmarks.timing import capture, time_graphs
from benchmarks.verify import make_layers
from flashkda.planner import TILES, Plan, Tile, plan_verify, tile_fits
from tests.gpu.environment import ROOT, clocks, environment, gpu_slug, use_local_kernel_cache, write_json
from tests.gpu.setup import kernel_specs

CANDIDATES = (*TILES, Tile(16, 2, 8), Tile(64, 4, 16))
REQUESTS = (1, 2, 3, 4, 6, 8, 32)
WINDOWS = (1, 4, 16)
# Tiles of few rows for many heads are slower by multiples: not measured.
_MOST_CTAS = 800
SOURCES = ("flashkda", "benchmarks", "tests/gpu/cases.py", "tests/inputs.py")


def plans(point: Point) -> dict[str, Plan]:
    """A plan for each candidate that this point can have."""
    found = {}
    for tile in CANDIDATES:
        if point.requests * point.heads * tile.cluster <= _MOST_CTAS:
            plan = plan_verify(point.geometry, point.requests, path="fused", device=points.DEVICE, strict=True)
            if tile_fits(tile, point.geometry, plan.arch):
                found[str(tile)] = plan_verify(
                    point.geometry, point.requests, path="fused", device=points.DEVICE, strict=True, tile=tile
                )
    return found


def measure(point: Point, rounds: int) -> dict[str, Any]:
    """The candidates' times, the fastest first, and what the planner picks."""
    cases = make_layers(point, point.layers)
    graphs = {name: capture([plan.bind(**case.tensors).run for case in cases]) for name, plan in plans(point).items()}
    times = time_graphs(graphs, rounds=rounds, milliseconds=4.0)
    order = sorted(times, key=lambda name: times[name].median)
    chosen = plan_verify(point.geometry, point.requests, path="fused", device=points.DEVICE, strict=True).tile
    us = {name: round(times[name].median / point.layers, 3) for name in order}
    return {**point.row, "us_per_layer": us, "chosen": str(chosen)}


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiles", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds of each point")
    parser.add_argument(
        "--output", type=Path, metavar="FILE.json", help="(default: benchmarks/results/tiles/<gpu>.json)"
    )
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("the benchmarks need a CUDA device, and torch finds none.", file=sys.stderr)
        return 2
    use_local_kernel_cache()
    from flashkda.jit.cache import prebuild

    grid = [Point(requests, window) for window in WINDOWS for requests in REQUESTS]
    prebuild(kernel_specs([plan for point in grid for plan in plans(point).values()]))
    path = options.output or ROOT / "benchmarks" / "results" / "tiles" / f"{gpu_slug()}.json"
    values: dict[str, Any] = {**environment(*SOURCES), "rounds": options.rounds, "points": []}
    for point in grid:
        row = measure(point, options.rounds)
        torch.cuda.empty_cache()
        values["points"].append(row)
        values["clocks"] = clocks()
        write_json(path, values)
        print(
            f"{point.label}: " + ", ".join(f"{tile} {us:.2f}" for tile, us in row["us_per_layer"].items()), flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
