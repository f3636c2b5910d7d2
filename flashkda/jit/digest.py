# SPDX-License-Identifier: Apache-2.0
"""What a compiled kernel depends on besides its own parameters: the kernels' sources and the toolchain.

All is read without importing the kernels, the DSL or the FFI, so a plan can be fingerprinted anywhere.
"""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

TOOLCHAIN = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
# The DSL's libraries come in one flavour per CUDA major version. Each brings its own ptxas, so the code differs.
FLAVOURS = ("nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl-libs-cu13")
# The DSL's own variables that change the code it writes (not settings of FlashKDA: those are in config.py).
DSL_SWITCHES = (
    "CUTE_DSL_AUTO_M2S",
    "CUTE_DSL_COMPILER_BACKEND",
    "CUTE_DSL_COMPILER_OPT",
    "CUTE_DSL_DEBUG",
    "CUTE_DSL_ENABLE_ASSERTIONS",
    "CUTE_DSL_ENABLE_PYIR",
    "CUTE_DSL_LINEINFO",
    "CUTE_DSL_TOLERATE_M2M",
)


def digest_files(root: Path) -> str:
    """SHA-256 (hex) over the names and contents of all ``.py`` files below ``root``, in the order of their names."""
    digest = hashlib.sha256()
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in root.rglob("*.py")):
        content = path.read_bytes()
        # The lengths keep names and contents apart: without them a byte could wander from one file to the next.
        digest.update(f"{len(name)}:{name}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()


@functools.cache
def source_digest(package: str = "flashkda.kernels") -> str:
    """SHA-256 (hex) of the package's Python sources, taken once a process: what is imported is what was digested.

    Raises KernelBuildError when the package has no sources.
    """
    import importlib.util

    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        spec = None
    roots = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not roots or next(Path(roots[0]).rglob("*.py"), None) is None:
        from flashkda.errors import KernelBuildError

        raise KernelBuildError(f"the sources of {package} are missing: reinstall flashkda", missing=[package])
    return digest_files(Path(roots[0]))


@functools.cache
def toolchain_versions() -> dict[str, str | None]:
    """Installed versions of the DSL, of the FFI (None where missing) and of the installed flavours of the DSL."""
    from importlib import metadata

    versions: dict[str, str | None] = {}
    for name in (*TOOLCHAIN, *FLAVOURS):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name in TOOLCHAIN:
                versions[name] = None
    return versions


def dsl_switches() -> dict[str, str]:
    """The set DSL variables that change the code. Empty in an ordinary environment."""
    return {name: os.environ[name] for name in DSL_SWITCHES if os.environ.get(name)}
