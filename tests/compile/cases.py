# SPDX-License-Identifier: Apache-2.0
"""Which kernels are compiled and looked at: kind x tile x geometry x architecture. Needs neither the DSL nor a GPU.

``quick_cases`` is what every run compiles: the widest geometry that engines have, with every tile on every architecture
of the fused path; the hungriest rows of the table with every tile on sm_90a; and each tile with every second row, the
architectures in turn, so that two neighbours in the list of tiles meet all rows.
``full_cases`` (pytest tests/compile --compile=full) is every row with every tile on every architecture.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

from flashkda.capability import ARCHITECTURES
from flashkda.commit import CommitGeometry
from flashkda.geometry import VerifyGeometry, preset
from flashkda.kernels.specs import KINDS, make_commit_spec, make_spec
from flashkda.planner import CHUNKED_TILES, ROUND_TILE_RULES, TILES, Tile, tile_fits

CLUSTER_ARCHS = ("sm_90a", "sm_100a", "sm_120a")
# The same code as sm_100a but for its name: one kernel of each kind.
SIBLING_ARCH = "sm_103a"
DECOMPOSED_ARCHS = ("sm_80", "sm_89")
CHUNKED_KINDS = ("record_chunked", "fused_verify_chunked")
TILED_KINDS = ("record", "fused_verify", "fused_decode", "decode_rule", "fused_round", *CHUNKED_KINDS)
FUSED_KINDS = ("fused_verify", "fused_decode", "fused_round", "fused_verify_chunked")
ROUND_TILES = tuple(dict.fromkeys(rule.tile for rule in ROUND_TILE_RULES))
COMMITS = {
    "commit": {},
    "commit_all": dict.fromkeys(("compact", "has_dst", "has_boundary", "has_accepted_indices"), True),
}

FACTORS = (
    "window", "state_dtype", "alignment", "gate", "conv_layout", "norm", "has_num_accepted", "records", "index_dtype",
    "conv_weight_dtype", "norm_weight_dtype", "null_slot",
)  # fmt: skip

# Every two options meet in some row, in all their combinations (test_shared_formulas.py).
ROWS: tuple[tuple[Any, ...], ...] = (
    (1, "float32", 2, "softplus", "SD", False, False, "slot", "int32", "float32", "float32", -1),
    (1, "bfloat16", 2, "bounded", "SD", True, False, "request", "int64", "bfloat16", "bfloat16", 0),
    (1, "bfloat16", 16, "softplus", "DS", False, True, "indices", "int32", "float32", "float32", 0),
    (4, "float32", 16, "softplus", "DS", True, True, "slot", "int64", "float32", "bfloat16", -1),
    (4, "bfloat16", 2, "bounded", "SD", False, False, "request", "int32", "float32", "bfloat16", 0),
    (4, "float32", 2, "bounded", "SD", True, True, "indices", "int64", "bfloat16", "float32", -1),
    (8, "bfloat16", 2, "softplus", "SD", False, True, "slot", "int64", "bfloat16", "float32", -1),
    (8, "bfloat16", 2, "bounded", "SD", True, True, "request", "int32", "float32", "bfloat16", 0),
    (8, "float32", 16, "bounded", "DS", True, False, "indices", "int64", "bfloat16", "bfloat16", -1),
    (16, "bfloat16", 2, "bounded", "DS", True, True, "slot", "int32", "bfloat16", "float32", 0),
    (16, "float32", 16, "softplus", "DS", False, True, "request", "int64", "float32", "float32", -1),
    (16, "float32", 16, "softplus", "SD", True, False, "indices", "int64", "bfloat16", "bfloat16", 0),
)


def row_geometry(row: tuple[Any, ...]) -> VerifyGeometry:
    """The geometry of a row of the table, at 12 heads."""
    values = dict(zip(FACTORS, row, strict=True))
    return VerifyGeometry(heads=12, lower_bound=-5.0 if values["gate"] == "bounded" else None, **values)


@dataclass(frozen=True)
class Case:
    """One kernel to compile."""

    kind: str
    geometry: VerifyGeometry
    tile: Tile
    arch: str
    label: str

    @property
    def id(self) -> str:
        tile = ["x".join(str(value) for value in astuple(self.tile))] if self.kind in TILED_KINDS else []
        return "-".join([self.kind, *tile, self.label, self.arch])

    @property
    def spec(self) -> tuple[Any, tuple[Any, ...]]:
        """Module-level function and arguments that give key and recipe; picklable."""
        if self.kind in COMMITS:
            return make_commit_spec, (CommitGeometry(self.geometry, 2, **COMMITS[self.kind]), self.arch)
        return make_spec, (self.kind, self.geometry, self.tile, self.arch)


_TABLE = tuple((f"row{i}_t{row[0]}", row_geometry(row)) for i, row in enumerate(ROWS))
# What a persistent tile takes: the same rows, but for alignment and layout of the conv window.
_PLAIN = tuple((f"plain_{name}", g.replace(alignment=16, conv_layout="SD")) for name, g in _TABLE)
_PERSISTENT = next(tile for tile in TILES if tile.persistent)
_UNALIGNED = (5, 9)
_ENGINE = {window: (f"k3_t{window}", preset("kimi-k3", tp=8, window=window)) for window in (4, 8, 16)}


def _case(kind: str, tile: Tile, arch: str, named: tuple[str, VerifyGeometry]) -> Case:
    return Case(kind, named[1], tile, arch, named[0])


def _unique(cases: Iterable[Case]) -> tuple[Case, ...]:
    """One case a kernel: geometries and tiles that share its code are one."""
    found: dict[Any, Case] = {}
    for case in cases:
        # Without a norm the decomposed path has two launches. Not every tile takes every geometry.
        fits = case.kind not in FUSED_KINDS or tile_fits(case.tile, case.geometry, case.arch)
        if fits and (case.kind != "gated_rms_norm" or case.geometry.norm):
            recipe, arguments = case.spec
            found.setdefault(recipe(*arguments)[0], case)
    return tuple(found.values())


def _quick() -> Iterator[Case]:
    turns = len(CLUSTER_ARCHS)
    # Persistent tiles last: they take few of the rows, and neighbours are to share them out.
    for t, tile in enumerate(sorted(TILES, key=lambda tile: tile.persistent)):
        for kind, window in (("fused_verify", 8), ("fused_verify", 16), ("record", 16)):
            yield _case(kind, tile, "sm_90a", _ENGINE[window])
        yield from (_case("fused_verify", tile, arch, _ENGINE[16]) for arch in CLUSTER_ARCHS)
        # Without alignment the state comes through registers, and most of them are wanted.
        yield from (_case("fused_verify", tile, "sm_90a", _TABLE[row]) for row in _UNALIGNED)
        # Every second row, which has all windows.
        for i, named in list(enumerate(_TABLE))[t % 2 :: 2]:
            yield _case("fused_verify", tile, CLUSTER_ARCHS[(i + t) % turns], named)
            if i % 4 == t % 4:
                yield _case("record", tile, CLUSTER_ARCHS[(i + t + 1) % turns], named)
        yield _case("record", tile, DECOMPOSED_ARCHS[t % len(DECOMPOSED_ARCHS)], _TABLE[-1])
    for i, named in enumerate(_TABLE):
        kind = ("short_conv", "gated_rms_norm")[i % 2]
        yield _case(kind, TILES[0], CLUSTER_ARCHS[i // 2 % turns], named)
    for i, arch in enumerate(DECOMPOSED_ARCHS):
        for kind in ("short_conv", "gated_rms_norm"):
            yield _case(kind, TILES[0], arch, _TABLE[-1 - 2 * i])
        yield _case("decode_rule", TILES[i], arch, _TABLE[-1 - 2 * i])
    for i, arch in enumerate((*CLUSTER_ARCHS, "sm_80")):
        for t, tile in enumerate(TILES):
            for kind in ("fused_decode", "decode_rule") if ARCHITECTURES[arch].cluster else ():
                yield _case(kind, tile, arch, _TABLE[(5 * i + 3 * t) % len(_TABLE)])
        yield _case("commit", TILES[-1], arch, _TABLE[(3, 8, 1, 10)[i]])
        yield _case("commit_all", TILES[-1], arch, _TABLE[(11, 9, 6, 5)[i]])
    yield _case("commit_all", TILES[-1], "sm_90a", _TABLE[9])
    for i, named in enumerate(_PLAIN):
        yield _case("fused_verify", _PERSISTENT, ("sm_90a", "sm_100a")[i % 3 == 2], named)
        if i % 4 == 0:
            yield _case("fused_decode", _PERSISTENT, "sm_90a", named)
    for kind in KINDS:
        yield _case(kind, ROUND_TILES[0] if kind == "fused_round" else TILES[-1], SIBLING_ARCH, _ENGINE[16])
    yield from _quick_chunked()
    yield from _quick_rounds()


def _quick_chunked() -> Iterator[Case]:
    turns = len(CLUSTER_ARCHS)
    for t, tile in enumerate(CHUNKED_TILES):
        yield from (_case("fused_verify_chunked", tile, "sm_90a", named) for named in _ENGINE.values())
        yield from (_case("fused_verify_chunked", tile, arch, _ENGINE[16]) for arch in CLUSTER_ARCHS)
        yield from (_case("record_chunked", tile, "sm_90a", _ENGINE[window]) for window in (4, 16))
        for i, named in list(enumerate(_TABLE))[t % 2 :: 2]:
            yield _case("fused_verify_chunked", tile, CLUSTER_ARCHS[(i + t) % turns], named)
            if i % 4 == t % 4:
                yield _case("record_chunked", tile, CLUSTER_ARCHS[(i + t + 1) % turns], named)
        yield _case("record_chunked", tile, DECOMPOSED_ARCHS[t % len(DECOMPOSED_ARCHS)], _TABLE[-1])


def _quick_rounds() -> Iterator[Case]:
    turns = len(CLUSTER_ARCHS)
    counted = {window: (f"{name}_counted", g.replace(has_num_accepted=True)) for window, (name, g) in _ENGINE.items()}
    for t, tile in enumerate(ROUND_TILES):
        yield from (_case("fused_round", tile, "sm_90a", counted[window]) for window in (4, 16))
        yield from (_case("fused_round", tile, arch, counted[16]) for arch in CLUSTER_ARCHS[1:])
        # Every fourth row: what they differ in is what a verify's kernels differ in.
        for i, named in list(enumerate(_PLAIN if tile.persistent else _TABLE))[t::4]:
            yield _case("fused_round", tile, "sm_90a" if tile.persistent else CLUSTER_ARCHS[(i + t) % turns], named)


def _full() -> Iterator[Case]:
    for arch, info in ARCHITECTURES.items():
        for kind in KINDS:
            if kind in FUSED_KINDS and not info.cluster:
                continue
            for tile in {"fused_round": ROUND_TILES}.get(kind, CHUNKED_TILES if kind in CHUNKED_KINDS else TILES):
                for named in (*_TABLE, *_ENGINE.values()):
                    yield _case(kind, tile, arch, named)


@functools.cache
def quick_cases() -> tuple[Case, ...]:
    """What every run compiles."""
    return _unique(_quick())


@functools.cache
def full_cases() -> tuple[Case, ...]:
    """Every row with every tile on every architecture."""
    return _unique((*_quick(), *_full()))
