# SPDX-License-Identifier: Apache-2.0
"""From a kernel's key and recipe to a relocatable object, and from the object to a callable. Needs no GPU.

The DSL compiles; we keep what it exports: an object file with the host wrapper (TVM-FFI calling convention) and, inside
it, the machine code. Loading needs the DSL's runtime and the FFI, but no linker and, until the first call, no driver.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashkda.errors import KernelBuildError
from flashkda.jit.key import KernelKey
from flashkda.jit.resources import (
    Resources,
    cubin_number,
    cubin_sass,
    cubin_usage,
    dynamic_shared_bytes,
    embedded_cubins,
    ptxas_spills,
)

# A recipe: imports the DSL, returns a jit callable and the fake arguments that describe its signature.
Make = Callable[[], tuple[Any, tuple[Any, ...]]]

_MODULES = {"cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}

# The DSL keeps its compile options and its MLIR context in process-wide objects.
_COMPILING = threading.RLock()


def require_toolchain() -> None:
    """Raises KernelBuildError that names the packages that are missing to compile or load a kernel."""
    missing = [package for module, package in _MODULES.items() if importlib.util.find_spec(module) is None]
    if missing:
        names = " ".join(missing)
        raise KernelBuildError(f"kernels are built and loaded with {names}: pip install {names}", missing=missing)


def compile_kernel(key: KernelKey, make: Make) -> bytes:
    """Compile the kernel and return its object file.

    Raises KernelBuildError when the toolchain is missing, the DSL refuses the kernel, or the result is not a TVM-FFI
    function for exactly the key's architecture.
    """
    with _COMPILING:
        return _export(key, _compile(key, make))


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


def load_object(key: KernelKey, path: Path) -> Callable[..., None]:
    """Load an object file that compile_kernel made.

    The result takes the arguments in order, without the stream (torch's current one is used); an argument that was
    compiled as None stays in its place as None. CUDA starts with the first call. Raises KernelBuildError.
    """
    require_toolchain()
    from cutlass.cute.runtime import load_module

    try:
        function: Callable[..., None] = load_module(str(path), enable_tvm_ffi=True)[key.symbol]
    except Exception as error:  # the loader raises RuntimeError, OSError and types of its own
        raise KernelBuildError(f"{path} cannot be loaded: {_plain(error)}") from error
    return function


def load_bytes(key: KernelKey, binary: bytes) -> Callable[..., None]:
    """load_object of an object that is in memory only."""
    with tempfile.TemporaryDirectory(prefix="flashkda-") as folder:
        path = Path(folder) / "kernel.o"
        path.write_bytes(binary)
        return load_object(key, path)


def _compile(key: KernelKey, make: Make, more: str = "") -> Any:
    require_toolchain()
    import cutlass.cute as cute
    from cutlass.cutlass_dsl.tvm_ffi_provider import TVMFFIJitCompiledFunctionWithKwargs

    function, arguments = make()
    try:
        # One string: a tuple of option objects is ignored in part, and without an architecture the DSL assumes one.
        compiled = cute.compile(function, *arguments, options=f"--gpu-arch {key.arch} --enable-tvm-ffi {more}".strip())
    except Exception as error:  # the DSL raises whatever the traced code raises, and types of its own
        raise KernelBuildError(f"{key} does not compile: {_plain(error)}") from error
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


def _plain(error: BaseException) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
    return f"{type(error).__name__}: {text}"
