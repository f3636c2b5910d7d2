# SPDX-License-Identifier: Apache-2.0
"""The verification of one layer: ``FusedVerify`` (conv, rule, norm in one launch) and ``Record`` (the rule alone).

One CTA has one request, one head and ``rows`` of the head's 128 value rows; ``128 / rows`` CTAs form a cluster. Phases:

1. Metadata, then every global load: the state by one bulk copy, conv inputs, gates, the output gate, weights.
2. One warp a token: conv of q and k, their norms, gates, dots, into shared memory; all threads: conv of v.
3. One barrier. The rule runs over the tokens with the state in registers, without a barrier.
4. One barrier. Corrections are stored; the norm sums squares in the CTA, then over the cluster (st.async, mbarrier).

Each rank reads the whole conv history of q and k, and each writes a part of the window in place: ranks arrive at the
cluster barrier once their taps have been consumed and write behind its wait. The same barrier makes the peers' mbarrier
known to be initialized. No CTA leaves before every message to it has come, so no message meets a dead CTA.

``Record`` and ``FusedVerify`` are one class: what differs is where q, k and v come from and where o goes to.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from . import memory
from .delta_rule import DeltaRule
from .epilogue import Epilogue
from .memory import at
from .numerics import select
from .prologue import Place, Prologue, token_store
from .traits import HEAD_DIM, WARP, Traits
from .window import history_column, record_row, request_window, zero_rows

_STATE_BARRIER, _NORM_BARRIER, _BARRIERS = 0, 1, 2


class Verify:
    """Shared body; ``fuse`` is whether conv and norm are part of the launch."""

    fuse: bool

    def __init__(self, traits: Traits):
        self.traits = traits
        self.rule = DeltaRule(traits)
        self.prologue = Prologue(traits, self.fuse)
        self.epilogue = Epilogue(traits, self.fuse and traits.norm)
        # Only the norm and the shared conv window need the CTAs of a head together.
        self.clustered = self.fuse and traits.cluster > 1

    def launch(self, stream, requests, heads, *tensors):
        """Grid (cluster, heads, requests)."""
        traits = self.traits
        self.kernel(*tensors).launch(
            grid=(traits.cluster, heads, requests),
            block=(traits.threads, 1, 1),
            cluster=(traits.cluster, 1, 1) if self.clustered else None,
            stream=stream,
            min_blocks_per_mp=traits.min_blocks,
            # Stated, since the DSL otherwise asks the device for its shared memory, and there may be no device.
            preferred_smem_carveout=100,
            use_pdl=traits.pdl,
        )

    @cute.kernel
    def kernel(
        self,
        mixed_qkv: cute.Tensor,
        conv_weight: cute.Tensor | None,
        conv_state: cute.Tensor | None,
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
    ):
        traits = self.traits
        tid, _, _ = cute.arch.thread_idx()
        rank, head, n = cute.arch.block_idx()
        requests = Int32(state_indices.shape[0])
        window = Int32(corrections.shape[2])
        total_rows = Int32(out.shape[0])

        allocator = SmemAllocator()
        shared = token_store(allocator, traits.capacity)
        # v of the window's tokens, which the rule replaces by their u; behind them o, before its rounding to bf16.
        results = memory.shared_array(allocator, Float32, 2 * traits.capacity * traits.rows)
        partials = memory.shared_array(allocator, Float32, traits.capacity * traits.cluster)
        barriers = memory.shared_array(allocator, Int64, _BARRIERS)
        staged = None
        if cutlass.const_expr(traits.bulk_state):
            staged = memory.shared_array(allocator, state.element_type, traits.rows * HEAD_DIM, 128)

        if cutlass.const_expr(traits.pdl):
            memory.wait_for_predecessor()
        request = request_window(traits, n, window, query_start_loc, state_indices, state.shape[0], total_rows)
        record = record_row(traits, n, request.slot, record_indices)
        padding = query_start_loc[requests]
        column = Int32(0)
        live = request.live & (record >= Int64(0)) & (record < Int64(corrections.shape[0]))
        if cutlass.const_expr(self.fuse):
            column = history_column(traits, n, window, num_accepted)
            live = live & (request.slot < Int64(conv_state.shape[0]))

        lane = tid % WARP
        place = Place(
            head=head,
            rank=rank,
            row0=rank * traits.rows,
            tid=tid,
            warp=tid // WARP,
            lane=lane,
            key_lane=lane & (traits.key_lanes - 1),
            local_row=tid // traits.key_lanes * traits.rows_per_thread,
            channels=Int32(state.shape[1]) * HEAD_DIM,
            window=window,
            record=record,
        )
        if live & (request.length > 0):
            self.verify(
                request, place, column, shared, results, partials, barriers, staged,
                mixed_qkv, conv_weight, conv_state, raw_gate, raw_beta, A_log, dt_bias, state, output_gate, norm_weight,
                out, corrections, key_gate,
            )  # fmt: skip
        zero = (place.row0, tid, traits.rows, traits.threads, traits.vector)
        if not live:
            end = request.start + request.length
            zero_rows(out, head, request.start, end, Int32(1), *zero)
        # Rows past the last request belong to nobody; the requests share them out.
        zero_rows(out, head, padding + n, total_rows, requests, *zero)

    @cute.jit
    def verify(
        self, request: cutlass.Constexpr, place: cutlass.Constexpr, column,
        shared: cutlass.Constexpr, results, partials, barriers, staged,
        mixed_qkv, conv_weight, conv_state, raw_gate, raw_beta, A_log, dt_bias, state, output_gate, norm_weight,
        out, corrections, key_gate,
    ):  # fmt: skip
        """Phases 1 to 4 for a live request."""
        traits, rule, prologue, epilogue = self.traits, self.rule, self.prologue, self.epilogue

        # ---- 1. loads
        source = at(state, request.slot * state.stride[0] + Int64(place.head * HEAD_DIM + place.row0) * HEAD_DIM)
        fragment = cute.make_rmem_tensor(rule.rows * rule.keys, Float32)
        if cutlass.const_expr(traits.bulk_state or epilogue.messages):
            if place.tid == 0:
                for i in cutlass.range_constexpr(_BARRIERS):
                    cute.arch.mbarrier_init(barriers + i, 1)
                cute.arch.mbarrier_init_fence()
                if cutlass.const_expr(traits.bulk_state):
                    bytes_ = traits.rows * HEAD_DIM * state.element_type.width // 8
                    cute.arch.mbarrier_arrive_and_expect_tx(barriers + _STATE_BARRIER, bytes_)
                    memory.bulk_copy_to_shared(staged, source, bytes_, barriers + _STATE_BARRIER)
        inputs, output_fragments = prologue.fragments(), epilogue.fragments()
        prologue.load(inputs, request, place, column, mixed_qkv, conv_state, raw_gate, raw_beta)
        epilogue.load(output_fragments, request, place, output_gate, norm_weight)
        if cutlass.const_expr(not traits.bulk_state):
            rule.load_state(fragment, source + place.local_row * HEAD_DIM, place.key_lane, traits.vector)

        # ---- 2. prepare the tokens
        prologue.prepare(inputs, request, place, shared, results, conv_weight, A_log, dt_bias, key_gate)
        if cutlass.const_expr(self.clustered):
            # The taps have been consumed; nothing else is published here, so the arrival can be relaxed.
            cute.arch.cluster_arrive_relaxed()
        cute.arch.sync_threads()
        if cutlass.const_expr(epilogue.messages):
            if place.tid == 0:
                self.epilogue.expect(request, place, barriers + _NORM_BARRIER)
        if cutlass.const_expr(self.fuse and not self.clustered):
            prologue.roll_windows(inputs, request, place, conv_state)
        if cutlass.const_expr(traits.bulk_state):
            cute.arch.mbarrier_wait(barriers + _STATE_BARRIER, 0)
            rule.load_state(fragment, staged + place.local_row * HEAD_DIM, place.key_lane, traits.vector)
        if cutlass.const_expr(traits.pdl):
            memory.launch_dependents()

        # ---- 3. the rule
        value_row = place.local_row + rule.own_row(place.key_lane)
        behind = Int32(traits.capacity * traits.rows)
        result_row = value_row + select(rule.finishes_output(place.key_lane), behind, Int32(0))
        for token in cutlass.range(request.length, unroll=1):
            key, query, decay = (
                self.rule.load_keys(array, token, place.key_lane)
                for array in (shared.key, shared.query, shared.decay)
            )
            result = self.rule.step(
                fragment, key, query, decay, (results + (token * traits.rows + value_row)).load(),
                (shared.beta + token).load(), (shared.key_dot_query + token).load(), place.lane,
            )  # fmt: skip
            # Lanes that finish the same number store equal words to one place: no predicate, no branch.
            (results + (token * traits.rows + result_row)).store(result)
        cute.arch.sync_threads()

        # ---- 4. corrections, norm, output
        if cutlass.const_expr(self.clustered):
            cute.arch.cluster_wait()
        sums = cute.make_rmem_tensor(epilogue.passes, Float32)
        if cutlass.const_expr(epilogue.norm):
            epilogue.sum_squares(sums, request, place, results, partials, barriers + _NORM_BARRIER)
        epilogue.store_corrections(request, place, results, corrections)
        if cutlass.const_expr(self.clustered):
            prologue.roll_windows(inputs, request, place, conv_state)
        if cutlass.const_expr(epilogue.messages):
            cute.arch.mbarrier_wait(barriers + _NORM_BARRIER, 0)
        epilogue.store_output(sums, output_fragments, request, place, results, partials, out)


class FusedVerify(Verify):
    """Conv, rule and norm in one launch. Writes out, conv_state, corrections and key_gate; leaves state as it is."""

    fuse = True

    @cute.jit
    def __call__(
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
        corrections: cute.Tensor,
        key_gate: cute.Tensor,
        stream,
    ):
        self.launch(
            stream, state_indices.shape[0], state.shape[1],
            mixed_qkv, conv_weight, conv_state, raw_gate, raw_beta, A_log, dt_bias, state, output_gate, norm_weight,
            query_start_loc, state_indices, num_accepted, record_indices, out, corrections, key_gate,
        )  # fmt: skip


class Record(Verify):
    """The rule alone, on convolved q|k|v. Writes o (before the norm), corrections and key_gate."""

    fuse = False

    @cute.jit
    def __call__(
        self,
        qkv: cute.Tensor,
        raw_gate: cute.Tensor,
        raw_beta: cute.Tensor,
        A_log: cute.Tensor,
        dt_bias: cute.Tensor,
        state: cute.Tensor,
        query_start_loc: cute.Tensor,
        state_indices: cute.Tensor,
        record_indices: cute.Tensor | None,
        o: cute.Tensor,
        corrections: cute.Tensor,
        key_gate: cute.Tensor,
        stream,
    ):
        self.launch(
            stream, state_indices.shape[0], state.shape[1],
            qkv, None, None, raw_gate, raw_beta, A_log, dt_bias, state, None, None,
            query_start_loc, state_indices, None, record_indices, o, corrections, key_gate,
        )  # fmt: skip
