# SPDX-License-Identifier: Apache-2.0
"""The tensor cores' product of fp32 numbers: 16 x 8 by 8 x 8 a warp, with tf32 operands in two parts.

An fp32 number is the sum of two tf32 ones to 2^-22 of it or better. Who multiplies two such sums leaves out the product
of the two small parts. Of a warp, lane 4g + l has rows g and g + 8 of the first operand at columns l and l + 4, column
g of the second at rows l and l + 4, and of the product rows g and g + 8 at columns 2l and 2l + 1.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32


def split(x):
    """(high, low) as bits: tf32 numbers whose sum is x to 2^-23, high being x rounded to nearest."""
    return cute.arch.inline_ptx(
        "{\n.reg .f32 high, low;\n"
        "cvt.rna.tf32.f32 {$w0}, {$r0};\n"
        "mov.b32 high, {$w0};\n"
        "sub.rn.f32 low, {$r0}, high;\n"
        "cvt.rna.tf32.f32 {$w1}, low;\n}",
        write_only_types=[Int32, Int32],
        read_only_args=[x],
    )


def split_state(x):
    """The same for the state, of which there is much: high is cut off rather than rounded, which leaves low a bit more;
    rounded to nearest, where the tensor cores cut off, it is x - high to 2^-22 of x."""
    return cute.arch.inline_ptx(
        "{\n.reg .f32 high, low;\n.reg .b32 bits;\n"
        "and.b32 {$w0}, {$r0}, 0xffffe000;\n"
        "mov.b32 high, {$w0};\n"
        "mov.b32 low, {$r0};\n"
        "sub.rn.f32 low, low, high;\n"
        "mov.b32 bits, low;\n"
        "add.u32 {$w1}, bits, 0x1000;\n}",
        write_only_types=[Int32, Int32],
        read_only_args=[bits(x)],
    )


def bits(x):
    """The bits of an fp32 number."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


def number(bits):
    """The fp32 number of these bits."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


def mma(a, b, c):
    """c + a b of one step: 16 x 8 (four registers), 8 x 8 (two), 16 x 8 (four fp32)."""
    return cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *c],
    )
