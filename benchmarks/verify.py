# SPDX-License-Identifier: Apache-2.0
"""Time of one layer's verification: fused, in three launches, chunked, its floors, and other projects' kernels.

Each variant is a CUDA graph of 69 layers (fewer from 64 requests on), every one with states, conv windows, records and
inputs of its own, as a model has them. All variants of a point are timed in turn, in one run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks import peers, points
from benchmarks.points import Point, Result, Unavailable
from benchmarks.timing import best_of, capture, time_graphs, time_host
from flashkda.errors import GeometryError, UnsupportedError
from flashkda.planner import Plan, plan_verify
from tests.gpu.cases import device_case, fork
from tests.gpu.setup import kernel_specs
from tests.inputs import Case

HOST_POINTS = ((1, 4), (8, 4))
#: Path and numerics of each implementation.
IMPLS = {
    "flashkda-fused": ("fused", "exact"),
    "flashkda-fused-chunked": ("fused", "chunked"),
    "flashkda-decomposed": ("decomposed", "exact"),
}
EMPTY, READ = "floor-empty", "floor-state-read"

Calls = list[Callable[[], object]]
Wanted = Callable[[str], bool]


def plan_of(impl: str, point: Point) -> Plan:
    """What the planner chooses for an implementation. Raises Unavailable where it refuses, with every reason."""
    path, numerics = IMPLS[impl]
    try:
        return plan_verify(
            point.geometry, point.requests, path=path, numerics=numerics, device=points.DEVICE, strict=True
        )
    except (GeometryError, UnsupportedError) as error:  # a mode that it does not know, or a path that it refuses
        raise Unavailable(error) from error


def plans(point: Point, wanted: Wanted, result: Result | None = None) -> dict[str, Plan]:
    """The plans of the wanted implementations; those that the planner refuses go to result's skipped."""
    found = {}
    for impl in filter(wanted, IMPLS):
        try:
            found[impl] = plan_of(impl, point)
        except Unavailable as reason:
            if result is not None:
                result.skip(impl, point, reason)
    return found


def specs(point: Point, wanted: Wanted) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Recipes of the kernels, for `jit.cache.prebuild`."""
    from benchmarks import floors
    from flashkda.planner import target

    found = kernel_specs(plans(point, wanted).values())
    if wanted(READ) or wanted(EMPTY):
        found += floors.specs(target(points.DEVICE, None), point.state_dtype)
    return found


def make_layers(point: Point, count: int) -> list[Case]:
    """A batch in which every request uses its whole window; another one for each layer, in the same slots."""
    lengths, slots = [point.window] * point.requests, list(range(1, point.requests + 1))
    return [device_case(point.geometry, lengths, seed=seed, device=points.DEVICE, slots=slots) for seed in range(count)]


def measure(point: Point, rounds: int, wanted: Wanted) -> Result:
    """Time the wanted implementations of one point."""
    result, count = Result(), point.layers
    cases = make_layers(point, count)
    runs: dict[str, Calls] = {}
    more: dict[str, dict[str, Any]] = {}
    chosen = plans(point, wanted, result)
    for impl, plan in chosen.items():
        between: dict[str, Any] = {}
        if plan.path == "decomposed":  # the layers of a stream share what is between their launches
            between = {"qkv": torch.empty_like(cases[0]["mixed_qkv"]), "o": torch.empty_like(cases[0]["out"])}
        # Its own conv windows, records and output; the states are read only.
        own = [fork(case) for case in cases]
        runs[impl] = [plan.bind(**case.tensors, **between).run for case in own]
        more[impl] = {"tile": str(plan.tile), "plan": plan.fingerprint}
    runs |= _floors(point, cases, wanted)
    graphs = {name: capture(calls) for name, calls in runs.items()}
    for peer in peers.PEERS:
        if wanted(peer.impl):
            try:
                graphs[peer.impl] = capture(peer.calls(point, cases))
                more[peer.impl] = {"covers": peer.covers, "version": peer.version}
            except (Unavailable, RuntimeError) as reason:  # the latter where a capture refuses what it does
                result.skip(peer.impl, point, str(reason).splitlines()[0])
    times = best_of(time_graphs(graphs, rounds=rounds, milliseconds=8.0))
    result.add(point, times, dict.fromkeys(times, count), more)
    if (point.requests, point.window) in HOST_POINTS:
        for impl in chosen:
            timing = time_host(runs[impl][0])
            host = {"us": round(timing.median, 2), "p10_to_p90_us": round(timing.spread, 2)}
            result.host.append({"impl": impl, **point.row, **host})
    return result


def _floors(point: Point, cases: list[Case], wanted: Wanted) -> dict[str, Calls]:
    from benchmarks import floors
    from flashkda.planner import target

    arch, sink = target(points.DEVICE, None), torch.zeros(1, device=points.DEVICE)
    runs: dict[str, Calls] = {}
    if wanted(EMPTY):
        empty = floors.load("floor_empty", arch)
        runs[EMPTY] = [lambda: empty(sink)] * len(cases)
    for loads in floors.LOADS if wanted(READ) else ():
        read = floors.load("floor_state_read", arch, point.state_dtype, loads)
        runs[f"{READ}/{loads}"] = [
            lambda read=read, case=case: read(case["state"], case["state_indices"], sink)  # type: ignore[misc]
            for case in cases
        ]
    return runs
