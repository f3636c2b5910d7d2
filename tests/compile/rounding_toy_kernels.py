# SPDX-License-Identifier: Apache-2.0
"""One expression a kernel, for the tests of the scans. A module of its own: the DSL looks up annotations in it."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.math import RoundingMode

from flashkda.kernels import numerics

THREADS = 32
_RN = RoundingMode.NEAREST_EVEN


def _vector(tensor):
    return cute.make_tensor(tensor.iterator, cute.make_layout(4)).load()


# Values come as scalars; ``x``, ``y``, ``z`` are elements of the input.
EXPRESSIONS = {
    "x*y": lambda x, y, z: x * y,
    "x+y": lambda x, y, z: x + y,
    "x-y": lambda x, y, z: x - y,
    "x/y": lambda x, y, z: x / y,
    "x*y+z": lambda x, y, z: x * y + z,
    "x*y-z": lambda x, y, z: x * y - z,
    "x*y+z*x": lambda x, y, z: x * y + z * x,
    "mul.rn then +": lambda x, y, z: numerics.mul(x, y) + z,
    "* then add.rn": lambda x, y, z: numerics.add(x * y, z),
    "fma.rz": lambda x, y, z: cute.math.fma(x, y, z, rounding=RoundingMode.ZERO),
    "add.ftz": lambda x, y, z: cute.math.add(x, y, rounding=_RN, ftz=True),
    "exp of the DSL": lambda x, y, z: cute.math.exp(x),
    "fast exp of the DSL": lambda x, y, z: cute.math.exp(x, fastmath=True),
    "bf16 product": lambda x, y, z: (x.to(BFloat16) * y.to(BFloat16)).to(Float32),
    "f16": lambda x, y, z: x.to(cutlass.Float16).to(Float32),
    "mul then add": lambda x, y, z: numerics.add(numerics.mul(x, y), z),
    "numerics": lambda x, y, z: numerics.sub(
        numerics.fma(numerics.exp(x), numerics.softplus(y), numerics.silu(z)),
        numerics.mul(numerics.rsqrt(x), numerics.to_bf16_and_back(numerics.add(y, z))),
    ),
    "moves": lambda x, y, z: numerics.select(x < y, cute.arch.shuffle_sync_bfly(x, 1), -z),
}


class Expression:
    """out[i] = the expression, of x = in[i], y = in[i + 32], z = in[i + 64]; ``vector``: in[0..3] * in[0..3] too."""

    def __init__(self, name: str, vector: bool):
        self.expression = EXPRESSIONS[name]
        self.vector = vector

    @cute.jit
    def __call__(self, values: cute.Tensor, out: cute.Tensor, stream):
        self.kernel(values, out).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, values: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        x, y, z = (values[thread + i * THREADS] for i in range(3))
        out[thread] = self.expression(x, y, z)
        if cutlass.const_expr(self.vector):
            square = _vector(values) * _vector(values)
            out[thread] = square[0]


class LocalArray:
    """An array that is indexed at run time, and so has no place in registers. Nothing is spilled."""

    @cute.jit
    def __call__(self, values: cute.Tensor, out: cute.Tensor, stream):
        self.kernel(values, out).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, values: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        held = cute.make_rmem_tensor(64, Float32)
        held.fill(0.0)
        for i in range(Int32(values[thread])):
            held[i % 64] = values[i % 96]
        out[thread] = held[thread]


def recipe(kernel):
    """The kernel and its arguments: 96 values in, 32 out."""
    tensors = [cute.runtime.make_fake_tensor(Float32, (n,), (1,), assumed_align=16) for n in (96, 32)]
    return kernel, (*tensors, cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True))
