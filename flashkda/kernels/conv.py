# SPDX-License-Identifier: Apache-2.0
"""Short convolution: y = silu(w0*h0 + w1*h1 + w2*h2 + w3*x) -> bf16, and the window it rolls.

The window of a slot has T+2 columns. Token t of this call sees, in taps 0..3, the inputs t-3..t; those before the
first token are history, in columns a+t+0..2 where a is the history's first column. After the call columns 0 and 1 hold
the last two history inputs and column t+2 the input of token t.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from .memory import at, load, store
from .numerics import fma, mul, select, silu, to_bf16_and_back
from .traits import TAPS


def weights_as_float(weights, count):
    """The fragment ``weights`` [count * 4], channel-major, as ``count`` lists of 4 fp32 scalars."""
    return [[Float32(weights[i * TAPS + j]) for j in range(TAPS)] for i in range(count)]


def convolve(taps, weights):
    """taps: four lists (oldest first) of channel values; returns one list, rounded to bf16 and widened again."""
    result = []
    for channel, weight in enumerate(weights):
        y = mul(weight[0], taps[0][channel])
        for j in range(1, TAPS):
            y = fma(weight[j], taps[j][channel], y)
        result.append(to_bf16_and_back(silu(y)))
    return result


@cute.jit
def load_taps(
    taps: cute.Tensor,
    mixed_qkv: cute.Tensor,
    conv_state: cute.Tensor,
    start: Int32,
    token: Int32,
    slot: Int64,
    column: Int32,
    channel: Int32,
    count: cutlass.Constexpr,
    vector: cutlass.Constexpr,
    layout: cutlass.Constexpr,
):
    """The four inputs that token ``token`` sees, for ``count`` adjacent channels; fills ``taps`` [4, count] bf16."""
    window = at(conv_state, slot * conv_state.stride[0] + Int64(channel) * conv_state.stride[1])
    for j in cutlass.range_constexpr(TAPS):
        row = token + (j - (TAPS - 1))
        source = at(mixed_qkv, Int64(start + row) * mixed_qkv.stride[0] + channel)
        if cutlass.const_expr(j == TAPS - 1):
            values = load(source, count, vector)
            for i in cutlass.range_constexpr(count):
                taps[j, i] = values[i]
        elif cutlass.const_expr(layout == "SD"):
            # Columns of the window are rows of channels here, as mixed_qkv's are: choose the address, not the value.
            history = window + Int64(column + token + j) * conv_state.stride[2]
            address = select(row < 0, history.toint(), source.toint())
            pointer = cute.make_ptr(BFloat16, address, cute.AddressSpace.gmem, assumed_align=2 * vector)
            values = load(pointer, count, vector)
            for i in cutlass.range_constexpr(count):
                taps[j, i] = values[i]
        else:
            if row < 0:
                for i in cutlass.range_constexpr(count):
                    taps[j, i] = (window + i * Int64(conv_state.stride[1]) + (column + token + j)).load()
            else:
                values = load(source, count, vector)
                for i in cutlass.range_constexpr(count):
                    taps[j, i] = values[i]


def store_column(conv_state, slot, column, channel, values, vector, layout):
    """Values of adjacent channels to one column of a slot."""
    base = slot * conv_state.stride[0] + Int64(channel) * conv_state.stride[1]
    pointer = at(conv_state, base + Int64(column) * conv_state.stride[2])
    if layout == "SD":
        store(pointer, values, vector)
    else:
        for i, value in enumerate(values):
            (pointer + i * Int64(conv_state.stride[1])).store(value)


@cute.jit
def roll_window(
    conv_state: cute.Tensor,
    taps: cute.Tensor,
    slot: Int64,
    token: Int32,
    channel: Int32,
    count: cutlass.Constexpr,
    vector: cutlass.Constexpr,
    layout: cutlass.Constexpr,
    may_be_first: cutlass.Constexpr,
):
    """Writes token ``token``'s input to column token+2 and, with token 0, the last two history inputs to 0 and 1.

    Where the token cannot be 0, ``may_be_first`` false spares the registers of its history.
    """
    inputs = [taps[TAPS - 1, i] for i in range(count)]
    store_column(conv_state, slot, token + 2, channel, inputs, vector, layout)
    if cutlass.const_expr(may_be_first):
        if token == 0:
            for column in cutlass.range_constexpr(2):
                history = [taps[column + 1, i] for i in range(count)]
                store_column(conv_state, slot, Int32(column), channel, history, vector, layout)


def load_columns(columns, conv_state, slot, first, channel, count, vector, layout):
    """Columns ``first``, first+1, ... of ``count`` adjacent channels into the fragment [columns, count]."""
    base = slot * conv_state.stride[0] + Int64(channel) * conv_state.stride[1]
    for column in range(columns.shape[0]):
        pointer = at(conv_state, base + Int64(first + column) * conv_state.stride[2])
        if layout == "SD":
            values = load(pointer, count, vector)
        else:
            values = [(pointer + i * Int64(conv_state.stride[1])).load() for i in range(count)]
        for i, value in enumerate(values):
            columns[column, i] = value


def store_columns(conv_state, columns, slot, channel, count, vector, layout):
    """The fragment [columns, count] to columns 0, 1, ... of ``slot``."""
    for column in range(columns.shape[0]):
        values = [columns[column, i] for i in range(count)]
        store_column(conv_state, slot, Int32(column), channel, values, vector, layout)


def taps_as_float(taps, count):
    """The fragment ``taps`` [4, count] as four lists of fp32 scalars."""
    return [[Float32(taps[j, i]) for i in range(count)] for j in range(TAPS)]
