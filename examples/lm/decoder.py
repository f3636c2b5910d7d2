# SPDX-License-Identifier: Apache-2.0
"""The language model through FlashKDA: a window of bytes in, logits out, then a commit of what was accepted.

Its logits after a byte have the same bits whether the byte came alone or as a draft in a longer window, on one rank or
on several. FlashKDA promises that for what it does; the rest of the model keeps to it as follows. A matmul picks its
order of summation by its shape, so the same row may differ in its last bits when it comes with other rows or when the
weight is split over ranks, and one differing bit is enough to sample another byte. Here every sum is a fixed tree over
elementwise products (``project``), and transcendentals go through the reference's ``pointwise``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, distributed

import flashkda
from examples.lm.model import LM, NORM_EPS, Layer
from flashkda.commit import CommitGeometry, plan_commit
from flashkda.ops import reference

SLOT = 1  # the one request's; slot 0 is null


def project(x: Tensor, weight: Tensor) -> Tensor:
    """``x`` [rows, in] times ``weight`` [in, out] with each element's sum a tree whose order is set by ``in`` alone, a
    power of two. Returns fp32 [rows, out]."""
    terms = x[:, :, None] * weight
    while terms.shape[1] > 1:
        low, high = terms.chunk(2, dim=1)
        terms = low + high
    return terms[:, 0]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """The model's norm of rows, its mean a tree as well."""
    return x * reference.pointwise(torch.rsqrt, reference.tree_sum(x * x) / x.shape[-1] + NORM_EPS) * weight


class DecoderLayer:
    """One layer's weights as FlashKDA and ``project`` take them, for the heads of one rank, with pools and a verify."""

    def __init__(self, layer: Layer, plan: flashkda.Plan, heads: slice, buffers: dict[str, Tensor]) -> None:
        geometry, device = plan.geometry, buffers["accepted"].device
        count, dim, channels, window = geometry.heads, geometry.head_dim, geometry.channels, geometry.window

        def put(weight: Tensor) -> Tensor:
            return weight.detach().to(device).contiguous()

        parts = [layer.qkv[:, heads].flatten(0, 2), layer.gate[heads].flatten(0, 1)]
        parts += [layer.output_gate[heads].flatten(0, 1), layer.beta[heads]]
        parts.append(parts[0].new_zeros(-count % 8, parts[0].shape[1]))  # rows of a multiple of 16 bytes in bf16
        self.wide, self.out = put(torch.cat(parts).T), put(layer.out.T)
        self.up, self.down = put(layer.up.T), put(layer.down.T)
        self.norm, self.mlp_norm = put(layer.norm), put(layer.mlp_norm)

        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.projection, self.heads_out = empty(window, self.wide.shape[1]), empty(window, count, dim)
        self.state = empty(SLOT + 1, count, dim, dim, dtype=torch.float32)
        self.conv_state = empty(SLOT + 1, geometry.conv_columns, channels).transpose(1, 2)
        self.corrections = empty(SLOT + 1, count, window, dim, dtype=torch.float32)
        self.key_gate = empty(SLOT + 1, count, window, 2 * dim)
        self.A_log, self.dt_bias = put(layer.A_log[heads]), put(layer.dt_bias[heads])
        mixed_qkv, gate, z, beta = self.projection.tensor_split([channels, channels + count * dim, 5 * count * dim], 1)
        self.verify = plan.bind(
            mixed_qkv=mixed_qkv,
            conv_weight=put(layer.conv[:, heads].flatten(0, 2)),
            conv_state=self.conv_state,
            raw_gate=gate.unflatten(1, (count, dim)),
            raw_beta=beta[:, :count],
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            state=self.state,
            output_gate=z.unflatten(1, (count, dim)),
            norm_weight=put(layer.head_norm),
            query_start_loc=buffers["query_start_loc"],
            state_indices=buffers["state_indices"],
            num_accepted=buffers["accepted"],
            out=self.heads_out,
            corrections=self.corrections,
            key_gate=self.key_gate,
        )

    def run(self, x: Tensor, ranks: int) -> Tensor:
        """``x`` [rows, hidden] fp32 through the layer; conv window and records are written, the state is not."""
        rows = x.shape[0]
        self.projection[:rows] = project(rms_norm(x, self.norm), self.wide)
        self.verify.run()
        # Ranks exchange the outputs of their heads, not partial sums: the sum over heads stays one tree.
        heads = self.heads_out[:rows].float().flatten(1)
        if ranks > 1:
            shares = [torch.empty_like(heads) for _ in range(ranks)]
            distributed.all_gather(shares, heads)
            heads = torch.cat(shares, dim=1)
        x = x + project(heads, self.out)
        h = project(rms_norm(x, self.mlp_norm), self.up)
        return x + project(h * reference.sigmoid(h), self.down)


class Decoder:
    """One request of the model, on the device's best path or on ``path``; its state begins empty.

    ``window`` is the most bytes of one ``verify``. With ``ranks`` > 1, rank ``rank`` of torch.distributed's group has
    its share of the heads and every rank gets the logits.
    """

    def __init__(
        self, model: LM, window: int, *, device: str = "cpu", path: str = "auto", rank: int = 0, ranks: int = 1
    ) -> None:
        config = model.config
        if config.heads % ranks:
            raise ValueError(f"{config.heads} heads cannot be split over {ranks} ranks; take a divisor")
        geometry = config.geometry(window, ranks=ranks)
        self.plan = flashkda.plan_verify(geometry, 1, device=device, path=path)
        self.ranks, self.window = ranks, window
        self.tokens = torch.zeros(window, dtype=torch.int64, device=device)
        self.query_start_loc = torch.zeros(2, dtype=torch.int32, device=device)
        self.accepted = torch.ones(1, dtype=torch.int32, device=device)
        state_indices = torch.full((1,), SLOT, dtype=torch.int32, device=device)
        buffers = {
            "query_start_loc": self.query_start_loc,
            "state_indices": state_indices,
            "accepted": self.accepted,
        }
        heads = slice(rank * geometry.heads, (rank + 1) * geometry.heads)
        self.layers = [DecoderLayer(layer, self.plan, heads, buffers) for layer in model.blocks()]
        self.embedding, self.norm = model.embedding.to(device), model.norm.to(device)
        self.head = self.embedding.T.contiguous()
        commit_path = "reference" if self.plan.path == "reference" else "auto"
        commit = plan_commit(CommitGeometry(geometry, len(self.layers)), 1, device=device, path=commit_path)
        names = ("state", "corrections", "key_gate", "A_log", "dt_bias")
        self._commit = commit.bind(
            accepted=self.accepted,
            state_indices=state_indices,
            check_metadata=None,
            **{name: [getattr(layer, name) for layer in self.layers] for name in names},
        )
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits = torch.empty(0)
        if self.plan.path != "reference" and ranks == 1:
            self._capture()

    @property
    def launches(self) -> int:
        """Launches of a step, verify and commit of all layers; on the reference path, calls of it."""
        return len(self.layers) * (3 if self.plan.path == "decomposed" else 1) + 1

    def verify(self, tokens: Sequence[int]) -> Tensor:
        """The logits [len(tokens), 256] after each of the bytes, which follow what has been committed."""
        count = len(tokens)
        self.tokens[:count] = torch.tensor(list(tokens))
        self.query_start_loc[1] = count
        if self._graph is None:
            return self._run(count)
        self._graph.replay()
        return self._logits[:count]

    def commit(self, accepted: int) -> None:
        """Keep the first ``accepted`` >= 1 bytes of the last ``verify``; the others have never been."""
        # The next verify reads the same number: behind it lies its conv history.
        self.accepted.fill_(accepted)
        self._commit.run()

    def _run(self, rows: int) -> Tensor:
        x = self.embedding[self.tokens[:rows]]
        for layer in self.layers:
            x = layer.run(x, self.ranks)
        return project(rms_norm(x, self.norm), self.head)

    def _capture(self) -> None:
        """Capture the step for a full window, in which shorter ones run too. An empty window writes no pool."""
        self._run(self.window)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = self._run(self.window)
