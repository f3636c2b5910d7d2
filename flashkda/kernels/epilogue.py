# SPDX-License-Identifier: Apache-2.0
"""The window after the rule: corrections to the records, and o through the norm (or as it is) to the output.

A thread has quads of value rows, tokens apart. The norm's sum of squares runs over the CTA's rows by shuffles and over
the cluster by one message a token and peer.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from . import memory, norm
from .memory import at, load, store
from .numerics import to_bf16_and_back
from .traits import HEAD_DIM, QUAD, Traits


class Epilogue:
    """``norm`` is whether the gated RMSNorm is part of the launch. ``results`` in shared memory has v, u and o in fp32
    arrays of [capacity, rows], as ``Traits.result_blocks`` says."""

    def __init__(self, traits: Traits, norm: bool):
        self.traits = traits
        self.norm = norm
        self.messages = norm and traits.cluster > 1
        self.passes = -(-traits.capacity * traits.quads // traits.threads)

    def _token(self, place, i):
        return (place.tid + i * self.traits.threads) // self.traits.quads

    def _row(self, place):
        """First of the thread's four rows, within the CTA."""
        return place.tid % self.traits.quads * QUAD

    def _output(self, results, place, i):
        """A quad of o, rounded to bf16. A token past the capacity (its lanes only keep the shuffles company) reads some
        other's."""
        traits = self.traits
        token = traits.result_blocks[1] * traits.capacity + (self._token(place, i) & (traits.capacity - 1))
        return [to_bf16_and_back(o) for o in load(results + (token * traits.rows + self._row(place)), QUAD, QUAD)]

    def fragments(self):
        """Output gate of each pass, and the norm's weight."""
        return [cute.make_rmem_tensor(QUAD, BFloat16) for _ in range(self.passes)], cute.make_rmem_tensor(QUAD, Float32)

    @cute.jit
    def load_constants(self, fragments: cutlass.Constexpr, place: cutlass.Constexpr, weight):
        """Issues the loads that need no metadata."""
        if cutlass.const_expr(self.norm):
            scale = load(at(weight, place.row0 + self._row(place)), QUAD, self.traits.vector)
            for j in cutlass.range_constexpr(QUAD):
                fragments[1][j] = scale[j].to(Float32)

    @cute.jit
    def load(self, fragments: cutlass.Constexpr, request: cutlass.Constexpr, place: cutlass.Constexpr, gate):
        """Issues the loads that the end of the kernel will want."""
        if cutlass.const_expr(self.norm):
            for i in cutlass.range_constexpr(self.passes):
                row = Int64(request.start + memory.minimum(self._token(place, i), request.length - 1))
                offset = row * gate.stride[0] + place.head * HEAD_DIM + place.row0 + self._row(place)
                memory.copy_in(fragments[0][i], at(gate, offset), QUAD, self.traits.vector)

    def _factors(self, factors, place, i):
        traits = self.traits
        token = self._token(place, i) & (traits.capacity - 1)
        return factors + (token * traits.rows + self._row(place))

    @cute.jit
    def prepare(self, fragments: cutlass.Constexpr, place: cutlass.Constexpr, factors):
        """Leaves weight * sigmoid(gate) in shared memory, where the same thread will read it: no registers are held."""
        if cutlass.const_expr(self.norm):
            weight = [fragments[1][j] for j in range(QUAD)]
            for i in cutlass.range_constexpr(self.passes):
                z = [Float32(fragments[0][i][j]) for j in range(QUAD)]
                if self._token(place, i) < self.traits.capacity:
                    store(self._factors(factors, place, i), norm.gate_factor(weight, z), QUAD)

    @cute.jit
    def sum_squares(
        self, sums: cute.Tensor, request: cutlass.Constexpr, place: cutlass.Constexpr, results, partials, barrier
    ):
        """Sums of squares over the CTA's rows into ``sums`` [passes]; in a cluster also sent to every peer."""
        traits = self.traits
        for i in cutlass.range_constexpr(self.passes):
            token = self._token(place, i)
            total = norm.subtree_sum(self._output(results, place, i), traits.quads)
            sums[i] = total
            if cutlass.const_expr(self.messages):
                if token < request.length:
                    for round_ in cutlass.range_constexpr(-(-traits.cluster // traits.quads)):
                        peer = place.tid % traits.quads + round_ * traits.quads
                        if peer < traits.cluster:
                            memory.send(partials + (token * traits.cluster + place.rank), total, barrier, peer)

    @cute.jit
    def store_corrections(self, request: cutlass.Constexpr, place: cutlass.Constexpr, results, corrections):
        """u of the CTA's rows to the record."""
        traits = self.traits
        for i in cutlass.range_constexpr(self.passes):
            token = self._token(place, i)
            if token < request.length:
                offset = request.record * corrections.stride[0] + place.row0 + self._row(place)
                offset = offset + (Int64(place.head) * place.window + token) * HEAD_DIM
                place_of_u = (traits.result_blocks[0] * traits.capacity + token) * traits.rows + self._row(place)
                u = load(results + place_of_u, QUAD, QUAD)
                store(at(corrections, offset), u, traits.vector)

    @cute.jit
    def store_output(
        self,
        sums: cute.Tensor,
        factors,
        request: cutlass.Constexpr,
        place: cutlass.Constexpr,
        results,
        partials,
        out,
    ):
        """Finishes and stores the CTA's rows of ``out``."""
        traits = self.traits
        for i in cutlass.range_constexpr(self.passes):
            token = self._token(place, i)
            if token < request.length:
                output = self._output(results, place, i)
                if cutlass.const_expr(self.norm):
                    total = sums[i]
                    if cutlass.const_expr(self.messages):
                        pointer = partials + token * traits.cluster
                        total = norm.join_subtrees(load(pointer, traits.cluster, min(4, traits.cluster)))
                    factor = load(self._factors(factors, place, i), QUAD, QUAD)
                    output = norm.finish(traits, output, total, factor)
                offset = Int64(request.start + token) * out.stride[0] + place.head * HEAD_DIM
                pointer = at(out, offset + place.row0 + self._row(place))
                store(pointer, [x.to(BFloat16) for x in output], traits.vector)

    def expect(self, request, place, barrier):
        """One arrival, and the bytes of every message to this CTA."""
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, request.length * Int32(4 * self.traits.cluster))
