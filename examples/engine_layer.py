# SPDX-License-Identifier: Apache-2.0
"""A Kimi K3 layer as an engine holds it, and a small engine around it: `python examples/engine_layer.py`.

A `Layer` has weights, pools and records of its own, and three things to run: the verify of a step with drafts, whose
conv and record bindings are made apart and joined by a VerifyLayer; the decode of a step without; and its part in the
commit of all layers. The `Engine` asks what the device can do, plans, has the layers bind, and captures verify, commit
and decode in CUDA graphs where there is a GPU; on the CPU it runs the reference. Its batch has a fixed size, idle
places are null, windows are ragged, and the pools move while requests are being served.

Each request's tokens are known beforehand, and so are the rows that a model's projections would give for them. The
engine drafts: some drafts are the request's next tokens (they are accepted), the others are noise. In the end the
accepted outputs have to be those of the same engine without drafts, which decodes only, to the bit.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import torch
from torch import Tensor

import flashkda

LAYERS, PLACES, TOKENS = 2, 4, (9, 7, 4)  # PLACES: requests of a batch; TOKENS: of the requests that will come
GEOMETRY = flashkda.preset("kimi-k3", tp=8, window=4, has_num_accepted=True, records="request")
HEADS, DIM, CHANNELS = GEOMETRY.heads, GEOMETRY.head_dim, GEOMETRY.channels
# A row of the one wide projection: q|k|v, forget gate, output gate, beta, padded to 16 bytes.
WIDTH = CHANNELS + 2 * HEADS * DIM + -(-HEADS // 8) * 8


class Plans:
    """What every layer and the commit run by: made once, before any memory is laid out."""

    def __init__(self, device: str) -> None:
        arch = flashkda.capability.detect_arch(device)
        capability = flashkda.query(GEOMETRY, arch)
        for reason in capability.fused.reasons:
            print(f"no fused path: {reason}")
        self.verify = flashkda.plan_verify(GEOMETRY, PLACES, device=device)
        # States, windows and records of the reference are for the reference: all three go by one backend.
        path = "reference" if self.verify.path == "reference" else "auto"
        self.decode = flashkda.plan_decode(GEOMETRY, PLACES, device=device, path=path)
        of_all_layers = flashkda.CommitGeometry(GEOMETRY, LAYERS)
        self.commit = flashkda.plan_commit(of_all_layers, PLACES, device=device, path=path)

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph can hold the runs: the reference reads metadata on the host."""
        return self.verify.path != "reference"


class Batch:
    """The buffers that all layers share. They stay where they are, so that a graph finds them: an engine writes
    each step's lengths, slots and counts into them."""

    def __init__(self, device: str) -> None:
        self.query_start_loc = torch.zeros(PLACES + 1, dtype=torch.int32, device=device)
        self.state_indices = torch.zeros(PLACES, dtype=torch.int32, device=device)
        self.num_accepted = torch.ones(PLACES, dtype=torch.int32, device=device)


class Layer:
    """One KDA layer: weights, records, pools, and its runs."""

    def __init__(self, plans: Plans, batch: Batch, slots: int, device: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=generator) * 0.5).to(device)

        self.plans, self.batch = plans, batch
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
        self.verify = flashkda.VerifyLayer(plans.verify)
        self.bind()

    def bind(self) -> None:
        """All bindings, the verify's two as the two halves of an engine make them. What was bound before is stale."""
        gate, z, beta = self.projection[:, CHANNELS:].tensor_split([HEADS * DIM, 2 * HEADS * DIM], dim=1)
        requests = {"query_start_loc": self.batch.query_start_loc, "state_indices": self.batch.state_indices}
        conv = {
            "mixed_qkv": self.projection[:, :CHANNELS],
            "conv_weight": self.conv_weight,
            "conv_state": self.conv_state,
            "num_accepted": self.batch.num_accepted,
            **requests,
        }
        rule = {
            "raw_gate": gate.unflatten(1, (HEADS, DIM)),
            "raw_beta": beta[:, :HEADS],
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "state": self.state,
            "output_gate": z.unflatten(1, (HEADS, DIM)),
            "norm_weight": self.norm_weight,
            "out": self.out,
            **requests,
        }
        records = {"corrections": self.corrections, "key_gate": self.key_gate}
        self.verify.conv = self.plans.verify.bind_short_conv(qkv=self.qkv, **conv)
        self.verify.record = self.plans.verify.bind_record(qkv=self.qkv, **rule, **records)
        self.verify.finalize()
        # A decode has one row a place at most.
        rows = {
            name: (conv | rule)[name][:PLACES] for name in ("mixed_qkv", "raw_gate", "raw_beta", "output_gate", "out")
        }
        self.decode = self.plans.decode.bind(**(conv | rule | rows))

    def move_pools(self, slots: int) -> None:
        """Larger pools elsewhere, with the same contents in their first slots."""
        state, conv_state = self.state, self.conv_state
        self.state = state.new_zeros(slots, *state.shape[1:])
        self.conv_state = conv_state.new_zeros(slots, conv_state.shape[2], CHANNELS).transpose(1, 2)
        self.state[: state.shape[0]] = state
        self.conv_state[: state.shape[0]] = conv_state
        self.bind()


class Engine:
    """Layers, a batch, and graphs where the plan's path can be captured."""

    def __init__(self, device: str) -> None:
        self.plans, self.batch = Plans(device), Batch(device)
        self.layers = [Layer(self.plans, self.batch, 1 + PLACES, device, seed) for seed in range(LAYERS)]
        self.prepare()

    def prepare(self) -> None:
        """Bind the commit of all layers to their pools, and capture what a step runs."""
        names = ("state", "corrections", "key_gate", "A_log", "dt_bias")
        # Kept: its tables of addresses are read by the graph.
        self.commit_binding = self.plans.commit.bind(
            accepted=self.batch.num_accepted,
            state_indices=self.batch.state_indices,
            check_metadata=None,
            **{name: [getattr(layer, name) for layer in self.layers] for name in names},
        )
        self.verify = self.captured(lambda: [layer.verify.run() for layer in self.layers])
        self.decode = self.captured(lambda: [layer.decode.run() for layer in self.layers])
        self.commit = self.captured(self.commit_binding.run)

    def captured(self, run: Callable[[], object]) -> Callable[[], object]:
        """The run as a replay of a CUDA graph, where there can be one. Bind has prepared it, so it may be captured."""
        if not self.plans.captured:
            return run
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def move_pools(self) -> None:
        """What an engine does when its memory is laid out anew: bind again, capture again."""
        for layer in self.layers:
            layer.move_pools(2 * (1 + PLACES))
        self.prepare()

    def step(self, windows: list[Tensor | None], accepted: list[int]) -> None:
        """Run one window a place ([LAYERS, tokens, WIDTH], or None), and keep what was accepted of each."""
        lengths = [0 if window is None else window.shape[1] for window in windows]
        starts = torch.tensor([0, *lengths]).cumsum(0)
        slots = [0 if window is None else 1 + place for place, window in enumerate(windows)]
        self.batch.query_start_loc.copy_(starts)
        self.batch.state_indices.copy_(torch.tensor(slots))
        for place, window in enumerate(windows):
            if window is not None:
                for layer, rows in zip(self.layers, window, strict=True):
                    layer.projection[int(starts[place]) : int(starts[place + 1])] = rows
        drafted = max(lengths) > 1
        if drafted:
            self.verify()
        else:  # the state it leaves is the next one
            self.decode()
        # Read by the commit, and by the next step to find the conv history. Idle places are null: the commit skips
        # them.
        self.batch.num_accepted.copy_(torch.tensor(accepted))
        if drafted:
            self.commit()


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
    print(f"{kind} drafts: {sum(done)} tokens in {steps} steps on the {engine.plans.verify.path} path")
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
