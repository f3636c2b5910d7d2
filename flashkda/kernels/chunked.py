# SPDX-License-Identifier: Apache-2.0
"""The verification of one layer in the chunked numerics: ``FusedVerifyChunked`` and ``RecordChunked``.

As kernels/verify.py but for the rule: one CTA has one request, one head and ``rows`` of its value rows, a cluster has
the head. Phases, with a barrier between each two:

1. Metadata; the state by one bulk copy; conv inputs, gates, weights. A warp a token prepares q, k and the decay.
2. What the tokens are to each other (chunked_rule.py), while the state is on its way. The conv window is rolled.
3. The state times [p|r] on the tensor cores; then the solve, by the warps that have the rows.
4. Corrections, norm, output.

The cluster's order of reads and writes of the conv window, and the norm's messages, are those of kernels/verify.py.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from . import memory
from .chunked_rule import ChunkedRule, chunk_store
from .epilogue import Epilogue
from .memory import at
from .place import here
from .prologue import Prologue
from .traits import HEAD_DIM, QUAD, WARP, ChunkedTraits
from .window import read_metadata, request_window, zero_rows

_STATE_BARRIER, _NORM_BARRIER, _BARRIERS = 0, 1, 2


class VerifyChunked:
    """Shared body; ``fuse`` is whether conv and norm are part of the launch."""

    fuse: bool

    def __init__(self, traits: ChunkedTraits):
        self.traits = traits
        self.rule = ChunkedRule(traits)
        self.prologue = Prologue(traits, self.fuse)
        self.epilogue = Epilogue(traits, self.fuse and traits.norm)
        # The thread that initializes barriers and sends for the state; its warp has v alone, or as much as all.
        self.courier = traits.threads - WARP
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
        rank, head, n = cute.arch.block_idx()
        requests = Int32(state_indices.shape[0])
        records, window = corrections.shape[0], Int32(corrections.shape[2])
        total_rows = Int32(out.shape[0])

        allocator = SmemAllocator()
        shared, chunk = chunk_store(allocator, traits, self.epilogue.norm)
        partials = memory.shared_array(allocator, Float32, traits.capacity * traits.cluster)
        barriers = memory.shared_array(allocator, Int64, _BARRIERS)
        if cutlass.const_expr(traits.padding > 0):
            memory.shared_array(allocator, Int64, traits.padding // 8)
        staged = None
        if cutlass.const_expr(traits.bulk_state):
            staged = memory.shared_array(allocator, state.element_type, traits.rows * HEAD_DIM, 128)

        place = here(traits, cute.arch.thread_idx()[0], head, rank, Int32(state.shape[1]) * HEAD_DIM, window)
        # What needs no global value comes before the wait for the grid ahead, and overlaps its end: barriers, and
        # sending for the weights. (A prefetch to L2 reads nothing: what the grid ahead writes goes through L2 as well.)
        if cutlass.const_expr(traits.bulk_state or self.epilogue.messages):
            if place.tid == self.courier:
                for i in cutlass.range_constexpr(_BARRIERS):
                    cute.arch.mbarrier_init(barriers + i, 1)
                cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()
        self.prologue.prefetch_constants(place, conv_weight, dt_bias)
        if cutlass.const_expr(traits.pdl):
            memory.wait_for_predecessor()
        # The metadata first: everything else of the request waits for it.
        metadata = read_metadata(traits, n, requests, query_start_loc, state_indices, num_accepted, record_indices)
        slots = state.shape[0]
        if cutlass.const_expr(self.fuse):
            slots = memory.minimum(Int32(slots), Int32(conv_state.shape[0]))
        request = request_window(traits, metadata, window, total_rows, slots, records)
        zero = (place.row0, place.tid, traits.rows, traits.threads, traits.vector)
        # Rows past the last request belong to nobody; the requests share them out.
        zero_rows(out, head, metadata.padding + n, total_rows, requests, *zero)
        if not request.live:
            zero_rows(out, head, request.start, request.start + request.length, Int32(1), *zero)
        if request.live & (request.length > 0):
            self.verify(
                request, place, shared, chunk, partials, barriers, staged,
                mixed_qkv, conv_weight, conv_state, raw_gate, raw_beta, A_log, dt_bias, state, output_gate,
                norm_weight, out, corrections, key_gate,
            )  # fmt: skip

    @cute.jit
    def copy_state(self, place: cutlass.Constexpr, state, source, barriers, staged):
        """Sends for the CTA's rows of the state."""
        if cutlass.const_expr(self.traits.bulk_state):
            if place.tid == self.courier:
                bytes_ = self.traits.rows * HEAD_DIM * state.element_type.width // 8
                cute.arch.mbarrier_arrive_and_expect_tx(barriers + _STATE_BARRIER, bytes_)
                memory.bulk_copy_to_shared(staged, source, bytes_, barriers + _STATE_BARRIER)

    @cute.jit
    def verify(
        self, request: cutlass.Constexpr, place: cutlass.Constexpr, shared: cutlass.Constexpr,
        chunk: cutlass.Constexpr, partials, barriers, staged,
        mixed_qkv, conv_weight, conv_state, raw_gate, raw_beta, A_log, dt_bias, state, output_gate,
        norm_weight, out, corrections, key_gate,
    ):  # fmt: skip
        """Phases 1 to 4 for a live request."""
        traits, rule, prologue, epilogue = self.traits, self.rule, self.prologue, self.epilogue

        # ---- 1. loads, and the tokens
        source = at(state, request.slot * state.stride[0] + Int64(place.head * HEAD_DIM + place.row0) * HEAD_DIM)
        weight_type = Float32
        if cutlass.const_expr(self.fuse):
            weight_type = conv_weight.element_type
        inputs, constants = prologue.inputs(prologue.token_passes, 2), prologue.constants(weight_type, 2)
        value_inputs, value_constants, finals = None, None, epilogue.fragments()
        if cutlass.const_expr(not prologue.roles):
            value_inputs = prologue.inputs(prologue.value_passes, 1)
            value_constants = prologue.constants(weight_type, 1)
        for i in cutlass.range_constexpr(prologue.token_passes):
            prologue.load_token(inputs, request, place, i, mixed_qkv, conv_state, raw_gate, raw_beta)
        prologue.load_constants(constants, place, conv_weight, A_log, dt_bias)
        if cutlass.const_expr(not prologue.roles):
            for i in cutlass.range_constexpr(prologue.value_passes):
                prologue.load_value(value_inputs, request, place, i, mixed_qkv, conv_state)
            prologue.load_value_constants(value_constants, place, conv_weight)
        epilogue.load_constants(finals, place, norm_weight)
        epilogue.load(finals, request, place, output_gate)
        if cutlass.const_expr(not traits.folded):
            self.copy_state(place, state, source, barriers, staged)
        for i in cutlass.range_constexpr(prologue.token_passes):
            prologue.prepare_token(inputs, constants, request, place, i, shared, chunk.values, key_gate)
        if cutlass.const_expr(not prologue.roles):
            for i in cutlass.range_constexpr(prologue.value_passes):
                prologue.prepare_value(value_inputs, value_constants, place, i, chunk.values)
        if cutlass.const_expr(traits.folded):
            # Behind the small loads: with many requests they would wait for everybody's states.
            self.copy_state(place, state, source, barriers, staged)
        else:
            epilogue.prepare(finals, place, chunk.factors)
        if cutlass.const_expr(self.clustered):
            # The taps have been consumed; nothing else is published here, so the arrival can be relaxed.
            cute.arch.cluster_arrive_relaxed()
        cute.arch.sync_threads()
        if cutlass.const_expr(epilogue.messages):
            if place.tid == 0:
                self.epilogue.expect(request, place, barriers + _NORM_BARRIER)

        # ---- 2. the tokens among themselves
        if cutlass.const_expr(self.fuse and not self.clustered):
            prologue.roll_windows(inputs, value_inputs, request, place, mixed_qkv, conv_state)
        rule.couple(place, shared, chunk)
        cute.arch.sync_threads()
        if cutlass.const_expr(traits.bulk_state):
            cute.arch.mbarrier_wait(barriers + _STATE_BARRIER, 0)
        if cutlass.const_expr(traits.pdl):
            memory.launch_dependents()

        # ---- 3. the state, and the solve
        if cutlass.const_expr(traits.bulk_state):
            rule.project(place, staged, QUAD, chunk)
        else:
            rule.project(place, source, traits.vector, chunk)
        rule.solve(place, shared, chunk)
        if cutlass.const_expr(traits.folded):
            epilogue.prepare(finals, place, chunk.factors)
        cute.arch.sync_threads()

        # ---- 4. corrections, norm, output
        if cutlass.const_expr(self.clustered):
            cute.arch.cluster_wait()
        sums = cute.make_rmem_tensor(epilogue.passes, Float32)
        if cutlass.const_expr(epilogue.norm):
            epilogue.sum_squares(sums, request, place, chunk.outputs, partials, barriers + _NORM_BARRIER)
        epilogue.store_corrections(request, place, chunk.outputs, corrections)
        if cutlass.const_expr(self.clustered):
            prologue.roll_windows(inputs, value_inputs, request, place, mixed_qkv, conv_state)
        if cutlass.const_expr(epilogue.messages):
            cute.arch.mbarrier_wait(barriers + _NORM_BARRIER, 0)
        epilogue.store_output(sums, chunk.factors, request, place, chunk.outputs, partials, out)


class FusedVerifyChunked(VerifyChunked):
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


class RecordChunked(VerifyChunked):
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
