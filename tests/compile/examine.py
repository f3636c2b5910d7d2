# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels in worker processes and keeps what the tests ask about them: numbers and counts, not texts.

Workers, for two reasons: a machine's cores compile side by side while tests run one after the other, and the DSL shows
its IR only to a process that was started for it. What one process found, others (pytest-xdist) read in a shared folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.compile.rounding import ir_operations, ptx_operations

# A module-level function and its arguments, which give a kernel's key and recipe. Picklable.
Spec = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True)
class Facts:
    """One compiled kernel.

    registers, spill_bytes, local_bytes, shared_bytes, local_accesses   as in flashkda.jit.resources.Resources
    threads, min_blocks   threads a CTA, and how many CTAs must fit an SM
    ptx_operations, ir_operations   operations on floating point (rounding.py)
    """

    registers: int
    spill_bytes: int
    local_bytes: int
    local_accesses: int
    shared_bytes: int
    threads: int
    min_blocks: int
    ptx_operations: dict[str, int]
    ir_operations: dict[str, int]
    ptx_digest: str


class Examiner:
    """Facts of kernels, each compiled once a session. ``folder`` may be shared with other sessions' examiners."""

    def __init__(self, folder: Path, workers: int):
        self.folder = folder
        self._waiting: dict[Spec, Future[Facts]] = {}
        self._pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (str(folder),))

    def submit(self, spec: Spec) -> None:
        """Have the kernel compiled, after those submitted before."""
        if spec not in self._waiting:
            self._waiting[spec] = self._pool.submit(_examine_once, self.folder, spec)

    def facts(self, spec: Spec) -> Facts:
        """The facts, waited for. Raises RuntimeError with the reason where the kernel does not compile."""
        self.submit(spec)
        return self._waiting[spec].result()

    def compile_again(self, spec: Spec) -> Facts:
        """The facts of a new compilation, whatever is known of the kernel's key."""
        return self._pool.submit(_examine, spec).result()

    def close(self) -> None:
        """Ends the workers; what has not been begun is dropped."""
        self._pool.shutdown(cancel_futures=True)


_ir_folder: Path


def _start_worker(folder: str) -> None:
    global _ir_folder
    _ir_folder = Path(tempfile.mkdtemp(prefix="ir-", dir=folder))
    # Read by the DSL when it is imported, which happens with the first recipe.
    os.environ["CUTE_DSL_KEEP"] = "ir-debug"
    os.environ["CUTE_DSL_DUMP_DIR"] = str(_ir_folder)


def _examine_once(folder: Path, spec: Spec) -> Facts:
    from filelock import FileLock

    function, arguments = spec
    path = folder / f"{function(*arguments)[0].digest}.json"
    with FileLock(path.with_suffix(".lock")):
        if path.exists():
            return Facts(**json.loads(path.read_text()))
        facts = _examine(spec)
        path.write_text(json.dumps(asdict(facts)))
        return facts


def _examine(spec: Spec) -> Facts:
    from flashkda.jit.compiler import inspect_kernel

    function, arguments = spec
    key, make = function(*arguments)
    for old in _ir_folder.glob("*.mlir"):
        old.unlink()
    try:
        found = inspect_kernel(key, make, sass=True)
    except Exception as error:
        # A type that crosses to the parent: the DSL's exceptions may not.
        raise RuntimeError(f"{type(error).__name__}: {error}") from None
    (ir,) = _ir_folder.glob("*.mlir")
    threads = [
        math.prod(map(int, sizes.split(","))) for sizes in re.findall(r"^\.reqntid (.+)$", found.ptx, re.MULTILINE)
    ]
    blocks = map(int, re.findall(r"^\.minnctapersm (\d+)", found.ptx, re.MULTILINE))
    return Facts(
        registers=found.registers,
        spill_bytes=found.spill_bytes,
        local_bytes=found.local_bytes,
        local_accesses=found.local_accesses or 0,
        shared_bytes=found.shared_bytes,
        threads=max(threads),
        min_blocks=max(blocks, default=1),
        ptx_operations=dict(ptx_operations(found.ptx)),
        ir_operations=dict(ir_operations(ir.read_text())),
        ptx_digest=hashlib.sha256(found.ptx.encode()).hexdigest(),
    )
