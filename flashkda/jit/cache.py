# SPDX-License-Identifier: Apache-2.0
"""A compiled kernel, from wherever it can be had: memory, the packs of FLASHKDA_KERNEL_PATH, the cache on disk, and
last the compiler, unless FLASHKDA_NO_JIT forbids it. One process compiles a key, others wait for it."""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from flashkda import config
from flashkda.errors import ConfigError, KernelBuildError, KernelNotFoundError, NotPreparedError
from flashkda.jit import packs, runtime
from flashkda.jit.key import KernelKey
from flashkda.jit.pool import Built, Make, Progress, Spec, build_all, raise_failures
from flashkda.jit.store import Place, Unusable, warn_unusable

__all__ = [
    "Built",
    "Spec",
    "build_kernel",
    "entry_path",
    "forget_loaded",
    "is_loaded",
    "load_kernel",
    "prebuild",
]

_log = logging.getLogger("flashkda.jit")

_loaded: dict[KernelKey, Callable[..., None]] = {}
_loading = threading.RLock()


def is_loaded(key: KernelKey) -> bool:
    """Whether load_kernel would return from memory."""
    return key in _loaded


def forget_loaded() -> None:
    """Empty the memory part of the cache. Callables handed out before stay valid."""
    _loaded.clear()


def load_kernel(key: KernelKey, make: Make) -> Callable[..., None]:
    """The compiled kernel, from memory, a pack, the cache or the compiler.

    Takes the arguments of ``make`` in order, without the stream; see runtime.load_bytes.
    Raises NotPreparedError under CUDA graph capture unless the kernel is in memory, KernelNotFoundError where it would
    have to be compiled under FLASHKDA_NO_JIT, KernelBuildError when it can be neither loaded nor built. An unusable
    cache folder costs a RuntimeWarning and a compile in each process.
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
    """Make sure that the kernel is in the cache on disk, without loading it; True when it was compiled now.

    Raises KernelBuildError, also where the cache folder cannot be written.
    """
    place, limit = Place(key, config.cache_dir()), config.cache_limit()
    problem = place.problem()
    if problem is None:
        return False
    with place.lock() as locked:
        if locked:
            if place.problem() is None:
                return False
            if _store(place, _compile(key, make, problem), limit):
                return True
    raise KernelBuildError(f"{key} cannot be kept: the cache folder cannot be written; set FLASHKDA_CACHE_DIR")


def entry_path(key: KernelKey) -> Path:
    """Where the kernel's library is in the cache, or would be."""
    return Place(key, config.cache_dir()).path


def prebuild(specs: Iterable[Spec], *, jobs: int | None = None, progress: Progress | None = None) -> list[Built]:
    """Compile many kernels to the cache in ``jobs`` worker processes (default: one a usable core).

    ``specs`` are picklable pairs (module-level function, its arguments); a worker calls the function for (key, recipe).
    ``progress(done, total, built)`` is called here after each. Results come in the order of ``specs``. Workers are
    spawned, so a script must guard its main code with ``if __name__ == "__main__"``.
    Raises KernelBuildError after all others are done, listing every kernel that failed.
    """
    specs = list(specs)

    def done(count: int, built: Built) -> None:
        if progress is not None:
            progress(count, len(specs), built)

    built = build_all(specs, _build, jobs=jobs, done=done)
    raise_failures(built)
    return built


def _build(key: KernelKey, make: Make) -> tuple[bool, None]:
    return build_kernel(key, make), None


def _obtain(key: KernelKey, make: Make) -> Callable[..., None]:
    start = time.perf_counter()
    reasons: list[str] = []
    for folder in config.kernel_path():
        function = _attempt(key, str(folder), functools.partial(packs.read, key, folder), start, reasons)
        if function is not None:
            return function
    try:
        place = Place(key, config.cache_dir())
    except ConfigError as error:
        if config.no_jit():
            raise KernelNotFoundError(str(key), [*reasons, str(error)]) from error
        warn_unusable(error)
        return runtime.load_bytes(key, _compile(key, make, str(error)))
    function = _attempt(key, str(place.path), place.read, start, reasons)
    if function is not None:
        return function
    if config.no_jit():
        raise KernelNotFoundError(str(key), reasons)
    limit = config.cache_limit()
    with place.lock() as locked:
        if locked:  # another process may have built it while this one waited
            function = _attempt(key, str(place.path), place.read, start, reasons)
            if function is not None:
                return function
        binary = _compile(key, make, "; ".join(dict.fromkeys(reasons)))
        if locked:
            _store(place, binary, limit)
    return runtime.load_bytes(key, binary)


def _attempt(
    key: KernelKey, where: str, read: Callable[[], bytes], start: float, reasons: list[str]
) -> Callable[..., None] | None:
    """The kernel as it is on disk; None, with one more reason, where it cannot be used."""
    try:
        function = runtime.load_bytes(key, read())
    except (Unusable, KernelBuildError) as error:
        reasons.append(str(error))
        return None
    _log.info("%s: loaded from %s in %.1f ms", key, where, 1e3 * (time.perf_counter() - start))
    return function


def _compile(key: KernelKey, make: Make, why: str) -> bytes:
    from flashkda.jit import compiler  # with all that a compile needs: a hit does without

    _log.info("%s: compiling (%s)", key, why)
    start = time.perf_counter()
    binary = compiler.compile_kernel(key, make)
    _log.info("%s: compiled in %.1f s, %d bytes", key, time.perf_counter() - start, len(binary))
    return binary


def _store(place: Place, binary: bytes, limit: int | None) -> bool:
    from flashkda.jit import cleaning

    stored = place.store(binary)
    cleaning.trim(place.root, limit, place.path)
    return stored


def _is_capturing() -> bool:
    torch = sys.modules.get("torch")
    # Only where torch has started CUDA can a stream of its be capturing; a build without CUDA has no such query.
    return torch is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
