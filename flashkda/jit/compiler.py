# SPDX-License-Identifier: Apache-2.0
"""From a kernel's key and recipe to a shared library. Needs no GPU.

The DSL compiles; we keep what it exports: the host wrapper (TVM-FFI calling convention) and, inside it, the machine
code. Linked against the DSL's runtime library and the FFI it loads without the DSL (see runtime). Where there is no
linker the object is kept as it is, and the DSL has to load it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import logging
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

from flashkda.errors import KernelBuildError
from flashkda.jit.key import KernelKey
from flashkda.jit.pool import Make
from flashkda.jit.resources import (
    Resources,
    cubin_number,
    cubin_sass,
    cubin_usage,
    dynamic_shared_bytes,
    embedded_cubins,
    ptxas_spills,
)
from flashkda.jit.runtime import find_runtime, plain

_MODULES = {"cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}
_LINKERS = ("ld", "ld.lld", "ld.gold", "ld.bfd", "mold")

_log = logging.getLogger("flashkda.jit")

# The DSL keeps its compile options and its MLIR context in process-wide objects.
_COMPILING = threading.RLock()


def require_toolchain() -> None:
    """Raises KernelBuildError that names the packages that are missing to compile or load a kernel."""
    missing = [package for module, package in _MODULES.items() if importlib.util.find_spec(module) is None]
    if missing:
        names = " ".join(missing)
        raise KernelBuildError(f"kernels are built and loaded with {names}: pip install {names}", missing=missing)


def compile_kernel(key: KernelKey, make: Make) -> bytes:
    """Compile the kernel and return its shared library (a relocatable object where there is no linker).

    Raises KernelBuildError when the toolchain is missing, the DSL refuses the kernel, or the result is not a TVM-FFI
    function for exactly the key's architecture.
    """
    with _COMPILING:
        return link(key, _export(key, _compile(key, make)))


class Measured(NamedTuple):
    """A compiled kernel, the registers of a thread and the shared memory of a CTA in bytes (None: no cuobjdump)."""

    binary: bytes
    registers: int | None
    shared_bytes: int | None


def compile_measured(key: KernelKey, make: Make) -> Measured:
    """compile_kernel, and what the kernel uses of a multiprocessor. Raises KernelBuildError as it does."""
    with _COMPILING:
        compiled = _compile(key, make)
        binary = _export(key, compiled)
        module = str(compiled.ir_module)
    try:
        usage = cubin_usage(embedded_cubins(binary)[0])
    except KernelBuildError as error:
        _log.info("registers and shared memory of %s are not known: %s", key, error)
        return Measured(link(key, binary), None, None)
    return Measured(link(key, binary), usage.registers, usage.static_shared_bytes + dynamic_shared_bytes(module))


def inspect_kernel(key: KernelKey, make: Make, *, sass: bool = False) -> Resources:
    """Compile the kernel and read its resources (see Resources). Touches neither the cache nor a GPU.

    Raises KernelBuildError as compile_kernel does, and where cuobjdump is missing.
    """
    log = io.StringIO()
    with _COMPILING, tempfile.TemporaryDirectory(prefix="flashkda-") as folder:
        with contextlib.redirect_stderr(log):
            compiled = _compile(key, make, f"--keep-ptx --keep-cubin --dump-dir '{folder}' remarks{{ptx}}")
        # The object is checked for its architecture and not needed further.
        _export(key, compiled)
        module = str(compiled.ir_module)
    ptx, cubin = compiled.artifacts.PTX, compiled.artifacts.CUBIN
    usage = cubin_usage(cubin)
    return Resources(
        registers=usage.registers,
        spill_bytes=ptxas_spills(log.getvalue()),
        local_bytes=usage.local_bytes,
        shared_bytes=usage.static_shared_bytes + dynamic_shared_bytes(module),
        ptx=ptx,
        sass=cubin_sass(cubin) if sass else None,
    )


def check_object(key: KernelKey, binary: bytes) -> None:
    """Raises KernelBuildError unless the object holds GPU code, all of it for the key's architecture."""
    found = {f"sm_{cubin_number(cubin)}" for cubin in embedded_cubins(binary)}
    if found != {key.arch.rstrip("af")}:
        raise KernelBuildError(f"object of {key}: expected code for {key.arch}, found {sorted(found) or 'none'}")


def link(key: KernelKey, binary: bytes) -> bytes:
    """The object as a shared library; the object itself where no linker is found. Raises KernelBuildError."""
    import tvm_ffi.libinfo

    linker = find_linker()
    if linker is None:
        return binary
    with tempfile.TemporaryDirectory(prefix="flashkda-") as folder:
        source, target = Path(folder) / "kernel.o", Path(folder) / "kernel.so"
        source.write_bytes(binary)
        # Bound at load, so that a runtime that lacks a symbol is refused then and not in the middle of a launch.
        options = ("-shared", "-s", "-z", "now", "-z", "noexecstack", "-o", str(target))
        libraries = (str(find_runtime()), tvm_ffi.libinfo.find_libtvm_ffi())
        done = subprocess.run([linker, *options, str(source), *libraries], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise KernelBuildError(f"{key} cannot be linked by {linker}: {done.stderr.strip()}")
        return target.read_bytes()


@functools.cache
def find_linker() -> str | None:
    """Path of a linker; None, with a warning, where there is none."""
    found = next(filter(None, map(shutil.which, _LINKERS)), None)
    if found is None:
        _log.warning("no linker (%s) is on the PATH: what is compiled loads slowly, with the DSL", ", ".join(_LINKERS))
    return found


def _compile(key: KernelKey, make: Make, more: str = "") -> Any:
    require_toolchain()
    import cutlass.cute as cute
    from cutlass.cutlass_dsl.tvm_ffi_provider import TVMFFIJitCompiledFunctionWithKwargs

    function, arguments = make()
    try:
        # One string: a tuple of option objects is ignored in part, and without an architecture the DSL assumes one.
        compiled = cute.compile(function, *arguments, options=f"--gpu-arch {key.arch} --enable-tvm-ffi {more}".strip())
    except Exception as error:  # the DSL raises whatever the traced code raises, and types of its own
        raise KernelBuildError(f"{key} does not compile: {plain(error)}") from error
    if not isinstance(compiled, TVMFFIJitCompiledFunctionWithKwargs):
        raise KernelBuildError(
            f"{key}: expected a TVM-FFI function from the DSL, found {type(compiled).__name__}; "
            "is CUTE_DSL_DRYRUN set, or does the jit function take no arguments?"
        )
    return compiled


def _export(key: KernelKey, compiled: Any) -> bytes:
    with tempfile.TemporaryDirectory(prefix="flashkda-") as folder:
        path = Path(folder) / "kernel.o"
        compiled.export_to_c(str(path), function_name=key.symbol)
        binary = path.read_bytes()
    check_object(key, binary)
    return binary
