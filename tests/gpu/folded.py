# SPDX-License-Identifier: Apache-2.0
"""The folded round: one launch has the bits of a commit and a verify, and touches no more than they do."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from flashkda.commit import CommitGeometry, plan_commit
from flashkda.geometry import VerifyGeometry
from flashkda.planner import ROUND_TILE_RULES, Tile
from flashkda.round import RoundPlan, plan_round
from tests.gpu.cases import device_case, fork, ragged
from tests.gpu.setup import Check, Detail, Setup, describe, kimi_k3
from tests.inputs import Case, assert_same_bits, written

REPLAYS = 500
_TILES = tuple(dict.fromkeys(rule.tile for rule in ROUND_TILE_RULES))
_SIZES = ((1, 1), (1, 40), (12, 1), (12, 3), (12, 33), (6, 130))  # heads, requests
_SMALL_SIZES = ((1, 1), (2, 3))
_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"state_dtype": "bfloat16"},
    {"gate": "softplus", "lower_bound": None, "records": "request", "index_dtype": "int64"},
    {"records": "indices", "norm": False, "null_slot": -1, "conv_weight_dtype": "bfloat16"},
    {"alignment": 2, "conv_layout": "DS", "norm_weight_dtype": "bfloat16"},
)


def checks(setup: Setup) -> list[Check]:
    """Nothing where the reference stands in: it has tests of its own."""
    if setup.reference:
        return []
    found = []
    sizes = _SIZES if not setup.small else _SMALL_SIZES
    for window in (1, 2, 4, 7, 8, 16):
        for options in _OPTIONS if window in (4, 16) else _OPTIONS[:2]:
            geometry = kimi_k3(window, 1, has_num_accepted=True, **options)
            plans = [plan for h, n in sizes for plan in _plans(setup, geometry.replace(heads=h), n)]
            name = f"as commit and verify, T={window}, {options or 'as Kimi K3'}"
            found.append(_check(name, partial(_equal, setup, geometry, sizes), geometry, plans))
    heads, requests, replays = (12, 40, REPLAYS) if not setup.small else (2, 5, 12)
    geometry = kimi_k3(4, heads, has_num_accepted=True)
    tiled = [plan_round(geometry, 3, path="fused", device=setup.device, tile=tile) for tile in _TILES]
    found.append(
        _check("every tile", partial(_tiles, setup, geometry), geometry, [*tiled, *_plans(setup, geometry, 3)])
    )
    plans = _plans(setup, geometry, requests)
    run = partial(_replays, setup, geometry, requests, replays)
    found.append(_check(f"{replays} replays, counts changed in place", run, geometry, plans))
    return found


def _check(name: str, run: Any, geometry: VerifyGeometry, plans: list[Any]) -> Check:
    from flashkda.kernels import specs

    kernels: list[Any] = [
        (specs.make_spec, ("fused_round", plan.geometry, plan.tile, plan.arch))
        for plan in plans
        if isinstance(plan, RoundPlan)
    ]
    kernels.append((specs.make_commit_spec, (CommitGeometry(geometry, 1), plans[0].arch)))
    return Check("folded", name, run, tuple(p for p in plans if not isinstance(p, RoundPlan)), tuple(kernels))


def _plans(setup: Setup, geometry: VerifyGeometry, requests: int) -> list[Any]:
    return [
        plan_round(geometry, requests, path="fused", device=setup.device),
        setup.whole(geometry, requests),
    ]


def _case(setup: Setup, geometry: VerifyGeometry, requests: int, seed: int) -> Case:
    """A batch whose records hold the window before, of every request."""
    lengths = ragged(requests, geometry.window, seed)
    case = device_case(geometry, lengths, seed=seed, device=setup.device, padding=3, nulls=requests > 2)
    for name in ("corrections", "key_gate"):
        case[name].normal_()
    return case


def _twin(case: Case) -> Case:
    """A copy with a state of its own."""
    other = fork(case)
    arena, view = case.arenas["state"].clone(), case["state"]
    other.arenas["state"] = arena
    other.tensors["state"] = arena.as_strided(view.shape, view.stride(), view.storage_offset())
    return other


def _apart(setup: Setup, case: Case) -> Any:
    """Commit and verify over the case, ready to run."""
    geometry = case.geometry
    lengths = case["query_start_loc"].diff()
    plan = plan_commit(CommitGeometry(geometry, 1), max(1, len(case.lengths)), device=setup.device, strict=True)
    accepted = torch.where(lengths > 0, case["num_accepted"], 0).to(torch.int32)
    names = ("state", "corrections", "key_gate", "A_log", "dt_bias")
    tensors: dict[str, Any] = {name: [case[name]] for name in names}
    if geometry.records == "indices":
        tensors["record_indices"] = case["record_indices"]
    commit = plan.bind(**tensors, accepted=accepted, state_indices=case["state_indices"])
    verify = setup.bind_whole(case)

    def run() -> None:
        accepted.copy_(torch.where(lengths > 0, case["num_accepted"], 0))
        commit.run()
        verify()

    return run


def _compare(setup: Setup, geometry: VerifyGeometry, requests: int, seed: int, tile: Tile | None = None) -> None:
    case = _case(setup, geometry, requests, seed)
    apart, folded = _twin(case), _twin(case)
    _apart(setup, apart)()
    plan = plan_round(geometry, requests, path="fused", device=setup.device, tile=tile)
    plan.bind(**folded.tensors).run()
    assert_same_bits(written(folded), written(apart))


def _equal(setup: Setup, geometry: VerifyGeometry, sizes: tuple[tuple[int, int], ...]) -> Detail:
    for heads, requests in sizes:
        try:
            _compare(setup, geometry.replace(heads=heads), requests, seed=100 * geometry.window + requests)
        except AssertionError as error:
            raise AssertionError(f"H={heads} N={requests}: {error}") from error
    return {"sizes": [list(size) for size in sizes], **describe(geometry)}


def _tiles(setup: Setup, geometry: VerifyGeometry) -> Detail:
    for tile in _TILES:
        _compare(setup, geometry, 3, seed=5, tile=tile)
    return {"tiles": [str(tile) for tile in _TILES]}


def _replays(setup: Setup, geometry: VerifyGeometry, requests: int, replays: int) -> Detail:
    case = _case(setup, geometry, requests, seed=11)
    apart, folded = _twin(case), _twin(case)
    plan = plan_round(geometry, requests, path="fused", device=setup.device)
    one = setup.capture(plan.bind(**folded.tensors).run)
    two = setup.capture(_apart(setup, apart))
    counts = case["num_accepted"]  # shared by the twins
    mismatches = torch.zeros((), dtype=torch.int64, device=counts.device)
    for name in ("state", "conv_state", "corrections", "key_gate"):
        folded[name].copy_(apart[name])  # the warm-up has run both once, and states drift with each round
    for replay in range(replays):
        counts.random_(0, geometry.window + 1)
        if replay % 50 == 0:  # states grow over hundreds of rounds of the same window
            folded["state"].normal_(0.0, 0.5)
            apart["state"].copy_(folded["state"])
        one()
        two()
        for name in ("out", "state", "conv_state", "corrections", "key_gate"):
            found, wanted = folded[name].contiguous(), apart[name].contiguous()
            mismatches += (found.view(torch.int16) != wanted.view(torch.int16)).any()
    if int(mismatches):
        raise AssertionError(f"{int(mismatches)} comparisons differ")
    return {"replays": replays, "mismatches": int(mismatches)}
