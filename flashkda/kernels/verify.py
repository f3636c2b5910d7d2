# SPDX-License-Identifier: Apache-2.0
"""The verification of one layer: ``FusedVerify`` (conv, rule, norm in one launch) and ``Record`` (the rule alone), and
the decode of one token, ``FusedDecode`` and ``DecodeRule``, which writes the state in place.

One CTA has one request, one head and ``rows`` of the head's 128 value rows; ``128 / rows`` CTAs form a cluster. Phases:

1. Metadata, then every global load: the state by one bulk copy, conv inputs, gates, the output gate, weights.
2. One warp a token: conv of q and k, their norms, gates, dots, into shared memory; all threads: conv of v.
3. One barrier. The rule runs over the tokens with the state in registers, without a barrier.
4. One barrier. Corrections are stored; the norm sums squares in the CTA, then over the cluster (st.async, mbarrier).

Each rank reads the whole conv history of q and k, and each writes a part of the window in place: ranks arrive at the
cluster barrier once their taps have been consumed and write behind its wait. The same barrier makes the peers' mbarrier
known to be initialized. No CTA leaves before every message to it has come, so no message meets a dead CTA.

All are one class: what differs is where q, k and v come from and where o goes to. A ``FusedVerify`` may also fold the
accepted records of the window before into the state first, and writes it back then; it records its own window once no
CTA of the head reads the old records any more.
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
from .place import STASH, here, stash, stashed
from .prologue import Prologue, fold_store, token_store
from .traits import HEAD_DIM, QUAD, Traits
from .window import read_metadata, request_window, tokens_to_fold, zero_rows

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
        corrections: cute.Tensor | None,
        key_gate: cute.Tensor | None,
    ):
        traits = self.traits
        rank, head, n = cute.arch.block_idx()
        requests = Int32(state_indices.shape[0])
        records = None
        if cutlass.const_expr(not traits.decode):
            records, window = corrections.shape[0], Int32(corrections.shape[2])
        elif cutlass.const_expr(self.fuse):
            window = Int32(conv_state.shape[2]) - 2
        else:
            window = Int32(1)
        total_rows = Int32(out.shape[0])

        allocator = SmemAllocator()
        shared = token_store(allocator, traits.capacity)
        # v of the window's tokens, u, and o before its rounding to bf16.
        blocks = traits.result_blocks[1] + 1
        results = memory.shared_array(allocator, Float32, blocks * traits.capacity * traits.rows)
        factors = results
        if cutlass.const_expr(self.epilogue.norm):
            factors = memory.shared_array(allocator, Float32, traits.capacity * traits.rows)
        partials = memory.shared_array(allocator, Float32, traits.capacity * traits.cluster)
        barriers = memory.shared_array(allocator, Int64, _BARRIERS)
        kept = memory.shared_array(allocator, Int64, STASH)
        folded = None
        if cutlass.const_expr(traits.fold):
            folded = fold_store(allocator, traits)
        if cutlass.const_expr(traits.padding > 0):
            memory.shared_array(allocator, Int64, traits.padding // 8)
        staged = None
        if cutlass.const_expr(traits.bulk_state):
            staged = memory.shared_array(allocator, state.element_type, traits.rows * HEAD_DIM, 128)

        place = here(traits, cute.arch.thread_idx()[0], head, rank, Int32(state.shape[1]) * HEAD_DIM, window)
        # What needs no global value comes before the wait for the grid ahead, and overlaps its end: barriers, and
        # sending for the weights. (A prefetch to L2 reads nothing: what the grid ahead writes goes through L2 as well.)
        if cutlass.const_expr(traits.bulk_state or self.epilogue.messages):
            if place.tid == 0:
                for i in cutlass.range_constexpr(_BARRIERS):
                    cute.arch.mbarrier_init(barriers + i, 1)
                cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()
        if cutlass.const_expr(not traits.lean):
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
            count = Int32(0)
            if cutlass.const_expr(traits.fold):
                count = tokens_to_fold(metadata, window)
            self.verify(
                request, place, shared, results, factors, partials, barriers, kept, staged, folded, count,
                mixed_qkv, conv_weight, conv_state, raw_gate, raw_beta, A_log, dt_bias, state, output_gate,
                norm_weight, out, corrections, key_gate,
            )  # fmt: skip

    @cute.jit
    def verify(
        self, request: cutlass.Constexpr, place: cutlass.Constexpr,
        shared: cutlass.Constexpr, results, factors, partials, barriers, kept, staged, folded: cutlass.Constexpr, count,
        mixed_qkv, conv_weight, conv_state, raw_gate, raw_beta, A_log, dt_bias, state, output_gate,
        norm_weight, out, corrections, key_gate,
    ):  # fmt: skip
        """Phases 1 to 4 for a live request."""
        traits, rule, prologue, epilogue = self.traits, self.rule, self.prologue, self.epilogue

        # ---- 1. loads
        source = at(state, request.slot * state.stride[0] + Int64(place.head * HEAD_DIM + place.row0) * HEAD_DIM)
        fragment = cute.make_rmem_tensor(rule.rows * rule.keys, Float32)
        if cutlass.const_expr(traits.bulk_state):
            if place.tid == 0:
                bytes_ = traits.rows * HEAD_DIM * state.element_type.width // 8
                cute.arch.mbarrier_arrive_and_expect_tx(barriers + _STATE_BARRIER, bytes_)
                memory.bulk_copy_to_shared(staged, source, bytes_, barriers + _STATE_BARRIER)
        weight_type = Float32
        if cutlass.const_expr(self.fuse):
            weight_type = conv_weight.element_type
        inputs, constants = prologue.inputs(prologue.token_passes, 2), prologue.constants(weight_type, 2)
        value_inputs, value_constants, finals = None, None, epilogue.fragments()
        records = prologue.records()
        if cutlass.const_expr(not prologue.roles):
            value_inputs = prologue.inputs(prologue.value_passes, 1)
            value_constants = prologue.constants(weight_type, 1)
        if cutlass.const_expr(not traits.lean):
            for i in cutlass.range_constexpr(prologue.token_passes):
                prologue.load_token(inputs, request, place, i, mixed_qkv, conv_state, raw_gate, raw_beta)
            prologue.load_constants(constants, place, conv_weight, A_log, dt_bias)
            if cutlass.const_expr(not prologue.roles):
                for i in cutlass.range_constexpr(prologue.value_passes):
                    prologue.load_value(value_inputs, request, place, i, mixed_qkv, conv_state)
                prologue.load_value_constants(value_constants, place, conv_weight)
        if cutlass.const_expr(traits.fold):
            last = select(count > 0, count - 1, Int32(0))
            prologue.load_records(records, request, place, last, corrections, key_gate)
        epilogue.load_constants(finals, place, norm_weight)
        epilogue.load(finals, request, place, output_gate)
        if cutlass.const_expr(not traits.bulk_state and not traits.lean):
            if place.tid < traits.rule_threads:
                self.rule.load_state(fragment, source + place.local_row * HEAD_DIM, place.key_lane, traits.vector)

        # ---- 2. prepare the tokens
        if cutlass.const_expr(traits.lean):
            prologue.load_constants(constants, place, conv_weight, A_log, dt_bias)
        for i in cutlass.range_constexpr(prologue.token_passes):
            if cutlass.const_expr(traits.lean):
                prologue.load_token(inputs, request, place, i, mixed_qkv, conv_state, raw_gate, raw_beta)
            prologue.prepare_token(inputs, constants, request, place, i, shared, results, key_gate, records)
        if cutlass.const_expr(traits.fold):
            prologue.prepare_records(records, constants, place, folded)
        if cutlass.const_expr(not prologue.roles):
            if cutlass.const_expr(traits.lean):
                prologue.load_value_constants(value_constants, place, conv_weight)
            for i in cutlass.range_constexpr(prologue.value_passes):
                if cutlass.const_expr(traits.lean):
                    prologue.load_value(value_inputs, request, place, i, mixed_qkv, conv_state)
                prologue.prepare_value(value_inputs, value_constants, place, i, results)
        epilogue.prepare(finals, place, factors)
        if cutlass.const_expr(traits.lean):
            if place.tid == 0:
                stash(kept, request, place)
        if cutlass.const_expr(self.clustered):
            # The taps have been consumed; nothing else is published here, so the arrival can be relaxed.
            cute.arch.cluster_arrive_relaxed()
        cute.arch.sync_threads()
        if cutlass.const_expr(epilogue.messages):
            if place.tid == 0:
                self.epilogue.expect(request, place, barriers + _NORM_BARRIER)
        if cutlass.const_expr(self.clustered and traits.lean):
            cute.arch.cluster_wait()
        if cutlass.const_expr(self.fuse and (traits.lean or not self.clustered)):
            prologue.roll_windows(inputs, value_inputs, request, place, mixed_qkv, conv_state)
        if cutlass.const_expr(traits.bulk_state):
            cute.arch.mbarrier_wait(barriers + _STATE_BARRIER, 0)
        if cutlass.const_expr(traits.pdl):
            memory.launch_dependents()

        # ---- 3. the rule
        if place.tid < traits.rule_threads:
            if cutlass.const_expr(traits.bulk_state):
                self.rule.load_state(fragment, staged + place.local_row * HEAD_DIM, place.key_lane, QUAD)
            elif cutlass.const_expr(traits.lean):
                # Its registers were needed for the tokens until now.
                self.rule.load_state(fragment, source + place.local_row * HEAD_DIM, place.key_lane, traits.vector)
            if cutlass.const_expr(traits.fold):
                self.fold(fragment, count, place, folded, source)
            self.run_rule(fragment, request, place, shared, results)
            if cutlass.const_expr(traits.decode):
                target = source + place.local_row * HEAD_DIM
                self.rule.store_state(fragment, target, place.key_lane, traits.vector)
        cute.arch.sync_threads()
        if cutlass.const_expr(traits.lean):
            # Read back rather than kept: over the rule every register is the state's.
            request, place = stashed(traits, kept, request, place)

        # ---- 4. corrections, norm, output
        if cutlass.const_expr(self.clustered and not traits.lean):
            cute.arch.cluster_wait()
        sums = cute.make_rmem_tensor(epilogue.passes, Float32)
        if cutlass.const_expr(epilogue.norm):
            epilogue.sum_squares(sums, request, place, results, partials, barriers + _NORM_BARRIER)
        if cutlass.const_expr(not traits.decode):
            epilogue.store_corrections(request, place, results, corrections)
        if cutlass.const_expr(self.clustered and not traits.lean):
            prologue.roll_windows(inputs, value_inputs, request, place, mixed_qkv, conv_state)
        if cutlass.const_expr(traits.fold):
            prologue.store_records(records, inputs, request, place, key_gate)
        if cutlass.const_expr(epilogue.messages):
            cute.arch.mbarrier_wait(barriers + _NORM_BARRIER, 0)
        epilogue.store_output(sums, factors, request, place, results, partials, out)

    @cute.jit
    def fold(self, fragment: cute.Tensor, count, place: cutlass.Constexpr, folded: cutlass.Constexpr, source):
        """The accepted tokens of the window before into the state, which is written back."""
        for token in cutlass.range(cute.arch.make_warp_uniform(count), unroll=1):
            u = folded.u + (token * self.traits.rows + place.local_row)
            corrections = memory.load(u, self.rule.rows, min(self.rule.rows, QUAD))
            self.rule.fold(fragment, folded.key, folded.decay, token, place.key_lane, corrections)
        if count > 0:
            self.rule.store_state(fragment, source + place.local_row * HEAD_DIM, place.key_lane, self.traits.vector)
            if cutlass.const_expr(source.dtype.width < 32):
                # What a commit leaves in the pool is what a verify after it reads.
                for i in cutlass.range_constexpr(self.rule.rows * self.rule.keys):
                    fragment[i] = fragment[i].to(source.dtype).to(Float32)

    @cute.jit
    def run_rule(
        self, fragment: cute.Tensor, request: cutlass.Constexpr, place: cutlass.Constexpr, shared: cutlass.Constexpr,
        results,
    ):  # fmt: skip
        """The tokens one after another; each leaves its u and o in ``results``."""
        traits = self.traits
        value_row = place.local_row + self.rule.own_row(place.key_lane)
        u_place, o_place = (Int32(block * traits.capacity * traits.rows) for block in traits.result_blocks)
        behind = select(self.rule.finishes_output(place.key_lane), o_place, u_place)
        result_row = value_row + behind
        operands = self.rule.operands()
        self.rule.load_operands(operands, shared, Int32(0), place.key_lane)
        # Known to be the same for a warp, the count of tokens costs no register a thread.
        length = cute.arch.make_warp_uniform(request.length)
        for token in cutlass.range(length, unroll=1):
            value = (results + (token * traits.rows + value_row)).load()
            result = self.rule.step(
                fragment, operands, shared, token, memory.minimum(token + 1, length - 1), value, place.key_lane
            )
            # Lanes that finish the same number store equal words to one place: no predicate, no branch.
            (results + (token * traits.rows + result_row)).store(result)


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


class FusedDecode(Verify):
    """One token a request: conv, rule and norm in one launch. Writes out, conv_state, and state in place."""

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
        out: cute.Tensor,
        stream,
    ):
        self.launch(
            stream, state_indices.shape[0], state.shape[1],
            mixed_qkv, conv_weight, conv_state, raw_gate, raw_beta, A_log, dt_bias, state, output_gate, norm_weight,
            query_start_loc, state_indices, num_accepted, None, out, None, None,
        )  # fmt: skip


class DecodeRule(Verify):
    """The rule of one token a request, on convolved q|k|v. Writes o (before the norm), and state in place."""

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
        o: cute.Tensor,
        stream,
    ):
        self.launch(
            stream, state_indices.shape[0], state.shape[1],
            qkv, None, None, raw_gate, raw_beta, A_log, dt_bias, state, None, None,
            query_start_loc, state_indices, None, None, o, None, None,
        )  # fmt: skip
