# SPDX-License-Identifier: Apache-2.0
"""A few layers with pools of their own, to play rounds on, and comparisons that wait for nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flashkda.commit import CommitGeometry
from flashkda.geometry import VerifyGeometry
from flashkda.ops.launch import load
from flashkda.planner import plan_verify
from tests.gpu.cases import poison
from tests.gpu.setup import Setup, require
from tests.inputs import bits


class Differences:
    """Counts comparisons that fail, on the device: nobody waits for one."""

    def __init__(self, device: str) -> None:
        self._found = torch.zeros((), dtype=torch.int64, device=device)
        self.made = 0

    def compare(self, found: Tensor, wanted: Tensor) -> None:
        """To the bit."""
        self.made += 1
        self._found += (bits(found) != bits(wanted)).any()

    def require_none(self) -> None:
        """Raises Failure."""
        require(int(self._found) == 0, f"{int(self._found)} of {self.made} comparisons differ")


class World:
    """A few layers with pools of their own, and the kernels to run on them."""

    def __init__(
        self, setup: Setup, geometry: VerifyGeometry, *, layers: int, slots: int, seed: int = 0, requests: int = 4
    ) -> None:
        self._share = setup.share
        self.geometry, self.layers, self.slots, self.device = geometry, layers, slots, setup.device
        plan = plan_verify(geometry, requests, path="fused", device=setup.device, strict=True)
        assert plan.tile is not None
        self.arch = plan.arch
        self._plan, self._current = plan, setup.current
        self._verify, self._decode = (load(plan, kind, setup.current) for kind in ("fused_verify", "fused_decode"))
        self._draw = torch.Generator(setup.device).manual_seed(seed)
        self._table: tuple[object, Tensor] | None = None
        heads, window = geometry.heads, geometry.window
        self.weights = [
            {
                "conv_weight": self.random(geometry.channels, 4, scale=0.5, dtype=torch.float32),
                "A_log": self.random(heads, scale=0.7, dtype=torch.float32),
                "dt_bias": self.random(heads, 128, scale=0.5, dtype=torch.float32),
                "norm_weight": self.random(128, dtype=torch.float32),
            }
            for _ in range(layers)
        ]
        state = torch.float32 if geometry.state_dtype == "float32" else torch.bfloat16
        self.pools = []
        for _ in range(layers):
            conv = self.random(slots, geometry.conv_columns, geometry.channels).transpose(1, 2)
            if geometry.conv_layout == "DS":
                conv = conv.contiguous()
            pool = {
                "state": self.random(slots, heads, 128, 128, scale=0.5, dtype=state),
                "conv_state": conv,
                "corrections": torch.empty(slots, heads, window, 128, device=self.device),
                "key_gate": torch.empty(slots, heads, window, 256, dtype=torch.bfloat16, device=self.device),
            }
            poison(pool["corrections"])
            poison(pool["key_gate"])
            self.pools.append(pool)

    def random(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Normal values."""
        return (torch.randn(*shape, generator=self._draw, device=self.device) * scale).to(dtype)

    def twin(self) -> World:
        """The same weights, and pools of its own with the same bits."""
        other = object.__new__(World)
        other.__dict__.update(self.__dict__)
        other.pools = [
            {name: torch.empty_like(t, memory_format=torch.preserve_format).copy_(t) for name, t in pool.items()}
            for pool in self.pools
        ]
        return other

    def inputs(self, rows: int) -> list[dict[str, Tensor]]:
        """Activations of each layer."""
        heads = self.geometry.heads
        return [
            {
                "mixed_qkv": self.random(rows, self.geometry.channels),
                "raw_gate": self.random(rows, heads, 128, scale=1.5),
                "raw_beta": self.random(rows, heads, scale=1.5),
                "output_gate": self.random(rows, heads, 128, scale=2.0),
            }
            for _ in range(self.layers)
        ]

    def ints(self, values: Sequence[int]) -> Tensor:
        """An int32 tensor."""
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def _arguments(self, layer: int, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        weights, pool = self.weights[layer], self.pools[layer]
        return (
            inputs["mixed_qkv"], weights["conv_weight"], pool["conv_state"], inputs["raw_gate"], inputs["raw_beta"],
            weights["A_log"], weights["dt_bias"], pool["state"], inputs["output_gate"], weights["norm_weight"],
        )  # fmt: skip

    def verify(self, inputs: list[dict[str, Tensor]], starts: Tensor, slots: Tensor, counts: Tensor) -> list[Tensor]:
        """out of each layer."""
        outs = []
        counted = counts if self.geometry.has_num_accepted else None
        for layer, given in enumerate(inputs):
            out = torch.empty_like(given["raw_gate"])
            records = (self.pools[layer]["corrections"], self.pools[layer]["key_gate"])
            self._verify(*self._arguments(layer, given), starts, slots, counted, None, out, *records)
            outs.append(out)
        return outs

    def decode(self, inputs: list[dict[str, Tensor]], starts: Tensor, slots: Tensor) -> list[Tensor]:
        """out of each layer; one token a request, whose history is at the head of its window."""
        outs = []
        counted = torch.ones_like(slots) if self.geometry.has_num_accepted else None
        for layer, given in enumerate(inputs):
            out = torch.empty_like(given["raw_gate"])
            self._decode(*self._arguments(layer, given), starts, slots, counted, out)
            outs.append(out)
        return outs

    def decode_in_parts(self, inputs: list[dict[str, Tensor]], starts: Tensor, slots: Tensor) -> list[Tensor]:
        """`decode` in three launches."""
        conv, rule, norm = (
            load(self._plan, kind, self._current) for kind in ("short_conv", "decode_rule", "gated_rms_norm")
        )
        counted = torch.ones_like(slots) if self.geometry.has_num_accepted else None
        outs = []
        for layer, given in enumerate(inputs):
            mixed, conv_weight, conv_state, gate, beta, a_log, bias, state, z, weight = self._arguments(layer, given)
            qkv, o, out = torch.empty_like(mixed), torch.empty_like(gate), torch.empty_like(gate)
            conv(mixed, conv_weight, conv_state, starts, slots, counted, qkv)
            rule(qkv, gate, beta, a_log, bias, state, starts, slots, o)
            norm(o, z, weight, starts, slots, out)
            outs.append(out)
        return outs

    def commit(self, accepted: Tensor, slots: Tensor, *, compact: bool = False, **optional: Tensor) -> None:
        """All layers in one launch. optional: dst_indices, boundary_length, boundary_indices, accepted_indices."""
        from flashkda.kernels import specs

        geometry = CommitGeometry(
            self.geometry,
            self.layers,
            compact=compact,
            has_dst="dst_indices" in optional,
            has_boundary="boundary_length" in optional,
            has_accepted_indices="accepted_indices" in optional,
        )
        first = self.pools[0]
        specs.load_commit(geometry, self.arch)(
            self.table(), first["state"], first["corrections"], first["key_gate"],
            first["conv_state"] if compact else None, accepted, optional.get("accepted_indices"), slots,
            optional.get("dst_indices"), None, optional.get("boundary_length"), optional.get("boundary_indices"),
        )  # fmt: skip

    def table(self) -> Tensor:
        """Addresses of the layers' tensors; the same tensor at each call, as a graph needs it."""
        if self._table is None or self._table[0] is not self.pools:
            names = ("state", "corrections", "key_gate", "conv_state", "A_log", "dt_bias")
            layers = [{**pool, **weights} for pool, weights in zip(self.pools, self.weights, strict=True)]
            self._share({f"{name}[{i}]": layer[name] for i, layer in enumerate(layers) for name in names})
            addresses = [[layer[name].data_ptr() for layer in layers] for name in names]
            self._table = self.pools, torch.tensor(addresses, dtype=torch.int64, device=self.device)
        return self._table[1]


def decode_all(
    world: World, inputs: list[dict[str, Tensor]], lengths: list[int], counts: list[int], slots: Tensor
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Decodes the first counts[n] tokens of each request's window, one at a time. Yields (rows, outs) of each step."""
    firsts = [sum(lengths[:n]) for n in range(len(lengths))]
    for step in range(max(counts)):
        active = [int(step < count) for count in counts]
        rows = torch.tensor([f + step for f, a in zip(firsts, active, strict=True) if a], device=world.device)
        starts = world.ints([sum(active[:n]) for n in range(len(active) + 1)])
        chosen = [{name: tensor[rows] for name, tensor in layer.items()} for layer in inputs]
        yield rows, world.decode(chosen, starts, slots)
