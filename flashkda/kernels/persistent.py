# SPDX-License-Identifier: Apache-2.0
"""Verification of many requests in one launch: a persistent grid that overlaps the stages of different heads.

A CTA of four warps takes (request, head) pairs one after another, ``index + i * grid``, with a head's whole state in
its registers; two CTAs share an SM, and while one waits the other computes. For each pair:

1. Inputs have been copied to shared memory while the pair before was computed; the tokens are prepared out of it.
2. The inputs of the next pair are sent for, and metadata of the one after it.
3. The state, which has come the same way, goes to registers, and the next state is sent for.
4. The rule runs over the tokens without a barrier, then corrections, norm and output (persistent_rule.py).

The functions are those of ``FusedVerify``, and so are the bits: value rows are independent, and every reduction has the
one order of its stage. Only whole heads come here, so neither the norm nor the conv window crosses CTAs.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from . import memory
from .memory import at, load, store
from .numerics import select
from .persistent_rule import RuleStage
from .persistent_window import WindowStage
from .traits import HEAD_DIM, QUAD, WARP, Traits
from .window import zero_rows


class Persistent:
    """Shared body of ``PersistentVerify`` and its siblings."""

    def __init__(self, traits: Traits):
        self.traits = traits
        self.window = WindowStage(traits)
        self.rule = RuleStage(traits)

    def launch(self, stream, sms, *tensors):
        """As many CTAs as fit the device, or one a head where there are fewer."""
        traits, state_indices, state = self.traits, tensors[11], tensors[7]
        items = Int32(state_indices.shape[0] * state.shape[1])
        self.kernel(*tensors).launch(
            grid=(Int32(memory.minimum(items, sms * traits.min_blocks)), 1, 1),
            block=(traits.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=traits.min_blocks,
            preferred_smem_carveout=100,
            use_pdl=traits.pdl,
        )

    @cute.kernel
    def kernel(
        self,
        mixed_qkv: cute.Tensor,
        conv_weight: cute.Tensor,
        conv_state: cute.Tensor,
        raw_gate: cute.Tensor,
        raw_beta: cute.Tensor,
        A_log: cute.Tensor,
        dt_bias: cute.Tensor,
        state: cute.Tensor,
        output_gate: cute.Tensor | None,
        norm_weight: cute.Tensor | None,
        query_start_loc: cute.Tensor,
        state_indices: cute.Tensor,
        num_accepted: cute.Tensor | None,
        record_indices: cute.Tensor | None,
        out: cute.Tensor,
        corrections: cute.Tensor | None,
        key_gate: cute.Tensor | None,
    ):
        traits = self.traits
        tid, _, _ = cute.arch.thread_idx()
        item, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        allocator = SmemAllocator()
        raw, prepared = self.window.allocate(allocator, conv_weight.element_type, state_indices.element_type)
        weight = memory.shared_array(allocator, Float32, HEAD_DIM) if traits.norm else None
        arrived = memory.shared_array(allocator, Int64, 1)
        staged = None
        if cutlass.const_expr(traits.bulk_state):
            staged = memory.shared_array(allocator, state.element_type, HEAD_DIM * HEAD_DIM, 128)
            if tid == 0:
                cute.arch.mbarrier_init(arrived, 1)
                cute.arch.mbarrier_init_fence()
        heads, requests = Int32(state.shape[1]), Int32(state_indices.shape[0])
        items = requests * heads
        capacity, total_rows = Int32(conv_state.shape[2]) - 2, Int32(out.shape[0])
        # Requests and heads of this pair, of the next, and of the one after it; divisions only here.
        n, head = item // heads, item % heads
        step_n, step_head = step // heads, step % heads
        next_n, next_head = self.advance(n, head, step_n, step_head, heads)
        if cutlass.const_expr(traits.pdl):
            memory.wait_for_predecessor()
        sources = (
            state, mixed_qkv, conv_weight, conv_state, raw_gate, raw_beta, A_log, dt_bias, output_gate, corrections,
            key_gate,
        )  # fmt: skip
        indices = (query_start_loc, state_indices, num_accepted, record_indices)
        if tid == 0:
            self.window.read(raw, Int32(0), n, *indices)
            memory.copy_async(raw.padding, at(query_start_loc, requests), 4)
        if cutlass.const_expr(traits.norm):
            if tid < WARP:
                scale = load(at(norm_weight, tid * QUAD), QUAD, traits.vector)
                store(weight + tid * QUAD, [w.to(Float32) for w in scale], QUAD)
        memory.wait_for_copies()
        cute.arch.sync_threads()
        self.window.fetch(raw, Int32(0), n, head, heads, tid, capacity, total_rows, *sources)
        if tid == 0:
            if cutlass.const_expr(traits.bulk_state):
                self.window.send_for_state(raw, Int32(0), head, state, staged, arrived)
            if item + step < items:
                self.window.read(raw, Int32(1), next_n, *indices)
        fragment = self.rule.fragment()
        turn = Int32(0)
        while item < items:
            # The inputs are there, and every warp has left the pair before.
            memory.wait_for_copies()
            cute.arch.sync_threads()
            known = self.window.known(raw, turn)
            length = cute.arch.make_warp_uniform(known.length)
            if length > 0:
                self.window.prepare(
                    prepared, raw, known, length, head, heads, tid, capacity, raw_beta, conv_state, key_gate
                )
            zero = (Int32(0), tid, HEAD_DIM, traits.threads, traits.vector)
            padding = raw.padding.load()
            padding = select(padding > 0, padding, Int32(0))
            zero_rows(out, head, padding + n, total_rows, requests, *zero)
            if known.live == 0:
                zero_rows(out, head, known.request.start, known.request.start + known.request.length, Int32(1), *zero)
            cute.arch.sync_threads()
            following = item + step
            if following < items:
                self.window.fetch(raw, turn + 1, next_n, next_head, heads, tid, capacity, total_rows, *sources)
                if (tid == 0) & (following + step < items):
                    third_n, _ = self.advance(next_n, next_head, step_n, step_head, heads)
                    self.window.read(raw, turn + 2, third_n, *indices)
            if cutlass.const_expr(traits.bulk_state):
                cute.arch.mbarrier_wait(arrived, turn & 1)
                if length > 0:
                    self.rule.take_state(fragment, staged, tid)
                cute.arch.sync_threads()
                if (tid == 0) & (following < items):
                    self.window.send_for_state(raw, turn + 1, next_head, state, staged, arrived)
            else:
                if length > 0:
                    self.rule.take_state(fragment, self.head_state(raw, turn, head, state), tid)
            if length > 0:
                self.rule.compute(fragment, prepared, self.window.known(raw, turn), length, head, tid, state)
                # Results are in shared memory, for every warp.
                cute.arch.sync_threads()
                self.rule.finish(
                    prepared, weight, self.window.known(raw, turn).request, length, head, tid, out, corrections
                )
            turn = turn + 1
            item = following
            n, head = next_n, next_head
            next_n, next_head = self.advance(n, head, step_n, step_head, heads)
        if cutlass.const_expr(traits.pdl):
            memory.launch_dependents()

    def head_state(self, raw, turn, head, state):
        """The head's first element in the pool."""
        slot = self.window.known(raw, turn).request.slot
        return at(state, slot * state.stride[0] + Int64(head) * (HEAD_DIM * HEAD_DIM))

    def advance(self, n, head, step_n, step_head, heads):
        """Request and head one step further."""
        head = head + step_head
        over = head >= heads
        return n + step_n + select(over, Int32(1), Int32(0)), Int32(select(over, head - heads, head))


class PersistentVerify(Persistent):
    """Conv, rule and norm in one launch. Writes out, conv_state, corrections and key_gate; state only where it folds
    the records of the window before into it first. ``sms``: the device's SMs."""

    @cute.jit
    def __call__(
        self,
        sms: Int32,
        mixed_qkv: cute.Tensor,
        conv_weight: cute.Tensor,
        conv_state: cute.Tensor,
        raw_gate: cute.Tensor,
        raw_beta: cute.Tensor,
        A_log: cute.Tensor,
        dt_bias: cute.Tensor,
        state: cute.Tensor,
        output_gate: cute.Tensor | None,
        norm_weight: cute.Tensor | None,
        query_start_loc: cute.Tensor,
        state_indices: cute.Tensor,
        num_accepted: cute.Tensor | None,
        record_indices: cute.Tensor | None,
        out: cute.Tensor,
        corrections: cute.Tensor,
        key_gate: cute.Tensor,
        stream,
    ):
        self.launch(
            stream, sms, mixed_qkv, conv_weight, conv_state, raw_gate, raw_beta, A_log, dt_bias, state, output_gate,
            norm_weight, query_start_loc, state_indices, num_accepted, record_indices, out, corrections, key_gate,
        )  # fmt: skip


class PersistentDecode(Persistent):
    """One token a request. Writes out, conv_state, and state in place."""

    @cute.jit
    def __call__(
        self,
        sms: Int32,
        mixed_qkv: cute.Tensor,
        conv_weight: cute.Tensor,
        conv_state: cute.Tensor,
        raw_gate: cute.Tensor,
        raw_beta: cute.Tensor,
        A_log: cute.Tensor,
        dt_bias: cute.Tensor,
        state: cute.Tensor,
        output_gate: cute.Tensor | None,
        norm_weight: cute.Tensor | None,
        query_start_loc: cute.Tensor,
        state_indices: cute.Tensor,
        num_accepted: cute.Tensor | None,
        out: cute.Tensor,
        stream,
    ):
        self.launch(
            stream, sms, mixed_qkv, conv_weight, conv_state, raw_gate, raw_beta, A_log, dt_bias, state, output_gate,
            norm_weight, query_start_loc, state_indices, num_accepted, None, out, None, None,
        )  # fmt: skip
