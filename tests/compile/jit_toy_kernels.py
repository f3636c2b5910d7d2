# SPDX-License-Identifier: Apache-2.0
"""The small kernels of jit_toys. A module of their own: the DSL looks up annotations among a module's globals."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32

THREADS = 128


class Axpy:
    """y = a*x (+ bias, where there is one)."""

    @cute.jit
    def __call__(self, x: cute.Tensor, a: cute.Tensor, bias: cute.Tensor | None, y: cute.Tensor, stream):
        n = x.shape[0]
        grid = [cute.ceil_div(n, THREADS), 1, 1]
        self.kernel(x, a, bias, y, n).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, a: cute.Tensor, bias: cute.Tensor | None, y: cute.Tensor, n: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * THREADS + thread
        if i < n:
            value = a[0] * x[i]
            if cutlass.const_expr(bias is not None):
                value = value + bias[i]  # type: ignore[index]
            y[i] = value


class Rotate:
    """Holds ``values`` registers a thread over a loop, and ``shared`` floats of shared memory."""

    def __init__(self, values: int, shared: int):
        self.values = values
        self.shared = shared

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        self.kernel(x, y).launch(grid=[x.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout((self.shared,)), 16)
        row[thread] = x[block, thread]
        cute.arch.barrier()
        held = cute.make_rmem_tensor((self.values,), Float32)
        for i in cutlass.range_constexpr(self.values):
            held[i] = row[(thread + i) % self.shared]
        for j in range(x.shape[0]):
            for i in cutlass.range_constexpr(self.values):
                held[i] = cute.math.fma(held[i], held[(i + 7) % self.values], x[j, 0])
        total = Float32(0.0)
        for i in cutlass.range_constexpr(self.values):
            total = total + held[i]
        y[block, thread] = total


@cute.jit
def refuse(x: cute.Tensor):
    raise ValueError("no such tile")


def axpy(bias: bool):
    rows = cute.sym_int()

    def vector(size):
        return cute.runtime.make_fake_tensor(Float32, (size,), (1,), assumed_align=4)

    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return Axpy(), (vector(rows), vector(1), vector(rows) if bias else None, vector(rows), stream)


def rotate(values: int, shared: int):
    rows = cute.sym_int()
    matrix = [cute.runtime.make_fake_tensor(Float32, (rows, THREADS), (THREADS, 1), assumed_align=16) for _ in range(2)]
    return Rotate(values, shared), (*matrix, cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True))


def refused():
    return refuse, (cute.runtime.make_fake_tensor(Float32, (4,), (1,)),)
