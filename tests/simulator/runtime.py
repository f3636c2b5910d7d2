# SPDX-License-Identifier: Apache-2.0
"""From a kernel's key and recipe to a callable on CPU tensors, which runs the kernel's own host code and its PTX."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.simulator.machine import Machine, Program, Report, Schedule
from tests.simulator.memory import Extent, GlobalMemory
from tests.simulator.ptx import Kernel, parse

_CUDA = 2  # kDLCUDA
# cudaLaunchAttributeClusterDimension, cudaLaunchAttributeProgrammaticStreamSerialization
_CLUSTER, _DEPENDENT = 4, 6


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """cudaLaunchConfig_t"""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


class Simulator:
    """Where kernels are launched.

    seed: None, or each launch has a schedule drawn from this number and its own. edit: what to make of a kernel before
    it runs. reports: of the launches that were. memory: tensors that a launch may use besides its arguments, such as
    those whose addresses are in a table.
    """

    def __init__(self, seed: int | None = None, edit: Callable[[Kernel], Kernel] | None = None) -> None:
        self.seed, self._edit = seed, edit
        self.reports: list[Report] = []
        self.memory: dict[str, torch.Tensor] = {}

    def kernel(self, key: Any, make: Any, names: tuple[str, ...]) -> Callable[..., None]:
        """The kernel as `specs.load` gives it. names: of its tensors, in order, for reports and faults."""
        library, kernel = _compiled(key, make)
        program = _program(kernel) if self._edit is None else Program(self._edit(kernel))

        def launch(*arguments: Any) -> None:
            extents = []
            tensors = arguments[len(arguments) - len(names) :]
            for name, tensor in (*zip(names, tensors, strict=True), *self.memory.items()):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    extents.append(Extent(name, storage.data_ptr(), storage.nbytes()))
            memory = GlobalMemory({extent.address: extent for extent in reversed(extents)}.values())
            with _launches(lambda config, given: self._run(program, config, given, memory)):
                library(*map(_as_cuda, arguments))

        return launch

    def _run(self, program: Program, config: _Config, arguments: Any, memory: GlobalMemory) -> None:
        sizes = program.kernel.parameters.values()
        parameters = b"".join(ctypes.string_at(arguments[i], size) for i, size in enumerate(sizes))
        grid: tuple[int, int, int] = tuple(config.grid)
        threads = config.block[0] * config.block[1] * config.block[2]
        if threads != program.kernel.threads:
            raise ValueError(f"a launch of {threads} threads a CTA; compiled for {program.kernel.threads}")
        attributes = {config.attributes[i].id: config.attributes[i].value for i in range(config.attribute_count)}
        cluster = list(attributes[_CLUSTER][:3]) if _CLUSTER in attributes else [1, 1, 1]
        dependent = _DEPENDENT in attributes and bool(attributes[_DEPENDENT][0])
        if cluster[1:] != [1, 1]:
            raise ValueError(f"clusters of {cluster}: only those along x are known")
        schedule = Schedule(None if self.seed is None else self.seed + 1000003 * len(self.reports))
        machine = Machine(program, grid, cluster[0], parameters, config.shared_bytes, memory, schedule, dependent)
        self.reports.append(machine.run())


def _as_cuda(argument: Any) -> Any:
    """The tensor's memory as that of a CUDA device, which is what the host code asks for."""
    import tvm_ffi

    if not isinstance(argument, torch.Tensor):
        return argument
    capsule = argument.__dlpack__()
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    # DLManagedTensor begins with its DLTensor: the address, then the device's type.
    ctypes.c_int.from_address(get(capsule, b"dltensor") + 8).value = _CUDA

    class Exported:
        def __dlpack__(self, **_: Any) -> Any:
            return capsule

        def __dlpack_device__(self) -> tuple[int, int]:
            return _CUDA, 0

    return tvm_ffi.from_dlpack(Exported())


_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Config), ctypes.POINTER(ctypes.c_void_p))
_current: list[Callable[[_Config, ctypes.Array[ctypes.c_void_p]], None]] = []


@contextmanager
def _launches(run: Callable[[_Config, Any], None]) -> Iterator[None]:
    """What host code launches goes to `run`; what that raises is raised here, not in host code, which has no errors."""
    raised: list[BaseException] = []

    def guarded(config: _Config, arguments: Any) -> None:
        try:
            run(config, arguments)
        except BaseException as error:
            raised.append(error)

    _current.append(guarded)
    try:
        yield
    finally:
        _current.pop()
        if raised:
            raise raised[0]


@_LAUNCH
def _launched(config: Any, arguments: Any) -> int:
    _current[-1](config.contents, arguments)
    return 0


@functools.cache
def _stand_in() -> Path:
    """The library that takes the DSL's runtime library's place, built once a process."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("the simulator's runtime.c wants a C compiler")
    path = Path(tempfile.mkdtemp(prefix="flashkda-simulator-")) / "libsimulator.so"
    source = Path(__file__).with_name("runtime.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(path), str(source)], check=True)
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.simulator_set_launch(_launched)
    return path


_loaded: dict[Any, tuple[Callable[..., None], Kernel]] = {}
_programs: dict[int, Program] = {}


def _compiled(key: Any, make: Any) -> tuple[Callable[..., None], Kernel]:
    """Host code and PTX of a kernel, compiled once a process."""
    if key not in _loaded:
        _loaded[key] = _compile(key, make)
    return _loaded[key]


def _program(kernel: Kernel) -> Program:
    """That of an unedited kernel, which lives as long as the process."""
    if id(kernel) not in _programs:
        _programs[id(kernel)] = Program(kernel)
    return _programs[id(kernel)]


def _compile(key: Any, make: Any) -> tuple[Callable[..., None], Kernel]:
    import tvm_ffi

    from flashkda.jit import compiler

    with tempfile.TemporaryDirectory(prefix="flashkda-") as folder:
        compiled = compiler._compile(key, make, f"--keep-ptx --dump-dir '{folder}'")
        kernel = parse(compiled.artifacts.PTX)
        source = Path(folder) / "kernel.o"
        source.write_bytes(compiler._export(key, compiled))
        library = Path(tempfile.mkdtemp(prefix="flashkda-simulator-")) / "kernel.so"
        linker = compiler.find_linker()
        if linker is None:
            raise RuntimeError("the simulator wants a linker")
        libraries = (str(_stand_in()), tvm_ffi.libinfo.find_libtvm_ffi())
        subprocess.run([linker, "-shared", "-o", str(library), str(source), *libraries], check=True)
    return tvm_ffi.load_module(str(library))[key.symbol], kernel
