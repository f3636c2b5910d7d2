# SPDX-License-Identifier: Apache-2.0
"""Times of the rest of a round: the commit of all layers in one launch, verify with commit, and decode.

Beside the commit stands the fastest of a few kernels that read and write the same states, all layers in one launch too.
A small model's states would stay in the L2 cache, so several models take turns in a graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import points
from benchmarks.points import KDA_LAYERS, Point, Result, Unavailable, chosen
from benchmarks.timing import best_of, capture, time_graphs
from benchmarks.verify import Calls, Wanted, make_layers, plan_of, plans
from flashkda.commit import CommitGeometry, plan_commit
from flashkda.decode import DecodePlan, plan_decode
from flashkda.errors import UnsupportedError
from flashkda.planner import target
from flashkda.round import RoundPlan, plan_round
from tests.gpu.setup import kernel_specs
from tests.inputs import Case

COMMIT, COPY, ROUND = "flashkda-commit", "floor-state-copy", "flashkda-round"
FOLDED = "flashkda-round-folded"
VERIFY = "flashkda-fused"  # of a round
DECODES = {"flashkda-decode-fused": "fused", "flashkda-decode-decomposed": "decomposed"}
Models = list[list[Case]]
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
    if wanted(FOLDED):
        with contextlib.suppress(Unavailable):
            plan = _folded_plan(point)
            found.append((kernels.make_spec, ("fused_round", plan.geometry, plan.tile, plan.arch)))
    verifies = plans(point, chosen((VERIFY,))) if wanted(ROUND) else {}
    return kernel_specs(verifies.values(), found)


def decode_specs(point: Point, wanted: Wanted) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The same for decode."""
    from flashkda.kernels import specs as kernels
    from flashkda.ops.decode_binding import DecodeBinding

    found: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    for impl in filter(wanted, DECODES):
        with contextlib.suppress(Unavailable):
            plan = _decode(point, impl)
            found += [
                (kernels.make_spec, (kind, plan.geometry, plan.tile, plan.arch)) for kind in DecodeBinding.kinds(plan)
            ]
    return found


def measure(point: Point, rounds: int, wanted: Wanted) -> Result:
    """Time commit, its floor, and the round, of all layers of as many models as keep the caches cold."""
    count = min(_MODELS, max(1, round(_BYTES / (KDA_LAYERS * point.state_bytes))))
    models = [make_layers(point, KDA_LAYERS) for _ in range(count)]
    for case in (case for model in models for case in model):  # records as a verify leaves them
        case["corrections"].normal_()
        case["key_gate"].normal_()
    runs: dict[str, Calls] = {}
    result = Result()
    for impl, calls_of in IMPLS.items():
        if wanted(impl):
            try:
                runs |= calls_of(point, models)
            except Unavailable as reason:
                result.skip(impl, point, reason)
    graphs = {name: capture(calls) for name, calls in runs.items()}
    times = best_of(time_graphs(graphs, rounds=rounds, milliseconds=8.0))
    result.add(point, times, dict.fromkeys(times, KDA_LAYERS * count))
    for row in result.rows:
        row["layers"] = KDA_LAYERS
    return result


def decode(point: Point, rounds: int, wanted: Wanted) -> Result:
    """Time decode (the point's window is 1), a layer a launch and in three."""
    cases = make_layers(point, point.layers)
    runs: dict[str, Calls] = {}
    result = Result()
    for impl in filter(wanted, DECODES):
        try:
            plan = _decode(point, impl)
        except Unavailable as reason:
            result.skip(impl, point, reason)
            continue
        tensors: list[Any] = [{name: case[name] for name in _OF_DECODE} for case in cases]
        runs[impl] = [plan.bind(**each).run for each in tensors]
    times = time_graphs({name: capture(calls) for name, calls in runs.items()}, rounds=rounds, milliseconds=8.0)
    result.add(point, times, dict.fromkeys(times, len(cases)))
    return result


def _decode(point: Point, impl: str) -> DecodePlan:
    try:
        return plan_decode(point.geometry, point.requests, path=DECODES[impl], device=points.DEVICE, strict=True)
    except UnsupportedError as error:
        raise Unavailable(error) from error


def _commits(point: Point, models: Models) -> dict[str, Calls]:
    return {COMMIT: [_commit(point, model) for model in models]}


def _rounds(point: Point, models: Models) -> dict[str, Calls]:
    plan = plan_of(VERIFY, point)
    return {
        ROUND: [
            call
            for model in models
            for call in (*(plan.bind(**case.tensors).run for case in model), _commit(point, model))
        ]
    }


def _folded_plan(point: Point) -> RoundPlan:
    try:
        geometry = point.geometry.replace(has_num_accepted=True)
        return plan_round(geometry, point.requests, path="fused", device=points.DEVICE)
    except UnsupportedError as error:
        raise Unavailable(error) from error


def _folded(point: Point, models: Models) -> dict[str, Calls]:
    plan = _folded_plan(point)
    counts = torch.full((point.requests,), point.window, dtype=torch.int32, device=points.DEVICE)
    return {FOLDED: [plan.bind(**{**case.tensors, "num_accepted": counts}).run for model in models for case in model]}


def _commit(point: Point, model: list[Case]) -> Callable[[], object]:
    plan = plan_commit(CommitGeometry(point.geometry, KDA_LAYERS), point.requests, device=points.DEVICE, strict=True)
    layers: Any = {name: [case[name] for case in model] for name in _LAYERED}
    accepted = torch.full((point.requests,), point.window, dtype=torch.int32, device=points.DEVICE)
    return plan.bind(**layers, accepted=accepted, state_indices=model[0]["state_indices"]).run


def _copies(point: Point, models: Models) -> dict[str, Calls]:
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


#: Implementations, and what makes their calls on the layers of each model. It raises Unavailable, with the reason.
IMPLS: dict[str, Callable[[Point, Models], dict[str, Calls]]] = {
    COMMIT: _commits,
    ROUND: _rounds,
    FOLDED: _folded,
    COPY: _copies,
}
