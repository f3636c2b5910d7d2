# SPDX-License-Identifier: Apache-2.0
"""The window of a (request, head) pair in a persistent CTA: fetched a pair ahead, then prepared for the rule.

What a window needs from memory is copied asynchronously while the pair before it is computed, so that nobody waits
for a load and no register holds one: rows of q|k|v behind the three of its history, gates, weights, and the state by a
bulk copy. Later a warp prepares a token at a time out of shared memory, a lane four adjacent channels of q, k and v.
The conv window is rolled and k and the gate are recorded here, once the history is in shared memory.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from . import conv, gate, memory
from .memory import at, load, store, store_shared, to_float
from .numerics import exp, mul, select
from .token import TokenStore, key_scale, prepare_token
from .traits import HEAD_DIM, QUAD, TAPS, WARP, WINDOW_WORDS, Traits
from .window import Metadata, Window, request_window, tokens_to_fold

_STREAMS = 3
_HISTORY = TAPS - 1
_WIDE = 8  # bf16 of a 16-byte copy
_ROW_THREADS = HEAD_DIM // _WIDE
_LENGTHS, _INDICES = 3, 2


class Raw(NamedTuple):
    """What comes from memory: ``rows`` [3, 3 + capacity, 128] bf16 of q, k and v, history first; ``gates`` and
    ``closing`` (the output gate) [capacity, 128] bf16; ``folded`` and ``folded_u`` [capacity, 256 and 128], records of
    k and the gate, and of u; ``weights`` [3, 128, 4]; ``bias`` [128]; ``betas`` [capacity], the aligned pair around
    each raw beta; ``rate``, A_log of the head; ``words`` [2, 8], this window and the next; ``lengths`` [2, 3] and
    ``indices`` [2, 2], metadata as memory has it, of the next window and the one after it; ``padding``, the first row
    that belongs to no request."""

    rows: object
    gates: object
    closing: object
    folded: object
    folded_u: object
    weights: object
    bias: object
    betas: object
    rate: object
    words: object
    lengths: object
    indices: object
    padding: object


class Prepared(NamedTuple):
    """What the rule reads and leaves: operands; ``values`` [capacity, 128], v and then u; ``outputs`` [capacity, 128],
    o before its rounding; ``gates``, the output gate; ``folded_key``, ``folded_decay`` and ``folded_u`` [capacity, 128]
    of the tokens to fold first."""

    shared: TokenStore
    values: object
    outputs: object
    gates: object
    folded_key: object
    folded_decay: object
    folded_u: object


class Known(NamedTuple):
    """A window as its words say: ``request`` (with the length that its rows have), whether it is ``live``, the number
    of tokens to prepare, and the number to fold."""

    request: Window
    live: Int32
    length: Int32
    count: Int32


class WindowStage:
    """``warps`` share the tokens of a window."""

    def __init__(self, traits: Traits):
        self.traits = traits
        self.warps = traits.token_warps
        self.threads = traits.token_warps * WARP
        self.rows_at_once = self.threads // _ROW_THREADS
        self.rows = _HISTORY + traits.capacity
        self.sizes = Raw(
            rows=_STREAMS * self.rows * HEAD_DIM,
            gates=traits.capacity * HEAD_DIM,
            closing=traits.capacity * HEAD_DIM * traits.norm,
            folded=traits.capacity * 2 * HEAD_DIM * traits.fold,
            folded_u=traits.capacity * HEAD_DIM * traits.fold,
            weights=_STREAMS * HEAD_DIM * TAPS,
            bias=HEAD_DIM,
            betas=traits.capacity,
            rate=1,
            words=2 * WINDOW_WORDS,
            lengths=2 * _LENGTHS,
            indices=2 * _INDICES,
            padding=1,
        )

    def allocate(self, allocator, weight_type, index_type) -> tuple[Raw, Prepared]:
        """Shared memory of one window on its way, and of one that is ready."""
        traits = self.traits
        types = Raw(
            BFloat16, BFloat16, BFloat16, BFloat16, Float32, weight_type, Float32, Int32, Float32, Int64, Int32,
            index_type, Int32,
        )  # fmt: skip
        raw = [
            memory.shared_array(allocator, dtype, size, 128) if size else None
            for dtype, size in zip(types, self.sizes, strict=True)
        ]

        def by_channel(present=True, dtype=Float32):
            return memory.shared_array(allocator, dtype, traits.capacity * HEAD_DIM) if present else None

        operands = [by_channel() for _ in range(3)]
        scalars = [memory.shared_array(allocator, Float32, traits.capacity) for _ in range(2)]
        prepared = Prepared(
            shared=TokenStore(*operands, *scalars),
            values=by_channel(),
            outputs=by_channel(),
            gates=by_channel(traits.norm, BFloat16),
            folded_key=by_channel(traits.fold),
            folded_decay=by_channel(traits.fold),
            folded_u=by_channel(traits.fold),
        )
        return Raw(*raw), prepared

    def read(self, raw: Raw, turn, n, query_start_loc, state_indices, num_accepted=None, record_indices=None):
        """By one thread: sends for a request's metadata, to be there when the window before it is complete."""
        lengths, indices = raw.lengths + (turn & 1) * _LENGTHS, raw.indices + (turn & 1) * _INDICES
        width = state_indices.element_type.width // 8
        memory.copy_async(lengths, at(query_start_loc, n), 4)
        memory.copy_async(lengths + 1, at(query_start_loc, n + 1), 4)
        memory.copy_async(indices, at(state_indices, Int64(n) * state_indices.stride[0]), width)
        if self.traits.has_num_accepted:
            memory.copy_async(lengths + 2, at(num_accepted, n), 4)
        if self.traits.records == "indices" and not self.traits.decode:
            memory.copy_async(indices + 1, at(record_indices, Int64(n) * record_indices.stride[0]), width)

    def metadata(self, raw: Raw, turn, n) -> Metadata:
        """What ``read`` sent for."""
        lengths, indices = raw.lengths + (turn & 1) * _LENGTHS, raw.indices + (turn & 1) * _INDICES
        slot = Int64(indices.load())
        records = "slot" if self.traits.decode else self.traits.records
        return Metadata(
            first=lengths.load(),
            end=(lengths + 1).load(),
            padding=Int32(0),
            slot=slot,
            num_accepted=(lengths + 2).load() if self.traits.has_num_accepted else Int32(1),
            record=Int64((indices + 1).load()) if records == "indices" else slot if records == "slot" else Int64(n),
        )

    @cute.jit
    def fetch(
        self, raw: cutlass.Constexpr, turn: Int32, n: Int32, head: Int32, heads: Int32, tid: Int32, window: Int32,
        total_rows: Int32, state: cute.Tensor, mixed_qkv: cute.Tensor, conv_weight: cute.Tensor,
        conv_state: cute.Tensor, raw_gate: cute.Tensor, raw_beta: cute.Tensor, A_log: cute.Tensor,
        dt_bias: cute.Tensor, output_gate: cute.Tensor | None, corrections: cute.Tensor | None,
        key_gate: cute.Tensor | None,
    ):  # fmt: skip
        """Sends for all that a window needs but its state, and writes its words."""
        traits = self.traits
        known = self.metadata(raw, turn, n)
        records = None
        if cutlass.const_expr(not traits.decode):
            records = corrections.shape[0]
        slots = memory.minimum(Int32(state.shape[0]), Int32(conv_state.shape[0]))
        request = request_window(traits, known, window, total_rows, slots, records)
        length = select(request.live, request.length, Int32(0))
        count = Int32(0)
        if cutlass.const_expr(traits.fold):
            count = select(length > 0, tokens_to_fold(known, window), Int32(0))
        if tid == 0:
            words = (
                request.start, request.length, request.slot, request.record, request.column, Int32(request.live),
                length, count,
            )  # fmt: skip
            for i in cutlass.range_constexpr(WINDOW_WORDS):
                (raw.words + ((turn & 1) * WINDOW_WORDS + i)).store(Int64(words[i]))
        if length > 0:
            # Sixteen threads a row of 128 bf16.
            lane = tid % _ROW_THREADS * _WIDE
            channel = head * HEAD_DIM + lane
            history = at(conv_state, request.slot * conv_state.stride[0] + Int64(channel))
            for i in cutlass.range_constexpr(-(-self.rows // self.rows_at_once)):
                row = tid // _ROW_THREADS + i * self.rows_at_once
                if row < _HISTORY + length:
                    old = history + Int64(request.column + row) * conv_state.stride[2]
                    new = at(mixed_qkv, Int64(request.start + row - _HISTORY) * mixed_qkv.stride[0] + channel)
                    address = select(row < _HISTORY, old.toint(), new.toint())
                    source = cute.make_ptr(BFloat16, address, cute.AddressSpace.gmem, assumed_align=16)
                    for stream in cutlass.range_constexpr(_STREAMS):
                        target = raw.rows + ((stream * self.rows + row) * HEAD_DIM + lane)
                        memory.copy_async(target, source + stream * heads * HEAD_DIM)
            for i in cutlass.range_constexpr(-(-traits.capacity // self.rows_at_once)):
                token = tid // _ROW_THREADS + i * self.rows_at_once
                if token < length:
                    place = token * HEAD_DIM + lane
                    place_in_row = Int64(request.start + token)
                    memory.copy_async(raw.gates + place, at(raw_gate, place_in_row * raw_gate.stride[0] + channel))
                    if cutlass.const_expr(traits.norm):
                        source_of_z = at(output_gate, place_in_row * output_gate.stride[0] + channel)
                        memory.copy_async(raw.closing + place, source_of_z)
            elements = 128 // conv_weight.element_type.width
            first = tid * elements
            if first < HEAD_DIM * TAPS:
                for stream in cutlass.range_constexpr(_STREAMS):
                    source_of_w = at(conv_weight, (stream * heads + head) * (HEAD_DIM * TAPS) + first)
                    memory.copy_async(raw.weights + (stream * (HEAD_DIM * TAPS) + first), source_of_w)
            if tid < length:
                beta = self._beta(raw_beta, request, tid, head)
                memory.copy_async(raw.betas + tid, memory.round_down(beta, 4), 4)
            if tid == self.threads - 1:
                memory.copy_async(raw.rate, at(A_log, head), 4)
            if tid < HEAD_DIM // QUAD:
                memory.copy_async(raw.bias + tid * QUAD, at(dt_bias, head * HEAD_DIM + tid * QUAD))
            if cutlass.const_expr(traits.fold):
                # A token's key and gate are 512 bytes, and so are its corrections: a warp at once.
                folded = tid // WARP
                record = Int64(head) * window * HEAD_DIM
                while folded < count:
                    wide = folded * (2 * HEAD_DIM) + tid % WARP * _WIDE
                    source_of_k = at(key_gate, request.record * key_gate.stride[0] + 2 * record + wide)
                    memory.copy_async(raw.folded + wide, source_of_k)
                    four = folded * HEAD_DIM + tid % WARP * QUAD
                    source_of_u = at(corrections, request.record * corrections.stride[0] + record + four)
                    memory.copy_async(raw.folded_u + four, source_of_u)
                    folded = folded + self.warps

    def _beta(self, raw_beta, request: Window, token, head):
        return at(raw_beta, Int64(request.start + token) * raw_beta.stride[0] + head)

    def known(self, raw: Raw, turn) -> Known:
        """The window of pass ``turn``."""
        words = raw.words + (turn & 1) * WINDOW_WORDS
        start, rows, slot, record, column, live, length, count = ((words + i).load() for i in range(WINDOW_WORDS))
        request = Window(Int32(start), Int32(rows), slot, record, Int32(column), cutlass.Boolean(True))
        return Known(request, Int32(live), Int32(length), Int32(count))

    @cute.jit
    def send_for_state(
        self, raw: cutlass.Constexpr, turn: Int32, head: Int32, state: cute.Tensor, staged: cute.Pointer,
        barrier: cute.Pointer,
    ):  # fmt: skip
        """By one thread: the bulk copy of the head's state, or a bare arrival where there is none to read."""
        known = self.known(raw, turn)
        if known.length > 0:
            elements = HEAD_DIM * HEAD_DIM
            bytes_ = elements * state.element_type.width // 8
            source = at(state, known.request.slot * state.stride[0] + Int64(head) * elements)
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, bytes_)
            memory.bulk_copy_to_shared(staged, source, bytes_, barrier)
        else:
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def prepare(
        self, prepared: cutlass.Constexpr, raw: cutlass.Constexpr, known: cutlass.Constexpr, length: Int32,
        head: Int32, heads: Int32, tid: Int32, window: Int32, raw_beta: cute.Tensor, conv_state: cute.Tensor,
        key_gate: cute.Tensor | None,
    ):  # fmt: skip
        """The window's tokens, and those to fold, shared out among the warps."""
        traits = self.traits
        request = known.request
        warp, quad = cute.arch.make_warp_uniform(tid // WARP), tid % WARP * QUAD
        rate = exp(raw.rate.load())
        if cutlass.const_expr(traits.fold):
            folded = warp
            while folded < known.count:
                self.prepare_folded(prepared, raw, folded, quad, rate)
                folded = folded + self.warps
        token = warp
        while token < length:
            place = token * HEAD_DIM + quad
            activated = []
            for stream in cutlass.range_constexpr(_STREAMS):
                rows = raw.rows + ((stream * self.rows + token) * HEAD_DIM + quad)
                taps = [to_float(load(rows + j * HEAD_DIM, QUAD, QUAD)) for j in range(TAPS)]
                weights = load(raw.weights + (stream * HEAD_DIM + quad) * TAPS, QUAD * TAPS, QUAD)
                activated.append(conv.convolve(taps, conv.weights_as_float(weights, QUAD)))
            query, key, value = activated
            gates = load(raw.gates + place, QUAD, QUAD)
            decay = gate.decay(traits, rate, to_float(gates), load(raw.bias + quad, QUAD, QUAD))
            pair = memory.halves(raw.betas + token)
            odd = (Int32(self._beta(raw_beta, request, token, head).toint()) & 2) != 0
            beta = gate.beta(Float32(select(odd, pair[1], pair[0])))
            prepare_token(prepared.shared, token, tid % WARP, query, key, decay, beta)
            store_shared(prepared.values + place, value)
            if cutlass.const_expr(traits.norm):
                store(prepared.gates + place, load(raw.closing + place, QUAD, QUAD), QUAD)
            if cutlass.const_expr(not traits.decode):
                offset = request.record * key_gate.stride[0] + (Int64(head) * window + token) * (2 * HEAD_DIM) + quad
                store(at(key_gate, offset), [k.to(BFloat16) for k in key], traits.vector)
                store(at(key_gate, offset + HEAD_DIM), gates, traits.vector)
            token = token + self.warps
        self.roll(raw, request, length, heads, head, warp, quad, conv_state)

    @cute.jit
    def roll(
        self, raw: cutlass.Constexpr, request: cutlass.Constexpr, length: Int32, heads: Int32, head: Int32,
        warp: Int32, quad: Int32, conv_state: cute.Tensor,
    ):  # fmt: skip
        """Inputs of the tokens to columns 2 on, and the last two of the history to columns 0 and 1."""
        column = warp
        while column < length + 2:
            rows = raw.rows + ((column + 1) * HEAD_DIM + quad)
            for stream in cutlass.range_constexpr(_STREAMS):
                channel = (stream * heads + head) * HEAD_DIM + quad
                self._store_column(conv_state, request, column, channel, rows + stream * self.rows * HEAD_DIM)
            column = column + self.warps

    def _store_column(self, conv_state, request: Window, column, channel, source):
        values = load(source, QUAD, QUAD)
        conv.store_column(
            conv_state, request.slot, column, channel, values, self.traits.vector, self.traits.conv_layout
        )

    def prepare_folded(self, prepared, raw: Raw, token, quad, rate):
        """Token ``token`` of the window before, from its records."""
        record = raw.folded + (token * (2 * HEAD_DIM) + quad)
        keys = to_float(load(record, QUAD, QUAD))
        gates = to_float(load(record + HEAD_DIM, QUAD, QUAD))
        scale = key_scale(keys)
        place = token * HEAD_DIM + quad
        store_shared(prepared.folded_key + place, [mul(k, scale) for k in keys])
        decay = gate.decay(self.traits, rate, gates, load(raw.bias + quad, QUAD, QUAD))
        store_shared(prepared.folded_decay + place, decay)
        store_shared(prepared.folded_u + place, load(raw.folded_u + place, QUAD, QUAD))
