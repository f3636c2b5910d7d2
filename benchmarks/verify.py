# SPDX-License-Identifier: Apache-2.0
"""Time of one layer's verification, fused and in three launches, beside its floors: `python -m benchmarks.verify`.

Kimi K3 at TP8 (12 heads). Each variant is a CUDA graph of 69 layers (24 from 64 requests on), every one with states,
conv windows, records and inputs of its own, as a model has them. Writes benchmarks/results/<gpu>.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import rounds as the_round
from benchmarks.timing import Timing, capture, time_graphs, time_host
from flashkda.geometry import PRESETS, VerifyGeometry, preset
from flashkda.planner import Plan, plan_verify
from tests.gpu.cases import device_case, fork
from tests.gpu.environment import ROOT, clocks, environment, gpu_slug, use_local_kernel_cache, write_json
from tests.gpu.setup import kernel_specs
from tests.inputs import Case

# Requests and window of the points in docs and issues.
POINTS = ((1, 1), (1, 4), (1, 8), (1, 16), (8, 4), (32, 4), (64, 8), (128, 4))
HOST_POINTS = ((1, 4), (8, 4))
# Path and numerics of each implementation.
IMPLS = {
    "flashkda-fused": ("fused", "exact"),
    "flashkda-fused-chunked": ("fused", "chunked"),
    "flashkda-decomposed": ("decomposed", "exact"),
}
SOURCES = ("flashkda", "benchmarks", "tests/gpu/cases.py", "tests/gpu/worlds.py", "tests/inputs.py")


def layers(requests: int) -> int:
    """Layers of a graph: all KDA layers of Kimi K3, fewer where their states would fill the memory."""
    return PRESETS["kimi-k3"].kda_layers if requests < 64 else 24


def geometry_of(window: int, state_dtype: str) -> VerifyGeometry:
    """A Kimi K3 rank at TP8."""
    return preset("kimi-k3", tp=8, window=window, state_dtype=state_dtype)


def plan_of(impl: str, requests: int, window: int, state_dtype: str) -> Plan:
    """What the planner chooses for an implementation."""
    path, numerics = IMPLS[impl]
    geometry = geometry_of(window, state_dtype)
    return plan_verify(geometry, requests, path=path, numerics=numerics, device="cuda", strict=True)


def make_layers(geometry: VerifyGeometry, requests: int, count: int) -> list[Case]:
    """A batch in which every request uses its whole window; another one for each layer."""
    lengths = [geometry.window] * requests
    return [device_case(geometry, lengths, seed=seed, device="cuda") for seed in range(count)]


def point(
    requests: int, window: int, state_dtype: str, rounds: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of one point, and those of the host's time."""
    from benchmarks import floors

    geometry, count = geometry_of(window, state_dtype), layers(requests)
    cases = make_layers(geometry, requests, count)
    arch = plan_of("flashkda-fused", requests, window, state_dtype).arch
    sink = torch.zeros(1, device="cuda")
    runs: dict[str, list[Callable[[], object]]] = {}
    between: dict[str, Any] = {}
    for impl in IMPLS:
        plan = plan_of(impl, requests, window, state_dtype)
        if plan.path == "decomposed":  # the layers of a stream share what is between their launches
            between = {"qkv": torch.empty_like(cases[0]["mixed_qkv"]), "o": torch.empty_like(cases[0]["out"])}
        # Its own conv windows, records and output; the states are read only.
        own = [fork(case) for case in cases]
        runs[impl] = [plan.bind(**case.tensors, **between).run for case in own]
    empty = floors.load("floor_empty", arch)
    runs["floor-empty"] = [lambda: empty(sink)] * count
    for loads in floors.LOADS:
        read = floors.load("floor_state_read", arch, state_dtype, loads)
        runs[f"floor-state-read/{loads}"] = [
            lambda read=read, case=case: read(case["state"], case["state_indices"], sink)  # type: ignore[misc]
            for case in cases
        ]
    graphs = {name: capture(calls) for name, calls in runs.items()}
    times = time_graphs(graphs, rounds=rounds, milliseconds=8.0)
    reads = {name: times.pop(name) for name in list(times) if name.startswith("floor-state-read")}
    times["floor-state-read"] = min(reads.values(), key=lambda timing: timing.median)
    shape = {"N": requests, "T": window, "H": geometry.heads, "state_dtype": state_dtype}
    rows = [_row(impl, shape, timing, count) for impl, timing in times.items()]
    host = []
    if (requests, window) in HOST_POINTS:
        for impl in IMPLS:
            timing = time_host(runs[impl][0])
            host.append(
                {"impl": impl, **shape, "us": round(timing.median, 2), "p10_to_p90_us": round(timing.spread, 2)}
            )
    return rows, host


def _row(impl: str, shape: dict[str, Any], timing: Timing, count: int) -> dict[str, Any]:
    row = {"impl": impl, **shape, "us_per_layer": round(timing.median / count, 3)}
    row |= {"spread_us": round(timing.spread / count, 3), "layers": count}
    if impl in IMPLS:
        plan = plan_of(impl, shape["N"], shape["T"], shape["state_dtype"])
        row |= {"tile": str(plan.tile), "plan": plan.fingerprint}
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown: a column a point, and how much faster fused is."""
    points = list(dict.fromkeys((row["N"], row["T"]) for row in rows))
    found = {(row["impl"], row["N"], row["T"]): row["us_per_layer"] for row in rows}
    impls = list(dict.fromkeys(row["impl"] for row in rows))
    lines = ["| us per layer | " + " | ".join(f"N{n} T{t}" for n, t in points) + " |", "|---" * (len(points) + 1) + "|"]
    for impl in impls:
        lines.append(f"| {impl} | " + " | ".join(f"{found[impl, n, t]:.2f}" for n, t in points) + " |")
    fused, split = "flashkda-fused", "flashkda-decomposed"
    ratios = (found[split, n, t] / found[fused, n, t] for n, t in points)
    lines.append("| fused is faster by | " + " | ".join(f"{ratio:.2f}x" for ratio in ratios) + " |")
    return "\n".join(lines)


def build(points: Sequence[tuple[int, int]], state_dtype: str) -> int:
    """Build all kernels in parallel; how many there are."""
    from benchmarks import floors
    from flashkda.jit.cache import prebuild

    plans = [plan_of(impl, n, t, state_dtype) for n, t in points for impl in IMPLS]
    specs = [*kernel_specs(plans, the_round.specs()), *floors.specs(plans[0].arch, state_dtype)]
    return len(prebuild(specs))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verify", description=__doc__)
    parser.add_argument("--state-dtype", default="float32", choices=("float32", "bfloat16"), help="of the states")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="rounds of each point")
    parser.add_argument("--points", nargs="+", metavar="N,T", help="e.g. 1,4 128,4 (default: all eight)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: benchmarks/results/<gpu>.json")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("benchmarks.verify needs a CUDA device, and torch finds none.", file=sys.stderr)
        return 2
    use_local_kernel_cache()
    points = [(int(n), int(t)) for n, t in (text.split(",") for text in options.points or ())] or POINTS
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - start:6.1f} s] {text}", flush=True)

    say(f"{torch.cuda.get_device_name()}; built {build(points, options.state_dtype)} kernels")
    values: dict[str, Any] = {**environment(*SOURCES), "clocks": {"before": clocks()}, "rows": [], "host_us_run": []}
    values["method"] = {
        "rounds": options.rounds,
        "us_per_layer": "median over rounds of a CUDA graph of all layers, variants interleaved A B B A",
        "spread_us": "largest minus smallest round, per layer",
        "host_us_run": "median of binding.run() called eagerly",
    }
    path = options.output or ROOT / "benchmarks" / "results" / f"{gpu_slug()}.json"
    for requests, window in points:
        rows, host = point(requests, window, options.state_dtype, options.rounds)
        torch.cuda.empty_cache()
        values["rows"] += rows
        values["host_us_run"] += host
        values["clocks"]["after"] = clocks()
        values["seconds"] = round(time.monotonic() - start, 1)
        write_json(path, values)
        say(f"N{requests} T{window}: " + ", ".join(f"{row['impl']} {row['us_per_layer']:.2f}" for row in rows))
    print(table(values["rows"]))
    if not options.points and options.state_dtype == "float32":
        for row in the_round.rows(options.rounds):
            values["rows"].append(row)
            say(f"N{row['N']} T{row['T']}: {row['impl']} {row['us_per_layer']:.2f}")
        values["clocks"]["after"] = clocks()
        values["seconds"] = round(time.monotonic() - start, 1)
        write_json(path, values)
    for host in values["host_us_run"]:
        print(f"host time of {host['impl']} run(), N{host['N']} T{host['T']}: {host['us']:.1f} us")
    say(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
