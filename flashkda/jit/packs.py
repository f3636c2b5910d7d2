# SPDX-License-Identifier: Apache-2.0
"""Packs: folders of kernels that were built ahead, by `flashkda compile`, perhaps elsewhere. See docs/prebuilt.md."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from flashkda import config
from flashkda.errors import KernelBuildError
from flashkda.jit.digest import dsl_switches, source_digest
from flashkda.jit.key import KernelKey
from flashkda.jit.manifest import MANIFEST, Manifest, PackedKernel, read_manifest, runtime_problems
from flashkda.jit.store import Unusable
from flashkda.jit.trust import Untrusted, read_trusted

_log = logging.getLogger("flashkda.jit")

# Manifests that have been read, by folder: what the file was then, the manifest, its kernels by name and parameters.
_Index = dict[str, list[PackedKernel]]
_read: dict[Path, tuple[tuple[int, ...], Manifest, _Index]] = {}
_said: set[tuple[Path, str]] = set()


def search_path() -> list[Path]:
    """The packs that FLASHKDA_KERNEL_PATH names, in the order in which they are looked through."""
    return list(config.kernel_path())


def pack_entries(folder: Path) -> list[tuple[PackedKernel, str]]:
    """The kernels of a pack, each with why it is passed over on this machine: "" where it would be loaded.

    The architecture is not looked at. Reads every library. Raises KernelBuildError where the manifest cannot be read or
    trusted.
    """
    folder = Path(folder)
    return [(kernel, pack_problem(folder, kernel)) for kernel in read_manifest(folder).kernels]


def read(key: KernelKey, folder: Path) -> bytes:
    """The kernel's library out of a pack, checked. Raises Unusable."""
    try:
        index = _open(folder)[2]
    except KernelBuildError as error:
        _say(folder, f"the pack {folder} is passed over: {error}")
        raise Unusable(str(error)) from error
    reasons = []
    for kernel in index.get(name_of(key.name, dict(key.params)), []):
        problems = kernel.passed_over(key)
        if not problems:
            try:
                return _read_library(folder, kernel)
            except Unusable as error:
                problems = [str(error)]
                _say(folder, f"{error}; the kernel of the pack is not used")
        elif kernel.arch == key.arch:  # what is for this GPU and does not fit is a mistake; other GPUs' kernels are not
            _say(folder, f"the pack {folder} is passed over: what is in it {', '.join(problems)}")
        reasons.append(f"{kernel.file} {', '.join(problems)}")
    text = f"{folder}: {'; '.join(reasons)}" if reasons else f"{folder} has no such kernel"
    _log.info("%s: %s", key, text)
    raise Unusable(text)


def _open(folder: Path) -> tuple[tuple[int, ...], Manifest, _Index]:
    """The pack's manifest, read again where the file has changed. Raises KernelBuildError."""
    try:
        status = os.stat(folder / MANIFEST)
    except OSError as error:
        raise KernelBuildError(str(error)) from error
    now = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
    known = _read.get(folder)
    if known is None or known[0] != now:
        manifest = read_manifest(folder)
        index: _Index = {}
        for kernel in manifest.kernels:
            index.setdefault(name_of(kernel.name, kernel.params), []).append(kernel)
        known = _read[folder] = (now, manifest, index)
    return known


def name_of(name: str, params: dict[str, Any]) -> str:
    """A kernel's name and parameters as one key."""
    # As text: in Python 1, 1.0 and True are one key.
    return json.dumps([name, params], sort_keys=True)


def _read_library(folder: Path, kernel: PackedKernel) -> bytes:
    try:
        binary = read_trusted(folder, kernel.file)
    except (OSError, Untrusted) as error:
        raise Unusable(str(error)) from error
    found = hashlib.sha256(binary).hexdigest()
    if found != kernel.sha256:
        raise Unusable(f"{folder / kernel.file} is not what the manifest says (sha256 {found[:16]}...): copy it again")
    return binary


def pack_problem(folder: Path, kernel: PackedKernel) -> str:
    """Why a kernel of the pack is passed over here, whatever the GPU; "" where it is not."""
    problems = runtime_problems(kernel.toolchain)
    if kernel.sources != source_digest():
        problems.insert(0, "was built from other sources of the kernels")
    if kernel.switches != dsl_switches():
        problems.append(f"was built with other switches ({kernel.switches})")
    try:
        _read_library(folder, kernel)
    except Unusable as error:
        problems.append(str(error))
    return ", ".join(problems)


def _say(folder: Path, text: str) -> None:
    """Warn, once for each pack and text."""
    if (folder, text) not in _said:
        _said.add((folder, text))
        _log.warning("%s", text)
