# SPDX-License-Identifier: Apache-2.0
"""The name of a compiled kernel: everything that changes its code, and nothing else."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from dataclasses import dataclass
from typing import Any, TypeAlias

from flashkda.errors import KernelBuildError
from flashkda.jit.digest import dsl_switches, source_digest, toolchain_versions

Scalar: TypeAlias = str | int | float | bool | None

# Raised when this package compiles or exports differently, so that older entries on disk are left alone.
RECIPE = 2


@dataclass(frozen=True)
class KernelKey:
    """Kernel ``name`` with compile-time parameters ``params`` (sorted here), for GPU architecture ``arch`` ("sm_90a").

    There is no device serial number in it, no stride and no size that the compiled code reads at run time.
    Raises KernelBuildError for a name, architecture or parameter that cannot be part of a key.
    """

    name: str
    params: tuple[tuple[str, Scalar], ...]
    arch: str

    def __post_init__(self) -> None:
        # The name becomes a file name and a symbol.
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.name):
            raise KernelBuildError(f"kernel name: expected lower case letters, digits and _, found {self.name!r}")
        if not re.fullmatch(r"sm_\d+[a-z]?", self.arch):
            raise KernelBuildError(f"architecture: expected a name such as sm_90a, found {self.arch!r}")
        names = [name for name, _ in self.params]
        if len(set(names)) != len(names):
            raise KernelBuildError(f"parameters of {self.name}: a name occurs twice in {sorted(names)}")
        for name, value in self.params:
            finite = not isinstance(value, float) or value - value == 0.0
            if not (value is None or isinstance(value, (str, int, float))) or not finite:
                raise KernelBuildError(f"parameter {name} of {self.name}: expected a JSON scalar, found {value!r}")
        object.__setattr__(self, "params", tuple(sorted(self.params)))

    def __str__(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in self.params)
        return f"{self.name}({values}) for {self.arch}"

    @property
    def symbol(self) -> str:
        """Name under which the compiled object exports the kernel."""
        return f"flashkda_{self.name}"

    def fields(self) -> dict[str, Any]:
        """All that the digest covers, as JSON values."""
        return {**self.identity(), "toolchain": toolchain_versions()}

    def identity(self) -> dict[str, Any]:
        """Which kernel it is, whatever compiled it, as JSON values."""
        return {
            "recipe": RECIPE,
            "name": self.name,
            "params": dict(self.params),
            "arch": self.arch,
            "sources": source_digest(),
            "switches": dsl_switches(),
            # The library holds host code too.
            "host": platform.machine(),
        }

    @property
    def digest(self) -> str:
        """32 hex digits over ``fields``."""
        text = json.dumps(self.fields(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:32]
