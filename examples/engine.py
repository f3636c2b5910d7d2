# SPDX-License-Identifier: Apache-2.0
"""A small engine around FlashKDA's verify and commit: `python examples/engine.py`, on a GPU or on the CPU.

It has what a serving engine has: KDA layers with pools of their own, a batch of fixed size whose idle places are null,
ragged windows of accepted tokens and rejected drafts, conv and record bindings made apart and joined by a VerifyLayer,
a commit of all layers, CUDA graphs where there is a GPU, and pools that move while requests are being served.

Each request's tokens are known beforehand, and so are the rows that a model's projections would give for them. The
engine drafts: some drafts are the request's next tokens (they are accepted), the others are noise. In the end the
accepted outputs have to be those of the same engine without drafts, to the bit.
"""

from __future__ import annotations

import random
import sys

import torch
from torch import Tensor

import flashkda

LAYERS, PLACES, TOKENS = 2, 4, (9, 7, 4)  # PLACES: requests of a batch; TOKENS: of the requests that will come
GEOMETRY = flashkda.preset("kimi-k3", tp=8, window=4, has_num_accepted=True, records="request")
HEADS, DIM, CHANNELS = GEOMETRY.heads, GEOMETRY.head_dim, GEOMETRY.channels
# A row of the one wide projection: q|k|v, forget gate, output gate, beta, padded to 16 bytes.
WIDTH = CHANNELS + 2 * HEADS * DIM + -(-HEADS // 8) * 8


class Batch:
    """The buffers that all layers share. They stay where they are, so that a graph finds them: an engine writes
    each step's lengths, slots and counts into them."""

    def __init__(self, device: str) -> None:
        self.query_start_loc = torch.zeros(PLACES + 1, dtype=torch.int32, device=device)
        self.state_indices = torch.zeros(PLACES, dtype=torch.int32, device=device)
        self.num_accepted = torch.ones(PLACES, dtype=torch.int32, device=device)


class Layer:
    """One KDA layer: weights, pools, and its verify."""

    def __init__(self, plan: flashkda.Plan, batch: Batch, slots: int, device: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=generator) * 0.5).to(device)

        self.plan, self.batch = plan, batch
        self.conv_weight, self.norm_weight = weight(CHANNELS, 4), weight(DIM)
        self.A_log, self.dt_bias = weight(HEADS), weight(HEADS, DIM)
        rows, window = PLACES * GEOMETRY.window, GEOMETRY.window

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device=device)

        self.projection = empty(rows, WIDTH).zero_()
        self.qkv = empty(rows, CHANNELS)
        self.out = empty(rows, HEADS, DIM)
        self.corrections = torch.empty(PLACES, HEADS, window, DIM, device=device)
        self.key_gate = empty(PLACES, HEADS, window, 2 * DIM)
        self.state = torch.zeros(slots, HEADS, DIM, DIM, device=device)
        self.conv_state = empty(slots, GEOMETRY.conv_columns, CHANNELS).zero_().transpose(1, 2)
        self.verify = flashkda.VerifyLayer(plan)
        self.bind()

    def bind(self) -> None:
        """Both bindings, as the two halves of an engine make them. What was bound before becomes stale."""
        gate, z, beta = self.projection[:, CHANNELS:].tensor_split([HEADS * DIM, 2 * HEADS * DIM], dim=1)
        self.verify.conv = self.plan.bind_short_conv(
            mixed_qkv=self.projection[:, :CHANNELS],
            conv_weight=self.conv_weight,
            conv_state=self.conv_state,
            num_accepted=self.batch.num_accepted,
            qkv=self.qkv,
            query_start_loc=self.batch.query_start_loc,
            state_indices=self.batch.state_indices,
        )
        self.verify.record = self.plan.bind_record(
            qkv=self.qkv,
            raw_gate=gate.unflatten(1, (HEADS, DIM)),
            raw_beta=beta[:, :HEADS],
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            state=self.state,
            output_gate=z.unflatten(1, (HEADS, DIM)),
            norm_weight=self.norm_weight,
            out=self.out,
            corrections=self.corrections,
            key_gate=self.key_gate,
            query_start_loc=self.batch.query_start_loc,
            state_indices=self.batch.state_indices,
        )

    def move_pools(self, slots: int) -> None:
        """Larger pools elsewhere, with the same contents in their first slots."""
        state, conv_state = self.state, self.conv_state
        self.state = state.new_zeros(slots, *state.shape[1:])
        self.conv_state = conv_state.new_zeros(slots, conv_state.shape[2], CHANNELS).transpose(1, 2)
        self.state[: state.shape[0]] = state
        self.conv_state[: state.shape[0]] = conv_state
        self.bind()


class Engine:
    """Layers, a batch, and a graph where the plan's path can be captured."""

    def __init__(self, device: str) -> None:
        self.plan = flashkda.plan_verify(GEOMETRY, PLACES, device=device)
        # Records of the reference are for the reference's commit.
        path = "reference" if self.plan.path == "reference" else "auto"
        self.commit_plan = flashkda.plan_commit(
            flashkda.CommitGeometry(GEOMETRY, LAYERS), PLACES, device=device, path=path
        )
        self.batch = Batch(device)
        self.layers = [Layer(self.plan, self.batch, 1 + PLACES, device, seed) for seed in range(LAYERS)]
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.capture()

    def capture(self) -> None:
        """Join the bindings, bind the commit, and capture the verify of all layers and the commit."""
        for layer in self.layers:
            layer.verify.finalize()
        names = ("state", "corrections", "key_gate", "A_log", "dt_bias")
        self.commit = self.commit_plan.bind(
            accepted=self.batch.num_accepted,
            state_indices=self.batch.state_indices,
            check_metadata=None,
            **{name: [getattr(layer, name) for layer in self.layers] for name in names},
        )
        self.graphs.clear()
        if self.plan.path == "reference":
            return
        self.batch.state_indices.zero_()  # the first calls, of null requests: they write nothing but zeros to out
        for layer in self.layers:
            layer.verify.run()
        torch.cuda.synchronize()
        for run in (self.verify, self.commit.run):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            self.graphs.append(graph)

    def verify(self) -> None:
        """A launch a layer, on the fused path."""
        for layer in self.layers:
            layer.verify.run()

    def move_pools(self) -> None:
        """What an engine does when its memory is laid out anew: bind again, capture again."""
        for layer in self.layers:
            layer.move_pools(2 * (1 + PLACES))
        self.capture()

    def step(self, windows: list[Tensor | None], accepted: list[int]) -> None:
        """Verify one window a place ([LAYERS, tokens, WIDTH], or None), then commit what was accepted of each."""
        lengths = [0 if window is None else window.shape[1] for window in windows]
        starts = torch.tensor([0, *lengths]).cumsum(0)
        slots = [0 if window is None else 1 + place for place, window in enumerate(windows)]
        self.batch.query_start_loc.copy_(starts)
        self.batch.state_indices.copy_(torch.tensor(slots))
        for place, window in enumerate(windows):
            if window is not None:
                for layer, rows in zip(self.layers, window, strict=True):
                    layer.projection[int(starts[place]) : int(starts[place + 1])] = rows
        verify, commit = [graph.replay for graph in self.graphs] or [self.verify, self.commit.run]
        verify()
        # Read by the commit, and by the next verify to find the conv history. Idle places are null: the commit skips
        # them.
        self.batch.num_accepted.copy_(torch.tensor(accepted))
        commit()


def serve(device: str, streams: list[Tensor], drafting: bool) -> list[Tensor]:
    """Every request to its end; the outputs of its tokens [LAYERS, tokens, HEADS, DIM]."""
    engine, chance = Engine(device), random.Random(0)
    done = [0] * len(streams)
    outputs: list[list[Tensor]] = [[] for _ in streams]
    steps = 0
    while any(done[n] < stream.shape[1] for n, stream in enumerate(streams)):
        windows: list[Tensor | None] = [None] * PLACES
        accepted = [1] * PLACES
        for n, stream in enumerate(streams):
            left = stream.shape[1] - done[n]
            if left == 0:
                continue
            length = chance.randint(1, GEOMETRY.window) if drafting else 1
            accepted[n] = chance.randint(1, min(length, left))
            noise = torch.randn(LAYERS, length - accepted[n], WIDTH).to(stream)
            windows[n] = torch.cat([stream[:, done[n] : done[n] + accepted[n]], noise], dim=1)
        engine.step(windows, accepted)
        for n, window in enumerate(windows):
            if window is not None:
                start = int(engine.batch.query_start_loc[n])
                outputs[n].append(torch.stack([layer.out[start : start + accepted[n]] for layer in engine.layers]))
                done[n] += accepted[n]
        steps += 1
        if steps == 2:
            engine.move_pools()
    kind = "with" if drafting else "without"
    print(f"{kind} drafts: {sum(done)} tokens in {steps} steps on the {engine.plan.path} path")
    return [torch.cat(parts, dim=1) for parts in outputs]


def main() -> int:
    """Serve with and without drafts; 1 where the outputs differ."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    streams = [torch.randn(LAYERS, count, WIDTH, generator=generator).to(device, torch.bfloat16) for count in TOKENS]
    drafted, plain = serve(device, streams, drafting=True), serve(device, streams, drafting=False)
    for n, (one, other) in enumerate(zip(drafted, plain, strict=True)):
        same = torch.equal(one.view(torch.int16), other.view(torch.int16))
        print(f"request {n}: {one.shape[1]} tokens, {'the same outputs' if same else 'OUTPUTS DIFFER'}")
        if not same:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
