# SPDX-License-Identifier: Apache-2.0
"""Times of the rest of a round: the commit of all layers in one launch, verify with commit, and decode.

Beside the commit stands the fastest of a few kernels that read and write the same states, all layers in one launch too.
A small model's states would stay in the L2 cache, so several models take turns in a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks import points
from benchmarks.points import KDA_LAYERS, Point, Result
from benchmarks.timing import best_of, capture, time_graphs
from benchmarks.verify import Calls, Wanted, make_layers
from flashkda.commit import CommitGeometry, plan_commit
from flashkda.decode import plan_decode
from flashkda.planner import plan_verify, target
from tests.gpu.setup import kernel_specs
from tests.inputs import Case

COMMIT, COPY, ROUND = "flashkda-commit", "floor-state-copy", "flashkda-round"
PATH = "fused"  # of the verify of a round
DECODES = {"flashkda-decode-fused": "fused", "flashkda-decode-decomposed": "decomposed"}
# States of the models that take turns, and how many models at most.
_BYTES, _MODELS = 400e6, 4
_LAYERED = ("state", "corrections", "key_gate", "A_log", "dt_bias")
_OF_DECODE = (
    "mixed_qkv", "conv_weight", "conv_state", "raw_gate", "raw_beta", "A_log", "dt_bias", "state", "output_gate",
    "norm_weight", "query_start_loc", "state_indices", "out",
)  # fmt: skip


def specs(point: Point, wanted: Wanted) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Recipes of the kernels, for `jit.cache.prebuild`."""
    from benchmarks import floors
    from flashkda.kernels import specs as kernels

    arch = target(points.DEVICE, None)
    found: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    if wanted(COMMIT) or wanted(ROUND):
        found.append((kernels.make_commit_spec, (CommitGeometry(point.geometry, KDA_LAYERS), arch)))
    if wanted(COPY):
        found += floors.specs(arch, point.state_dtype)
    return kernel_specs([_verify(point)] if wanted(ROUND) else [], found)


def decode_specs(point: Point, wanted: Wanted) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The same for decode."""
    from flashkda.kernels import specs as kernels
    from flashkda.ops.decode_binding import DecodeBinding

    plans = [_decode(point, impl) for impl in filter(wanted, DECODES)]
    return [
        (kernels.make_spec, (kind, plan.geometry, plan.tile, plan.arch))
        for plan in plans
        for kind in DecodeBinding.kinds(plan)
    ]


def measure(point: Point, rounds: int, wanted: Wanted) -> Result:
    """Time commit, its floor, and the round, of all layers of as many models as keep the caches cold."""
    count = min(_MODELS, max(1, round(_BYTES / (KDA_LAYERS * point.state_bytes))))
    models = [make_layers(point, KDA_LAYERS) for _ in range(count)]
    for case in (case for model in models for case in model):  # records as a verify leaves them
        case["corrections"].normal_()
        case["key_gate"].normal_()
    runs: dict[str, Calls] = {}
    commits = [_commit(point, model) for model in models] if wanted(COMMIT) or wanted(ROUND) else []
    if wanted(COMMIT):
        runs[COMMIT] = list(commits)
    if wanted(ROUND):
        plan = _verify(point)
        runs[ROUND] = [
            call
            for model, commit in zip(models, commits, strict=True)
            for call in (*(plan.bind(**case.tensors).run for case in model), commit)
        ]
    if wanted(COPY):
        runs |= _copies(point, models)
    result = Result()
    times = best_of(
        time_graphs({name: capture(calls) for name, calls in runs.items()}, rounds=rounds, milliseconds=8.0)
    )
    result.add(point, times, dict.fromkeys(times, KDA_LAYERS * count))
    for row in result.rows:
        row["layers"] = KDA_LAYERS
    return result


def decode(point: Point, rounds: int, wanted: Wanted) -> Result:
    """Time decode (the point's window is 1), a layer a launch and in three."""
    cases = make_layers(point, point.layers)
    runs: dict[str, Calls] = {}
    for impl in filter(wanted, DECODES):
        plan = _decode(point, impl)
        runs[impl] = [plan.bind(**{name: case[name] for name in _OF_DECODE}).run for case in cases]
    result = Result()
    times = time_graphs({name: capture(calls) for name, calls in runs.items()}, rounds=rounds, milliseconds=8.0)
    result.add(point, times, dict.fromkeys(times, len(cases)))
    return result


def _decode(point: Point, impl: str) -> Any:
    return plan_decode(point.geometry, point.requests, path=DECODES[impl], device=points.DEVICE, strict=True)


def _verify(point: Point) -> Any:
    return plan_verify(point.geometry, point.requests, path=PATH, device=points.DEVICE, strict=True)


def _commit(point: Point, model: list[Case]) -> Callable[[], object]:
    plan = plan_commit(CommitGeometry(point.geometry, KDA_LAYERS), point.requests, device=points.DEVICE, strict=True)
    layers: Any = {name: [case[name] for case in model] for name in _LAYERED}
    accepted = torch.full((point.requests,), point.window, dtype=torch.int32, device=points.DEVICE)
    return plan.bind(**layers, accepted=accepted, state_indices=model[0]["state_indices"]).run


def _copies(point: Point, models: list[list[Case]]) -> dict[str, Calls]:
    from benchmarks import floors

    tables = [torch.tensor([case["state"].data_ptr() for case in model], device=points.DEVICE) for model in models]
    runs: dict[str, Calls] = {}
    for loads in floors.copy_loads(point.state_dtype):
        copy = floors.load("floor_state_copy", target(points.DEVICE, None), point.state_dtype, loads)
        runs[f"{COPY}/{loads}"] = [
            lambda copy=copy, table=table, first=model[0]: copy(table, first["state"], first["state_indices"])  # type: ignore[misc]
            for table, model in zip(tables, models, strict=True)
        ]
    return runs
