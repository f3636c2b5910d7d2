# SPDX-License-Identifier: Apache-2.0
"""What is measured: points (requests, window, heads, type of the state), and the rows that come of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

from benchmarks.timing import Timing
from flashkda.geometry import PRESETS, VerifyGeometry, preset

#: Requests and window of the points in docs and issues.
POINTS = ((1, 1), (1, 4), (1, 8), (1, 16), (8, 4), (32, 4), (64, 8), (128, 4))
DEVICE = "cuda"
HEADS = 12  # of a Kimi K3 rank at TP8
KDA_LAYERS = PRESETS["kimi-k3"].kda_layers
_HEAD = 128 * 128
# States of all layers of a graph, at most; and layers beyond which a larger batch needs no more to fill the caches.
_BYTES = 24e9
_FEW_LAYERS = 24


@dataclass(frozen=True)
class Point:
    """N requests that all use their window of T tokens, H heads, and the type of the states."""

    requests: int
    window: int
    heads: int = HEADS
    state_dtype: str = "float32"

    @property
    def label(self) -> str:
        """As it is printed."""
        more = "" if self.heads == HEADS else f" H{self.heads}"
        return f"N{self.requests} T{self.window}{more} {self.state_dtype}"

    @property
    def geometry(self) -> VerifyGeometry:
        """A rank of Kimi K3 with these heads."""
        geometry = preset("kimi-k3", tp=8, window=self.window, state_dtype=self.state_dtype)
        return geometry if self.heads == geometry.heads else geometry.replace(heads=self.heads)

    @property
    def state_bytes(self) -> int:
        """The states of one layer."""
        return self.requests * self.heads * _HEAD * (4 if self.state_dtype == "float32" else 2)

    @property
    def layers(self) -> int:
        """Layers of a graph: all KDA layers of Kimi K3, fewer where their states would fill the memory."""
        if self.requests * self.heads < 64 * HEADS:
            return KDA_LAYERS
        return max(4, min(_FEW_LAYERS, int(_BYTES // self.state_bytes)))

    @property
    def row(self) -> dict[str, Any]:
        """The keys of this point's rows."""
        return {"N": self.requests, "T": self.window, "H": self.heads, "state_dtype": self.state_dtype}


class Unavailable(Exception):
    """An implementation that cannot be measured here; the text says why."""


@dataclass
class Result:
    """Rows of one point, what was skipped and why, and rows of the host's time."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    host: list[dict[str, Any]] = field(default_factory=list)

    def skip(self, impl: str, point: Point, reason: object) -> None:
        """Keep that an implementation was not measured."""
        self.skipped.append({"impl": impl, **point.row, "reason": str(reason)})

    def add(self, point: Point, times: Mapping[str, Timing], layers: Mapping[str, int], more: Any = None) -> None:
        """A row for each time; layers: of each graph. more: further keys by implementation."""
        for impl, timing in times.items():
            count = layers[impl]
            times_of = {"us_per_layer": round(timing.median / count, 3), "spread_us": round(timing.spread / count, 3)}
            self.rows.append({"impl": impl, **point.row, **times_of, "layers": count, **(more or {}).get(impl, {})})


def chosen(patterns: Sequence[str] | None) -> Callable[[str], bool]:
    """Whether an implementation is wanted: its name matches one of the patterns, or there are none."""
    return lambda impl: not patterns or any(fnmatch(impl, pattern) for pattern in patterns)
