# SPDX-License-Identifier: Apache-2.0
"""The round: verify, then commit what was accepted, is decoding one token at a time, to the bit."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashkda.commit import CommitGeometry
from flashkda.geometry import VerifyGeometry
from flashkda.planner import plan_verify
from tests.gpu.cases import poison
from tests.gpu.setup import Check, Detail, Setup, kimi_k3, require
from tests.inputs import bits

ROUNDS = 200
REPLAYS = 2000
_WEIGHTS = ("conv_weight", "A_log", "dt_bias", "norm_weight")
_POOLS = ("state", "conv_state", "corrections", "key_gate")


def checks(setup: Setup) -> list[Check]:
    """Nothing where the reference stands in: it has tests of its own."""
    if setup.reference:
        return []
    found = []
    for heads in (1, 12, 96):
        for gate in ("bounded", "softplus"):
            changes: dict[str, Any] = {"gate": gate, "lower_bound": -5.0 if gate == "bounded" else None}
            for compact in (True, False):
                geometry = kimi_k3(4, heads, has_num_accepted=not compact, **changes)
                name = f"lossless, H={heads}, {gate}, {'compacted' if compact else 'counted'}"
                found.append(_check(setup, name, partial(_lossless, setup, geometry, compact), geometry, compact))
    others: tuple[tuple[int, dict[str, Any]], ...] = ((16, {}), (8, {"alignment": 2, "conv_layout": "DS"}))
    for window, more in others:
        geometry = kimi_k3(window, 6, **more)
        name = f"lossless, T={window}, {more or 'as Kimi K3'}"
        found.append(_check(setup, name, partial(_lossless, setup, geometry, True), geometry, True))
    for window, more in others:
        geometry = kimi_k3(window, 6, **more)
        name = f"decode in one launch and in three, {more or 'as Kimi K3'}"
        found.append(_check(setup, name, partial(_decode_parts, setup, geometry), geometry, True))
    found.append(_check(setup, "commit, 2,000 replays", partial(_replays, setup), kimi_k3(4), False))
    found.append(_check(setup, "destinations and boundaries", partial(_places, setup), kimi_k3(4, 3), True))
    bf16 = kimi_k3(4, 2, state_dtype="bfloat16")
    found.append(_check(setup, "bf16 state, 64 rounds", partial(_bf16, setup), bf16, True))
    return found


def _check(setup: Setup, name: str, run: Any, geometry: VerifyGeometry, compact: bool) -> Check:
    from flashkda.kernels import specs

    plan = setup.whole(geometry, 4)
    kernels = (
        (specs.make_spec, ("fused_decode", geometry, plan.tile, plan.arch)),
        (specs.make_commit_spec, (CommitGeometry(geometry, 2, compact=compact), plan.arch)),
    )
    return Check("round", name, run, (plan,), kernels)


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
        from flashkda.kernels import specs

        self.geometry, self.layers, self.slots, self.device = geometry, layers, slots, setup.device
        plan = plan_verify(geometry, requests, path="fused", device=setup.device, strict=True)
        assert plan.tile is not None
        self.arch = plan.arch
        self._where = where = (geometry, plan.tile, plan.arch)
        self._verify, self._decode = specs.load("fused_verify", *where), specs.load("fused_decode", *where)
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
        from flashkda.kernels import specs

        conv, rule, norm = (specs.load(kind, *self._where) for kind in ("short_conv", "decode_rule", "gated_rms_norm"))
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


def _lossless(setup: Setup, geometry: VerifyGeometry, compact: bool) -> Detail:
    rounds = ROUNDS if geometry.window == 4 else 40
    draw = random.Random(geometry.heads)
    world = World(setup, geometry, layers=2, slots=7)
    plain = world.twin()
    accepted_before = [1] * world.slots
    differences = Differences(setup.device)
    for _round in range(rounds):
        requests = draw.sample(range(1, world.slots), draw.randint(1, 4))
        for slot in requests:
            if draw.random() < 0.1:  # a request has gone, another has its slot
                for pool, other in zip(world.pools, plain.pools, strict=True):
                    for name in ("state", "conv_state"):
                        fresh = world.random(*pool[name][slot].shape, scale=0.5, dtype=pool[name].dtype)
                        pool[name][slot] = fresh
                        other[name][slot] = fresh
                accepted_before[slot] = 1
        lengths = [draw.randint(1, geometry.window) for _ in requests]
        counts = [draw.randint(1, length) for length in lengths]
        slots = world.ints(requests)
        inputs = world.inputs(sum(lengths))
        starts = world.ints([sum(lengths[:n]) for n in range(len(lengths) + 1)])
        outs = world.verify(inputs, starts, slots, world.ints([accepted_before[slot] for slot in requests]))
        world.commit(world.ints(counts), slots, compact=compact)
        for rows, step_outs in decode_all(plain, inputs, lengths, counts, slots):
            for layer in range(world.layers):
                differences.compare(outs[layer][rows], step_outs[layer])
        for slot, count in zip(requests, counts, strict=True):
            accepted_before[slot] = 1 if compact else count
        for pool, other in zip(world.pools, plain.pools, strict=True):
            differences.compare(pool["state"], other["state"])
            for slot in requests:
                first = accepted_before[slot] - 1
                differences.compare(pool["conv_state"][slot, :, first : first + 3], other["conv_state"][slot, :, :3])
    differences.require_none()
    return {"rounds": rounds, "comparisons": differences.made, "heads": geometry.heads, "window": geometry.window}


def _decode_parts(setup: Setup, geometry: VerifyGeometry) -> Detail:
    differences = Differences(setup.device)
    for requests in (1, 3, 9, 40):
        world = World(setup, geometry, layers=1, slots=requests + 2, requests=requests)
        parts = world.twin()
        slots = world.ints([n % 5 and n + 1 for n in range(requests)])  # every fifth request is null
        starts = world.ints(range(requests + 1))
        inputs = world.inputs(requests + 2)  # two rows belong to nobody
        differences.compare(world.decode(inputs, starts, slots)[0], parts.decode_in_parts(inputs, starts, slots)[0])
        for name in ("state", "conv_state"):
            differences.compare(world.pools[0][name], parts.pools[0][name])
    differences.require_none()
    return {"comparisons": differences.made}


def _snapshots(world: World, slots: Tensor) -> tuple[list[World], list[dict[str, Tensor]]]:
    """A verified window of full length, and the worlds that decoding 0, 1, ... T of its tokens gives."""
    window, requests = world.geometry.window, len(slots)
    inputs = world.inputs(window * requests)
    starts = world.ints(range(0, window * requests + 1, window))
    plain = world.twin()
    worlds = [plain.twin()]
    for _ in decode_all(plain, inputs, [window] * requests, [window] * requests, slots):
        worlds.append(plain.twin())
    world.verify(inputs, starts, slots, torch.ones_like(slots))
    return worlds, inputs


def _replays(setup: Setup) -> Detail:
    world = World(setup, kimi_k3(4), layers=3, slots=8)
    requests = world.ints([5, 2, 0, 6])  # the third is null
    for pool in world.pools:
        for slot in (0, 1, 3, 4, 7):
            poison(pool["state"][slot])
    worlds, _ = _snapshots(world, requests)
    accepted = torch.zeros_like(requests)
    begin = [pool["state"].clone() for pool in world.pools]
    wanted = [torch.stack([w.pools[layer]["state"] for w in worlds]) for layer in range(world.layers)]
    mismatches = torch.zeros((), dtype=torch.int64, device=setup.device)
    counts = torch.randint(0, 5, (REPLAYS, 4), generator=torch.Generator().manual_seed(0)).to(requests)

    def step() -> None:
        for pool, start in zip(world.pools, begin, strict=True):
            pool["state"].copy_(start)
        world.commit(accepted, requests)

    replay = setup.capture(step)
    by_slot = torch.zeros(world.slots, dtype=torch.int64, device=setup.device)
    every = torch.arange(world.slots, device=setup.device)
    for turn in range(REPLAYS):
        accepted.copy_(counts[turn])
        replay()
        by_slot.zero_()
        by_slot[requests.long()] = accepted.long()
        by_slot[0] = 0
        for pool, expected in zip(world.pools, wanted, strict=True):
            found = pool["state"].view(torch.int32)
            mismatches += (found != expected[by_slot, every].view(torch.int32)).any()
    require(int(mismatches) == 0, f"{int(mismatches)} of {REPLAYS} replays differ from decoding")
    return {"replays": REPLAYS, "mismatches": int(mismatches)}


def _places(setup: Setup) -> Detail:
    differences = Differences(setup.device)
    for window, dtype in ((4, "float32"), (8, "float32"), (4, "bfloat16")):
        world = World(setup, kimi_k3(window, 3, state_dtype=dtype), layers=2, slots=16)
        slots = world.ints([1, 2, 3])
        worlds, _ = _snapshots(world, slots)
        for counts, boundaries in (
            ((window, 1, 2), (window, 0, 1)),
            ((0, 0, 3), (0, 1, 4)),
            ((2, window, 1), (2, -1, 0)),
            ((window + 5, -3, 1), (window - 1, 0, 1)),
        ):
            trial = world.twin()
            trial.commit(
                trial.ints(counts),
                slots,
                compact=True,
                dst_indices=trial.ints((4, 5, 6)),
                boundary_length=trial.ints(boundaries),
                boundary_indices=trial.ints((8, 9, 10)),
            )
            for layer in range(world.layers):
                before, after = world.pools[layer], trial.pools[layer]
                state, conv = before["state"].clone(), before["conv_state"].clone()
                for n, (count, boundary) in enumerate(zip(counts, boundaries, strict=True)):
                    m = min(max(count, 0), window)
                    places = [(4 + n, m)] * (m > 0) + [(8 + n, boundary)] * (0 <= boundary <= m)
                    for slot, tokens in places:
                        if dtype == "float32":
                            state[slot] = worlds[tokens].pools[layer]["state"][1 + n]
                        else:
                            state[slot] = after["state"][slot]  # rounded once here, at each token when decoding
                        if tokens > 0:
                            conv[slot, :, :3] = before["conv_state"][1 + n, :, tokens - 1 : tokens + 2]
                differences.compare(after["state"], state)
                differences.compare(after["conv_state"], conv)
    differences.require_none()
    return {"comparisons": differences.made}


def _bf16(setup: Setup) -> Detail:
    """Both ways against the same rounds on an fp32 state (whose own error is thousands of times smaller)."""
    geometry = kimi_k3(4, 2, state_dtype="bfloat16")
    world = World(setup, geometry, layers=1, slots=4)
    exact = World(setup, geometry.replace(state_dtype="float32"), layers=1, slots=4)
    exact.weights = world.weights
    exact.pools[0]["state"].copy_(world.pools[0]["state"].float())
    exact.pools[0]["conv_state"].copy_(world.pools[0]["conv_state"])
    plain, slots = world.twin(), world.ints([1, 2, 3])
    starts, worst = world.ints([0, 4, 8, 12]), {"commit": 0.0, "decode": 0.0}
    for _ in range(64):
        inputs = world.inputs(12)
        world.verify(inputs, starts, slots, torch.ones_like(slots))
        world.commit(world.ints([4, 4, 4]), slots, compact=True)
        for other in (plain, exact):
            for _step in decode_all(other, inputs, [4, 4, 4], [4, 4, 4], slots):
                pass
        right = exact.pools[0]["state"][1:]
        for name, found in (("commit", world), ("decode", plain)):
            error = (found.pools[0]["state"][1:].float() - right).norm() / right.norm()
            worst[name] = max(worst[name], float(error))
    require(worst["commit"] <= 1.1 * worst["decode"], f"relative errors: {worst}")
    return {"rounds": 64, **{f"worst_{name}": value for name, value in worst.items()}}
