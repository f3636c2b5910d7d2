# SPDX-License-Identifier: Apache-2.0
"""Folds the accepted prefix of the records into the states of all layers, in one launch.

S <- S * decay; S <- S + u k^T, for the first m records: the updates of the verify's rule, by its functions and in its
lane order, so that the bits are those of decoding. With u recorded nothing is reduced over a row, so rows need neither
shared memory nor barriers: a warp has eight rows, a lane four keys of each, and a head is spread over four CTAs so that
even one request's layers fill a GPU evenly. Every warp prepares k^ and decay for itself; that is cheaper than to wait
for another.

A layer's tensors are found by a table of addresses: engines allocate layers apart. The tensors of layer 0 stand for
the shapes and strides of all.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from . import conv, gate, memory
from .memory import at, load, store, to_float
from .numerics import exp, fma, mul, select
from .token import key_scale
from .traits import HEAD_DIM, QUAD, WARP, CommitTraits

_WARPS = 4
_ROWS = 8  # of a warp
_PARTS = HEAD_DIM // (_WARPS * _ROWS)
_CHUNK = 4  # tokens whose operands are loaded together
_HISTORY = 3
_STATE, _CORRECTIONS, _KEY_GATE, _CONV_STATE, _A_LOG, _DT_BIAS = range(6)


class Work(NamedTuple):
    """What a request asks for: its slots, record row, accepted count, and the count at its boundary (-1: none)."""

    source: Int64
    target: Int64
    checkpoint: Int64
    record: Int64
    count: Int32
    boundary: Int32


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
            grid=(_PARTS * table.shape[1], state.shape[1], state_indices.shape[0]),
            block=(_WARPS * WARP, 1, 1),
            stream=stream,
            use_pdl=self.traits.pdl,
        )  # fmt: skip

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
        block, head, n = cute.arch.block_idx()
        layer, part = block // _PARTS, block % _PARTS
        window = Int32(corrections.shape[2])
        if cutlass.const_expr(self.traits.pdl):
            memory.wait_for_predecessor()
        work = self._work(
            n, window, state, accepted, accepted_indices, state_indices, dst_indices, record_indices,
            boundary_length, boundary_indices, corrections.shape[0],
        )  # fmt: skip
        if (work.target >= Int64(0)) | (work.checkpoint >= Int64(0)):
            self.fold(work, tid, layer, part, head, window, table, state, corrections, key_gate)
            if cutlass.const_expr(self.traits.compact):
                if tid < self._conv_threads():
                    self.compact(work, tid, part, head, Int32(state.shape[1]), table, layer, conv_state)

    def _of_layer(self, template, table, which, layer):
        """The tensor of a layer: its address, and the layout of layer 0's."""
        address = at(table, Int64(which) * table.stride[0] + layer).load()
        align = 16 if self.traits.vector > 1 else template.element_type.width // 8
        pointer = cute.make_ptr(template.element_type, address, cute.AddressSpace.gmem, assumed_align=align)
        return cute.make_tensor(pointer, template.layout)

    def _floats_of_layer(self, table, which, layer):
        address = at(table, Int64(which) * table.stride[0] + layer).load()
        return cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)

    def _store(self, fragment, state, slot, offset):
        """This thread's part of the state, rounded to the pool's type, to ``slot``."""
        for row in range(_ROWS):
            values = [fragment[row * QUAD + i].to(state.element_type) for i in range(QUAD)]
            store(at(state, slot * state.stride[0] + offset + row * HEAD_DIM), values, self.traits.vector)

    @cute.jit
    def fold(
        self, work: cutlass.Constexpr, tid: Int32, layer: Int32, part: Int32, head: Int32, window: Int32,
        table: cute.Tensor, state_0: cute.Tensor, corrections_0: cute.Tensor, key_gate_0: cute.Tensor,
    ):  # fmt: skip
        """The thread's rows through the accepted tokens."""
        traits = self.traits
        warp, lane = tid // WARP, tid % WARP
        state = self._of_layer(state_0, table, _STATE, layer)
        corrections = self._of_layer(corrections_0, table, _CORRECTIONS, layer)
        key_gate = self._of_layer(key_gate_0, table, _KEY_GATE, layer)
        row0 = (part * _WARPS + warp) * _ROWS
        key = lane * QUAD
        offset = Int64(head * HEAD_DIM + row0) * HEAD_DIM + key
        u_base = work.record * corrections.stride[0] + Int64(head) * window * HEAD_DIM + row0
        k_base = work.record * key_gate.stride[0] + Int64(head) * window * (2 * HEAD_DIM) + key
        last = select(work.count > 0, work.count - 1, Int32(0))

        fragment = cute.make_rmem_tensor(_ROWS * QUAD, Float32)
        source = work.source * state.stride[0] + offset
        for row in range(_ROWS):
            values = to_float(load(at(state, source + row * HEAD_DIM), QUAD, traits.vector))
            for i, value in enumerate(values):
                fragment[row * QUAD + i] = value
        rate = exp((self._floats_of_layer(table, _A_LOG, layer) + head).load())
        bias = load(self._floats_of_layer(table, _DT_BIAS, layer) + (head * HEAD_DIM + key), QUAD, traits.vector)
        if cutlass.const_expr(traits.has_boundary):
            if work.boundary == 0:
                self._store(fragment, state, work.checkpoint, offset)
        for first in cutlass.range_constexpr(0, traits.capacity, _CHUNK):
            if first < work.count:
                tokens = [memory.minimum(Int32(first + i), last) for i in range(min(_CHUNK, traits.capacity))]
                raw = [
                    (
                        to_float(load(at(key_gate, k_base + token * (2 * HEAD_DIM)), QUAD, traits.vector)),
                        to_float(load(at(key_gate, k_base + token * (2 * HEAD_DIM) + HEAD_DIM), QUAD, traits.vector)),
                        load(at(corrections, u_base + token * HEAD_DIM), _ROWS, traits.vector),
                    )
                    for token in tokens
                ]
                operands = []
                for keys, gates, u in raw:
                    scale = key_scale(keys)
                    operands.append(([mul(k, scale) for k in keys], gate.decay(traits, rate, gates, bias), u))
                for i in cutlass.range_constexpr(len(tokens)):
                    if first + i < work.count:
                        k, decay, u = operands[i]
                        for row in cutlass.range_constexpr(_ROWS):
                            for j in cutlass.range_constexpr(QUAD):
                                place = row * QUAD + j
                                fragment[place] = fma(u[row], k[j], mul(fragment[place], decay[j]))
                        if cutlass.const_expr(traits.has_boundary):
                            if work.boundary == first + i + 1:
                                self._store(fragment, state, work.checkpoint, offset)
        if work.target >= Int64(0):
            self._store(fragment, state, work.target, offset)

    def _conv_threads(self):
        """Threads of a CTA that move conv history, a quad of channels each."""
        return 3 * HEAD_DIM // QUAD // _PARTS

    @cute.jit
    def compact(
        self, work: cutlass.Constexpr, tid: Int32, part: Int32, head: Int32, heads: Int32, table: cute.Tensor,
        layer: Int32, conv_state_0: cute.Tensor,
    ):  # fmt: skip
        """Moves the history behind the accepted tokens to columns 0..2. A channel is read before it is written."""
        traits = self.traits
        window = self._of_layer(conv_state_0, table, _CONV_STATE, layer)
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
