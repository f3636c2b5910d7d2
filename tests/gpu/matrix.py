# SPDX-License-Identifier: Apache-2.0
"""Fused = decomposed to the bit: every T, H and N at Kimi K3's options, and every tile the planner may pick."""

from __future__ import annotations

from functools import partial

from flashkda.geometry import VerifyGeometry
from flashkda.planner import TILES, Tile
from tests.gpu.cases import assert_inputs_kept, assert_only_touched, device_case, fork, inputs_of, ragged
from tests.gpu.setup import Check, Detail, Setup, kimi_k3
from tests.inputs import Case, assert_same_bits, written

WINDOWS = tuple(range(1, 17))
HEADS = (1, 6, 8, 12, 24, 96)
REQUESTS = (1, 3, 8, 33, 128)
# Every tile the planner may pick, and some that only a caller would: other splits of rows and keys.
ALL_TILES = (*TILES, Tile(16, 1, 8), Tile(32, 4, 8), Tile(64, 4, 8), Tile(64, 2, 16), Tile(128, 8, 16))


def checks(setup: Setup) -> list[Check]:
    """One check a window of the matrix and of the tiles."""
    windows, heads, requests = (WINDOWS, HEADS, REQUESTS) if not setup.small else ((1, 3, 8), (1, 2), (1, 3))
    found = []
    for window in windows:
        plans = [plan for h in heads for n in requests for plan in setup.both(kimi_k3(window, h), n)]
        found.append(Check("matrix", f"T={window}", partial(_matrix, setup, window, heads, requests), tuple(plans)))
    for window in windows:
        geometry = kimi_k3(window, heads[-1] if setup.small else 12)
        plans = [plan for tile in ALL_TILES for plan in setup.both(geometry, 1, tile)]
        found.append(Check("tiles", f"T={window}", partial(check_tiles, setup, geometry, ALL_TILES), tuple(plans)))
    return found


def _matrix(setup: Setup, window: int, heads: tuple[int, ...], requests: tuple[int, ...]) -> Detail:
    for h in heads:
        for n in (0, *requests):
            try:
                check_equal(setup, kimi_k3(window, h), n, seed=1000 * window + 10 * h + n)
            except AssertionError as error:
                raise AssertionError(f"T={window} H={h} N={n}: {error}") from error
    return {"heads": list(heads), "requests": [0, *requests]}


def check_tiles(setup: Setup, geometry: VerifyGeometry, tiles: tuple[Tile, ...]) -> Detail:
    """Each tile gives the bits of three launches with the planner's, in one launch and in three."""
    requests = (1, 9) if not setup.small else (2,)
    for n in requests:
        case = make(setup, geometry, n, seed=n)
        wanted = fork(case)
        setup.run_parts(wanted)
        for tile in tiles:
            for run in (setup.run_whole, setup.run_parts):
                found = fork(case)
                run(found, tile)
                try:
                    assert_same_bits(written(found), written(wanted))
                except AssertionError as error:
                    raise AssertionError(f"N={n} {tile} {run.__name__}: {error}") from error
    return {"tiles": [str(tile) for tile in tiles], "heads": geometry.heads, "requests": list(requests)}


def make(setup: Setup, geometry: VerifyGeometry, requests: int, seed: int) -> Case:
    """A ragged case with null requests, padded rows and unused slots."""
    lengths = ragged(requests, geometry.window, seed)
    return device_case(geometry, lengths, seed=seed, device=setup.device, padding=3, nulls=requests > 2)


def check_equal(setup: Setup, geometry: VerifyGeometry, requests: int, seed: int, tile: Tile | None = None) -> None:
    """One launch and three give the same bits, write what they must and touch nothing else."""
    case = make(setup, geometry, requests, seed)
    before = inputs_of(case)
    whole, parts = fork(case), fork(case)
    setup.run_whole(whole, tile)
    setup.run_parts(parts, tile)
    assert_same_bits(written(whole), written(parts))
    assert_only_touched(case, whole)
    assert_inputs_kept(case, before)
