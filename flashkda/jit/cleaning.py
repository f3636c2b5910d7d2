# SPDX-License-Identifier: Apache-2.0
"""The cache folder as a whole: what is in it, what is wrong with it, and what goes first when it is full."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from flashkda import config
from flashkda.jit.digest import dsl_switches, source_digest, toolchain_versions
from flashkda.jit.files import locked
from flashkda.jit.key import RECIPE
from flashkda.jit.trust import Untrusted, read_trusted

_ARCH = re.compile(r"sm_\d+[a-z]?")
# An entry's files, those of earlier recipes included: .so, .json, .lock, and what is temporary or set aside.
_FILE = re.compile(r"\.?([a-z][a-z0-9_]*)-([0-9a-f]{32})\.(so|o|json|lock)(\.\w+)?")
_log = logging.getLogger("flashkda.jit")


class Entry(NamedTuple):
    """A kernel in the cache folder.

    path: its library. last_use: seconds since the epoch. state: "ok", "stale" (whole, but made from other sources, by
    other versions or with other switches than those here: nothing will load it) or "bad"; reason says why it is not ok.
    """

    path: Path
    name: str
    arch: str
    digest: str
    bytes: int
    last_use: float
    state: str
    reason: str


@dataclass
class _Group:
    """All files of an entry."""

    folder: Path
    name: str
    digest: str
    files: dict[str, os.stat_result] = field(default_factory=dict)

    @property
    def stem(self) -> str:
        return f"{self.name}-{self.digest}"

    @property
    def bytes(self) -> int:
        return sum(status.st_size for status in self.files.values())

    @property
    def last_use(self) -> float:
        sidecar = self.files.get(f"{self.stem}.json")
        return sidecar.st_mtime if sidecar else max(status.st_mtime for status in self.files.values())

    @property
    def leftovers(self) -> list[str]:
        """What a killed writer left: it is temporary, and in use while a writer holds the lock."""
        return [name for name in self.files if name.startswith(".")]


def cache_entries() -> list[Entry]:
    """The kernels in the cache folder, the least recently used first. Their content is not read: see verify_cache."""
    groups = sorted(_groups(config.cache_dir()), key=lambda group: group.last_use)
    return [_entry(group, whole=False) for group in groups if _is_kernel(group)]


def verify_cache() -> list[tuple[Entry, str]]:
    """Every kernel in the cache folder that is damaged or not to be trusted, and what is wrong with it. Reads all."""
    entries = (_entry(group, whole=True) for group in _groups(config.cache_dir()) if _is_kernel(group))
    return [(entry, entry.reason) for entry in entries if entry.state == "bad"]


def clear_cache(*, older_than: float | None = None) -> tuple[int, int]:
    """Remove the kernels that were last used more than `older_than` seconds ago (None: all), but for those in use.

    Returns how many kernels went, and their bytes with those of what else lay about.
    """
    before = time.time() - (older_than or 0.0)
    count = freed = 0
    for group in _groups(config.cache_dir()):
        if older_than is None or group.last_use < before:
            removed = _remove(group)
            count += removed is not None and _is_kernel(group)
            freed += removed or 0
    return count, freed


def trim(root: Path, limit: int | None, spare: Path) -> None:
    """Evict the least recently used entries until `limit` bytes are left, and what killed writers left.

    Spares the library `spare`, and whatever is being read or written. Lists the folder: call it after a compile.
    """
    groups = [group for group in _groups(root) if group.folder / f"{group.stem}.so" != spare]
    for group in groups:
        if group.leftovers:
            _remove(group, group.leftovers)
    if limit is None:
        return
    total = sum(group.bytes for group in groups) + (spare.stat().st_size if spare.exists() else 0)
    for group in sorted(groups, key=lambda group: group.last_use):
        if total <= limit:
            return
        freed = _remove(group)
        if freed:
            total -= freed
            _log.info("%s is evicted: the cache is bounded to %d bytes", group.folder / group.stem, limit)


def _groups(root: Path) -> list[_Group]:
    found: dict[tuple[str, str], _Group] = {}
    for folder in _folders(root):
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as files:
            for file in files:
                match = _FILE.fullmatch(file.name)
                if match is None:
                    continue
                group = found.setdefault((folder.name, match[2]), _Group(folder, match[1], match[2]))
                with contextlib.suppress(FileNotFoundError):
                    group.files[file.name] = file.stat(follow_symlinks=False)
    return [group for group in found.values() if group.files]


def _folders(root: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError), os.scandir(root) as folders:
        for folder in folders:
            if _ARCH.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False):
                yield root / folder.name


def _is_kernel(group: _Group) -> bool:
    return any(name in group.files for name in (f"{group.stem}.so", f"{group.stem}.json", f"{group.stem}.o"))


def _remove(group: _Group, names: list[str] | None = None) -> int | None:
    """Remove these files of an entry, or all; the bytes that went, None where the entry is in use."""
    folder, stem = group.folder, group.stem
    freed = 0
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / f"{stem}.lock", 0.0))
            if names is None:
                stack.enter_context(_nobody_reads(folder / f"{stem}.json"))
        except (OSError, NotImplementedError):  # TimeoutError is an OSError
            return None
        # The sidecar first: without it the entry does not count. The lock last, while it is held.
        order = {f"{stem}.json": 0, f"{stem}.lock": 2}
        for name in sorted(group.files if names is None else names, key=lambda name: order.get(name, 1)):
            with contextlib.suppress(OSError):
                os.unlink(folder / name)
                freed += group.files[name].st_size
        if names is None:
            with contextlib.suppress(OSError):
                os.unlink(folder / f"{stem}.lock")
    return freed


@contextlib.contextmanager
def _nobody_reads(sidecar: Path) -> Iterator[None]:
    """Keeps readers out. Raises BlockingIOError where one is reading."""
    try:
        descriptor = os.open(sidecar, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # missing, or nothing that anyone would read
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _entry(group: _Group, *, whole: bool) -> Entry:
    state, reason = _judge(group, whole)
    path = group.folder / f"{group.stem}.so"
    return Entry(path, group.name, group.folder.name, group.digest, group.bytes, group.last_use, state, reason)


def _judge(group: _Group, whole: bool) -> tuple[str, str]:
    root, arch = group.folder.parent, group.folder.name
    if f"{group.stem}.o" in group.files:
        return "stale", "made by an earlier version of FlashKDA"
    for name in (f"{group.stem}.json", f"{group.stem}.so"):
        if name not in group.files:
            return "bad", f"{group.folder / name} is missing"
    try:
        note = json.loads(read_trusted(root, f"{arch}/{group.stem}.json"))
        fields, sha256 = dict(note["key"]), str(note["sha256"])
        if whole and hashlib.sha256(read_trusted(root, f"{arch}/{group.stem}.so")).hexdigest() != sha256:
            return "bad", f"{group.folder / group.stem}.so is not what was stored"
    except (OSError, ValueError, KeyError, TypeError, Untrusted) as error:
        return "bad", f"{group.folder / group.stem}.json: {error}" if isinstance(error, KeyError) else str(error)
    here: dict[str, Any] = {
        "recipe": RECIPE,
        "sources": source_digest(),
        "toolchain": toolchain_versions(),
        "switches": dsl_switches(),
    }
    other = [name for name, value in here.items() if fields.get(name) != value]
    return ("stale", f"made with other {', '.join(other)} than those here") if other else ("ok", "")
