# SPDX-License-Identifier: Apache-2.0
"""Plots of a result file: `python -m benchmarks.plots benchmarks/results/<gpu>.json` writes PNG files beside it.

Time over requests, time over the window, and the share of the memory's bandwidth that the states alone take.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.points import HEADS, Point

#: Bytes a second, from the data sheets.
PEAK = {
    "NVIDIA H100 80GB HBM3": 3.35e12,
    "NVIDIA H200": 4.8e12,
    "NVIDIA GH200 480GB": 4.0e12,
    "NVIDIA B200": 7.7e12,
}
WINDOW = 4  # of the plots over requests
_VERIFY_FLOOR, _COMMIT_FLOOR = "floor-state-read", "floor-state-copy"
# How often an implementation has to move the states: once, but for these.
_PASSES = {"flashkda-commit": 2, _COMMIT_FLOOR: 2, "flashkda-round": 3, "flashkda-round-folded": 2}
_ROUND = ("flashkda-round", "flashkda-round-folded")

Row = Mapping[str, Any]
Lines = dict[str, list[tuple[int, float]]]


def write(values: Mapping[str, Any], target: Path) -> list[Path]:
    """Plots of every number of heads and type of the state in a result file; ``target`` is its path without suffix.

    Those of 12 heads and an fp32 state have no such suffix. Returns the files. Raises ImportError without matplotlib.
    """
    written = []
    rows: Sequence[Row] = values["rows"]
    for heads, dtype in dict.fromkeys((row["H"], row["state_dtype"]) for row in rows):
        chosen = [row for row in rows if (row["H"], row["state_dtype"]) == (heads, dtype)]
        suffix = ("" if heads == HEADS else f"-{heads}") + ("" if dtype == "float32" else f"-{dtype}")
        title = f"{values.get('gpu', '')}, {heads} heads, {dtype} state"
        for name, draw in _drawings(chosen, values.get("gpu", "")):
            path = target.with_name(f"{target.name}-{name}{suffix}.png")
            _save(path, title, draw)
            written.append(path)
    return written


def _drawings(rows: Sequence[Row], gpu: str) -> Iterator[tuple[str, Callable[[Any], None]]]:
    over_requests = _lines((row for row in rows if row["T"] == WINDOW), "N")
    if _several(over_requests):
        yield "requests", lambda axes: _times(axes, over_requests, f"requests, windows of {WINDOW} tokens")
    over_windows = _lines((row for row in rows if row["N"] == 1), "T")
    if _several(over_windows):
        yield "window", lambda axes: _times(axes, over_windows, "tokens of a window, one request")
    peak = PEAK.get(gpu)
    if peak is not None and _several(over_requests):
        state = Point(1, WINDOW, rows[0]["H"], rows[0]["state_dtype"]).state_bytes
        shares = {
            impl: [(n, 100 * n * state * _PASSES.get(impl, 1) / (us * 1e-6 * peak)) for n, us in line]
            for impl, line in over_requests.items()
            if impl != "floor-empty"
        }
        yield "bandwidth", lambda axes: _shares(axes, shares, peak)


def _lines(rows: Any, key: str) -> Lines:
    lines: Lines = {}
    for row in rows:
        lines.setdefault(row["impl"], []).append((row[key], row["us_per_layer"]))
    return {impl: sorted(line) for impl, line in lines.items()}


def _several(lines: Lines) -> bool:
    return any(len(line) > 1 for line in lines.values())


def _style(impl: str) -> dict[str, Any]:
    """Floors are black lines without marks (an empty launch: grey), rounds and commits dashed, peers dotted."""
    if impl == "floor-empty":
        return {"color": "grey", "linewidth": 1.0}
    if impl.startswith("floor-"):
        return {"color": "black", "linewidth": 1.5, "linestyle": "-" if impl == _VERIFY_FLOOR else "--"}
    dashed = impl in _ROUND or impl == "flashkda-commit"
    return {"marker": "o", "markersize": 4, "linestyle": "--" if dashed else ":" if impl.startswith("peer-") else "-"}


def _draw(axes: Any, lines: Lines, label: str) -> None:
    places = sorted({place for line in lines.values() for place, _ in line})
    for impl, line in lines.items():
        if len(line) > 1:
            axes.plot(*zip(*line, strict=True), label=impl, **_style(impl))
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [str(place) for place in places])
    axes.set_xlabel(label)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8)


def _times(axes: Any, lines: Lines, label: str) -> None:
    _draw(axes, lines, label)
    axes.set_yscale("log")
    axes.set_ylabel("microseconds a layer")


def _shares(axes: Any, lines: Lines, peak: float) -> None:
    _draw(axes, lines, f"requests, windows of {WINDOW} tokens")
    axes.set_ylim(0, 100)
    axes.set_ylabel(f"states alone, percent of {peak / 1e12:.2f} TB/s")


def _save(path: Path, title: str, draw: Callable[[Any], None]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10)
    draw(axes)
    # Without the time and the version of the writer, the same numbers give the same file.
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main(arguments: Sequence[str]) -> int:
    """Plot the files named; the exit status."""
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    for name in arguments:
        path = Path(name)
        for written in write(json.loads(path.read_text()), path.with_suffix("")):
            print(written)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
