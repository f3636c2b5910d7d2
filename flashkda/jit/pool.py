# SPDX-License-Identifier: Apache-2.0
"""Many kernels compiled in worker processes: what prebuild and build_pack share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from flashkda.errors import KernelBuildError
from flashkda.jit.key import KernelKey

# A recipe: imports the DSL, returns a jit callable and the fake arguments that describe its signature.
Make = Callable[[], tuple[Any, tuple[Any, ...]]]

# What a worker receives: a module-level function and its arguments; it returns (key, recipe).
Spec = tuple[Callable[..., tuple[KernelKey, Make]], tuple[Any, ...]]


class Built(NamedTuple):
    """One kernel: ``compiled`` is False where it was on disk already; ``error`` is None where it is now. ``note`` is
    what the worker wants to tell its parent besides."""

    name: str
    digest: str
    compiled: bool
    seconds: float
    error: str | None = None
    note: Any = None


Progress = Callable[[int, int, Built], None]
# Does the work on one kernel; returns whether it was compiled now, and a note. Has to be a module's function.
Work = Callable[..., tuple[bool, Any]]


def build_spec(spec: Spec, work: Work, *arguments: Any) -> Built:
    """Name a kernel and do the work on it. Raises nothing: what went wrong is in the result."""
    start = time.perf_counter()
    function, values = spec
    name, digest = getattr(function, "__qualname__", repr(function)), ""
    try:
        key, make = function(*values)
        name, digest = key.name, key.digest
        compiled, note = work(key, make, *arguments)
    # Of any kind: it has to cross to the parent, where exceptions of the DSL may not unpickle.
    except Exception as error:
        text = str(error) if isinstance(error, KernelBuildError) else f"{name}: {type(error).__name__}: {error}"
        return Built(name, digest, False, time.perf_counter() - start, text)
    return Built(name, digest, compiled, time.perf_counter() - start, note=note)


def build_all(
    specs: Sequence[Spec], work: Work, *arguments: Any, jobs: int | None, done: Callable[[int, Built], None]
) -> list[Built]:
    """build_spec of each in ``jobs`` spawned processes (default: one a usable core), in the order of ``specs``.

    ``done(count, built)`` is called here after each. Raises KernelBuildError where a process died.
    """
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    if not specs:
        return []
    workers = min(jobs or len(os.sched_getaffinity(0)), len(specs))
    with ProcessPoolExecutor(max_workers=workers, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(build_spec, spec, work, *arguments) for spec in specs]
        try:
            for count, future in enumerate(as_completed(futures), start=1):
                done(count, future.result())
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise KernelBuildError("a compiling process died: out of memory, or a crash of the DSL") from error
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def raise_failures(built: Iterable[Built]) -> None:
    """Raises KernelBuildError that lists every kernel that failed, if any did."""
    built = list(built)
    failed = [f"  - {one.error}" for one in built if one.error is not None]
    if failed:
        raise KernelBuildError("\n".join([f"{len(failed)} of {len(built)} kernels failed to build:", *failed]))
