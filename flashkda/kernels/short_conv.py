# SPDX-License-Identifier: Apache-2.0
"""Short convolution of the window as a launch of its own: a warp has one part (q, k or v) of one head of a request."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64

from . import conv, memory
from .memory import at, store
from .traits import HEAD_DIM, QUAD, TAPS, WARP, Traits
from .window import read_metadata, request_window

_PARTS = 3


class ShortConv:
    """Writes ``qkv`` [M, C] for the rows of live requests and rolls their conv windows."""

    def __init__(self, traits: Traits):
        self.traits = traits

    @cute.jit
    def __call__(
        self,
        mixed_qkv: cute.Tensor,
        conv_weight: cute.Tensor,
        conv_state: cute.Tensor,
        query_start_loc: cute.Tensor,
        state_indices: cute.Tensor,
        num_accepted: cute.Tensor | None,
        qkv: cute.Tensor,
        stream,
    ):
        heads = conv_weight.shape[0] // (_PARTS * HEAD_DIM)
        self.kernel(mixed_qkv, conv_weight, conv_state, query_start_loc, state_indices, num_accepted, qkv).launch(
            grid=(heads, state_indices.shape[0], 1),
            block=(_PARTS * WARP, 1, 1),
            stream=stream,
            use_pdl=self.traits.pdl,
        )

    @cute.kernel
    def kernel(
        self,
        mixed_qkv: cute.Tensor,
        conv_weight: cute.Tensor,
        conv_state: cute.Tensor,
        query_start_loc: cute.Tensor,
        state_indices: cute.Tensor,
        num_accepted: cute.Tensor | None,
        qkv: cute.Tensor,
    ):
        traits = self.traits
        tid, _, _ = cute.arch.thread_idx()
        head, n, _ = cute.arch.block_idx()
        channels = Int32(conv_weight.shape[0]) // _PARTS
        channel = tid // WARP * channels + head * HEAD_DIM + tid % WARP * QUAD
        window = Int32(conv_state.shape[2]) - 2
        if cutlass.const_expr(traits.pdl):
            memory.wait_for_predecessor()
            memory.launch_dependents()
        metadata = read_metadata(traits, n, Int32(state_indices.shape[0]), query_start_loc, state_indices, num_accepted)
        request = request_window(traits, metadata, window, Int32(qkv.shape[0]), conv_state.shape[0])
        if request.live & (request.length > 0):
            fragment = cute.make_rmem_tensor(QUAD * TAPS, conv_weight.element_type)
            memory.copy_in(fragment, at(conv_weight, channel * TAPS), QUAD * TAPS, traits.vector)
            weights = conv.weights_as_float(fragment, QUAD)
            taps = [cute.make_rmem_tensor((TAPS, QUAD), BFloat16) for _ in range(traits.capacity)]
            # All of the history is read before any column is written: a token's column may be another's history.
            for token in cutlass.range_constexpr(traits.capacity):
                if token < request.length:
                    conv.load_taps(
                        taps[token], mixed_qkv, conv_state, request.start, Int32(token), request.slot, request.column,
                        channel, QUAD, traits.vector, traits.conv_layout,
                    )  # fmt: skip
            for token in cutlass.range_constexpr(traits.capacity):
                if token < request.length:
                    y = conv.convolve(conv.taps_as_float(taps[token], QUAD), weights)
                    pointer = at(qkv, Int64(request.start + token) * qkv.stride[0] + channel)
                    store(pointer, [value.to(BFloat16) for value in y], traits.vector)
                    conv.roll_window(
                        conv_state, taps[token], request.slot, Int32(token), channel, QUAD, traits.vector,
                        traits.conv_layout, token == 0,
                    )  # fmt: skip
