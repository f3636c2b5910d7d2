# SPDX-License-Identifier: Apache-2.0
"""plan_decode: rows without drafts, one token a request with the state written in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flashkda.geometry import VerifyGeometry
from flashkda.planner import Plan, Tile, make_plan

if TYPE_CHECKING:
    import torch

    from flashkda.ops.decode_binding import DecodeBinding


@dataclass(frozen=True)
class DecodePlan(Plan):
    """How a decode runs: made by plan_decode. A Plan for one token a request, with one binding."""

    op: ClassVar[str] = "decode"
    verb: ClassVar[str] = "decodes"
    # One token is no chunk: to decode in another mode would buy nothing.
    modes: ClassVar[tuple[str, ...]] = ("exact",)

    @classmethod
    def in_flight(cls, geometry: VerifyGeometry) -> VerifyGeometry:
        """One token a request, however wide the conv window is."""
        return geometry.replace(window=1)

    def bind(  # type: ignore[override]
        self, *, check_metadata: bool | None = None, **tensors: torch.Tensor | None
    ) -> DecodeBinding:
        """Bind a decode: see flashkda.ops.decode_binding.bind_decode."""
        from flashkda.ops import decode_binding

        return decode_binding.bind_decode(self, check_metadata=check_metadata, **tensors)


def plan_decode(
    geometry: VerifyGeometry,
    max_requests: int,
    *,
    path: str = "auto",
    device: torch.device | str | int | None = None,
    arch: str | None = None,
    strict: bool = False,
    numerics: str = "exact",
    tile: Tile | None = None,
) -> DecodePlan:
    """Choose how a geometry decodes. Arguments and errors are plan_verify's.

    geometry is that of the verify which shares the pools: its window says how wide the conv windows are, and where
    num_accepted points to. A decode takes no records and commits nothing: the state it leaves is the next one.
    """
    return make_plan(DecodePlan, geometry, max_requests, path, device, arch, strict, numerics, tile)
