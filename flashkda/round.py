# SPDX-License-Identifier: Apache-2.0
"""plan_round: the commit of the window before and the verify of this one, in one launch a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flashkda import config
from flashkda.capability import Reason, query
from flashkda.errors import GeometryError, UnsupportedError
from flashkda.geometry import VerifyGeometry
from flashkda.planner import NUMERICS, ROUND_TILE_RULES, Plan, Tile, TileRule, make_plan, target

if TYPE_CHECKING:
    import torch

    from flashkda.ops.round_binding import RoundBinding

PATHS = ("auto", "fused", "reference")
_APART = "a commit and a verify do the same in two launches"


@dataclass(frozen=True)
class RoundPlan(Plan):
    """How a folded round runs: made by plan_round. A Plan with one binding, of one launch."""

    op: ClassVar[str] = "round"
    verb: ClassVar[str] = "folds and verifies"
    modes: ClassVar[tuple[str, ...]] = NUMERICS[:1]

    @classmethod
    def tile_rules(cls, numerics: str) -> tuple[TileRule, ...]:
        """Rules of its own."""
        return ROUND_TILE_RULES

    def bind(  # type: ignore[override]
        self, *, check_metadata: bool | None = None, **tensors: torch.Tensor | None
    ) -> RoundBinding:
        """Bind a round: see flashkda.ops.round_binding.bind_round."""
        from flashkda.ops import round_binding

        return round_binding.bind_round(self, check_metadata=check_metadata, **tensors)


def plan_round(
    geometry: VerifyGeometry,
    max_requests: int,
    *,
    path: str = "auto",
    device: torch.device | str | int | None = None,
    arch: str | None = None,
    tile: Tile | None = None,
) -> RoundPlan:
    """Choose how a geometry folds the window before into the state while it verifies this one.

    The state is read once and written once, where a commit and a verify read it twice and write it once; the bits are
    those of the two. geometry has num_accepted: what of the previous window was accepted, 0 for a request that has
    none to fold. path is "fused", "reference" (torch), or "auto": what FLASHKDA_VERIFY_PATH names, else fused, and on a
    CPU device the reference; other arguments are plan_verify's.

    There is nothing slower in between to fall back to: where the one launch is refused, or FLASHKDA_VERIFY_PATH says
    decomposed, this raises UnsupportedError with every reason, and the way out is a commit and a verify. Raises
    GeometryError and ConfigError as plan_verify does.
    """
    if path not in PATHS:
        raise GeometryError("path", f"one of {', '.join(PATHS)}", repr(path))
    if isinstance(geometry, VerifyGeometry) and not geometry.has_num_accepted:
        raise GeometryError("geometry.has_num_accepted", "True: the counts say what to fold", "False")
    arch = target(device, arch)
    if path == "auto":
        path = config.verify_path() or ("reference" if arch == "cpu" else "fused")
        if path not in PATHS:
            asked = Reason("plan.path", "FLASHKDA_VERIFY_PATH", path, "fused, reference or auto, for a round")
            raise UnsupportedError("fused", (asked,), hint=_APART)
    if path == "fused" and isinstance(geometry, VerifyGeometry):
        support = query(geometry, arch).fused
        if not support.supported:
            raise UnsupportedError("fused", support.reasons, hint=_APART)
    if tile is not None and (tile.rows_per_thread * 128 // tile.key_lanes >= 64 and not tile.persistent):
        raise GeometryError("tile", "one with fewer than 64 elements of the state a thread, or persistent", str(tile))
    return make_plan(RoundPlan, geometry, max_requests, path, device, arch, True, "exact", tile)
