# SPDX-License-Identifier: Apache-2.0
"""Times of the rest of a round: the commit of all layers in one launch, decode, and verify with commit.

Beside the commit stands the fastest of a few kernels that read and write the same states, all layers in one launch too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.timing import Timing, best_of, capture, time_graphs
from flashkda.commit import CommitGeometry
from flashkda.geometry import PRESETS, preset
from flashkda.planner import plan_verify
from tests.gpu.setup import Setup
from tests.gpu.worlds import World

COMMIT_REQUESTS = (1, 8, 32, 128)
DECODE_REQUESTS = (1, 8, 32, 128)
ROUND_REQUESTS = (1, 32, 128)
WINDOW = 4
HEADS = 12
# Copies of a small model that take turns, so that the states come from memory and not from the L2 cache.
_BYTES = 400e6


def specs() -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Recipes of the kernels, for `jit.cache.prebuild`."""
    from flashkda.kernels import specs as kernels

    geometry, found = _geometry(), []
    for requests in DECODE_REQUESTS:
        plan = plan_verify(geometry, requests, path="fused", device="cuda", strict=True)
        kinds = ("fused_verify", "fused_decode", "short_conv", "decode_rule", "gated_rms_norm")
        found += [(kernels.make_spec, (kind, geometry, plan.tile, plan.arch)) for kind in kinds]
    return [*found, (kernels.make_commit_spec, (CommitGeometry(geometry, 1), plan.arch))]


def rows(rounds: int) -> list[dict[str, Any]]:
    """All rows."""
    found = []
    for requests in COMMIT_REQUESTS:
        found += _commit(requests, rounds)
    for requests in DECODE_REQUESTS:
        found += _decode(requests, rounds)
    return found


def _geometry() -> Any:
    return preset("kimi-k3", tp=8, window=WINDOW)


def _worlds(requests: int) -> tuple[list[World], torch.Tensor, int]:
    layers = PRESETS["kimi-k3"].kda_layers
    size = layers * requests * HEADS * 128 * 128 * 4
    worlds = [
        World(Setup(), _geometry(), layers=layers, slots=requests + 1, seed=i, requests=requests)
        for i in range(max(1, round(_BYTES / size)))
    ]
    for world in worlds:
        for pool in world.pools:  # records as a verify leaves them
            pool["corrections"].normal_()
            pool["key_gate"].normal_()
    return worlds, worlds[0].ints(range(1, requests + 1)), layers


def _commit(requests: int, rounds: int) -> list[dict[str, Any]]:
    from benchmarks import floors

    worlds, slots, layers = _worlds(requests)
    accepted = worlds[0].ints([WINDOW] * requests)
    calls: dict[str, Sequence[Callable[[], object]]] = {
        "flashkda-commit": [lambda w=w: w.commit(accepted, slots) for w in worlds],  # type: ignore[misc]
    }
    for loads in floors.copy_loads("float32"):
        copy = floors.load("floor_state_copy", worlds[0].arch, loads=loads)
        calls[f"floor-state-copy/{loads}"] = [
            lambda copy=copy, w=w: copy(w.table()[0], w.pools[0]["state"], slots)  # type: ignore[misc]
            for w in worlds
        ]
    if requests in ROUND_REQUESTS:
        starts = worlds[0].ints(range(0, WINDOW * requests + 1, WINDOW))
        ones = torch.ones_like(slots)
        given = worlds[0].inputs(WINDOW * requests)

        def whole() -> None:
            worlds[0].verify(given, starts, slots, ones)
            worlds[0].commit(accepted, slots)

        calls["flashkda-round"] = [whole]
    return _timed(calls, layers, requests, WINDOW, rounds)


def _decode(requests: int, rounds: int) -> list[dict[str, Any]]:
    worlds, slots, layers = _worlds(requests)
    world = worlds[0]
    inputs, starts = world.inputs(requests), world.ints(range(requests + 1))
    calls: dict[str, Sequence[Callable[[], object]]] = {
        "flashkda-decode-fused": [lambda: world.decode(inputs, starts, slots)],
        "flashkda-decode-decomposed": [lambda: world.decode_in_parts(inputs, starts, slots)],
    }
    return _timed(calls, layers, requests, 1, rounds)


def _timed(
    calls: dict[str, Sequence[Callable[[], object]]], layers: int, requests: int, window: int, rounds: int
) -> list[dict[str, Any]]:
    graphs = {name: capture(list(each)) for name, each in calls.items()}
    times: dict[str, Timing] = best_of(time_graphs(graphs, rounds=rounds, milliseconds=8.0))
    launches = {name.split("/")[0]: len(each) for name, each in calls.items()}
    shape = {"N": requests, "T": window, "H": HEADS, "state_dtype": "float32"}
    return [
        {
            "impl": name,
            **shape,
            "us_per_layer": round(timing.median / layers / launches[name], 3),
            "spread_us": round(timing.spread / layers / launches[name], 3),
            "layers": layers,
        }
        for name, timing in times.items()
    ]
