# SPDX-License-Identifier: Apache-2.0
"""Folds the accepted prefix of the records into the states of all layers, in one launch.

S <- S * decay; S <- S + u k^T, for the first m records: the updates of the verify's rule, by its functions and in its
lane order, so that the bits are those of decoding. With u recorded nothing is reduced over a row, so the time is that
of moving the state, and the code sees to it that enough of it is under way:

1. The request's metadata and the addresses of the layer's tensors, all loads at once.
2. The records and the state, all loads at once. A head is spread over CTAs of a few rows, whose registers hold the
   state; many of them share an SM.
3. While the state flies, each warp prepares k^, decay and u of its tokens in shared memory. One barrier.
4. Every thread takes its rows through the tokens, and stores them.

A layer's tensors are found by a table of addresses: engines allocate layers apart. The tensors of layer 0 stand for
the shapes and strides of all.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from . import conv, gate, memory
from .memory import at, load, store, store_shared, to_float
from .numerics import exp, fma, mul, select
from .token import key_scale
from .traits import HEAD_DIM, QUAD, WARP, CommitTraits

_WARPS = 8
_ROWS = 8  # of a warp
_CTA_ROWS = _WARPS * _ROWS
_PARTS = HEAD_DIM // _CTA_ROWS
_HISTORY = 3
_LANE_ROWS = _CTA_ROWS // WARP
_TENSORS = 6
_STATE, _CORRECTIONS, _KEY_GATE, _CONV_STATE, _A_LOG, _DT_BIAS = range(_TENSORS)


class Work(NamedTuple):
    """What a request asks for: its slots, record row, accepted count, and the count at its boundary (-1: none)."""

    source: Int64
    target: Int64
    checkpoint: Int64
    record: Int64
    count: Int32
    boundary: Int32


class Operands(NamedTuple):
    """Shared memory of the window: key and decay [capacity, 128], corrections of the CTA's rows [capacity, rows]."""

    key: object
    decay: object
    corrections: object


class Commit:
    """Writes state (and conv_state) of the destination and boundary slots of requests that take part."""

    def __init__(self, traits: CommitTraits):
        self.traits = traits

    @cute.jit
    def __call__(
        self,
        table: cute.Tensor,
        state: cute.Tensor,
        corrections: cute.Tensor,
        key_gate: cute.Tensor,
        conv_state: cute.Tensor | None,
        accepted: cute.Tensor,
        accepted_indices: cute.Tensor | None,
        state_indices: cute.Tensor,
        dst_indices: cute.Tensor | None,
        record_indices: cute.Tensor | None,
        boundary_length: cute.Tensor | None,
        boundary_indices: cute.Tensor | None,
        stream,
    ):
        self.kernel(
            table, state, corrections, key_gate, conv_state, accepted, accepted_indices, state_indices, dst_indices,
            record_indices, boundary_length, boundary_indices,
        ).launch(
            # Neighbours in the grid run at the same time: those of one slot are neighbours in memory.
            grid=(_PARTS * state.shape[1], table.shape[1], state_indices.shape[0]),
            block=(_WARPS * WARP, 1, 1),
            stream=stream,
            min_blocks_per_mp=self._ctas(),
            preferred_smem_carveout=100,  # stated, since the DSL otherwise asks the device, and there may be none
            use_pdl=self.traits.pdl,
        )  # fmt: skip

    def _ctas(self):
        """CTAs that must fit an SM: four leave a thread 64 registers, half of them for its state. A bf16 state that is
        stored element by element takes some more."""
        return 3 if self.traits.vector == 1 and self.traits.state_dtype == "bfloat16" else 4

    def _index(self, tensor, n):
        return Int64(at(tensor, Int64(n) * tensor.stride[0]).load())

    def _usable(self, slot, state):
        return (slot > Int64(self.traits.null_slot)) & (slot < Int64(state.shape[0]))

    def _work(
        self, n, window, state, accepted, accepted_indices, state_indices, dst_indices, record_indices,
        boundary_length, boundary_indices, records,
    ):  # fmt: skip
        """Reads the request's metadata. Slots that cannot be used become -1; a broken entry spoils its own request."""
        nowhere = Int64(-1)
        entry = Int64(n) if accepted_indices is None else self._index(accepted_indices, n)
        known = (entry >= Int64(0)) & (entry < Int64(accepted.shape[0]))
        count = at(accepted, select(known, entry, Int64(0))).load()
        count = select(count > window, window, select(known & (count > 0), count, Int32(0)))
        slot = self._index(state_indices, n)
        record = {"slot": slot, "request": Int64(n)}.get(self.traits.records)
        if record is None:
            record = self._index(record_indices, n)
        live = self._usable(slot, state) & (record >= Int64(0)) & (record < Int64(records))
        source = select(live, slot, nowhere)
        target = slot if dst_indices is None else self._index(dst_indices, n)
        target = select(live & (count > 0) & self._usable(target, state), target, nowhere)
        checkpoint, boundary = nowhere, Int32(-1)
        if boundary_length is not None:
            boundary = boundary_length[n]
            checkpoint = self._index(boundary_indices, n)
            due = live & (boundary >= 0) & (boundary <= count) & self._usable(checkpoint, state)
            checkpoint, boundary = select(due, checkpoint, nowhere), select(due, boundary, Int32(-1))
        return Work(source, target, checkpoint, record, count, boundary)

    @cute.kernel
    def kernel(
        self,
        table: cute.Tensor,
        state: cute.Tensor,
        corrections: cute.Tensor,
        key_gate: cute.Tensor,
        conv_state: cute.Tensor | None,
        accepted: cute.Tensor,
        accepted_indices: cute.Tensor | None,
        state_indices: cute.Tensor,
        dst_indices: cute.Tensor | None,
        record_indices: cute.Tensor | None,
        boundary_length: cute.Tensor | None,
        boundary_indices: cute.Tensor | None,
    ):
        tid, _, _ = cute.arch.thread_idx()
        block, layer, n = cute.arch.block_idx()
        head, part = block // _PARTS, block % _PARTS
        window = Int32(corrections.shape[2])
        allocator = SmemAllocator()
        shared = Operands(
            memory.shared_array(allocator, Float32, self.traits.capacity * HEAD_DIM),
            memory.shared_array(allocator, Float32, self.traits.capacity * HEAD_DIM),
            memory.shared_array(allocator, Float32, self.traits.capacity * _CTA_ROWS),
        )
        if cutlass.const_expr(self.traits.pdl):
            memory.wait_for_predecessor()
        # Before anything hangs on the metadata: it comes at the same time.
        addresses = [at(table, Int64(which) * table.stride[0] + layer).load() for which in range(_TENSORS)]
        work = self._work(
            n, window, state, accepted, accepted_indices, state_indices, dst_indices, record_indices,
            boundary_length, boundary_indices, corrections.shape[0],
        )  # fmt: skip
        if cutlass.const_expr(self.traits.pdl):
            # What comes next may start as soon as the last CTAs of this grid have. It waits for their end by itself.
            memory.launch_dependents()
        if (work.target >= Int64(0)) | (work.checkpoint >= Int64(0)):
            self.fold(work, addresses, shared, tid, part, head, window, state, corrections, key_gate)
            if cutlass.const_expr(self.traits.compact):
                if tid < self._conv_threads():
                    self.compact(work, addresses, tid, part, head, Int32(state.shape[1]), conv_state)

    def _of_layer(self, template, addresses, which):
        """The tensor of a layer: its address, and the layout of layer 0's."""
        align = 16 if self.traits.vector > 1 else template.element_type.width // 8
        pointer = cute.make_ptr(template.element_type, addresses[which], cute.AddressSpace.gmem, assumed_align=align)
        return cute.make_tensor(pointer, template.layout)

    def _floats_of_layer(self, addresses, which):
        return cute.make_ptr(Float32, addresses[which], cute.AddressSpace.gmem, assumed_align=4)

    def _store(self, fragment, state, slot, offset):
        """This thread's part of the state, rounded to the pool's type, to ``slot``."""
        for row in range(_ROWS):
            values = [fragment[row * QUAD + i].to(state.element_type) for i in range(QUAD)]
            store(at(state, slot * state.stride[0] + offset + row * HEAD_DIM), values, self.traits.vector)

    @cute.jit
    def fold(
        self, work: cutlass.Constexpr, addresses: cutlass.Constexpr, shared: cutlass.Constexpr, tid: Int32, part: Int32,
        head: Int32, window: Int32, state_0: cute.Tensor, corrections_0: cute.Tensor, key_gate_0: cute.Tensor,
    ):  # fmt: skip
        """The thread's rows through the accepted tokens."""
        traits = self.traits
        warp, lane = tid // WARP, tid % WARP
        state = self._of_layer(state_0, addresses, _STATE)
        row0 = part * _CTA_ROWS
        key = lane * QUAD
        offset = Int64(head * HEAD_DIM + row0 + warp * _ROWS) * HEAD_DIM + key

        records = self._load_records(work, addresses, warp, lane, head, row0, window, corrections_0, key_gate_0)
        fragment = cute.make_rmem_tensor(_ROWS * QUAD, Float32)
        source = work.source * state.stride[0] + offset
        for row in range(_ROWS):
            values = to_float(load(at(state, source + row * HEAD_DIM), QUAD, traits.vector))
            for i, value in enumerate(values):
                fragment[row * QUAD + i] = value
        self._prepare(records, addresses, shared, warp, lane, head)
        if cutlass.const_expr(traits.has_boundary):
            if work.boundary == 0:
                self._store(fragment, state, work.checkpoint, offset)
        cute.arch.sync_threads()
        for token in cutlass.range_constexpr(traits.capacity):
            if token < work.count:
                k = load(shared.key + (token * HEAD_DIM + key), QUAD, QUAD)
                decay = load(shared.decay + (token * HEAD_DIM + key), QUAD, QUAD)
                u = load(shared.corrections + (token * _CTA_ROWS + warp * _ROWS), _ROWS, QUAD)
                for row in cutlass.range_constexpr(_ROWS):
                    for j in cutlass.range_constexpr(QUAD):
                        place = row * QUAD + j
                        fragment[place] = fma(u[row], k[j], mul(fragment[place], decay[j]))
                if cutlass.const_expr(traits.has_boundary):
                    if work.boundary == token + 1:
                        self._store(fragment, state, work.checkpoint, offset)
        if work.target >= Int64(0):
            self._store(fragment, state, work.target, offset)

    def _load_records(self, work, addresses, warp, lane, head, row0, window, corrections_0, key_gate_0):
        """This warp's tokens: key and gate of the lane's channels, and u of the lane's rows of the CTA. Past the last
        accepted token that one is loaded again, since a branch would make the state's loads wait."""
        vector = self.traits.vector
        corrections = self._of_layer(corrections_0, addresses, _CORRECTIONS)
        key_gate = self._of_layer(key_gate_0, addresses, _KEY_GATE)
        u_base = work.record * corrections.stride[0] + Int64(head) * window * HEAD_DIM + row0 + lane * _LANE_ROWS
        k_base = work.record * key_gate.stride[0] + Int64(head) * window * (2 * HEAD_DIM) + lane * QUAD
        last = select(work.count > 0, work.count - 1, Int32(0))
        records = []
        for first in range(0, self.traits.capacity, _WARPS):
            token = memory.minimum(warp + first, last)
            keys = at(key_gate, k_base + token * (2 * HEAD_DIM))
            u = load(at(corrections, u_base + token * HEAD_DIM), _LANE_ROWS, min(vector, _LANE_ROWS))
            records.append((load(keys, QUAD, vector), load(keys + HEAD_DIM, QUAD, vector), u))
        return records

    def _prepare(self, records, addresses, shared, warp, lane, head):
        """k^, decay and u of this warp's tokens into shared memory."""
        rate = exp((self._floats_of_layer(addresses, _A_LOG) + head).load())
        bias_of = self._floats_of_layer(addresses, _DT_BIAS) + (head * HEAD_DIM + lane * QUAD)
        bias = load(bias_of, QUAD, self.traits.vector)
        for i, (keys, gates, u) in enumerate(records):
            token = warp + i * _WARPS
            if self.traits.capacity % _WARPS:  # warps beyond the window repeat its last token, to the same bits
                token = memory.minimum(token, Int32(self.traits.capacity - 1))
            keys = to_float(keys)
            scale = key_scale(keys)
            place = token * HEAD_DIM + lane * QUAD
            store_shared(shared.key + place, [mul(k, scale) for k in keys])
            store_shared(shared.decay + place, gate.decay(self.traits, rate, to_float(gates), bias))
            store(shared.corrections + (token * _CTA_ROWS + lane * _LANE_ROWS), u, _LANE_ROWS)

    def _conv_threads(self):
        """Threads of a CTA that move conv history, a quad of channels each."""
        return 3 * HEAD_DIM // QUAD // _PARTS

    @cute.jit
    def compact(
        self, work: cutlass.Constexpr, addresses: cutlass.Constexpr, tid: Int32, part: Int32, head: Int32, heads: Int32,
        conv_state_0: cute.Tensor,
    ):  # fmt: skip
        """Moves the history behind the accepted tokens to columns 0..2. A channel is read before it is written."""
        traits = self.traits
        window = self._of_layer(conv_state_0, addresses, _CONV_STATE)
        quad = part * self._conv_threads() + tid
        channel = (quad // WARP * heads + head) * HEAD_DIM + quad % WARP * QUAD
        slots = Int64(window.shape[0])
        rolls = (work.target >= Int64(0)) & (work.source < slots) & (work.target < slots)
        checkpoints = (work.boundary > 0) & (work.source < slots) & (work.checkpoint < slots)
        history = cute.make_rmem_tensor((_HISTORY, QUAD), BFloat16)
        earlier = cute.make_rmem_tensor((_HISTORY, QUAD), BFloat16)
        if rolls:
            conv.load_columns(
                history, window, work.source, work.count - 1, channel, QUAD, traits.vector, traits.conv_layout
            )
        if checkpoints:
            conv.load_columns(
                earlier, window, work.source, work.boundary - 1, channel, QUAD, traits.vector, traits.conv_layout
            )
            conv.store_columns(window, earlier, work.checkpoint, channel, QUAD, traits.vector, traits.conv_layout)
        if rolls:
            conv.store_columns(window, history, work.target, channel, QUAD, traits.vector, traits.conv_layout)
