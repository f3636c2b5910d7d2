# SPDX-License-Identifier: Apache-2.0
"""Building a pack: what `flashkda compile --out DIR` does."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flashkda import config
from flashkda.errors import ConfigError, KernelBuildError
from flashkda.jit import compiler
from flashkda.jit.digest import toolchain_versions
from flashkda.jit.files import locked, write_whole
from flashkda.jit.key import KernelKey
from flashkda.jit.manifest import MANIFEST, Manifest, PackedKernel
from flashkda.jit.packs import name_of, pack_problem
from flashkda.jit.pool import Built, Make, Progress, Spec, build_all, build_spec, raise_failures
from flashkda.jit.trust import Untrusted, read_trusted

_LOCK = ".lock"
# A library of a pack, or what it is written to first.
_LEFT = re.compile(r"[a-z][a-z0-9_]*-[0-9a-f]{32}\.so|\.[a-z][a-z0-9_]*-[0-9a-f]{32}\.so\.tmp")


def build_pack(
    specs: Iterable[Spec], folder: Path, *, jobs: int | None = None, progress: Progress | None = None
) -> Manifest:
    """Compile kernels into a pack, in ``jobs`` worker processes (default: one a usable core), without a GPU.

    ``specs`` as in prebuild; kernels that several of them share are compiled once. ``progress(done, total, built)`` is
    called here after each. A kernel that is in the pack already, whole and of the same sources and versions, is kept;
    one of others is replaced, and all else in the pack stays. The manifest grows with each kernel, so an interrupted
    build leaves a pack of those that were done, and the next one goes on.
    Raises KernelBuildError, listing every kernel that failed after all others are done, and where the folder cannot be
    written or another process builds in it.
    """
    folder = Path(folder).absolute()
    with contextlib.suppress(ConfigError):  # no home for a cache
        if folder.resolve() == config.cache_dir().resolve():
            raise KernelBuildError(f"{folder} is the cache, which prebuild fills: a pack needs a folder of its own")
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        with locked(folder / _LOCK, 0.0):
            try:
                return _build_pack(list(specs), folder, jobs, progress)
            finally:
                (folder / _LOCK).unlink(missing_ok=True)  # while it is held: the pack is to be copied
    except (OSError, NotImplementedError, Untrusted) as error:
        raise KernelBuildError(f"a pack cannot be built in {folder}: {error}") from error


def _build_pack(specs: list[Spec], folder: Path, jobs: int | None, progress: Progress | None) -> Manifest:
    kernels: dict[str, PackedKernel] = {}
    with contextlib.suppress(FileNotFoundError):
        kernels = {kernel.file: kernel for kernel in Manifest.read(folder).kernels}
    _sweep(folder, kernels)
    named = [build_spec(spec, _name) for spec in specs]
    failed = [one for one in named if one.error is not None]
    wanted = {one.note: (one, spec) for one, spec in zip(named, specs, strict=True) if one.error is None}
    kept = [file for file in wanted if file in kernels and pack_problem(folder, kernels[file]) == ""]
    total = len(wanted) + len(failed)
    count = 0

    def done(built: Built) -> None:
        nonlocal count
        count += 1
        if progress is not None:
            progress(count, total, built)

    def keep(_: int, built: Built) -> None:
        if built.error is None:
            arguments = wanted[built.note.file][1][1]
            kernel = built.note._replace(about=_about(arguments))
            same = [one for one in kernels.values() if _slot(one) == _slot(kernel)]
            for one in same:
                del kernels[one.file]
            kernels[kernel.file] = kernel
            _write_manifest(folder, kernels)
            for one in same:
                if one.file != kernel.file:
                    (folder / one.file).unlink(missing_ok=True)
        done(built)

    for one in failed:
        done(one)
    for file in kept:
        done(wanted[file][0]._replace(note=kernels[file]))
    missing = [spec for file, (_, spec) in wanted.items() if file not in kept]
    built = build_all(missing, _build, str(folder), jobs=jobs, done=keep)
    _write_manifest(folder, kernels)
    raise_failures([*failed, *built, *(wanted[file][0] for file in kept)])
    return Manifest(folder, tuple(kernels[file] for file in sorted(kernels)))


def _name(key: KernelKey, make: Make) -> tuple[bool, str]:
    return False, _file_of(key)


def _file_of(key: KernelKey) -> str:
    return f"{key.arch}/{key.name}-{key.digest}.so"


def _build(key: KernelKey, make: Make, folder: str) -> tuple[bool, PackedKernel]:
    """In the worker: compile, put the library in its place, and return what the manifest says of it."""
    compiled = compiler.compile_measured(key, make)
    file = _file_of(key)
    path = Path(folder) / file
    path.parent.mkdir(mode=0o755, exist_ok=True)
    write_whole(path, compiled.binary, 0o644)
    try:
        read_trusted(Path(folder), file)
    except Untrusted as error:
        raise KernelBuildError(f"{key} would not be loaded: {error}") from error
    kernel = PackedKernel(
        **key.identity(),
        toolchain=toolchain_versions(),
        file=file,
        sha256=hashlib.sha256(compiled.binary).hexdigest(),
        size=len(compiled.binary),
        registers=compiled.registers,
        shared_memory=compiled.shared_bytes,
        about={},
    )
    return True, kernel


def _about(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """What a spec's arguments tell a reader of the manifest: the geometry, and plain records such as the tile."""
    found: dict[str, Any] = {}
    for argument in arguments:
        if hasattr(argument, "to_dict"):
            found["geometry"] = argument.to_dict()
        elif dataclasses.is_dataclass(argument) and not isinstance(argument, type):
            found[type(argument).__name__.lower()] = dataclasses.asdict(argument)
    return found


def _slot(kernel: PackedKernel) -> tuple[str, str, str]:
    """Kernels of one slot are the same but for their sources and versions."""
    return kernel.arch, kernel.host, name_of(kernel.name, kernel.params)


def _sweep(folder: Path, kernels: dict[str, PackedKernel]) -> None:
    """Take away what an interrupted build left: libraries that are in no manifest, and temporary files."""
    (folder / f".{MANIFEST}.tmp").unlink(missing_ok=True)
    for path in folder.glob("sm_*/*"):
        if _LEFT.fullmatch(path.name) and path.relative_to(folder).as_posix() not in kernels:
            path.unlink(missing_ok=True)


def _write_manifest(folder: Path, kernels: dict[str, PackedKernel]) -> None:
    manifest = Manifest(folder, tuple(kernels[file] for file in sorted(kernels)))
    write_whole(folder / MANIFEST, manifest.to_json().encode(), 0o644)
