# SPDX-License-Identifier: Apache-2.0
"""The window before the rule: loads of every token's inputs, conv, norms, gates, and the records of k and the gate.

A warp prepares one token at a time, a lane four adjacent channels of q and of k. v belongs to the threads that own its
rows, a token a key lane. Past the window's end the last token is loaded again: that work is wasted, but without
branches every load is on its way before the first is used, and tokens of one warp overlap.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from . import conv, gate, memory
from .memory import at, load, store, to_float
from .numerics import exp
from .token import TokenStore, prepare_token
from .traits import HEAD_DIM, QUAD, TAPS, Traits
from .window import Window


class Place(NamedTuple):
    """Where a thread stands: its head and the CTA's first row ``row0`` of it, its own first row within the CTA, and the
    request's ``record`` row and window capacity T."""

    head: Int32
    rank: Int32
    row0: Int32
    tid: Int32
    warp: Int32
    lane: Int32
    key_lane: Int32
    local_row: Int32
    channels: Int32
    window: Int32
    record: Int64


class Inputs(NamedTuple):
    """Register fragments: per token pass the taps [4, 4] of q and k, the raw gate [4] and raw beta; per value pass the
    taps [4, rows_per_thread] of v. Without conv only the last tap is used."""

    query_key: list
    gate: list
    beta: cute.Tensor
    value: list


class Prologue:
    """``fuse`` is whether conv is part of the launch; without it mixed_qkv holds the conv's result."""

    def __init__(self, traits: Traits, fuse: bool):
        self.traits = traits
        self.fuse = fuse
        self.token_passes = -(-traits.capacity // traits.warps)
        self.value_passes = -(-traits.capacity // traits.key_lanes)

    def fragments(self) -> Inputs:
        tokens, values = range(self.token_passes), range(self.value_passes)
        return Inputs(
            [[cute.make_rmem_tensor((TAPS, QUAD), BFloat16) for _ in range(2)] for _ in tokens],
            [cute.make_rmem_tensor(QUAD, BFloat16) for _ in tokens],
            cute.make_rmem_tensor(self.token_passes, BFloat16),
            [cute.make_rmem_tensor((TAPS, self.traits.rows_per_thread), BFloat16) for _ in values],
        )

    def _token(self, place: Place, i):
        return place.warp + i * self.traits.warps

    def _value_token(self, place: Place, i):
        return place.key_lane + i * self.traits.key_lanes

    def _channel(self, place: Place, part):
        """This lane's first channel of q (part 0) or k (part 1)."""
        return part * place.channels + place.head * HEAD_DIM + place.lane * QUAD

    def _value_channel(self, place: Place):
        return 2 * place.channels + place.head * HEAD_DIM + place.row0 + place.local_row

    def _load_inputs(self, taps, mixed_qkv, conv_state, request: Window, token, column, channel, count):
        if self.fuse:
            conv.load_taps(
                taps, mixed_qkv, conv_state, request.start, token, request.slot, column, channel, count,
                self.traits.vector, self.traits.conv_layout,
            )  # fmt: skip
        else:
            pointer = at(mixed_qkv, Int64(request.start + token) * mixed_qkv.stride[0] + channel)
            for i, value in enumerate(load(pointer, count, self.traits.vector)):
                taps[TAPS - 1, i] = value

    def _activate(self, taps, weights, count):
        """Conv and SiLU of the fragment, or the conv's result as it came; fp32 values of bf16 precision."""
        if self.fuse:
            return conv.convolve(conv.taps_as_float(taps, count), weights)
        return [Float32(taps[TAPS - 1, i]) for i in range(count)]

    @cute.jit
    def load(
        self,
        inputs: cutlass.Constexpr,
        request: cutlass.Constexpr,
        place: cutlass.Constexpr,
        column,
        mixed_qkv,
        conv_state,
        raw_gate,
        raw_beta,
    ):
        """Issues the loads of all tokens."""
        last = request.length - 1
        if place.warp < self.traits.capacity:
            for i in cutlass.range_constexpr(self.token_passes):
                token = memory.minimum(self._token(place, i), last)
                for part in cutlass.range_constexpr(2):
                    self._load_inputs(
                        inputs.query_key[i][part], mixed_qkv, conv_state, request, token, column,
                        self._channel(place, part), QUAD,
                    )  # fmt: skip
                row = Int64(request.start + token)
                pointer = at(raw_gate, row * raw_gate.stride[0] + place.head * HEAD_DIM + place.lane * QUAD)
                values = load(pointer, QUAD, self.traits.vector)
                for j in cutlass.range_constexpr(QUAD):
                    inputs.gate[i][j] = values[j]
                inputs.beta[i] = at(raw_beta, row * raw_beta.stride[0] + place.head).load()
        for i in cutlass.range_constexpr(self.value_passes):
            token = memory.minimum(self._value_token(place, i), last)
            self._load_inputs(
                inputs.value[i], mixed_qkv, conv_state, request, token, column, self._value_channel(place),
                self.traits.rows_per_thread,
            )  # fmt: skip

    @cute.jit
    def prepare(
        self,
        inputs: cutlass.Constexpr,
        request: cutlass.Constexpr,
        place: cutlass.Constexpr,
        shared: cutlass.Constexpr,
        values,
        conv_weight,
        A_log,
        dt_bias,
        key_gate,
    ):
        """Leaves the operands in ``shared`` and v in ``values`` [capacity, rows]; records k and the raw gate."""
        traits = self.traits
        if place.warp < traits.capacity:
            rate = exp(A_log[place.head])
            bias = load(at(dt_bias, place.head * HEAD_DIM + place.lane * QUAD), QUAD, traits.vector)
            weights = [None, None]
            if cutlass.const_expr(self.fuse):
                weights = [
                    conv.load_weights(conv_weight, self._channel(place, part), QUAD, traits.vector) for part in range(2)
                ]
            for i in cutlass.range_constexpr(self.token_passes):
                token = self._token(place, i)
                query, key = (self._activate(inputs.query_key[i][part], weights[part], QUAD) for part in range(2))
                raw = [inputs.gate[i][j] for j in range(QUAD)]
                decay = gate.decay(traits, rate, to_float(raw), bias)
                prepare_token(shared, token, place.lane, query, key, decay, gate.beta(Float32(inputs.beta[i])))
                if self.owns_quad(place) & (token < request.length):
                    offset = place.record * key_gate.stride[0] + place.lane * QUAD
                    offset = offset + (Int64(place.head) * place.window + token) * (2 * HEAD_DIM)
                    store(at(key_gate, offset), [k.to(BFloat16) for k in key], traits.vector)
                    store(at(key_gate, offset + HEAD_DIM), raw, traits.vector)
        value_weights = None
        if cutlass.const_expr(self.fuse):
            value_weights = conv.load_weights(
                conv_weight, self._value_channel(place), traits.rows_per_thread, traits.vector
            )
        for i in cutlass.range_constexpr(self.value_passes):
            token = self._value_token(place, i)
            v = self._activate(inputs.value[i], value_weights, traits.rows_per_thread)
            if token < traits.capacity:
                memory.store_shared(values + (token * traits.rows + place.local_row), v)

    def owns_quad(self, place: Place):
        """Whether this CTA writes what belongs to the lane's key channels: each of a head's CTAs writes its share."""
        return place.lane // self.traits.quads == place.rank

    @cute.jit
    def roll_windows(
        self, inputs: cutlass.Constexpr, request: cutlass.Constexpr, place: cutlass.Constexpr, conv_state
    ):
        """Writes this CTA's share of the conv window, from the taps that are still in registers."""
        traits = self.traits
        for i in cutlass.range_constexpr(self.token_passes):
            token = self._token(place, i)
            if (token < request.length) & self.owns_quad(place):
                for part in cutlass.range_constexpr(2):
                    conv.roll_window(
                        conv_state, inputs.query_key[i][part], request.slot, token, self._channel(place, part), QUAD,
                        traits.vector, traits.conv_layout,
                    )  # fmt: skip
        for i in cutlass.range_constexpr(self.value_passes):
            token = self._value_token(place, i)
            if token < request.length:
                conv.roll_window(
                    conv_state, inputs.value[i], request.slot, token, self._value_channel(place),
                    traits.rows_per_thread, traits.vector, traits.conv_layout,
                )  # fmt: skip


def token_store(allocator, capacity) -> TokenStore:
    """Shared memory for the operands of ``capacity`` tokens."""
    return TokenStore(
        *(memory.shared_array(allocator, Float32, capacity * HEAD_DIM) for _ in range(3)),
        *(memory.shared_array(allocator, Float32, capacity) for _ in range(2)),
    )
