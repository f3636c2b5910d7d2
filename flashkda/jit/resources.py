# SPDX-License-Identifier: Apache-2.0
"""What a compiled kernel uses of a multiprocessor, read from its machine code. Needs no GPU.

The architecture is in the code's ELF header. The rest comes from cuobjdump, of the package nvidia-cuda-cuobjdump or
of a CUDA toolkit on the PATH.
"""

from __future__ import annotations

import functools
import re
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from flashkda.errors import KernelBuildError

_ELF64 = b"\x7fELF\x02\x01"
_MACHINE_CUDA = 190
# ABI version: offset of the architecture's number in e_flags. (Toolkits disagree about the bit of the "a" features, and
# CUDA 13's sets none for sm_90a, so only the number is read.)
_NUMBER = {7: 0, 8: 8}


@dataclass(frozen=True)
class Resources:
    """What one kernel uses.

    registers     a thread
    spill_bytes   stores and loads of spilled registers, as ptxas counts them
    local_bytes   local memory of a thread (stack frame): spilled registers and arrays that are not in registers
    shared_bytes  shared memory of a CTA: dynamic, static, and the 1024 bytes that sm_90 and later reserve
    ptx, sass     the code as text; sass only where it was asked for
    """

    registers: int
    spill_bytes: int
    local_bytes: int
    shared_bytes: int
    ptx: str
    sass: str | None = None

    @property
    def local_accesses(self) -> int | None:
        """Instructions that load from or store to local memory; None without sass."""
        return None if self.sass is None else sass_local_accesses(self.sass)


@dataclass(frozen=True)
class CubinUsage:
    """Registers and local memory of a thread, static shared memory of a CTA: of the kernel that uses most of each."""

    registers: int
    local_bytes: int
    static_shared_bytes: int


def embedded_cubins(binary: bytes) -> list[bytes]:
    """The GPU code in an exported object, each as its own ELF file."""
    cubins = []
    start = binary.find(_ELF64)
    while start >= 0:
        header = binary[start : start + 64]
        if len(header) == 64 and struct.unpack_from("<H", header, 18)[0] == _MACHINE_CUDA:
            program_offset, section_offset = struct.unpack_from("<QQ", header, 32)
            program_size, programs, section_size, sections = struct.unpack_from("<HHHH", header, 54)
            size = max(program_offset + program_size * programs, section_offset + section_size * sections)
            cubins.append(binary[start : start + size])
        start = binary.find(_ELF64, start + 1)
    return cubins


def cubin_number(cubin: bytes) -> int:
    """Number of the architecture (90 of "sm_90a") that the machine code is for. Raises KernelBuildError for an unknown
    layout."""
    if len(cubin) < 64 or not cubin.startswith(_ELF64) or cubin[8] not in _NUMBER:
        raise KernelBuildError(f"GPU code: expected an ELF file of ABI {sorted(_NUMBER)}, found {cubin[:9]!r}")
    return int(struct.unpack_from("<I", cubin, 48)[0] >> _NUMBER[cubin[8]] & 0xFF)


def cubin_usage(cubin: bytes) -> CubinUsage:
    """Registers, local and static shared memory of the kernels in ``cubin``. Raises KernelBuildError."""
    text = _cuobjdump("--dump-resource-usage", cubin)
    kernels = [
        {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", line)}
        for line in text.splitlines()
        if "REG:" in line
    ]
    if not kernels or any(kernel.keys() != {"REG", "STACK", "SHARED", "LOCAL"} for kernel in kernels):
        raise KernelBuildError(
            f"cuobjdump --dump-resource-usage: expected REG, STACK, SHARED and LOCAL, found {text!r}"
        )
    return CubinUsage(
        registers=max(kernel["REG"] for kernel in kernels),
        local_bytes=max(kernel["STACK"] + kernel["LOCAL"] for kernel in kernels),
        static_shared_bytes=max(kernel["SHARED"] for kernel in kernels),
    )


def cubin_sass(cubin: bytes) -> str:
    """Disassembly of ``cubin``. Raises KernelBuildError."""
    return _cuobjdump("--dump-sass", cubin)


def sass_local_accesses(sass: str) -> int:
    """Instructions of the disassembly that load from or store to local memory (LDL, STL)."""
    # A line is /*address*/ [predicate] instruction; its encoding stands behind it, in comments too.
    return len(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?:LDL|STL)\b", sass, re.MULTILINE))


def ptxas_spills(log: str) -> int:
    """Bytes of spill stores and loads in what ``ptxas -v`` reported. Raises KernelBuildError when it says nothing."""
    # The DSL colours and wraps the report.
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", log).split())
    found = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    if not found:
        raise KernelBuildError(f"report of ptxas: expected the bytes of spill stores and loads, found {text!r}")
    return max(int(stores) + int(loads) for stores, loads in found)


def dynamic_shared_bytes(module: str) -> int:
    """Dynamic shared memory of the launch, from the text of the compiled host module. Raises KernelBuildError."""
    # Field 2 of cudaLaunchConfig_t, the one 64-bit integer in it; the value is a constant of the same function.
    config = r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
    sizes = []
    for function in module.split("llvm.func ")[1:]:
        for field in re.findall(
            rf"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, {config}", function
        ):
            stored = re.search(rf"llvm\.store (%\w+), {field} : i64", function)
            value = stored and re.search(rf"{stored[1]} = llvm\.mlir\.constant\((\d+) : i64\)", function)
            if value:
                sizes.append(int(value[1]))
    if not sizes:
        raise KernelBuildError(
            "compiled host module: expected a launch with a constant size of shared memory, found none"
        )
    return max(sizes)


@functools.cache
def find_cuobjdump() -> str:
    """Path of cuobjdump. Raises KernelBuildError that says how to get it."""
    from importlib import metadata

    try:
        for file in metadata.distribution("nvidia-cuda-cuobjdump").files or ():
            if file.name == "cuobjdump":
                return str(file.locate())
    except metadata.PackageNotFoundError:
        pass
    on_path = shutil.which("cuobjdump")
    if on_path is None:
        raise KernelBuildError(
            "cuobjdump is missing: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm, or put a CUDA toolkit's bin "
            "on the PATH",
            missing=["nvidia-cuda-cuobjdump"],
        )
    return on_path


def _cuobjdump(option: str, cubin: bytes) -> str:
    with tempfile.TemporaryDirectory(prefix="flashkda-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([find_cuobjdump(), option, str(path)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise KernelBuildError(f"cuobjdump {option} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout
