# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels, in memory and on disk.

On disk an entry is <cache>/<arch>/<name>-<digest>.o and, beside it, a .json with the key's fields and the object's
SHA-256. An entry counts only when both agree; one that does not is renamed to *.corrupt and built again. One process
compiles a key, others wait for it. Readers take no lock: whoever finds half an entry looks again under the lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashkda.errors import KernelBuildError, NotPreparedError
from flashkda.jit.compiler import Make, check_object, compile_kernel, load_bytes, load_object, require_toolchain
from flashkda.jit.key import KernelKey

# What a worker of prebuild receives: a module-level function and its arguments; it returns (key, recipe).
Spec = tuple[Callable[..., tuple[KernelKey, Make]], tuple[Any, ...]]

LOCK_SECONDS = 900.0

_log = logging.getLogger("flashkda")

_loaded: dict[KernelKey, Callable[..., None]] = {}
_loading = threading.RLock()


def is_loaded(key: KernelKey) -> bool:
    """Whether load_kernel would return from memory."""
    return key in _loaded


def forget_loaded() -> None:
    """Empty the memory part of the cache. Callables handed out before stay valid."""
    _loaded.clear()


def load_kernel(key: KernelKey, make: Make) -> Callable[..., None]:
    """The compiled kernel, from memory, disk or the compiler.

    Takes the arguments of ``make`` in order, without the stream; see compiler.load_object.
    Raises NotPreparedError under CUDA graph capture unless the kernel is in memory, KernelBuildError when it can be
    neither loaded nor built. An unusable cache folder costs a RuntimeWarning and a compile in each process.
    """
    function = _loaded.get(key)
    if function is not None:
        return function
    if _is_capturing():
        raise NotPreparedError(
            f"{key.name} is not loaded and a CUDA graph is being captured: prepare first (bind, and run once, before)"
        )
    with _loading:
        if key not in _loaded:
            _loaded[key] = _obtain(key, make)
        return _loaded[key]


def build_kernel(key: KernelKey, make: Make) -> bool:
    """Make sure that the kernel is on disk, without loading it; True when it was compiled now.

    Raises KernelBuildError, also where the cache folder cannot be written.
    """
    entry = _Entry.of(key)
    if entry is not None and entry.problem() is None:
        return False
    if entry is not None:
        with entry.lock() as locked:
            if locked and entry.problem() is None:
                return False
            if locked and entry.store(compile_kernel(key, make)):
                return True
    raise KernelBuildError(f"{key} cannot be kept: the cache folder cannot be written; set FLASHKDA_CACHE_DIR")


def entry_path(key: KernelKey) -> Path:
    """Where the kernel's object is, or would be."""
    from flashkda.config import cache_dir

    return cache_dir() / key.arch / f"{key.name}-{key.digest}.o"


@dataclass(frozen=True)
class Built:
    """One kernel of prebuild: ``compiled`` is False where it was on disk already; ``error`` is None where it is now."""

    name: str
    digest: str
    compiled: bool
    seconds: float
    error: str | None = None


def prebuild(
    specs: Iterable[Spec], *, jobs: int | None = None, progress: Callable[[int, int, Built], None] | None = None
) -> list[Built]:
    """Compile many kernels to disk in ``jobs`` worker processes (default: one a usable core).

    ``specs`` are picklable pairs (module-level function, its arguments); a worker calls the function for (key, recipe).
    ``progress(done, total, built)`` is called here after each. Results come in the order of ``specs``. Workers are
    spawned, so a script must guard its main code with ``if __name__ == "__main__"``.
    Raises KernelBuildError after all others are done, listing every kernel that failed.
    """
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    specs = list(specs)
    if not specs:
        return []
    workers = min(jobs or len(os.sched_getaffinity(0)), len(specs))
    with ProcessPoolExecutor(max_workers=workers, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(_build_spec, spec) for spec in specs]
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                if progress is not None:
                    progress(done, len(specs), future.result())
            built = [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise KernelBuildError("a compiling process died: out of memory, or a crash of the DSL") from error
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    failed = [f"  - {one.error}" for one in built if one.error is not None]
    if failed:
        raise KernelBuildError("\n".join([f"{len(failed)} of {len(built)} kernels failed to build:", *failed]))
    return built


def _build_spec(spec: Spec) -> Built:
    start = time.perf_counter()
    function, arguments = spec
    name, digest = getattr(function, "__qualname__", repr(function)), ""
    try:
        key, make = function(*arguments)
        name, digest = key.name, key.digest
        compiled = build_kernel(key, make)
    except (
        Exception
    ) as error:  # of any kind: it has to cross to the parent, where exceptions of the DSL may not unpickle
        text = str(error) if isinstance(error, KernelBuildError) else f"{name}: {type(error).__name__}: {error}"
        return Built(name, digest, False, time.perf_counter() - start, text)
    return Built(name, digest, compiled, time.perf_counter() - start)


def _obtain(key: KernelKey, make: Make) -> Callable[..., None]:
    require_toolchain()
    entry = _Entry.of(key)
    if entry is None:
        return load_bytes(key, compile_kernel(key, make))
    function = entry.load()
    if function is not None:
        return function
    with entry.lock() as locked:
        function = entry.load() if locked else None
        if function is not None:
            return function
        binary = compile_kernel(key, make)
        if locked and entry.store(binary):
            return load_object(key, entry.path)
    return load_bytes(key, binary)


def _is_capturing() -> bool:
    torch = sys.modules.get("torch")
    # Only where torch has started CUDA can a stream of its be capturing; a build without CUDA has no such query.
    return torch is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class _Entry:
    """One kernel's place on disk."""

    def __init__(self, key: KernelKey, path: Path) -> None:
        self.key = key
        self.path = path
        self.sidecar = path.with_suffix(".json")

    @classmethod
    def of(cls, key: KernelKey) -> _Entry | None:
        """The entry, its folder made; None, with a warning, where the folder cannot be used."""
        path = entry_path(key)
        try:
            path.parents[2].mkdir(parents=True, exist_ok=True)
            for folder in (path.parents[1], path.parent):
                folder.mkdir(mode=0o700, exist_ok=True)
            status = path.parent.stat()
            # Objects are code: in a folder of somebody else, or open to others, they could be anybody's. A folder that
            # root made for all to read is fine.
            if status.st_uid == os.geteuid():
                if stat.S_IMODE(status.st_mode) != 0o700:
                    path.parent.chmod(0o700)
            elif status.st_uid != 0 or status.st_mode & 0o022:
                raise PermissionError(f"{path.parent} belongs to user {status.st_uid}, or others can write to it")
        except OSError as error:
            _warn_unusable(error)
            return None
        return cls(key, path)

    def problem(self) -> str | None:
        """None for a good entry, else what is wrong with it."""
        try:
            note = json.loads(self.sidecar.read_text())
            binary = self.path.read_bytes()
        except FileNotFoundError as error:
            return f"{error.filename} is missing"
        except (OSError, ValueError) as error:
            return str(error)
        if not isinstance(note, dict) or note.get("key") != self.key.fields():
            return f"{self.sidecar} is of another kernel"
        if note.get("sha256") != hashlib.sha256(binary).hexdigest():
            return f"{self.path} is not what was stored"
        try:
            check_object(self.key, binary)
        except KernelBuildError as error:
            return str(error)
        return None

    def load(self) -> Callable[..., None] | None:
        """The loaded kernel; None where the entry is missing, bad or refused by the loader."""
        if self.problem() is not None:
            return None
        try:
            return load_object(self.key, self.path)
        except KernelBuildError:
            return None

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        """Holds the key's lock between processes. Yields False, with a warning, where there can be none."""
        from filelock import FileLock, Timeout

        lock = FileLock(self.path.with_suffix(".lock"), mode=0o600)
        try:
            lock.acquire(timeout=LOCK_SECONDS)
        except Timeout as error:
            raise KernelBuildError(
                f"{self.key}: another process has held {lock.lock_file} for {LOCK_SECONDS:.0f} s"
            ) from error
        except (OSError, NotImplementedError) as error:
            _warn_unusable(error)
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def store(self, binary: bytes) -> bool:
        """Put the object and its sidecar in place, setting aside what is there. Call under the lock.

        False, with a warning, where that fails.
        """
        note = {"key": self.key.fields(), "sha256": hashlib.sha256(binary).hexdigest()}
        try:
            self._set_aside()
            _replace(self.path, binary)
            # Last: it makes the entry count.
            _replace(self.sidecar, json.dumps(note, indent=1, sort_keys=True).encode())
        except OSError as error:
            _warn_unusable(error)
            return False
        return True

    def _set_aside(self) -> None:
        problem = self.problem()
        for path in (self.path, self.sidecar):
            with contextlib.suppress(FileNotFoundError):
                os.replace(path, f"{path}.corrupt")
                _log.warning(
                    "%s is set aside as *.corrupt and built again (%s)", path, problem or "the loader refused it"
                )


def _replace(path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _warn_unusable(error: Exception) -> None:
    warnings.warn(
        f"the kernel cache cannot be used, kernels are compiled in each process ({error}); "
        "set FLASHKDA_CACHE_DIR to a folder of your own",
        RuntimeWarning,
        stacklevel=4,
    )
