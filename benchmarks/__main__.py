# SPDX-License-Identifier: Apache-2.0
"""Times of verify, commit, round and decode beside their floors and other projects' kernels: `python -m benchmarks`.

A rank of Kimi K3 at TP8 (12 heads) unless told otherwise. Writes a JSON file, its tables as Markdown, and its plots.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import plots, rounds, sweep, verify
from benchmarks.points import HEADS, POINTS, Point, Result, chosen
from benchmarks.progress import Progress, progress
from tests.gpu.environment import ROOT, clocks, environment, gpu_slug, use_local_kernel_cache, write_json
from tools import readme_table

SOURCES = ("flashkda", "benchmarks", "tests/gpu/cases.py", "tests/inputs.py")
RESULTS = ROOT / "benchmarks" / "results"
METHOD = {
    "us_per_layer": "median over rounds of a CUDA graph of all layers, variants interleaved A B B A",
    "spread_us": "largest minus smallest round, per layer",
    "host_us_run": "median of binding.run() called eagerly",
}


class Job(NamedTuple):
    """One step of a run: what it is called, the kernels that it needs, and what measures it."""

    name: str
    specs: Callable[[], list[Any]]
    measure: Callable[[], Result]


def jobs(points: Sequence[Point], wanted: Callable[[str], bool], turns: int) -> list[Job]:
    """The steps of a run: verify and its peers, commit and round, and decode for each number of requests."""
    found = [
        Job(
            f"verify, {point.label}",
            lambda point=point: verify.specs(point, wanted),  # type: ignore[misc]
            lambda point=point: verify.measure(point, turns, wanted),  # type: ignore[misc]
        )
        for point in points
    ]
    if any(map(wanted, (rounds.COMMIT, rounds.COPY, rounds.ROUND, rounds.FOLDED))):
        found += [
            Job(
                f"commit and round, {point.label}",
                lambda point=point: rounds.specs(point, wanted),  # type: ignore[misc]
                lambda point=point: rounds.measure(point, turns, wanted),  # type: ignore[misc]
            )
            for point in points
        ]
    if any(map(wanted, rounds.DECODES)):
        ones = dict.fromkeys(replace(point, window=1) for point in points)
        found += [
            Job(
                f"decode, {point.label}",
                lambda point=point: rounds.decode_specs(point, wanted),  # type: ignore[misc]
                lambda point=point: rounds.decode(point, turns, wanted),  # type: ignore[misc]
            )
            for point in ones
        ]
    return found


def run(steps: Sequence[Job], values: dict[str, Any], path: Path, report: Progress) -> None:
    """Take the steps one after the other; the file has what is measured after each."""
    values |= {"rows": [], "skipped": [], "host_us_run": [], "clocks": {"before": clocks(), "after_each": {}}}
    said: set[tuple[str, str]] = set()
    for step in steps:
        report.begin(step.name)
        result = step.measure()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        values["rows"] += result.rows
        values["skipped"] += result.skipped
        values["host_us_run"] += result.host
        values["clocks"]["after_each"][step.name] = clocks()
        write_json(path, values)
        report.say(f"{step.name}: " + ", ".join(f"{row['impl']} {row['us_per_layer']:.2f}" for row in result.rows))
        for skip in result.skipped:
            if (skip["impl"], skip["reason"]) not in said:
                said.add((skip["impl"], skip["reason"]))
                report.say(f"  {skip['impl']} skipped: {skip['reason']}")
        report.end()


def build(steps: Iterable[Job]) -> int:
    """Build all kernels in parallel; how many there are."""
    from flashkda.jit.cache import prebuild

    specs: dict[Any, Any] = {}
    for step in steps:
        for recipe, arguments in step.specs():
            specs.setdefault(recipe(*arguments)[0], (recipe, arguments))
    return len(prebuild(list(specs.values())))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    types = ("float32", "bfloat16")
    parser.add_argument("--state-dtype", nargs="+", default=types, choices=types, help="of the states (default: both)")
    parser.add_argument("--heads", nargs="+", type=int, default=(HEADS,), metavar="H", help=f"(default: {HEADS})")
    parser.add_argument("--points", nargs="+", type=_point, default=POINTS, metavar="N,T", help="e.g. 1,4 128,4")
    parser.add_argument("--impl", nargs="+", metavar="NAME", help="implementations, e.g. flashkda-fused 'floor-*'")
    parser.add_argument("--sweep", action="store_true", help="the fused verify over many shapes: time a byte of state")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds of each point")
    parser.add_argument("--no-plots", action="store_true", help="leave the PNG files out")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE.json",
        help="(default: benchmarks/results/<gpu>.json; build/bench/<gpu>.json for a part of it)",
    )
    return parser.parse_args(argv)


def _point(text: str) -> tuple[int, int]:
    requests, window = text.split(",")
    return int(requests), int(window)


def destination(options: argparse.Namespace) -> Path:
    """Where the results go. Those of a part do not take the place of the whole."""
    if options.output is not None:
        return Path(options.output)
    if options.sweep:
        return RESULTS / "sweep" / f"{gpu_slug()}.json"
    whole = options.impl is None and tuple(options.points) == POINTS and tuple(options.heads) == (HEADS,)
    return (RESULTS if whole and len(options.state_dtype) == 2 else ROOT / "build" / "bench") / f"{gpu_slug()}.json"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    options = arguments(argv)
    if not torch.cuda.is_available():
        print("the benchmarks need a CUDA device, and torch finds none.", file=sys.stderr)
        return 2
    use_local_kernel_cache()
    if options.sweep:
        steps = jobs(sweep.points(options.state_dtype), chosen((sweep.IMPL, verify.READ)), options.rounds)
    else:
        grid = [Point(n, t, h, d) for d in options.state_dtype for h in options.heads for n, t in options.points]
        steps = jobs(grid, chosen(options.impl), options.rounds)
    path = destination(options)
    values = {**environment(*SOURCES), "method": {"rounds": options.rounds, **METHOD}}
    with progress(len(steps) + 1) as report:
        report.begin("building kernels")
        report.say(f"{torch.cuda.get_device_name()}: {build(steps)} kernels are ready")
        report.end()
        run(steps, values, path, report)
    finish(values, path, sweeping=options.sweep, plot=not options.no_plots)
    return 0


def finish(values: dict[str, Any], path: Path, *, sweeping: bool, plot: bool) -> None:
    """Print the tables and write them, and the plots, beside the result file."""
    tables = sweep.table(values["rows"]) if sweeping else "\n\n".join(readme_table.file_tables(path))
    path.with_suffix(".md").write_text(tables + "\n")
    print(tables)
    for host in values["host_us_run"]:
        print(
            f"host time of {host['impl']} run(), N{host['N']} T{host['T']} {host['state_dtype']}: {host['us']:.1f} us"
        )
    written = [path, path.with_suffix(".md")]
    if plot and not sweeping:
        try:
            written += plots.write(values, path.with_suffix(""))
        except ImportError as error:
            print(f"no plots: {error}; pip install 'flashkda[bench]'", file=sys.stderr)
    print("written:", *written)


if __name__ == "__main__":
    sys.exit(main())
