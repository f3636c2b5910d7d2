# SPDX-License-Identifier: Apache-2.0
"""The commit's geometry and plan: it folds the accepted records of a verify into the states of all layers, see
docs/commit.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from flashkda import config, planner
from flashkda.capability import Capability, Reason, query
from flashkda.errors import GeometryError, PlanMismatchError, Problem, UnsupportedError
from flashkda.geometry import VerifyGeometry
from flashkda.stored import check_stored, fingerprint

if TYPE_CHECKING:
    import torch

    from flashkda.ops.commit_binding import CommitBinding, LayerTensors

PATHS = ("kernel", "reference")
MAX_LAYERS = 1024

_FORMAT = 1
_FLAGS = ("compact", "has_dst", "has_boundary", "has_accepted_indices")


@dataclass(frozen=True)
class CommitGeometry:
    """The static shape of a commit. Frozen, hashable and JSON-able.

    verify                the geometry whose verify wrote the records, and that the next verify has
    layers                L, the layers that one call commits, 1..1024
    compact               the accepted tokens' conv history moves to the first columns of the window, so that the next
                          verify needs no num_accepted
    has_dst               the new state goes to the slots dst_indices, the source keeps its bits
    has_boundary          a checkpoint after boundary_length tokens goes to the slots boundary_indices
    has_accepted_indices  request n's count is accepted[accepted_indices[n]], not accepted[n]

    Raises GeometryError, with every problem.
    """

    verify: VerifyGeometry
    layers: int
    compact: bool = False
    has_dst: bool = False
    has_boundary: bool = False
    has_accepted_indices: bool = False

    def __post_init__(self) -> None:
        problems: list[Problem] = []
        if not isinstance(self.verify, VerifyGeometry):
            problems.append(Problem("verify", "a VerifyGeometry", type(self.verify).__name__))
        if isinstance(self.layers, bool) or not isinstance(self.layers, int) or not 1 <= self.layers <= MAX_LAYERS:
            problems.append(Problem("layers", f"an int in 1..{MAX_LAYERS}", repr(self.layers)))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                problems.append(Problem(name, "a bool", repr(getattr(self, name))))
        if problems:
            raise GeometryError.of(problems)

    def replace(self, **changes: Any) -> CommitGeometry:
        """A copy with some fields changed. Raises GeometryError."""
        return _build({**{field.name: getattr(self, field.name) for field in fields(self)}, **changes})

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        flags = {name: getattr(self, name) for name in _FLAGS}
        return {"verify": self.verify.to_dict(), "layers": self.layers, **flags}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CommitGeometry:
        """The inverse of to_dict; a flag that is left out is False. Raises GeometryError."""
        if not isinstance(values, Mapping):
            raise GeometryError("geometry", "a mapping of field names to values", type(values).__name__)
        return _build({**values, "verify": VerifyGeometry.from_dict(values.get("verify", {}))})

    def __str__(self) -> str:
        flags = "".join(f", {name}" for name in _FLAGS if getattr(self, name))
        return f"CommitGeometry({self.verify}, layers={self.layers}{flags})"


def _build(values: Mapping[str, Any]) -> CommitGeometry:
    known = ("verify", "layers", *_FLAGS)
    problems = [
        Problem(f"field {name!r}", f"one of {', '.join(known)}", "an unknown name")
        for name in values
        if name not in known
    ]
    problems += [Problem(name, "a value", "none") for name in ("verify", "layers") if name not in values]
    if problems:
        raise GeometryError.of(problems)
    return CommitGeometry(**values)


@dataclass(frozen=True)
class CommitPlan:
    """How a commit runs: made by plan_commit. path is "kernel" (one launch for all layers) or "reference" (torch).

    reasons tells why the kernel was refused (empty where it was not); kernels_version is the digest of the kernels'
    sources.
    """

    geometry: CommitGeometry
    max_requests: int
    arch: str
    path: str
    reasons: tuple[Reason, ...]
    kernels_version: str

    op: ClassVar[str] = "commit"

    def _computation(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "geometry": self.geometry.to_dict(),
            "max_requests": self.max_requests,
            "arch": self.arch,
            "path": self.path,
            "kernels_version": self.kernels_version,
        }

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that differ between plans that run differently, the same in every process."""
        return fingerprint(self._computation())

    def to_json(self) -> str:
        """The plan as JSON text, with its fingerprint."""
        more = {"format": _FORMAT, "fingerprint": self.fingerprint, "reasons": [r.to_dict() for r in self.reasons]}
        return json.dumps({**more, **self._computation()}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> CommitPlan:
        """The inverse of to_json.

        Raises PlanMismatchError, with every reason, where the text is not a commit's plan, does not match its own
        fingerprint, was made for other kernels, or FLASHKDA_VERIFY_PATH now asks for another path.
        """
        plan, stored = _parse(text)
        switch = config.verify_path()
        leads_to: tuple[str, ...] = ()
        if switch is not None:
            wanted = _switched(switch)
            leads_to = wanted, _resolve(query(plan.geometry.verify, plan.arch, toolchain=False), wanted)[0]
        check_stored(plan, stored, planner.kernels_version(), switch, leads_to)
        return plan

    def bind(self, *, check_metadata: bool | None = None, **tensors: LayerTensors | None) -> CommitBinding:
        """Bind the tensors of all layers: see flashkda.ops.commit_binding.bind_commit."""
        from flashkda.ops import commit_binding

        return commit_binding.bind_commit(self, check_metadata=check_metadata, **tensors)


def plan_commit(
    geometry: CommitGeometry,
    max_requests: int,
    *,
    path: str = "auto",
    device: torch.device | str | int | None = None,
    arch: str | None = None,
    strict: bool = False,
) -> CommitPlan:
    """Choose how a geometry is committed.

    max_requests   the most requests of one call, >= 1
    path           "kernel" (one launch for all layers), "reference" (torch), or "auto": the kernel where it is
                   supported; on a CPU device the reference. Where FLASHKDA_VERIFY_PATH says reference, so does auto:
                   the records of one backend are not to be folded by the other
    device, arch   plan for a torch device (default: the current one), or for a named architecture
    strict         raise UnsupportedError where a FallbackWarning would be given

    A refused kernel falls back to the reference, with a FallbackWarning once per geometry. Raises GeometryError for a
    bad argument, ConfigError for a bad FLASHKDA_VERIFY_PATH, and KernelBuildError where the kernel is asked for by name
    and the packages that build and load kernels are missing.
    """
    _check_arguments(geometry, max_requests, path)
    arch = planner.target(device, arch)
    switch = config.verify_path()
    asked = path if path != "auto" or switch is None else _switched(switch)
    capability = query(geometry.verify, arch)
    if asked == "kernel":
        planner.require_toolchain("kernel", capability.decomposed.reasons)
    first = PATHS[0] if asked == "auto" else asked
    chosen, reasons = _resolve(capability, first)
    if chosen != first and not (asked == "auto" and arch == "cpu"):
        if strict:
            raise UnsupportedError(first, reasons, hint=f"strict; the fallback would be {chosen}")
        planner.warn_once(f"FlashKDA commits {geometry}", arch, first, chosen, reasons)
    planner.log_choice(f"commits {geometry}, up to {max_requests} requests", arch, chosen, f"{path} asked for")
    return CommitPlan(geometry, max_requests, arch, chosen, reasons, planner.kernels_version())


def _switched(switch: str) -> str:
    return "reference" if switch == "reference" else "kernel"


def _resolve(capability: Capability, first: str) -> tuple[str, tuple[Reason, ...]]:
    """The path from `first` on, and why the kernel is refused. It needs no clusters: what decomposed needs will do."""
    if first == "reference":
        return first, ()
    support = capability.decomposed
    return ("kernel" if support.supported else "reference"), support.reasons


def _check_arguments(geometry: Any, max_requests: Any, path: Any) -> None:
    problems: list[Problem] = []
    if not isinstance(geometry, CommitGeometry):
        problems.append(Problem("geometry", "a CommitGeometry", type(geometry).__name__))
    if isinstance(max_requests, bool) or not isinstance(max_requests, int) or max_requests < 1:
        problems.append(Problem("max_requests", "an int >= 1", repr(max_requests)))
    if path not in ("auto", *PATHS):
        problems.append(Problem("path", f"auto, {', '.join(PATHS)}", repr(path)))
    if problems:
        raise GeometryError.of(problems)


def _parse(text: str) -> tuple[CommitPlan, str]:
    """The plan in the text, and the fingerprint stored with it."""
    try:
        values = json.loads(text)
        if not isinstance(values, Mapping) or values.get("format") != _FORMAT or values.get("op") != CommitPlan.op:
            raise ValueError(f"it is not a commit's plan of format {_FORMAT}")
        plan = CommitPlan(
            geometry=CommitGeometry.from_dict(values["geometry"]),
            max_requests=values["max_requests"],
            arch=values["arch"],
            path=values["path"],
            reasons=tuple(Reason(**reason) for reason in values["reasons"]),
            kernels_version=values["kernels_version"],
        )
        _check_arguments(plan.geometry, plan.max_requests, plan.path)
        return plan, str(values["fingerprint"])
    except KeyError as error:
        raise PlanMismatchError(f"the stored plan cannot be read: it has no {error}") from error
    except (ValueError, TypeError) as error:  # GeometryError is a ValueError
        raise PlanMismatchError(f"the stored plan cannot be read: {error}") from error
