# SPDX-License-Identifier: Apache-2.0
"""Which kernels a geometry needs, to build them ahead, and the command for it. Needs neither the DSL nor a GPU."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from flashkda.capability import ARCHITECTURES
from flashkda.commit import CommitGeometry
from flashkda.errors import GeometryError, Problem
from flashkda.geometry import PRESETS, VerifyGeometry, preset
from flashkda.planner import NUMERICS, ROUND_TILE_RULES, Tile, TileRule, choose_tile, verify_rules

if TYPE_CHECKING:
    from flashkda.jit.pool import Spec

# The flags of CommitGeometry that are built unless others are asked for: with and without moving the conv windows.
COMMITS: tuple[Mapping[str, bool], ...] = ({}, {"compact": True})

_VERIFY = {True: ("fused_verify",), False: ("short_conv", "record", "gated_rms_norm")}
_ROUND: dict[bool, tuple[str, ...]] = {True: ("fused_round",), False: ()}
_OF_A_MODE = ("fused_verify", "record")
_DECODE = {True: ("fused_decode",), False: ("short_conv", "decode_rule", "gated_rms_norm")}


def kernel_set(
    geometry: VerifyGeometry,
    archs: Sequence[str],
    *,
    max_requests: int | None = None,
    commits: Iterable[Mapping[str, bool]] = COMMITS,
    numerics: Iterable[str] = NUMERICS[:1],
) -> list[Spec]:
    """All kernels that verify, decode and commit of this geometry may need on these architectures, each once.

    max_requests   only the tiles that the planner picks for plans of 1..max_requests requests (None: of any number)
    commits        flags of CommitGeometry, a mapping for each commit kernel; {} is the plain one
    numerics       modes of the verify

    Both paths are built, fused (where the architecture has clusters) and decomposed, and where the geometry counts
    what was accepted the folded round. The result is for
    `flashkda.jit.prebuild` and `build_pack`. Raises GeometryError, for an unknown architecture too.
    """
    from flashkda.kernels.specs import make_commit_spec, make_spec

    unknown = [arch for arch in archs if arch not in ARCHITECTURES]
    if unknown:
        expected = f"architectures with kernels ({', '.join(ARCHITECTURES)})"
        raise GeometryError.of([Problem("archs", expected, ", ".join(unknown))])
    found: dict[Any, Spec] = {}

    def add(function: Any, *arguments: Any) -> None:
        found.setdefault(function(*arguments)[0], (function, arguments))

    for arch in archs:
        paths = (True, False) if ARCHITECTURES[arch].cluster else (False,)
        wanted = [(_DECODE, geometry.replace(window=1), verify_rules("exact"), "")]
        for mode in numerics:
            wanted.append((_VERIFY, geometry, verify_rules(mode), "" if mode == "exact" else f"_{mode}"))
        if geometry.has_num_accepted:
            wanted.append((_ROUND, geometry, ROUND_TILE_RULES, ""))
        for kinds, in_flight, rules, suffix in wanted:
            for fused in paths:
                for tile in _tiles(in_flight, max_requests, arch, rules, suffix[1:] or "exact"):
                    for kind in kinds[fused]:
                        if kind != "gated_rms_norm" or geometry.norm:
                            name = kind + suffix if kind in _OF_A_MODE else kind
                            add(make_spec, name, geometry, tile, arch)
        for flags in commits:
            add(make_commit_spec, CommitGeometry(geometry, 1, **flags), arch)
    return list(found.values())


def _tiles(
    geometry: VerifyGeometry, max_requests: int | None, arch: str, rules: Sequence[TileRule], numerics: str
) -> tuple[Tile, ...]:
    # From there on the choice is that of any number.
    most = max(rule.load or 0 for rule in rules) // geometry.heads + 1
    if max_requests is not None:
        if isinstance(max_requests, bool) or not isinstance(max_requests, int) or max_requests < 1:
            raise GeometryError("max_requests", "an int >= 1 or None", repr(max_requests))
        most = min(most, max_requests)
    tiles = (choose_tile(geometry, requests, arch, numerics, rules) for requests in range(1, most + 1))
    return tuple(dict.fromkeys(tiles))


def compile_command(
    geometry: VerifyGeometry, arch: str, *, numerics: str = "exact", commit: Mapping[str, bool] | None = None
) -> str:
    """The command that builds the kernels of this geometry into a pack, with those of a mode or a commit's flags."""
    base, flags = min(_bases(geometry), key=lambda pair: len(pair[1]))
    more = [] if numerics == "exact" else ["--numerics", numerics]
    names = [name.removeprefix("has_").replace("_", "-") for name, value in (commit or {}).items() if value]
    if names and names != ["compact"]:
        more += ["--commit", ",".join(names)]
    return " ".join(["flashkda compile", *base, *flags, *more, "--arch", arch, "--out DIR"])


def _bases(geometry: VerifyGeometry) -> Iterable[tuple[list[str], list[str]]]:
    """Ways to say the geometry: a preset or none, and the flags of the fields that differ from it."""
    heads, window = str(geometry.heads), str(geometry.window)
    for name, model in PRESETS.items():
        if model.heads % geometry.heads == 0:
            tp = model.heads // geometry.heads
            base = ["--preset", name, "--tp", str(tp), "--window", window]
            yield base, _flags(geometry, preset(name, tp=tp, window=geometry.window))
    yield (["--heads", heads, "--window", window], _flags(geometry, VerifyGeometry(geometry.heads, geometry.window)))


def _flags(geometry: VerifyGeometry, base: VerifyGeometry) -> list[str]:
    found: list[str] = []
    for field in fields(VerifyGeometry):
        value = getattr(geometry, field.name)
        if value == getattr(base, field.name) or value is None:
            continue
        flag = field.name.removeprefix("has_").replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            found += [f"--{flag}", shlex.quote(str(value))]
    return found
