# SPDX-License-Identifier: Apache-2.0
"""Kills processes at random moments of compile, lock, write and rename, and looks whether the cache survives it.

`python -m tests.crash --kills 200` prints what happened as JSON and exits with 1 where anything failed. Compiler and
loader are stand-ins, which take milliseconds; files, locks, renames and evictions are the real ones.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import mmap
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from flashkda.jit import cache, cleaning, compiler, files, runtime, store
from flashkda.jit.key import KernelKey

KEYS = tuple(KernelKey("crash", (("tag", tag),), arch) for tag in range(4) for arch in ("sm_90a", "sm_100a"))
PROCESSES = 3
PHASES = ("elsewhere", "compile", "lock", "write", "rename", "evict")
# Room for five of the eight kernels, so that entries come and go.
_SIZE = 64 << 10
_LIMIT = 5 * (_SIZE + 4096)
_SECONDS = 20.0


def content(key: KernelKey) -> bytes:
    """What the stand-in compiles."""
    return hashlib.sha256(str(key).encode()).digest() * (_SIZE // 32)


class Phase:
    """Where each process is: a byte in shared memory that its parent can read."""

    def __init__(self) -> None:
        self._bytes = mmap.mmap(-1, PROCESSES + 1)
        self.slot = 0

    def of(self, slot: int) -> str:
        return PHASES[self._bytes[slot]]

    def during(self, name: str, function: Callable[..., Any], pause: float) -> Callable[..., Any]:
        """The function, with its name on the board for as long as it runs and a little longer."""

        def wrapped(*arguments: Any, **options: Any) -> Any:
            before = self._bytes[self.slot]
            self._bytes[self.slot] = PHASES.index(name)
            try:
                time.sleep(pause * random.random())
                result = function(*arguments, **options)
                time.sleep(pause * random.random())
                return result
            finally:
                self._bytes[self.slot] = before

        return wrapped


def install(phase: Phase) -> None:
    """In a process that will be killed: stand-ins below the cache, and all phases on the board."""

    stand_ins: tuple[tuple[Any, str, Any], ...] = (
        (compiler, "compile_kernel", phase.during("compile", lambda key, make: content(key), 0.003)),
        (compiler, "check_object", lambda key, binary: None),
        (runtime, "load_bytes", lambda key, binary: lambda: binary),
        (store, "write_whole", phase.during("write", files.write_whole, 0.001)),
        (os, "replace", phase.during("rename", os.replace, 0.001)),
        (cleaning, "_remove", phase.during("evict", cleaning._remove, 0.001)),
        (FileLock, "acquire", phase.during("lock", FileLock.acquire, 0.001)),
    )
    for owner, name, function in stand_ins:
        setattr(owner, name, function)


def load_some(phase: Phase, rounds: int | None) -> None:
    """Load kernels again and again, and check what comes."""
    done = 0
    while rounds is None or done < rounds:
        for key in KEYS if rounds is not None else random.sample(KEYS, len(KEYS)):
            cache.forget_loaded()
            found: Any = cache.load_kernel(key, None)()  # type: ignore[arg-type]
            if found != content(key):
                raise AssertionError(f"{key}: {len(found)} bytes that are not the kernel's")
        done += 1


def start(phase: Phase, slot: int, rounds: int | None, errors: Path) -> int:
    """A process that loads; its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _die_with_parent()
        phase.slot = slot
        random.seed(os.getpid())
        install(phase)
        warnings.simplefilter("error")  # a cache that could not be used is a failure
        load_some(phase, rounds)
        code = 0
    except BaseException:
        with errors.open("a") as file:
            file.write(traceback.format_exc())
    finally:
        os._exit(code)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def wait(pid: int, seconds: float) -> bool:
    """Whether the process ended well in time; it is gone in any case."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def play(folder: Path, kills: int, seed: int = 0) -> dict[str, Any]:
    """Kill `kills` processes; after each few, one that is left alone has to find everything."""
    os.environ["FLASHKDA_CACHE_DIR"] = str(folder / "cache")
    os.environ["FLASHKDA_CACHE_LIMIT"] = str(_LIMIT)
    for name in ("FLASHKDA_KERNEL_PATH", "FLASHKDA_NO_JIT"):
        os.environ.pop(name, None)
    draw, phase, errors = random.Random(seed), Phase(), folder / "errors"
    for key in KEYS:
        key.digest  # noqa: B018  the sources are digested once, here
    hit: Counter[str] = Counter()
    killed = failed = checked = 0
    running = {slot: start(phase, slot, None, errors) for slot in range(PROCESSES)}
    try:
        while killed < kills:
            time.sleep(draw.uniform(0.0, 0.03))
            slot = draw.randrange(PROCESSES)
            pid = running[slot]
            if os.waitpid(pid, os.WNOHANG)[0]:  # it ended by itself, which none should
                failed += 1
            else:
                hit[phase.of(slot)] += 1
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                killed += 1
            if killed % 10 == 0:
                checked += 1
                failed += not wait(start(phase, PROCESSES, 1, errors), _SECONDS)
            running[slot] = start(phase, slot, None, errors)
    finally:
        for pid in running.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    os.environ["FLASHKDA_CACHE_LIMIT"] = "unlimited"
    failed += not wait(start(phase, PROCESSES, 2, errors), _SECONDS)
    return {
        "kills": killed,
        "failed": failed,
        "phases": dict(hit),
        "checked": checked + 1,
        "entries": len(cleaning.cache_entries()),
        "damaged": [reason for _, reason in cleaning.verify_cache()],
        "temporary": sorted(path.name for path in folder.rglob(".*.tmp")),
        "errors": errors.read_text()[-4000:] if errors.exists() else "",
    }


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flashkda-crash-") as folder:
        found = play(Path(folder), options.kills, options.seed)
    print(json.dumps(found))
    return 1 if found["failed"] or found["damaged"] or found["temporary"] else 0


if __name__ == "__main__":
    sys.exit(main())
