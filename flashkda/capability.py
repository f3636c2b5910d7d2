# SPDX-License-Identifier: Apache-2.0
"""What each architecture can run, and every reason where it cannot. Needs neither a GPU nor the DSL."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

from flashkda.config import PATHS
from flashkda.errors import GeometryError
from flashkda.geometry import VerifyGeometry

if TYPE_CHECKING:
    import torch


class Architecture(NamedTuple):
    """cluster: CTAs can be launched in clusters that share memory. large_shared_memory: an SM has 228 KiB of it.
    measured: the kernels have been run on it."""

    cluster: bool
    measured: bool
    large_shared_memory: bool = False


# The architectures with kernels. Those not measured are covered by cross-compilation only.
ARCHITECTURES: Mapping[str, Architecture] = {
    "sm_80": Architecture(cluster=False, measured=False),
    "sm_86": Architecture(cluster=False, measured=False),
    "sm_89": Architecture(cluster=False, measured=False),
    "sm_90a": Architecture(cluster=True, measured=True, large_shared_memory=True),
    "sm_100a": Architecture(cluster=True, measured=False, large_shared_memory=True),
    "sm_103a": Architecture(cluster=True, measured=False, large_shared_memory=True),
    "sm_120a": Architecture(cluster=True, measured=False),
}

# What building and loading a kernel needs: importable module -> the package to install.
TOOLCHAIN: Mapping[str, str] = {"cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}


@dataclass(frozen=True)
class Reason:
    """One reason for a refusal: a stable code, the argument it is about, its value and the value that is needed."""

    code: str
    argument: str
    found: str
    needed: str

    def __str__(self) -> str:
        return f"{self.code}: {self.argument} is {self.found}, needed: {self.needed}"

    def to_dict(self) -> dict[str, str]:
        """The fields as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class PathSupport:
    """Whether one path can run; `measured` tells whether the project has run it on that architecture."""

    path: str
    supported: bool
    measured: bool
    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class Capability:
    """What an architecture can do with a geometry, path by path."""

    arch: str
    geometry: VerifyGeometry
    fused: PathSupport
    decomposed: PathSupport
    reference: PathSupport

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Every reason of every path, each once."""
        return unique(reason for path in PATHS for reason in self.support(path).reasons)

    def support(self, path: str) -> PathSupport:
        """The support of "fused", "decomposed" or "reference". Raises GeometryError on any other name."""
        if path not in PATHS:
            raise GeometryError("path", f"one of {', '.join(PATHS)}", repr(path))
        support: PathSupport = getattr(self, path)
        return support


def unique(reasons: Iterable[Reason]) -> tuple[Reason, ...]:
    """The reasons in order, each once."""
    return tuple(dict.fromkeys(reasons))


def query(geometry: VerifyGeometry, arch: str = "auto", *, toolchain: bool = True) -> Capability:
    """What `arch` can do with `geometry`, with every reason where it cannot.

    arch is an architecture as the DSL names it ("sm_90a"), "cpu", or "auto" for the current torch device. An unknown
    architecture has the reference only. toolchain=False leaves out whether the packages that build kernels are
    installed here. Needs a GPU only in so far as "auto" finds one.
    """
    if arch == "auto":
        arch = detect_arch()
    shared = [*_arch_reasons(arch), *_geometry_reasons(geometry), *(toolchain_reasons() if toolchain else ())]
    known = ARCHITECTURES.get(arch)
    fused = list(shared)
    if known is not None and not known.cluster:
        having = ", ".join(name for name, info in ARCHITECTURES.items() if info.cluster)
        fused.insert(
            0, Reason("arch.no_cluster", "arch", arch, f"an architecture with thread block clusters ({having})")
        )
    measured = known is not None and known.measured

    def support(path: str, reasons: list[Reason]) -> PathSupport:
        return PathSupport(path, not reasons, measured and not reasons, tuple(reasons))

    return Capability(
        arch=arch,
        geometry=geometry,
        fused=support("fused", fused),
        decomposed=support("decomposed", shared),
        reference=PathSupport("reference", True, measured or arch == "cpu", ()),
    )


def _arch_reasons(arch: str) -> list[Reason]:
    if arch in ARCHITECTURES:
        return []
    code = "arch.cpu" if arch == "cpu" else "arch.unknown"
    return [Reason(code, "arch", arch, f"an architecture with kernels ({', '.join(ARCHITECTURES)})")]


def _geometry_reasons(geometry: VerifyGeometry) -> list[Reason]:
    needed = {"head_dim": 128, "conv_width": 4}
    return [
        Reason(f"geometry.{name}", name, str(getattr(geometry, name)), str(value))
        for name, value in needed.items()
        if getattr(geometry, name) != value
    ]


def toolchain_reasons() -> tuple[Reason, ...]:
    """A reason for each package without which kernels are neither built nor loaded. Imports none of them."""
    return tuple(
        Reason("dsl.missing", package, "not importable", f"pip install {package}")
        for module, package in TOOLCHAIN.items()
        if not _importable(module)
    )


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a finder that blocks the name, or None in sys.modules
        return False


def detect_arch(device: torch.device | str | int | None = None) -> str:
    """The architecture of a torch device; of the current CUDA device, or "cpu" without one, where it is None.

    Devices of other makers give their type ("mps", "rocm"), which has the reference only. Raises GeometryError
    where a CUDA device is asked for and torch cannot use it.
    """
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
        if device.type != "cuda":
            return device.type
        if torch.version.hip:  # reports itself as cuda, with numbers that would pass for NVIDIA's
            return "rocm"
        major, minor = torch.cuda.get_device_capability(device)
    except (RuntimeError, AssertionError) as error:
        raise GeometryError("device", "a device that torch can use", f"{device!s} ({error})") from error
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")
