# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the compiler in the tests of the cache: quick, needs no DSL, and leaves a trace of each call."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from flashkda.errors import KernelBuildError
from flashkda.jit import cache, compiler, runtime
from flashkda.jit.key import KernelKey

ARCH = "sm_90a"


def key(tag: int = 0) -> KernelKey:
    return KernelKey("fake", (("tag", tag),), ARCH)


def content(one: KernelKey) -> bytes:
    return f"object of {one}".encode()


def install(patch, trace: Path, seconds: float = 0.0) -> None:
    """Replace compiler and loader by `patch(module, name, function)`. Each compile appends a line to `trace`."""

    def compile_kernel(one, make):
        with trace.open("a") as file:
            file.write(f"{os.getpid()} {one}\n")
        time.sleep(seconds)
        if make == "refused":
            raise KernelBuildError(f"{one} does not compile")
        return content(one)

    def check_object(one, binary):
        # As lenient as the real one: damage past the head is for the cache to see.
        if not binary.startswith(b"object of"):
            raise KernelBuildError("not an object")

    def load_bytes(one, binary):
        check_object(one, binary)
        return lambda: one

    def compile_measured(one, make):
        return compiler.Measured(compile_kernel(one, make), 32, 1024)

    patch(compiler, "compile_kernel", compile_kernel)
    patch(compiler, "compile_measured", compile_measured)
    patch(compiler, "check_object", check_object)
    patch(runtime, "load_bytes", load_bytes)


def load_in_worker(trace: str, seconds: float) -> str:
    """What a process of the concurrency test does."""
    install(setattr, Path(trace), seconds)
    recipe: Any = None  # the stand-in does not look at it
    return str(cache.load_kernel(key(), recipe)())


def spec(trace: str, tag: int, make=None):
    """A spec for prebuild. It runs in the worker, so the stand-in is installed there."""
    install(setattr, Path(trace))
    return key(tag), make


def dies():
    """A spec that takes its process down."""
    os._exit(9)


def slow_spec(trace: str, tag: int):
    """A spec that takes some time, to be interrupted in."""
    install(setattr, Path(trace), 0.4)
    return key(tag), None


def unnamed():
    """A spec that cannot even name its kernel."""
    raise KernelBuildError("no such geometry")
