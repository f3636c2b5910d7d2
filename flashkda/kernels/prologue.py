# SPDX-License-Identifier: Apache-2.0
"""The window before the rule: loads of every token's inputs, conv, norms, gates, and the records of k and the gate.

A token warp prepares one token at a time, a lane four adjacent channels of q and of k. A value thread prepares quads of
the CTA's value rows. Past the window's end the last token is loaded again: that work is wasted, but without branches
every load is on its way before the first is used, and the tokens of a warp overlap. (Loads of two roles into the same
registers, predicated, would wait for each other.)
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int64

from . import conv, gate, memory
from .memory import at, copy_in, load, store, to_float
from .numerics import exp, mul, select
from .place import Place
from .token import TokenStore, key_scale, prepare_token
from .traits import HEAD_DIM, QUAD, TAPS, WARP, Traits
from .window import Window


class Constants(NamedTuple):
    """Fragments of what belongs to no token: conv weights of each stream, A_log, dt_bias."""

    weights: list
    rate: cute.Tensor
    bias: cute.Tensor


class Inputs(NamedTuple):
    """Fragments: per pass the taps [4, 4] of each stream, the raw gate [4] and raw beta. Without conv only the last tap
    is used."""

    taps: list
    gate: list
    beta: cute.Tensor


class Folded(NamedTuple):
    """Shared memory of the tokens to fold first: ``key`` and ``decay`` [capacity, 128], ``u`` [capacity, rows]."""

    key: object
    decay: object
    u: object


class Records(NamedTuple):
    """Fragments of what the window before has recorded, and of what this one will: per pass k and the raw gate [4] of
    the token warp, u [4] of the value quads, and the keys of this window."""

    key: list
    gate: list
    u: list
    own_key: list


class Prologue:
    """``fuse`` is whether conv is part of the launch; without it mixed_qkv holds the conv's result.

    A stream is a quad of channels of one token: q and k of a token warp, v of a value thread. With value warps the
    first stream is q or v, by the warp, in one pass and the same instructions; without them every warp has all three,
    and the passes of q and k (``token_passes``) and of v (``value_passes``) differ in number.
    """

    def __init__(self, traits: Traits, fuse: bool):
        self.traits = traits
        self.fuse = fuse
        self.roles = traits.value_warps > 0
        self.token_passes = -(-traits.capacity // traits.token_warps)
        self.value_passes = -(-traits.capacity * traits.quads // traits.value_threads)
        self.fold_passes = -(-traits.capacity * traits.quads // traits.threads)
        assert not self.roles or self.token_passes == self.value_passes == 1

    def inputs(self, passes, streams) -> Inputs:
        return Inputs(
            [[cute.make_rmem_tensor((TAPS, QUAD), BFloat16) for _ in range(streams)] for _ in range(passes)],
            [cute.make_rmem_tensor(QUAD, BFloat16) for _ in range(passes)],
            cute.make_rmem_tensor(passes, BFloat16),
        )

    def constants(self, weight_type, streams) -> Constants:
        return Constants(
            [cute.make_rmem_tensor(QUAD * TAPS, weight_type) for _ in range(streams)],
            cute.make_rmem_tensor(1, Float32),
            cute.make_rmem_tensor(QUAD, Float32),
        )

    def prepares_tokens(self, place: Place):
        return place.warp < self.traits.token_warps

    def _has_work(self, place: Place):
        """False for warps that only run the rule."""
        return place.warp < self.traits.token_warps + self.traits.value_warps

    def _value_item(self, place: Place):
        return place.tid - (self.traits.token_warps * WARP if self.roles else 0)

    def _value_token(self, place: Place, i):
        return (self._value_item(place) + i * self.traits.value_threads) // self.traits.quads

    def _value_row(self, place: Place):
        """First of the value thread's four rows, within the CTA."""
        return self._value_item(place) % self.traits.quads * QUAD

    def _value_channel(self, place: Place):
        return 2 * place.channels + place.head * HEAD_DIM + place.row0 + self._value_row(place)

    def _token(self, place: Place, i):
        return place.warp + i * self.traits.token_warps

    def _first_token(self, place: Place, i):
        """Token of the first stream: the token warp's, or the value thread's."""
        token = self._token(place, i)
        if not self.roles:
            return token
        return select(self.prepares_tokens(place), token, self._value_token(place, i))

    def _channel(self, place: Place, stream):
        """First channel of stream 0 (q, or v of a value warp) or 1 (k)."""
        channel = stream * place.channels + place.head * HEAD_DIM + place.lane * QUAD
        if stream or not self.roles:
            return channel
        return select(self.prepares_tokens(place), channel, self._value_channel(place))

    def _load_stream(self, taps, mixed_qkv, conv_state, request: Window, token, channel):
        token = memory.minimum(token, request.length - 1)
        if self.fuse:
            conv.load_taps(
                taps, mixed_qkv, conv_state, request.start, token, request.slot, request.column, channel, QUAD,
                self.traits.vector, self.traits.conv_layout,
            )  # fmt: skip
        else:
            pointer = at(mixed_qkv, Int64(request.start + token) * mixed_qkv.stride[0] + channel)
            for i, value in enumerate(load(pointer, QUAD, self.traits.vector)):
                taps[TAPS - 1, i] = value

    def _activate(self, taps, weights):
        """Conv and SiLU of the fragment, or the conv's result as it came; fp32 values of bf16 precision."""
        if self.fuse:
            return conv.convolve(conv.taps_as_float(taps, QUAD), conv.weights_as_float(weights, QUAD))
        return [Float32(taps[TAPS - 1, i]) for i in range(QUAD)]

    def _store_value(self, values, token, place: Place, v):
        memory.store_shared(values + (token * self.traits.rows + self._value_row(place)), v)

    def prefetch_constants(self, place: Place, conv_weight, dt_bias):
        """Sends for what ``load_constants`` will load, before the metadata is known.

        A load so early would cost more than it brings: the wait for the metadata would wait for it too.
        """
        memory.prefetch(at(dt_bias, place.head * HEAD_DIM + place.lane * QUAD))
        if self.fuse:
            for stream in range(2):
                memory.prefetch(at(conv_weight, self._channel(place, stream) * TAPS))

    @cute.jit
    def load_constants(self, constants: cutlass.Constexpr, place: cutlass.Constexpr, conv_weight, A_log, dt_bias):
        """Issues the loads that belong to no token. Where registers are scarce each warp loads what it needs; else all
        load everything, since a branch would come between the loads and the next ones."""
        if cutlass.const_expr(self.traits.lean):
            if self._has_work(place):
                self._load_first_constants(constants, place, conv_weight)
            if self.prepares_tokens(place):
                self._load_token_constants(constants, place, conv_weight, A_log, dt_bias)
        else:
            self._load_first_constants(constants, place, conv_weight)
            self._load_token_constants(constants, place, conv_weight, A_log, dt_bias)

    def _load_first_constants(self, constants: Constants, place: Place, conv_weight):
        if self.fuse:
            pointer = at(conv_weight, self._channel(place, 0) * TAPS)
            copy_in(constants.weights[0], pointer, QUAD * TAPS, self.traits.vector)

    def _load_token_constants(self, constants: Constants, place: Place, conv_weight, A_log, dt_bias):
        constants.rate[0] = A_log[place.head]
        pointer = at(dt_bias, place.head * HEAD_DIM + place.lane * QUAD)
        copy_in(constants.bias, pointer, QUAD, self.traits.vector)
        if self.fuse:
            pointer = at(conv_weight, self._channel(place, 1) * TAPS)
            copy_in(constants.weights[1], pointer, QUAD * TAPS, self.traits.vector)

    def load_value_constants(self, constants: Constants, place: Place, conv_weight):
        """The same for v, where it has no warps of its own."""
        if self.fuse:
            pointer = at(conv_weight, self._value_channel(place) * TAPS)
            copy_in(constants.weights[0], pointer, QUAD * TAPS, self.traits.vector)

    @cute.jit
    def load_token(
        self,
        inputs: cutlass.Constexpr,
        request: cutlass.Constexpr,
        place: cutlass.Constexpr,
        i: cutlass.Constexpr,
        mixed_qkv,
        conv_state,
        raw_gate,
        raw_beta,
    ):
        """Issues the loads of pass ``i`` of q (or v) and k, the gate and beta."""
        tensors = (mixed_qkv, conv_state)
        if cutlass.const_expr(self.traits.lean):
            if self._has_work(place):
                self._load_first(inputs, request, place, i, *tensors)
            if self.prepares_tokens(place):
                self._load_rest(inputs, request, place, i, *tensors, raw_gate, raw_beta)
        else:
            self._load_first(inputs, request, place, i, *tensors)
            self._load_rest(inputs, request, place, i, *tensors, raw_gate, raw_beta)

    def _load_first(self, inputs: Inputs, request: Window, place: Place, i, mixed_qkv, conv_state):
        token, channel = self._first_token(place, i), self._channel(place, 0)
        self._load_stream(inputs.taps[i][0], mixed_qkv, conv_state, request, token, channel)

    def _load_rest(self, inputs: Inputs, request: Window, place: Place, i, mixed_qkv, conv_state, raw_gate, raw_beta):
        token, channel = self._token(place, i), self._channel(place, 1)
        self._load_stream(inputs.taps[i][1], mixed_qkv, conv_state, request, token, channel)
        row = Int64(request.start + memory.minimum(token, request.length - 1))
        pointer = at(raw_gate, row * raw_gate.stride[0] + place.head * HEAD_DIM + place.lane * QUAD)
        copy_in(inputs.gate[i], pointer, QUAD, self.traits.vector)
        inputs.beta[i] = at(raw_beta, row * raw_beta.stride[0] + place.head).load()

    def load_value(self, inputs: Inputs, request: Window, place: Place, i, mixed_qkv, conv_state):
        """Issues the loads of value pass ``i``."""
        token, channel = self._value_token(place, i), self._value_channel(place)
        self._load_stream(inputs.taps[i][0], mixed_qkv, conv_state, request, token, channel)

    @cute.jit
    def prepare_token(
        self,
        inputs: cutlass.Constexpr,
        constants: cutlass.Constexpr,
        request: cutlass.Constexpr,
        place: cutlass.Constexpr,
        i: cutlass.Constexpr,
        shared: cutlass.Constexpr,
        values,
        key_gate,
        records: cutlass.Constexpr = None,
    ):
        """Leaves the operands of pass ``i`` in ``shared`` (or v in ``values``); records k and the raw gate, or where
        records are folded leaves k in ``records``."""
        if cutlass.const_expr(self.roles):
            first = self._value_token(place, i)
            if self._has_work(place) & (place.warp >= self.traits.token_warps):
                v = self._activate(inputs.taps[i][0], constants.weights[0])
                if first < self.traits.capacity:
                    self._store_value(values, first, place, v)
        if self.prepares_tokens(place):
            token = self._token(place, i)
            query = self._activate(inputs.taps[i][0], constants.weights[0])
            key = self._activate(inputs.taps[i][1], constants.weights[1])
            raw = [inputs.gate[i][j] for j in range(QUAD)]
            bias = [constants.bias[j] for j in range(QUAD)]
            decay = gate.decay(self.traits, exp(constants.rate[0]), to_float(raw), bias)
            prepare_token(shared, token, place.lane, query, key, decay, gate.beta(Float32(inputs.beta[i])))
            if cutlass.const_expr(self.traits.fold):
                # The record of the window before may still be read by the cluster's other CTAs.
                self._keep(records, i, key)
            elif cutlass.const_expr(not self.traits.decode):
                self._record(key_gate, request, place, token, [k.to(BFloat16) for k in key], raw)

    def _keep(self, records: Records, i, key):
        for j in range(QUAD):
            records.own_key[i][j] = key[j].to(BFloat16)

    def _key_gate(self, key_gate, request: Window, place: Place, token):
        """Pointer to the lane's quad of a token's recorded key; the gate is 128 elements behind."""
        offset = request.record * key_gate.stride[0] + place.lane * QUAD
        return at(key_gate, offset + (Int64(place.head) * place.window + token) * (2 * HEAD_DIM))

    @cute.jit
    def _record(
        self, key_gate, request: cutlass.Constexpr, place: cutlass.Constexpr, token, key: cutlass.Constexpr,
        raw: cutlass.Constexpr,
    ):  # fmt: skip
        """Stores this CTA's share of a token's k and raw gate."""
        if self._owns_quad(place) & (token < request.length):
            pointer = self._key_gate(key_gate, request, place, token)
            store(pointer, key, self.traits.vector)
            store(pointer + HEAD_DIM, raw, self.traits.vector)

    def records(self) -> Records:
        """Fragments for ``load_records``; empty where nothing is folded."""
        tokens, values = (self.token_passes, self.fold_passes) if self.traits.fold else (0, 0)

        def quads(count, dtype):
            return [cute.make_rmem_tensor(QUAD, dtype) for _ in range(count)]

        return Records(
            quads(tokens, BFloat16), quads(tokens, BFloat16), quads(values, Float32), quads(tokens, BFloat16)
        )

    def _fold_item(self, place: Place, i):
        """Token and first row (of the CTA's) of the thread's quad of u in pass ``i``."""
        item = place.tid + i * self.traits.threads
        return item // self.traits.quads, item % self.traits.quads * QUAD

    def load_records(self, records: Records, request: Window, place: Place, last, corrections, key_gate):
        """Issues the loads of the records to fold, up to token ``last``; past it the last one is loaded again."""
        for i in range(self.token_passes):
            token = memory.minimum(self._token(place, i), last)
            pointer = self._key_gate(key_gate, request, place, token)
            copy_in(records.key[i], pointer, QUAD, self.traits.vector)
            copy_in(records.gate[i], pointer + HEAD_DIM, QUAD, self.traits.vector)
        for i in range(self.fold_passes):
            token, row = self._fold_item(place, i)
            token = memory.minimum(token, last)
            offset = request.record * corrections.stride[0] + place.row0 + row
            offset = offset + (Int64(place.head) * place.window + token) * HEAD_DIM
            copy_in(records.u[i], at(corrections, offset), QUAD, self.traits.vector)

    @cute.jit
    def prepare_records(
        self, records: cutlass.Constexpr, constants: cutlass.Constexpr, place: cutlass.Constexpr,
        folded: cutlass.Constexpr,
    ):  # fmt: skip
        """Leaves what the fold reads in shared memory."""
        for i in cutlass.range_constexpr(self.token_passes):
            if self.prepares_tokens(place):
                keys = [Float32(records.key[i][j]) for j in range(QUAD)]
                gates = [Float32(records.gate[i][j]) for j in range(QUAD)]
                scale = key_scale(keys)
                bias = [constants.bias[j] for j in range(QUAD)]
                decay = gate.decay(self.traits, exp(constants.rate[0]), gates, bias)
                offset = self._token(place, i) * HEAD_DIM + place.lane * QUAD
                if self._token(place, i) < self.traits.capacity:
                    memory.store_shared(folded.key + offset, [mul(k, scale) for k in keys])
                    memory.store_shared(folded.decay + offset, decay)
        for i in cutlass.range_constexpr(self.fold_passes):
            token, row = self._fold_item(place, i)
            if token < self.traits.capacity:
                u = [records.u[i][j] for j in range(QUAD)]
                memory.store_shared(folded.u + (token * self.traits.rows + row), u)

    @cute.jit
    def store_records(
        self, records: cutlass.Constexpr, inputs: cutlass.Constexpr, request: cutlass.Constexpr,
        place: cutlass.Constexpr, key_gate,
    ):  # fmt: skip
        """Records k and the raw gate, once no CTA of the cluster reads the old ones any more."""
        for i in cutlass.range_constexpr(self.token_passes):
            if self.prepares_tokens(place):
                key = [records.own_key[i][j] for j in range(QUAD)]
                raw = [inputs.gate[i][j] for j in range(QUAD)]
                self._record(key_gate, request, place, self._token(place, i), key, raw)

    @cute.jit
    def prepare_value(
        self,
        inputs: cutlass.Constexpr,
        constants: cutlass.Constexpr,
        place: cutlass.Constexpr,
        i: cutlass.Constexpr,
        values,
    ):
        """Leaves v of value pass ``i`` in ``values`` [capacity, rows]."""
        token = self._value_token(place, i)
        v = self._activate(inputs.taps[i][0], constants.weights[0])
        if token < self.traits.capacity:
            self._store_value(values, token, place, v)

    def _owns_quad(self, place: Place):
        """Whether this CTA writes what belongs to the lane's key channels: each of a head's CTAs writes its share."""
        return place.lane // self.traits.quads == place.rank

    def _roll(self, taps, mixed_qkv, conv_state, request: Window, token, channel, i):
        traits = self.traits
        if traits.lean:
            # The input is read again (it is near, and nobody writes it), so that no registers kept it until now.
            pointer = at(mixed_qkv, Int64(request.start + token) * mixed_qkv.stride[0] + channel)
            for j, value in enumerate(load(pointer, QUAD, traits.vector)):
                taps[TAPS - 1, j] = value
        conv.roll_window(
            conv_state, taps, request.slot, token, channel, QUAD, traits.vector, traits.conv_layout, i == 0
        )

    @cute.jit
    def roll_windows(
        self,
        inputs: cutlass.Constexpr,
        values: cutlass.Constexpr,
        request: cutlass.Constexpr,
        place: cutlass.Constexpr,
        mixed_qkv,
        conv_state,
    ):
        """Writes this CTA's share of the conv window; ``values`` are the inputs of the value passes, or None."""
        for i in cutlass.range_constexpr(self.token_passes):
            token, first = self._token(place, i), self._first_token(place, i)
            owns_first = self._owns_quad(place)
            if cutlass.const_expr(self.roles):
                owns_first = owns_first | (place.warp >= self.traits.token_warps)
                owns_first = owns_first & self._has_work(place)
            if (first < request.length) & owns_first:
                self._roll(inputs.taps[i][0], mixed_qkv, conv_state, request, first, self._channel(place, 0), i)
            if (token < request.length) & self._owns_quad(place):
                self._roll(inputs.taps[i][1], mixed_qkv, conv_state, request, token, self._channel(place, 1), i)
        if cutlass.const_expr(not self.roles):
            for i in cutlass.range_constexpr(self.value_passes):
                token = self._value_token(place, i)
                if token < request.length:
                    channel = self._value_channel(place)
                    self._roll(values.taps[i][0], mixed_qkv, conv_state, request, token, channel, i)


def fold_store(allocator, traits: Traits) -> Folded:
    """Shared memory for the records of a window."""
    sizes = (HEAD_DIM, HEAD_DIM, traits.rows)
    return Folded(*(memory.shared_array(allocator, Float32, traits.capacity * size) for size in sizes))


def token_store(allocator, capacity) -> TokenStore:
    """Shared memory for the operands of ``capacity`` tokens."""
    return TokenStore(
        *(memory.shared_array(allocator, Float32, capacity * HEAD_DIM) for _ in range(3)),
        *(memory.shared_array(allocator, Float32, capacity) for _ in range(2)),
    )
