# SPDX-License-Identifier: Apache-2.0
"""plan_verify, and how every plan is made: where a path, a tile and a cluster size are chosen."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from flashkda import config
from flashkda.capability import ARCHITECTURES, Capability, Reason, detect_arch, query, toolchain_reasons, unique
from flashkda.config import PATHS
from flashkda.errors import (
    FallbackWarning,
    GeometryError,
    KernelBuildError,
    PlanMismatchError,
    Problem,
    UnsupportedError,
)
from flashkda.geometry import VerifyGeometry
from flashkda.stored import check_stored, fingerprint

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

    from flashkda.ops.binding import NormBinding, RecordBinding, ShortConvBinding, VerifyBinding

# Both are in docs/math.md. "exact", the rule token by token, keeps every promise; "chunked", the window at once on
# tensor cores, is not lossless. Nothing chooses a mode but the caller.
NUMERICS = ("exact", "chunked")

_log = logging.getLogger("flashkda.planner")

_HEAD_ROWS = 128
_MOST_CLUSTER = 8  # the largest cluster that every architecture with clusters launches
_FORMAT = 2


@dataclass(frozen=True)
class Tile:
    """How a head's 128 value rows are split: over CTAs (rows each), and over the threads of a CTA.

    rows_per_thread value rows share a thread's reads of k, q and decay; key_lanes threads share the keys of a row.
    persistent: CTAs stay on their SM and take one head after another, with groups of threads for whole heads.
    Raises GeometryError.
    """

    rows: int
    rows_per_thread: int
    key_lanes: int
    persistent: bool = False

    def __post_init__(self) -> None:
        values = (self.rows, self.rows_per_thread, self.key_lanes)
        problems: list[Problem] = []
        for name, value in zip(("rows", "rows_per_thread", "key_lanes"), values, strict=True):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                problems.append(Problem(name, "an int >= 1", repr(value)))
        if not problems:
            if _HEAD_ROWS % self.rows or self.cluster > _MOST_CLUSTER:
                problems.append(Problem("rows", f"16, 32, 64 or {_HEAD_ROWS}", str(self.rows)))
            if self.rows % self.rows_per_thread:
                problems.append(Problem("rows_per_thread", f"a divisor of rows={self.rows}", str(self.rows_per_thread)))
            if self.key_lanes not in (8, 16):
                problems.append(Problem("key_lanes", "8 or 16", str(self.key_lanes)))
            if self.persistent and values != (_HEAD_ROWS, 8, 8):
                problems.append(Problem("persistent", f"False, or {_HEAD_ROWS}, 8, 8", str(values)))
            elif not self.persistent and (
                self.rows_per_thread not in (1, 2, 4, 8) or 2 * self.rows_per_thread > self.key_lanes
            ):
                expected = "1, 2, 4 or 8, at most half of key_lanes"
                problems.append(Problem("rows_per_thread", expected, str(self.rows_per_thread)))
            if self.threads % 32 or not 32 <= self.threads <= 1024:
                problems.append(Problem("threads", "whole warps, 32..1024", str(self.threads)))
        if problems:
            raise GeometryError.of(problems)

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.rows // self.rows_per_thread * self.key_lanes

    @property
    def cluster(self) -> int:
        """CTAs of a head."""
        return _HEAD_ROWS // self.rows


class TileRule(NamedTuple):
    """`tile` serves windows up to `window` with up to `load` heads in flight (requests times heads; None: any)."""

    window: int
    load: int | None
    tile: Tile


def _rules(name: str) -> tuple[TileRule, ...]:
    """The rules of tiles.json, which benchmarks.tiles measures the candidates for."""
    table = json.loads(Path(__file__).with_name("tiles.json").read_text())
    return tuple(TileRule(window, load, Tile(*tile)) for window, load, tile in table[name])


# The first rule that fits is taken, where its tile can be built. Few heads in flight leave SMs idle, so a head is split
# over more CTAs; many are taken one after another by CTAs that overlap them. The chunked kernels look at a tile's rows
# alone. A folded round takes no tile that fills its registers with the state: the fold wants some too.
TILE_RULES, CHUNKED_TILE_RULES, ROUND_TILE_RULES = (_rules(name) for name in ("exact", "chunked", "round"))

# All the tiles that the planner may pick.
TILES: tuple[Tile, ...] = tuple(dict.fromkeys(rule.tile for rule in TILE_RULES))
CHUNKED_TILES: tuple[Tile, ...] = tuple(dict.fromkeys(rule.tile for rule in CHUNKED_TILE_RULES))


def persistent_reasons(geometry: VerifyGeometry, arch: str, numerics: str = "exact") -> tuple[Reason, ...]:
    """Why a persistent tile cannot be built: it copies whole rows and states of 16-byte alignment to shared memory, of
    which two CTAs of an SM need 220 KiB; and it is exact."""
    known = ARCHITECTURES.get(arch)
    found = []
    if known is None or not known.large_shared_memory:
        having = ", ".join(name for name, info in ARCHITECTURES.items() if info.large_shared_memory)
        found.append(Reason("arch.shared_memory", "arch", arch, f"228 KiB of shared memory an SM ({having})"))
    if geometry.alignment != 16:
        found.append(Reason("geometry.alignment", "alignment", str(geometry.alignment), "16"))
    if geometry.conv_layout != "SD":
        found.append(Reason("geometry.conv_layout", "conv_layout", geometry.conv_layout, "SD"))
    if numerics != "exact":
        found.append(Reason("plan.numerics", "numerics", numerics, "exact"))
    return tuple(found)


def tile_fits(tile: Tile, geometry: VerifyGeometry, arch: str, numerics: str = "exact") -> bool:
    """Whether the fused kernels can be built with this tile."""
    return not (tile.persistent and persistent_reasons(geometry, arch, numerics))


def verify_rules(numerics: str) -> tuple[TileRule, ...]:
    """The rules of a verify in this mode."""
    return CHUNKED_TILE_RULES if numerics == "chunked" else TILE_RULES


def choose_tile(
    geometry: VerifyGeometry,
    max_requests: int,
    arch: str,
    numerics: str = "exact",
    rules: Sequence[TileRule] | None = None,
) -> Tile:
    """The tile for up to max_requests requests, by the verify's rules or others. It changes the speed only: bits do not
    depend on it."""
    load = max_requests * geometry.heads
    fits = (
        rule.tile
        for rule in rules or verify_rules(numerics)
        if geometry.window <= rule.window
        and (rule.load is None or load <= rule.load)
        and tile_fits(rule.tile, geometry, arch, numerics)
    )
    return next(fits)  # the last rule takes everything


@dataclass(frozen=True)
class Plan:
    """What will run: made by plan_verify, carried by bindings and exported graphs.

    tile is None on the reference path. reasons tells why a faster path was refused (empty where none was).
    kernels_version is the digest of the kernels' sources.
    """

    geometry: VerifyGeometry
    max_requests: int
    arch: str
    path: str
    tile: Tile | None
    numerics: str
    reasons: tuple[Reason, ...]
    kernels_version: str

    op: ClassVar[str] = "verify"
    verb: ClassVar[str] = "verifies"
    modes: ClassVar[tuple[str, ...]] = NUMERICS

    @classmethod
    def in_flight(cls, geometry: VerifyGeometry) -> VerifyGeometry:
        """The geometry of what one call computes, for the choice of a tile."""
        return geometry

    def kernel(self, kind: str) -> str:
        """The name of a kernel with the rule ("record", "fused_verify") in this plan's numerics."""
        return kind if self.numerics == "exact" else f"{kind}_{self.numerics}"

    @classmethod
    def tile_rules(cls, numerics: str) -> tuple[TileRule, ...]:
        """The rules that a tile is chosen by."""
        return verify_rules(numerics)

    def _computation(self) -> dict[str, Any]:
        # Not the reasons: they tell how the choice came about, not what is computed.
        return {
            "op": self.op,
            "geometry": self.geometry.to_dict(),
            "max_requests": self.max_requests,
            "arch": self.arch,
            "path": self.path,
            "tile": None if self.tile is None else asdict(self.tile),
            "numerics": self.numerics,
            "kernels_version": self.kernels_version,
        }

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that differ between plans that run differently, the same in every process."""
        return fingerprint(self._computation())

    def to_json(self) -> str:
        """The plan as JSON text, with its fingerprint."""
        reasons = [reason.to_dict() for reason in self.reasons]
        return json.dumps(
            {"format": _FORMAT, "fingerprint": self.fingerprint, **self._computation(), "reasons": reasons},
            sort_keys=True,
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of to_json.

        Raises PlanMismatchError, with every reason, where the text is not a plan, does not match its own
        fingerprint, was made for other kernels, or FLASHKDA_VERIFY_PATH now asks for another path.
        """
        plan, stored = _parse(cls, text)
        switch = config.verify_path()
        leads_to: tuple[str, ...] = ()
        if switch is not None:
            # The switch may itself have fallen back when the plan was made: compare with what it leads to.
            leads_to = switch, _resolve(query(plan.geometry, plan.arch, toolchain=False), switch)[0]
        check_stored(plan, stored, kernels_version(), switch, leads_to)
        return plan

    def require(self, path: str) -> Self:
        """This plan, if its path is `path`. Raises UnsupportedError with all the reasons otherwise."""
        refused = query(self.geometry, self.arch).support(path).reasons
        if self.path == path:
            return self
        # The plan's reasons, perhaps from another machine, all hold for the fastest path; not so for slower ones.
        stored = self.reasons if path == PATHS[0] else ()
        raise UnsupportedError(path, unique([*stored, *refused]) or [Reason("plan.path", "path", self.path, path)])

    def bind(self, *, check_metadata: bool | None = None, **tensors: torch.Tensor | None) -> VerifyBinding:
        """Bind the whole verify: see flashkda.ops.binding.bind."""
        from flashkda.ops import binding

        return binding.bind(self, check_metadata=check_metadata, **tensors)

    def bind_short_conv(
        self, *, check_metadata: bool | None = None, **tensors: torch.Tensor | None
    ) -> ShortConvBinding:
        """Bind the short conv alone: see flashkda.ops.binding.bind_short_conv."""
        from flashkda.ops import binding

        return binding.bind_short_conv(self, check_metadata=check_metadata, **tensors)

    def bind_record(self, *, check_metadata: bool | None = None, **tensors: torch.Tensor | None) -> RecordBinding:
        """Bind the rule and the norm: see flashkda.ops.binding.bind_record."""
        from flashkda.ops import binding

        return binding.bind_record(self, check_metadata=check_metadata, **tensors)

    def bind_gated_rms_norm(self, *, check_metadata: bool | None = None, **tensors: torch.Tensor | None) -> NormBinding:
        """Bind the norm alone: see flashkda.ops.binding.bind_gated_rms_norm."""
        from flashkda.ops import binding

        return binding.bind_gated_rms_norm(self, check_metadata=check_metadata, **tensors)


P = TypeVar("P", bound=Plan)


def plan_verify(
    geometry: VerifyGeometry,
    max_requests: int,
    *,
    path: str = "auto",
    device: torch.device | str | int | None = None,
    arch: str | None = None,
    strict: bool = False,
    numerics: str = "exact",
    tile: Tile | None = None,
) -> Plan:
    """Choose how a geometry is verified.

    max_requests   the most requests of one call, >= 1; the tile is chosen for it
    path           "fused" (one launch), "decomposed" (three), "reference" (torch), or "auto": what FLASHKDA_VERIFY_PATH
                   names, else the fastest path that is supported; on a CPU device the reference
    device, arch   plan for a torch device (default: the current one), or for a named architecture
    strict         raise UnsupportedError where a FallbackWarning would be given
    numerics       the mode of the rule's rounding; it never follows from the batch, nor from "auto".
                   "exact": the rule token by token, with every promise of docs/math.md.
                   "chunked": the window at once, S0 [p|r] on tensor cores; faster where requests and tokens are many.
                   Gives up one promise, losslessness: verify and commit do not give the bits of decoding token by
                   token. u and o differ from the exact mode's in the last bits (u by 5e-7 of its row's largest
                   magnitude at most in what was measured, and 2 in 10,000 of out's bf16 values), the state that a
                   commit folds from u by as little. Fused = decomposed, batch, prefix and rank invariance hold within
                   the mode, to the bit, and any gate is safe.
    tile           in place of the planner's choice, to tune; the reference has none

    A path that is refused falls back to the next slower one, with a FallbackWarning once per geometry. Raises
    GeometryError for a bad argument, ConfigError for a bad FLASHKDA_VERIFY_PATH, and KernelBuildError where fused or
    decomposed is asked for by name and the packages that build and load kernels are missing.
    """
    return make_plan(Plan, geometry, max_requests, path, device, arch, strict, numerics, tile)


def make_plan(
    kind: type[P],
    geometry: VerifyGeometry,
    max_requests: int,
    path: str,
    device: torch.device | str | int | None,
    arch: str | None,
    strict: bool,
    numerics: str,
    tile: Tile | None,
) -> P:
    """A plan of this kind: what plan_verify and plan_decode share."""
    _check_arguments(kind, geometry, max_requests, path, numerics, tile)
    arch = target(device, arch)
    asked = path if path != "auto" else config.verify_path() or "auto"
    capability = query(geometry, arch)
    if asked in ("fused", "decomposed"):
        require_toolchain(asked, capability.support(asked).reasons)
    first = PATHS[0] if asked == "auto" else asked
    chosen, reasons = _resolve(capability, first)
    if chosen != first and not (asked == "auto" and arch == "cpu"):
        if strict:
            raise UnsupportedError(first, reasons, hint=f"strict; the fallback would be {chosen}")
        warn_once(f"FlashKDA {kind.verb} {geometry}", arch, first, chosen, reasons, stacklevel=4)
    if chosen == "reference":
        tile = None
    elif tile is None:
        rules = kind.tile_rules(numerics)
        tile = choose_tile(kind.in_flight(geometry), max_requests, arch, numerics, rules)
    elif not tile_fits(tile, geometry, arch, numerics):
        unfit = persistent_reasons(geometry, arch, numerics)
        raise GeometryError.of([Problem("tile", f"one that is not persistent, since {r}", str(tile)) for r in unfit])
    log_choice(f"{kind.verb} {geometry}, up to {max_requests} requests", arch, chosen, f"{path} asked for, {tile}")
    return kind(geometry, max_requests, arch, chosen, tile, numerics, reasons, kernels_version())


def _check_arguments(kind: type[Plan], geometry: Any, max_requests: Any, path: Any, numerics: Any, tile: Any) -> None:
    problems: list[Problem] = []
    if not isinstance(geometry, VerifyGeometry):
        problems.append(Problem("geometry", "a VerifyGeometry", type(geometry).__name__))
    if isinstance(max_requests, bool) or not isinstance(max_requests, int) or max_requests < 1:
        problems.append(Problem("max_requests", "an int >= 1", repr(max_requests)))
    if path not in ("auto", *PATHS):
        problems.append(Problem("path", f"auto, {', '.join(PATHS)}", repr(path)))
    if numerics not in kind.modes:
        problems.append(Problem("numerics", f"one of {', '.join(kind.modes)}", repr(numerics)))
    if tile is not None and not isinstance(tile, Tile):
        problems.append(Problem("tile", "a Tile or None", type(tile).__name__))
    if problems:
        raise GeometryError.of(problems)


def target(device: torch.device | str | int | None, arch: str | None) -> str:
    """The architecture to plan for. Raises GeometryError where a device is of another one than `arch`."""
    if arch is None or arch == "auto":
        return detect_arch(device)
    if device is not None and (detected := detect_arch(device)) != arch:
        raise GeometryError("arch", f"{detected}, which device {device} is (or give one of the two)", arch)
    return arch


def require_toolchain(path: str, refused: Iterable[Reason]) -> None:
    """Raise KernelBuildError where a package that builds kernels is missing, with what else refuses the path."""
    missing = toolchain_reasons()
    if not missing:
        return
    names = tuple(reason.argument for reason in missing)
    reasons = unique([*missing, *refused])
    lines = "".join(f"\n  - {reason}" for reason in reasons)
    text = f"the {path} path was asked for, and its kernels can be neither built nor loaded without {', '.join(names)}:"
    raise KernelBuildError(text + lines, missing=names)


def _resolve(capability: Capability, first: str) -> tuple[str, tuple[Reason, ...]]:
    """The fastest supported path from `first` on, and why those before it are refused."""
    paths = PATHS[PATHS.index(first) :]
    chosen = next(path for path in paths if capability.support(path).supported)  # the reference always is
    refused = paths[: paths.index(chosen)]
    return chosen, unique(reason for path in refused for reason in capability.support(path).reasons)


def log_choice(what: str, arch: str, chosen: str, why: str) -> None:
    """Tell those who listen what was planned."""
    _log.info("%s on %s by the %s path (%s)", what, arch, chosen, why)


_warned: set[tuple[object, ...]] = set()


def warn_once(what: str, arch: str, first: str, chosen: str, reasons: Iterable[Reason], *, stacklevel: int = 3) -> None:
    """Warn that `what` goes by a slower path, with every reason, unless that has been said before."""
    key = (what, arch, first, chosen)
    if key in _warned:
        return
    lines = "".join(f"\n  - {reason}" for reason in reasons)
    text = f"{what} on {arch} by the {chosen} path; {first} is refused:{lines}"
    warnings.warn(text, FallbackWarning, stacklevel=stacklevel)
    _warned.add(key)  # after the warning, which a filter may have turned into an error


def kernels_version() -> str:
    """The digest of the kernels' sources."""
    from flashkda.jit.digest import source_digest

    return source_digest()


def _parse(kind: type[P], text: str) -> tuple[P, str]:
    """The plan in the text, and the fingerprint stored with it."""
    try:
        values = json.loads(text)
        if not isinstance(values, Mapping) or (values.get("format"), values.get("op")) != (_FORMAT, kind.op):
            raise ValueError(f"it is not a plan of format {_FORMAT} to {kind.op}")
        tile = values["tile"]
        plan = kind(
            geometry=VerifyGeometry.from_dict(values["geometry"]),
            max_requests=values["max_requests"],
            arch=values["arch"],
            path=values["path"],
            tile=None if tile is None else Tile(**tile),
            numerics=values["numerics"],
            reasons=tuple(Reason(**reason) for reason in values["reasons"]),
            kernels_version=values["kernels_version"],
        )
        _check_arguments(kind, plan.geometry, plan.max_requests, plan.path, plan.numerics, plan.tile)
        return plan, str(values["fingerprint"])
    except KeyError as error:
        raise PlanMismatchError(f"the stored plan cannot be read: it has no {error}") from error
    except (ValueError, TypeError) as error:  # GeometryError is a ValueError
        raise PlanMismatchError(f"the stored plan cannot be read: {error}") from error
