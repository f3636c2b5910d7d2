# SPDX-License-Identifier: Apache-2.0
"""Times of CUDA graphs, variants interleaved, and of host calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch


class Timing(NamedTuple):
    """Median over the rounds and their spread (largest minus smallest), in microseconds."""

    median: float
    spread: float


def capture(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """One graph of all the calls in order; each has run once by then."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def time_graphs(graphs: Mapping[str, torch.cuda.CUDAGraph], *, rounds: int, milliseconds: float) -> dict[str, Timing]:
    """The time of one replay of each graph.

    A round goes through the variants forth and back (A B B A), so that a drifting clock meets all of them. A
    measurement is a pair of events around as many replays as take ``milliseconds``, behind one that is not timed.
    """
    repeats = {
        name: max(1, round(milliseconds / max(_measure(graph, 3) * 1e-3, 1e-3))) for name, graph in graphs.items()
    }
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        forth = list(graphs)
        both = {name: 0.0 for name in graphs}
        for name in (*forth, *reversed(forth)):
            both[name] += _measure(graphs[name], repeats[name]) / 2
        for name, value in both.items():
            times[name].append(value)
    return {name: Timing(statistics.median(found), max(found) - min(found)) for name, found in times.items()}


def best_of(times: Mapping[str, Timing]) -> dict[str, Timing]:
    """The fastest of each "name/shape" as "name"; others as they are."""
    best: dict[str, Timing] = {}
    for name, timing in times.items():
        name = name.split("/")[0]
        best[name] = min(best.get(name, timing), timing, key=lambda one: one.median)
    return best


def _measure(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    """Microseconds a replay."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / repeats


def time_host(call: Callable[[], object], *, batches: int = 40, calls: int = 50) -> Timing:
    """What a call costs the host: the median call, and the distance from the 10th to the 90th percentile.

    The queue is drained between batches, which are short enough that no call waits for room in it.
    """
    clock, found = time.perf_counter_ns, []
    for batch in range(batches):
        torch.cuda.synchronize()
        for _ in range(calls):
            start = clock()
            call()
            found.append((clock() - start) / 1e3)
        if batch == 0:
            found.clear()  # warm-up
    found.sort()
    tenth = len(found) // 10
    return Timing(statistics.median(found), found[-1 - tenth] - found[tenth])
