# SPDX-License-Identifier: Apache-2.0
"""The rule of a (request, head) pair in a persistent CTA, and what follows it: corrections and output.

In the rule every lane finishes a row (``DeltaRule.paired``); afterwards every warp finishes tokens, a lane four
adjacent rows.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from . import norm
from .delta_rule import DeltaRule
from .memory import at, load, store
from .numerics import to_bf16_and_back
from .traits import HEAD_DIM, QUAD, WARP, Traits
from .window import Window


class RuleStage:
    def __init__(self, traits: Traits):
        self.traits = traits
        self.rule = DeltaRule(traits)
        self.warps = traits.rule_threads // WARP

    def fragment(self):
        """Registers for the thread's part of a state."""
        return cute.make_rmem_tensor(self.rule.rows * self.rule.keys, Float32)

    def _place(self, tid):
        """The thread's key lane and first row."""
        return tid & (self.rule.lanes - 1), tid // self.rule.lanes * self.rule.rows

    def take_state(self, fragment, source, tid):
        """The state from shared memory, or from a head's first element in the pool, into registers."""
        key_lane, row = self._place(tid)
        self.rule.load_state(fragment, source + row * HEAD_DIM, key_lane, QUAD)

    def _store_state(self, fragment, request: Window, head, tid, state):
        key_lane, row = self._place(tid)
        offset = request.slot * state.stride[0] + Int64(head * HEAD_DIM + row) * HEAD_DIM
        self.rule.store_state(fragment, at(state, offset), key_lane, self.traits.vector)

    @cute.jit
    def compute(
        self, fragment: cute.Tensor, prepared: cutlass.Constexpr, known: cutlass.Constexpr, length: Int32,
        head: Int32, tid: Int32, state: cute.Tensor,
    ):  # fmt: skip
        """The tokens to fold, and those of the window; u and o go to shared memory."""
        traits, rule = self.traits, self.rule
        key_lane, row = self._place(tid)
        own = row + rule.own_row(key_lane)
        if cutlass.const_expr(traits.fold):
            self.fold(fragment, prepared, known.count, key_lane, row)
            if known.count > 0:
                self._store_state(fragment, known.request, head, tid, state)
                if cutlass.const_expr(state.element_type.width < 32):
                    # What a commit would have left in the pool is what a verify after it would have read.
                    for i in cutlass.range_constexpr(rule.rows * rule.keys):
                        fragment[i] = fragment[i].to(state.element_type).to(Float32)
        operands = rule.operands()
        for token in cutlass.range(length, unroll=1):
            place = token * HEAD_DIM + own
            value = (prepared.values + place).load()
            u, o = self.rule.step_paired(fragment, operands, prepared.shared, token, value, key_lane)
            (prepared.values + place).store(u)  # in place of v, which only this lane reads
            (prepared.outputs + place).store(o)
        if cutlass.const_expr(traits.decode):
            self._store_state(fragment, known.request, head, tid, state)

    @cute.jit
    def fold(self, fragment: cute.Tensor, prepared: cutlass.Constexpr, count: Int32, key_lane: Int32, row: Int32):
        """The accepted tokens of the window before, from its records."""
        for token in cutlass.range(cute.arch.make_warp_uniform(count), unroll=1):
            u = load(prepared.folded_u + (token * HEAD_DIM + row), self.rule.rows, QUAD)
            self.rule.fold(fragment, prepared.folded_key, prepared.folded_decay, token, key_lane, u)

    @cute.jit
    def finish(
        self, prepared: cutlass.Constexpr, weight: cutlass.Constexpr, request: cutlass.Constexpr, length: Int32,
        head: Int32, tid: Int32, out: cute.Tensor, corrections: cute.Tensor | None,
    ):  # fmt: skip
        """Corrections to the record, and o through the norm (or as it is) to the output: a warp a token at a time."""
        traits = self.traits
        row = tid % WARP * QUAD
        window = Int32(1)
        if cutlass.const_expr(not traits.decode):
            window = Int32(corrections.shape[2])
        for i in cutlass.range_constexpr(-(-traits.capacity // self.warps)):
            token = tid // WARP + i * self.warps
            if token < length:
                place = token * HEAD_DIM + row
                output = [to_bf16_and_back(o) for o in load(prepared.outputs + place, QUAD, QUAD)]
                if cutlass.const_expr(not traits.decode):
                    offset = request.record * corrections.stride[0] + (Int64(head) * window + token) * HEAD_DIM + row
                    store(at(corrections, offset), load(prepared.values + place, QUAD, QUAD), traits.vector)
                if cutlass.const_expr(traits.norm):
                    gate = [Float32(z) for z in load(prepared.gates + place, QUAD, QUAD)]
                    factor = norm.gate_factor(load(weight + row, QUAD, QUAD), gate)
                    output = norm.finish(traits, output, norm.subtree_sum(output, WARP), factor)
                target = Int64(request.start + token) * out.stride[0] + head * HEAD_DIM + row
                store(at(out, target), [x.to(BFloat16) for x in output], traits.vector)
