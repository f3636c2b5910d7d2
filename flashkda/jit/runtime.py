# SPDX-License-Identifier: Apache-2.0
"""From the bytes of a compiled kernel to a callable. Needs the FFI and the DSL's runtime library, no compiler, no GPU.

What is loaded is what the caller has checked: the bytes go to the loader through memory, not by the name of a file that
could change in between.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import importlib.util
import logging
import os
import re
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flashkda.errors import KernelBuildError
from flashkda.jit.key import KernelKey

RUNTIME = "libcute_dsl_runtime.so"

_SHARED_OBJECT = 3  # e_type of ELF: a library; a relocatable object has 1
_log = logging.getLogger("flashkda.jit")

# How often each descriptor's path has been given to the loader.
_given: Counter[int] = Counter()
# What is loaded stays: a CUDA graph may hold its launches.
_modules: list[Any] = []


def is_library(binary: bytes) -> bool:
    """Whether these are the bytes of a shared library, not of a relocatable object."""
    return binary[:4] == b"\x7fELF" and binary[16:18] == struct.pack("<H", _SHARED_OBJECT)


def load_bytes(key: KernelKey, binary: bytes) -> Callable[..., None]:
    """Load what compile_kernel made.

    The result takes the arguments in order, without the stream (torch's current one is used); an argument that was
    compiled as None stays in its place as None. CUDA starts with the first call. A kernel stays loaded as long as the
    process lives. Raises KernelBuildError.
    """
    return _load_library(key, binary) if is_library(binary) else _load_relocatable(key, binary)


def _load_library(key: KernelKey, binary: bytes) -> Callable[..., None]:
    try:
        import tvm_ffi
    except ImportError as error:
        text = "kernels are loaded with apache-tvm-ffi: pip install apache-tvm-ffi"
        raise KernelBuildError(text, missing=["apache-tvm-ffi"]) from error
    open_runtime()
    try:
        with _in_memory(f"flashkda_{key.name}", binary) as path:
            # What tvm_ffi.load_module calls for a name that ends in .so; a file in memory has none.
            module = tvm_ffi.get_global_func("ffi.Module.load_from_file.so")(path, "so")
            function: Callable[..., None] = module[key.symbol]
    except Exception as error:  # the loader raises RuntimeError, OSError and types of its own
        raise KernelBuildError(f"{key} cannot be loaded: {plain(error)}") from error
    _modules.append(module)
    return function


def _load_relocatable(key: KernelKey, binary: bytes) -> Callable[..., None]:
    """By the DSL's own loader, which brings the whole DSL with it."""
    _log.info("%s was not linked, for want of a linker: the DSL loads it", key)
    with tempfile.TemporaryDirectory(prefix="flashkda-") as folder:
        path = Path(folder) / "kernel.o"
        path.write_bytes(binary)
        try:
            from cutlass.cute.runtime import load_module

            function: Callable[..., None] = load_module(str(path), enable_tvm_ffi=True)[key.symbol]
        except Exception as error:  # the loader raises RuntimeError, OSError and types of its own
            raise KernelBuildError(f"{key} cannot be loaded: {plain(error)}") from error
    return function


@contextlib.contextmanager
def _in_memory(name: str, binary: bytes) -> Iterator[str]:
    """A path that holds these bytes for the loader, in a file of memory that nobody can change any more."""
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:  # a kernel that forbids it: a file in a folder of our own is the next best
        with tempfile.TemporaryDirectory(prefix="flashkda-") as folder:
            path = Path(folder) / f"{name}.so"
            path.write_bytes(binary)
            yield str(path)
        return
    with open(descriptor, "wb", buffering=0) as file:
        file.write(binary)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
        # The loader takes a path that it has seen for the library that it loaded then, and descriptors are used again:
        # so no path is given twice.
        again = "./" * _given[descriptor]
        _given[descriptor] += 1
        yield f"/proc/self/fd/{again}{descriptor}"


@functools.cache
def open_runtime() -> ctypes.CDLL:
    """Load the DSL's runtime library, which kernels need by its name. Raises KernelBuildError."""
    path = find_runtime()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelBuildError(f"the DSL's runtime library cannot be loaded: {error}") from error


def find_runtime() -> Path:
    """The DSL's runtime library, found without importing the DSL. Raises KernelBuildError.

    Of several flavours (one a CUDA major version) the newest that is not newer than torch's CUDA, which runs here.
    """
    # The DSL's own setting, which its loader honours too.
    named = [Path(name) for name in os.environ.get("CUTE_DSL_LIBS", "").split(os.pathsep) if name.endswith(RUNTIME)]
    roots = _dsl_folders()
    found = {
        int(re.sub(r"\D", "", path.parts[-3])): path for root in roots for path in root.glob(f"cu[0-9]*/lib/{RUNTIME}")
    }
    torch = sys.modules.get("torch")
    cuda = getattr(getattr(torch, "version", None), "cuda", None)
    newest = int(cuda.split(".")[0]) if cuda else max(found, default=0)
    flavours = sorted(found, key=lambda major: (major <= newest, major), reverse=True)
    for path in (*named, *(found[major] for major in flavours), *(root / "lib" / RUNTIME for root in roots)):
        if path.exists():
            return path
    text = f"kernels need {RUNTIME} of nvidia-cutlass-dsl: pip install nvidia-cutlass-dsl"
    raise KernelBuildError(text, missing=["nvidia-cutlass-dsl"])


def _dsl_folders() -> list[Path]:
    """Where the DSL's wheels are unpacked."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    if spec is not None:
        return [Path(root) for root in spec.submodule_search_locations or ()]
    spec = importlib.util.find_spec(
        "cutlass"
    )  # nvidia_cutlass_dsl/dsl_packages/cutlass: its folder alone is on the path
    return [Path(spec.origin).parents[2]] if spec is not None and spec.origin else []


def plain(error: BaseException) -> str:
    """Type and text of an error, without colours."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
    return f"{type(error).__name__}: {text}"
