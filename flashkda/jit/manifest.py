# SPDX-License-Identifier: Apache-2.0
"""What is in a pack, a folder of prebuilt kernels, and whether it can run here. See docs/prebuilt.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flashkda.errors import KernelBuildError
from flashkda.jit.digest import FLAVOURS, toolchain_versions
from flashkda.jit.key import KernelKey
from flashkda.jit.trust import Untrusted, read_trusted

MANIFEST = "manifest.json"
FORMAT = 1


class PackedKernel(NamedTuple):
    """A kernel of a pack.

    name, params, arch, recipe, sources, switches, host: which kernel it is, as KernelKey.identity. toolchain: the
    versions that built it. file: its library, inside the pack; size in bytes. registers of a thread and shared_memory
    of a CTA in bytes, None where they were not measured. about: the geometry and the tile that it was built for, where
    known; other geometries can share it.
    """

    name: str
    params: dict[str, Any]
    arch: str
    recipe: int
    sources: str
    switches: dict[str, str]
    host: str
    toolchain: dict[str, Any]
    file: str
    sha256: str
    size: int
    registers: int | None
    shared_memory: int | None
    about: dict[str, Any]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PackedKernel:
        """The inverse of _asdict. Raises ValueError."""
        try:
            kernel = cls(**values)
        except TypeError as error:
            raise ValueError(f"a kernel has not the fields of one: {error}") from error
        for name, kind in _KINDS.items():
            if not isinstance(getattr(kernel, name), kind):
                raise ValueError(f"{name} of a kernel: expected {kind}, found {getattr(kernel, name)!r}")
        return kernel

    def passed_over(self, key: KernelKey) -> list[str]:
        """Why it is not the kernel of this key, or does not run where it is wanted; none where it does."""
        wanted = key.identity()
        found = []
        if self.params != wanted["params"] or self.name != wanted["name"]:
            found.append("is another kernel")
        if self.arch != wanted["arch"]:
            found.append(f"is for {self.arch}, not {wanted['arch']}")
        if self.sources != wanted["sources"]:
            found.append(
                f"was built from other sources of the kernels ({self.sources[:8]}, here {wanted['sources'][:8]})"
            )
        for name in ("recipe", "switches", "host"):
            if getattr(self, name) != wanted[name]:
                found.append(f"was built with another {name} ({getattr(self, name)}, here {wanted[name]})")
        return found + runtime_problems(self.toolchain)


_KINDS: dict[str, Any] = {
    **dict.fromkeys(("name", "arch", "sources", "host", "file", "sha256"), str),
    **dict.fromkeys(("params", "switches", "toolchain", "about"), dict),
    **dict.fromkeys(("recipe", "size"), int),
    **dict.fromkeys(("registers", "shared_memory"), (int, type(None))),
}


def runtime_problems(built_with: Mapping[str, Any]) -> list[str]:
    """Why a library that was built with these versions does not run on the runtime libraries here.

    What it calls of the DSL's runtime library is the DSL's own affair, so its version has to be the same; the flavour
    does not matter, since both have the same entries. The FFI keeps its binary interface within 0.x.
    """
    here = toolchain_versions()
    problems = []
    dsl = built_with.get("nvidia-cutlass-dsl")
    dsl_here = here["nvidia-cutlass-dsl"] or next((here[name] for name in FLAVOURS if here.get(name)), None)
    if dsl is None or dsl != dsl_here:
        problems.append(f"was built by nvidia-cutlass-dsl {dsl}, here is {dsl_here}")
    ffi, ffi_here = built_with.get("apache-tvm-ffi"), here["apache-tvm-ffi"]
    if ffi is None or ffi_here is None or _minor(ffi) != _minor(ffi_here):
        problems.append(f"was built for apache-tvm-ffi {ffi}, here is {ffi_here}")
    return problems


def _minor(version: str) -> list[str]:
    return str(version).split(".")[:2]


class Manifest(NamedTuple):
    """What is in a pack: the folder, and its kernels in the order of their files."""

    folder: Path
    kernels: tuple[PackedKernel, ...]

    @property
    def total_bytes(self) -> int:
        """Of all libraries."""
        return sum(kernel.size for kernel in self.kernels)

    def to_json(self) -> str:
        """The content of manifest.json."""
        values = {"format": FORMAT, "kernels": [kernel._asdict() for kernel in self.kernels]}
        return json.dumps(values, indent=1, sort_keys=True) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a pack. Raises Untrusted, OSError, and KernelBuildError where it is not one."""
        text = read_trusted(folder, MANIFEST)
        try:
            values = json.loads(text)
            if not isinstance(values, dict) or values.get("format") != FORMAT:
                raise ValueError(f"it is not of format {FORMAT}")
            return cls(folder, tuple(PackedKernel.from_dict(kernel) for kernel in values["kernels"]))
        except (ValueError, KeyError, TypeError) as error:
            text_of = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise KernelBuildError(f"{folder / MANIFEST} cannot be read: {text_of}") from error


def read_manifest(folder: Path) -> Manifest:
    """Manifest.read with one kind of error: KernelBuildError, which names the file and the way out."""
    try:
        return Manifest.read(folder)
    except (Untrusted, OSError) as error:
        raise KernelBuildError(str(error)) from error
