# SPDX-License-Identifier: Apache-2.0
"""The chunked numerics: what holds within the mode to the bit, and how far it is from the exact mode and the truth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import torch

from flashkda.geometry import VerifyGeometry
from flashkda.planner import CHUNKED_TILES, Plan, Tile
from tests.gpu import accuracy, invariance, matrix, pairwise
from tests.gpu.cases import device_case
from tests.gpu.setup import Check, Detail, Failure, Setup, describe, kimi_k3, require
from tests.inputs import KINDS, Case, assert_same_bits, clone, make_case, written
from tests.regroup import outcome

HEADS, REQUESTS = (1, 6, 12, 96), (1, 8, 32)
TILES = (*CHUNKED_TILES, Tile(64, 2, 16))
# Against the float64 oracle: the largest error at most this times the exact mode's, and the rms error.
MOST_ERROR = 2.0
# The largest magnitude of a row: how far u may be from the exact mode's.
MOST_DIFFERENCE = 1e-5
_SOFTPLUS = {"gate": "softplus", "lower_bound": None}


def checks(setup: Setup) -> list[Check]:
    """All of them; the other groups' checks, made for plans of this mode, where they say what is promised here too."""
    exact, setup = setup, dataclasses.replace(setup, numerics="chunked")
    windows, heads, requests = (matrix.WINDOWS, HEADS, REQUESTS) if not setup.small else ((1, 3), (1, 2), (1, 3))
    found: list[Check] = []

    def add(name: str, run: Callable[[], Detail], plans: list[Plan]) -> None:
        found.append(Check("chunked", name, run, tuple(plans)))

    for window in windows:
        plans = [plan for h in heads for n in requests for plan in setup.both(kimi_k3(window, h), n)]
        add(f"fused = decomposed, T={window}", partial(matrix._matrix, setup, window, heads, requests), plans)
    for window in (1, 3, 8, 16) if not setup.small else (3,):
        geometry = kimi_k3(window, 12 if not setup.small else 2)
        plans = [plan for tile in TILES for plan in setup.both(geometry, 1, tile)]
        add(f"any tile, T={window}", partial(matrix.check_tiles, setup, geometry, TILES), plans)
    for i, row in enumerate(pairwise.table() if not setup.small else pairwise.table()[::5]):
        tile = CHUNKED_TILES[i % len(CHUNKED_TILES)]
        row = row._replace(tile=tile)
        plans = list(setup.both(row.geometry, 1, tile))
        add(f"fused = decomposed, {row.name} of the pairs", partial(pairwise._row, setup, row), plans)
    for check in invariance.checks(setup):
        add(check.name, check.run, list(check.plans))
    longest = 16 if not setup.small else 5
    plans = [plan for window in _windows(longest) for plan in setup.both(kimi_k3(window, 6), 2)]
    add("later drafts and wider windows", partial(_capacities, setup, longest), plans)
    for window, options in ((4, {}), (8, _SOFTPLUS), (16, {}), (16, {"state_dtype": "bfloat16"})):
        if setup.small and window > 4:
            continue
        geometry = kimi_k3(window, 2 if not setup.small else 1).replace(**options)
        plans = [*setup.both(geometry, 4), *exact.both(geometry, 4)]
        name = f"against float64 and the exact mode, T={window} {' '.join(map(str, options.values()))}".rstrip()
        add(name, partial(_accuracy, setup, exact, geometry), plans)
    for options in ({}, _SOFTPLUS):
        geometry = kimi_k3(16 if not setup.small else 4, 2).replace(**options)
        name = f"extreme gates, {geometry.gate}"
        add(name, partial(_extreme, setup, geometry), list(setup.both(geometry, 2)))
    return found


def _windows(longest: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys((longest, 8, 4, 3, 2, 1))) if longest > 8 else (longest, 3, 1)


def _capacities(setup: Setup, longest: int) -> Detail:
    """The first tokens of a long window have the bits of a geometry whose window ends with them."""
    case = make_case(kimi_k3(longest, 6), (longest, longest - 1), seed=21, device=setup.device)
    base = clone(case)
    setup.run_whole(base)
    for window in _windows(longest)[1:]:
        geometry = case.geometry.replace(window=window)
        short = make_case(geometry, (window, window), seed=22, device=setup.device)
        for name in ("conv_weight", "A_log", "dt_bias", "norm_weight"):
            short[name].copy_(case[name])
        for n in range(2):
            rows, first = slice(n * window, (n + 1) * window), case.starts[n]
            for name in ("mixed_qkv", "raw_gate", "raw_beta", "output_gate"):
                short[name][rows] = case[name][first : first + window]
            short["state"][short.slots[n]] = case["state"][case.slots[n]]
            short["conv_state"][short.slots[n]] = case["conv_state"][case.slots[n]][:, : window + 2]
        setup.run_whole(short)
        for n in range(2):
            assert_same_bits(outcome(short, n), outcome(base, n, tokens=window))
    return {"windows": list(_windows(longest))}


def _accuracy(setup: Setup, exact: Setup, geometry: VerifyGeometry) -> Detail:
    """Within the oracle's tolerances, and not much further from it than the exact mode is."""
    window, worst = geometry.window, {"exact": 0.0, "chunked": 0.0}
    outs, difference = {"exact": 0.0, "chunked": 0.0}, 0.0
    other, compared = 0, 0
    for kind in KINDS if not setup.small else KINDS[:2]:
        lengths = (window, 1, 0, max(window - 1, 1))
        case = make_case(geometry, lengths, seed=7, device=setup.device, kind=kind, m_padding=2)
        after: dict[str, Case] = {}
        for name, one in (("exact", exact), ("chunked", setup)):
            after[name] = clone(case)
            qkv, o = one.run_parts(after[name])
            try:
                errors = accuracy.measure(case, after[name], qkv, o)
            except AssertionError as error:
                raise AssertionError(f"{kind}, {name}: {error}") from error
            worst[name] = max(worst[name], errors["corrections"])
            outs[name] = max(outs[name], errors["out"])
        found, wanted = (after[name]["corrections"].double() for name in ("chunked", "exact"))
        apart = ((found - wanted).abs() / wanted.abs().amax(-1, keepdim=True).clamp(min=1e-30)).nan_to_num(0.0)
        difference = max(difference, apart.max().item())
        other += int((after["chunked"]["out"] != after["exact"]["out"]).sum())
        compared += after["exact"]["out"].numel()
    detail = {
        "worst": {"corrections": worst["chunked"], "out": outs["chunked"]},
        "exact": {"corrections": worst["exact"], "out": outs["exact"]},
        "from_exact": {"corrections": difference, "share_of_other_outputs": other / compared},
        **describe(geometry),
    }
    if not worst["chunked"] <= MOST_ERROR * worst["exact"]:
        raise Failure(f"{worst['chunked']:.3g} from the oracle, the exact mode {worst['exact']:.3g}", detail)
    require(difference <= MOST_DIFFERENCE, f"{difference:.3g} from the exact mode")
    return detail


def _extreme(setup: Setup, geometry: VerifyGeometry) -> Detail:
    """Keys that are kept whole beside keys that are forgotten at once (exp(g) = 0 where the gate can), in any order."""
    case = device_case(geometry, (geometry.window,) * 2, seed=5, device=setup.device)
    rows = case["raw_gate"].shape[0]
    pattern = torch.arange(rows * geometry.heads * geometry.head_dim, device=setup.device).view_as(case["raw_gate"])
    large = torch.full_like(case["raw_gate"], 200.0)
    case["raw_gate"].copy_(torch.where(pattern * 2654435761 % 7 < 3, large, -large))
    case["A_log"].fill_(3.0)
    before = clone(case)
    qkv, o = setup.run_parts(case)
    errors = accuracy.measure(before, case, qkv, o)
    whole = clone(before)
    setup.run_whole(whole)
    assert_same_bits(written(whole), written(case))
    return {"worst": errors, **describe(geometry)}
