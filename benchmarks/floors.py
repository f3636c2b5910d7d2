# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="untyped-decorator"
"""What no kernel here can beat: a launch that does nothing, one that reads the states once, one that copies them.

All are launched as the kernels are (programmatic dependent launch, on torch's current stream), so that they show what
the launches and the memory cost. The result of the reading one hangs on all it has read; it is never written. The copy
is of all layers in one launch and in place, as a commit is: by a table of addresses, each slot onto itself.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from flashkda.jit.cache import Spec, load_kernel
from flashkda.jit.key import KernelKey

_THREADS = 256
_STATE = 128 * 128  # elements of a head
# The sum of no state: the compiler does not know it.
_NEVER = -1.2345e33

#: 16-byte loads of a thread. Few spread a small batch over more SMs, many keep more bytes in flight.
LOADS = (1, 2, 4)
COPY_LOADS = (4, 8, 16)


class Empty:
    """One CTA that waits for the launch before it, as every kernel has to, and ends."""

    @cute.jit
    def __call__(self, sink: cute.Tensor, stream: Any) -> None:
        self.kernel(sink).launch(
            grid=(1, 1, 1), block=(32, 1, 1), stream=stream, use_pdl=True, preferred_smem_carveout=100
        )

    @cute.kernel
    def kernel(self, sink: cute.Tensor) -> None:
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()


class StateRead:
    """Reads the states of all requests once, in 16-byte loads, ``loads`` a thread, all in flight together."""

    def __init__(self, dtype: Any, loads: int) -> None:
        self.loads = loads
        self.vector = 128 // dtype.width
        self.chunk = loads * self.vector * _THREADS  # elements a CTA

    @cute.jit
    def __call__(self, state: cute.Tensor, state_indices: cute.Tensor, sink: cute.Tensor, stream: Any) -> None:
        self.kernel(state, state_indices, sink).launch(
            grid=(_STATE // self.chunk, state.shape[1], state_indices.shape[0]),
            block=(_THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, state: cute.Tensor, state_indices: cute.Tensor, sink: cute.Tensor) -> None:
        tid, _, _ = cute.arch.thread_idx()
        part, head, n = cute.arch.block_idx()
        cute.arch.griddepcontrol_wait()
        slot = Int64(state_indices[n])
        first = head * _STATE + part * self.chunk + tid * self.vector
        source = state.iterator + (slot * state.stride[0] + Int64(first))
        values = []
        for i in cutlass.range_constexpr(self.loads):
            here = source + i * _THREADS * self.vector
            aligned = cute.make_ptr(here.dtype, here.toint(), here.memspace, assumed_align=16)
            values.append(cute.make_tensor(aligned, cute.make_layout(self.vector)).load())
        total = Float32(0.0)
        for i in cutlass.range_constexpr(self.loads):
            for j in cutlass.range_constexpr(self.vector):
                total += values[i][j].to(Float32)
        cute.arch.griddepcontrol_launch_dependents()
        if total == Float32(_NEVER):
            sink[0] = total


class StateCopy:
    """Reads the states of all requests and layers and writes them where they were, ``loads`` 16-byte accesses a thread.

    Asm that the compiler must keep stands between a load and its store, so that neither is dropped.
    """

    def __init__(self, dtype: Any, loads: int) -> None:
        self.loads = loads
        self.vector = 128 // dtype.width
        self.chunk = loads * self.vector * _THREADS  # elements a CTA

    @cute.jit
    def __call__(self, table: cute.Tensor, state: cute.Tensor, state_indices: cute.Tensor, stream: Any) -> None:
        parts = _STATE // self.chunk
        self.kernel(table, state, state_indices).launch(
            grid=(parts * state.shape[1], table.shape[0], state_indices.shape[0]),
            block=(_THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, table: cute.Tensor, state: cute.Tensor, state_indices: cute.Tensor) -> None:
        tid, _, _ = cute.arch.thread_idx()
        block, layer, n = cute.arch.block_idx()
        cute.arch.griddepcontrol_wait()
        address, slot = table[layer], Int64(state_indices[n])
        cute.arch.griddepcontrol_launch_dependents()
        first = block * self.chunk + tid * self.vector
        offset = (slot * state.stride[0] + Int64(first)) * (state.element_type.width // 8)
        values = []
        for i in cutlass.range_constexpr(self.loads):
            here = address + offset + i * (_THREADS * 16)
            pointer = cute.make_ptr(cutlass.Uint32, here, cute.AddressSpace.gmem, assumed_align=16)
            values.append((pointer, cute.make_tensor(pointer, cute.make_layout(4)).load()))
        for i in cutlass.range_constexpr(self.loads):
            pointer, loaded = values[i]
            words = cute.make_rmem_tensor(4, cutlass.Uint32)
            for j in cutlass.range_constexpr(4):
                words[j] = cute.arch.inline_ptx(
                    "mov.b32 {$w0}, {$r0};", write_only_types=[cutlass.Uint32], read_only_args=[loaded[j]]
                )
            cute.make_tensor(pointer, cute.make_layout(4)).store(words.load())


def spec(kind: str, arch: str, state_dtype: str = "float32", loads: int = 1) -> tuple[KernelKey, Callable[[], Any]]:
    """Key and recipe of a floor (floor_empty, floor_state_read, floor_state_copy), as flashkda.jit takes them."""
    here = sha256(Path(__file__).read_bytes()).hexdigest()  # the cache knows the sources of flashkda.kernels only
    params = (("loads", loads), ("source", here), ("state_dtype", state_dtype))
    return KernelKey(kind, params, arch), lambda: _recipe(kind, state_dtype, loads)


def specs(arch: str, state_dtype: str) -> list[Spec]:
    """All of them, for prebuild."""
    found: list[Spec] = [(spec, ("floor_empty", arch))]
    found += ((spec, ("floor_state_read", arch, state_dtype, loads)) for loads in LOADS)
    found += ((spec, ("floor_state_copy", arch, state_dtype, loads)) for loads in copy_loads(state_dtype))
    return found


def copy_loads(state_dtype: str) -> tuple[int, ...]:
    """The shapes of the copy: those of COPY_LOADS whose CTAs have a head at most."""
    element = 4 if state_dtype == "float32" else 2
    return tuple(loads for loads in COPY_LOADS if loads * 16 * _THREADS <= _STATE * element)


def load(kind: str, arch: str, state_dtype: str = "float32", loads: int = 1) -> Callable[..., None]:
    """The callable: (sink), (state, state_indices, sink) or, for the copy, (table, state, state_indices).

    sink is one fp32 and keeps its value. table: int64 [L], addresses of the layers' states; state is layer 0's, and
    stands for the shape and strides of all.
    """
    return load_kernel(*spec(kind, arch, state_dtype, loads))


def _recipe(kind: str, state_dtype: str, loads: int) -> tuple[Any, tuple[Any, ...]]:
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    sink = make_fake_tensor(Float32, (1,), (1,), assumed_align=4)
    if kind == "floor_empty":
        return Empty(), (sink, stream)
    dtype = {"float32": cutlass.Float32, "bfloat16": cutlass.BFloat16}[state_dtype]
    slots, heads, requests = cute.sym_int(), cute.sym_int(), cute.sym_int()
    state = make_fake_tensor(
        dtype, (slots, heads, 128, 128), (cute.sym_int64(divisibility=8), _STATE, 128, 1), assumed_align=16
    )
    indices = make_fake_tensor(cutlass.Int32, (requests,), (1,), assumed_align=4)
    if kind == "floor_state_copy":
        table = make_fake_tensor(Int64, (cute.sym_int(),), (1,), assumed_align=8)
        return StateCopy(dtype, loads), (table, state, indices, stream)
    return StateRead(dtype, loads), (state, indices, sink, stream)
