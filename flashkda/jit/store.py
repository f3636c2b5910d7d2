# SPDX-License-Identifier: Apache-2.0
"""One kernel's place in the cache folder.

An entry is <cache>/<arch>/<name>-<digest>.so and, beside it, a .json with the key's fields and the library's SHA-256.
It counts only when both agree. Readers take no lock but a shared one on the .json, which keeps the entry from being
evicted under them; whoever finds half an entry looks again under the writers' lock. The time of the .json is the
entry's last use. (Where there is no linker, the .so is a relocatable object: its header tells.)
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from flashkda.errors import KernelBuildError
from flashkda.jit.files import locked, write_whole
from flashkda.jit.key import KernelKey
from flashkda.jit.trust import Untrusted, open_trusted, read_all, read_trusted

LOCK_SECONDS = 900.0
# A hit writes the time of its use no more often than this.
_USE_SECONDS = 60.0

_log = logging.getLogger("flashkda.jit")
_warned = False


class Unusable(Exception):
    """An entry cannot be used; the text says why."""


class Place:
    """Where a kernel's entry is in the cache, or would be."""

    def __init__(self, key: KernelKey, root: Path) -> None:
        self.key = key
        self.root = root
        self.stem = f"{key.arch}/{key.name}-{key.digest}"
        self.path = root / f"{self.stem}.so"
        self.sidecar = root / f"{self.stem}.json"

    def read(self) -> bytes:
        """The library, if it is the one that was stored for this key. Raises Unusable."""
        try:
            with open_trusted(self.root, f"{self.stem}.json") as descriptor:
                _hold(descriptor)
                note = json.loads(read_all(descriptor))
                binary = read_trusted(self.root, f"{self.stem}.so")
                self._check(note, binary)
                _note_use(descriptor)
        except FileNotFoundError as error:
            raise Unusable(f"{error.filename} is missing") from error
        except (OSError, ValueError, Untrusted) as error:
            raise Unusable(str(error)) from error
        return binary

    def problem(self) -> str | None:
        """None for a good entry, else what is wrong with it."""
        from flashkda.jit import compiler  # with all that a compile needs: a hit does without

        try:
            compiler.check_object(self.key, self.read())
        except (Unusable, KernelBuildError) as error:
            return str(error)
        return None

    def _check(self, note: object, binary: bytes) -> None:
        if not isinstance(note, dict) or note.get("key") != self.key.fields():
            raise Unusable(f"{self.sidecar} is of another kernel")
        if note.get("sha256") != hashlib.sha256(binary).hexdigest():
            raise Unusable(f"{self.path} is not what was stored")

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        """Makes the folders and holds the writers' lock. Yields False, with a warning, where nothing can be stored.

        Raises KernelBuildError where another process keeps the lock.
        """
        with contextlib.ExitStack() as stack:
            try:
                self._make_folders()
                stack.enter_context(locked(self.root / f"{self.stem}.lock", LOCK_SECONDS))
            except TimeoutError as error:
                raise KernelBuildError(f"{self.key}: {error} for {LOCK_SECONDS:.0f} s") from error
            except (OSError, NotImplementedError) as error:
                warn_unusable(error)
                yield False
                return
            yield True

    def store(self, binary: bytes) -> bool:
        """Put library and sidecar in place, setting aside what is there. Call under the lock.

        False, with a warning, where that fails.
        """
        note = {"key": self.key.fields(), "sha256": hashlib.sha256(binary).hexdigest()}
        try:
            self._set_aside()
            write_whole(self.path, binary)
            # Last: it makes the entry count.
            write_whole(self.sidecar, json.dumps(note, indent=1, sort_keys=True).encode())
        except OSError as error:
            warn_unusable(error)
            return False
        return True

    def _set_aside(self) -> None:
        there = [path for path in (self.path, self.sidecar) if os.path.lexists(path)]
        if len(there) == 1:
            # A process that was killed between the two leaves this.
            _log.info("%s is half an entry: it is built again", there[0])
            there[0].unlink()
            return
        problem = self.problem() or "the loader refused it"
        for path in there:
            os.replace(path, f"{path}.corrupt")
            _log.warning("%s is set aside as *.corrupt and built again (%s)", path, problem)

    def _make_folders(self) -> None:
        self.root.parent.mkdir(parents=True, exist_ok=True)
        for folder in (self.root, self.path.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
            status = folder.stat()
            if folder != self.root and folder.is_symlink():
                raise PermissionError(f"{folder} is a symbolic link; put a folder there")
            # A folder that root made for all to read is fine.
            if status.st_uid not in (0, os.geteuid()):
                raise PermissionError(f"{folder} belongs to user {status.st_uid}")
            if status.st_mode & 0o022:
                folder.chmod(0o700)  # fails where it is root's and we are not
                _log.warning("%s could be written to by others: it is now closed to them (mode 0700)", folder)


def warn_unusable(error: Exception) -> None:
    """Say, once in a process, that kernels are kept in memory only."""
    global _warned
    _log.info("the kernel cache cannot be used: %s", error)
    if not _warned:
        _warned = True
        warnings.warn(
            f"the kernel cache cannot be used, kernels are compiled in each process ({error}); "
            "set FLASHKDA_CACHE_DIR to a folder of your own",
            RuntimeWarning,
            stacklevel=4,
        )


def _hold(descriptor: int) -> None:
    """Keep the entry from being evicted while it is read. Raises Unusable where it is going."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Unusable("the entry is being evicted") from error
    except OSError:  # a file system without locks: nobody evicts there either, see trim
        return
    if os.fstat(descriptor).st_nlink == 0:
        raise Unusable("the entry has just been evicted")


def _note_use(descriptor: int) -> None:
    if time.time() - os.fstat(descriptor).st_mtime > _USE_SECONDS:
        with contextlib.suppress(OSError):  # a read-only cache has no order of use
            os.utime(descriptor)
