# SPDX-License-Identifier: Apache-2.0
"""Gated RMSNorm of the window's rows as a launch of its own: a warp a token of one head, a quad of rows a lane."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64

from . import memory, norm
from .memory import at, load, store, to_float
from .traits import HEAD_DIM, QUAD, WARP, Traits
from .window import read_metadata, request_window, zero_rows

_WARPS = 4


class GatedRmsNorm:
    """Writes every row of ``out`` [M, H, D]: rows of null requests and rows past the last request become zero."""

    def __init__(self, traits: Traits):
        self.traits = traits

    @cute.jit
    def __call__(
        self,
        o: cute.Tensor,
        output_gate: cute.Tensor,
        norm_weight: cute.Tensor,
        query_start_loc: cute.Tensor,
        state_indices: cute.Tensor,
        out: cute.Tensor,
        stream,
    ):
        self.kernel(o, output_gate, norm_weight, query_start_loc, state_indices, out).launch(
            grid=(out.shape[1], state_indices.shape[0], 1),
            block=(_WARPS * WARP, 1, 1),
            stream=stream,
            use_pdl=self.traits.pdl,
        )

    @cute.kernel
    def kernel(
        self,
        o: cute.Tensor,
        output_gate: cute.Tensor,
        norm_weight: cute.Tensor,
        query_start_loc: cute.Tensor,
        state_indices: cute.Tensor,
        out: cute.Tensor,
    ):
        traits = self.traits
        tid, _, _ = cute.arch.thread_idx()
        head, n, _ = cute.arch.block_idx()
        lane = tid % WARP
        requests = Int32(state_indices.shape[0])
        total_rows = Int32(out.shape[0])
        if cutlass.const_expr(traits.pdl):
            memory.wait_for_predecessor()
            memory.launch_dependents()
        # The pools are not at hand here, so only the null rule applies to the slot. Lengths need no window.
        metadata = read_metadata(traits, n, requests, query_start_loc, state_indices)
        request = request_window(traits, metadata, total_rows, total_rows, 2**62)
        column = head * HEAD_DIM + lane * QUAD
        if request.live:
            weight = to_float(load(at(norm_weight, lane * QUAD), QUAD, traits.vector))
            row = request.start + tid // WARP
            end = request.start + request.length
            while row < end:
                values = to_float(load(at(o, Int64(row) * o.stride[0] + column), QUAD, traits.vector))
                z = load(at(output_gate, Int64(row) * output_gate.stride[0] + column), QUAD, traits.vector)
                total = norm.subtree_sum(values, HEAD_DIM // QUAD)
                result = norm.finish(traits, values, total, norm.gate_factor(weight, to_float(z)))
                store(at(out, Int64(row) * out.stride[0] + column), [x.to(BFloat16) for x in result], traits.vector)
                row = row + _WARPS
        else:
            zero_rows(
                out, head, request.start, request.start + request.length, Int32(1), Int32(0), tid, HEAD_DIM,
                _WARPS * WARP, traits.vector,
            )  # fmt: skip
        zero_rows(
            out, head, metadata.padding + n, total_rows, requests, Int32(0), tid, HEAD_DIM, _WARPS * WARP,
            traits.vector,
        )  # fmt: skip
