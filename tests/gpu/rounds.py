# SPDX-License-Identifier: Apache-2.0
"""The round: verify, then commit what was accepted, is decoding one token at a time, to the bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashkda.commit import CommitGeometry, plan_commit
from flashkda.decode import plan_decode
from flashkda.geometry import VerifyGeometry
from tests.gpu.cases import poison
from tests.gpu.setup import Check, Detail, Setup, kimi_k3, require
from tests.gpu.worlds import Differences, World, decode_all

ROUNDS = 200
REPLAYS = 2000


def checks(setup: Setup) -> list[Check]:
    """Nothing where the reference stands in: it has tests of its own."""
    if setup.reference:
        return []
    found = []
    for heads in (1, 12, 96) if not setup.small else (1, 2):
        for gate in ("bounded", "softplus"):
            changes: dict[str, Any] = {"gate": gate, "lower_bound": -5.0 if gate == "bounded" else None}
            for compact in (True, False):
                geometry = kimi_k3(4, heads, has_num_accepted=not compact, **changes)
                name = f"lossless, H={heads}, {gate}, {'compacted' if compact else 'counted'}"
                found.append(_check(setup, name, partial(_lossless, setup, geometry, compact), geometry, compact))
    others: tuple[tuple[int, dict[str, Any]], ...] = ((16, {}), (8, {"alignment": 2, "conv_layout": "DS"}))
    few = 6 if not setup.small else 1
    for window, more in others:
        geometry = kimi_k3(window, few, **more)
        name = f"lossless, T={window}, {more or 'as Kimi K3'}"
        found.append(_check(setup, name, partial(_lossless, setup, geometry, True), geometry, True))
    for window, more in others:
        geometry = kimi_k3(window, few, **more)
        name = f"decode in one launch and in three, {more or 'as Kimi K3'}"
        found.append(_check(setup, name, partial(_decode_parts, setup, geometry), geometry, True))
    whole, few, replays, rounds = (kimi_k3(4), 3, REPLAYS, 64) if not setup.small else (kimi_k3(4, 1), 1, 30, 8)
    found.append(_check(setup, "through the bindings", partial(_bindings, setup, whole), whole, True))
    found.append(_check(setup, f"commit, {replays:,} replays", partial(_replays, setup, whole, replays), whole, False))
    found.append(_check(setup, "destinations and boundaries", partial(_places, setup, few), kimi_k3(4, few), True))
    bf16 = kimi_k3(4, 2, state_dtype="bfloat16")
    found.append(_check(setup, f"bf16 state, {rounds} rounds", partial(_bf16, setup, rounds), bf16, True))
    return found


def _check(setup: Setup, name: str, run: Any, geometry: VerifyGeometry, compact: bool) -> Check:
    from flashkda.kernels import specs

    plan = setup.whole(geometry, 4)
    kernels = (
        (specs.make_spec, ("fused_decode", geometry, plan.tile, plan.arch)),
        (specs.make_commit_spec, (CommitGeometry(geometry, 2, compact=compact), plan.arch)),
    )
    return Check("round", name, run, (plan,), kernels)


def _lossless(setup: Setup, geometry: VerifyGeometry, compact: bool) -> Detail:
    rounds = 12 if setup.small else ROUNDS if geometry.window == 4 else 40
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
    for requests in (1, 3, 9, 40) if not setup.small else (1, 6):
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


def _bindings(setup: Setup, geometry: VerifyGeometry) -> Detail:
    """What an engine calls, captured right after it was bound, against the kernels called by hand."""
    world, differences = World(setup, geometry, layers=3, slots=8), Differences(setup.device)
    slots, accepted = world.ints([5, 2, 0, 6]), world.ints([4, 1, 3, 2])
    _snapshots(world, slots, world.twin())
    bound = world.twin()
    commits = plan_commit(CommitGeometry(world.geometry, world.layers, compact=True), 4, device=setup.device)
    names = ("state", "corrections", "key_gate", "conv_state")
    layers: Any = {name: [pool[name] for pool in bound.pools] for name in names}
    gates: Any = {name: [weights[name] for weights in bound.weights] for name in ("A_log", "dt_bias")}
    commit = commits.bind(**layers, **gates, accepted=accepted, state_indices=slots)
    _capture(setup, commit.run)()
    world.commit(accepted, slots, compact=True)

    inputs, starts = world.inputs(4), world.ints(range(5))
    wanted = world.decode(inputs, starts, slots)
    for path in ("fused", "decomposed"):
        decoded = bound.twin()
        for layer in range(world.layers):
            out = torch.empty_like(inputs[layer]["raw_gate"])
            poison(out)
            tensors: Any = {name: decoded.pools[layer][name] for name in ("state", "conv_state")}
            plan = plan_decode(world.geometry, 4, path=path, device=setup.device, strict=True)
            given: Any = {**inputs[layer], **decoded.weights[layer], **tensors, "out": out}
            decode = plan.bind(**given, query_start_loc=starts, state_indices=slots)
            _capture(setup, decode.run)()
            differences.compare(out, wanted[layer])
            for name, found in tensors.items():
                differences.compare(found, world.pools[layer][name])
    differences.require_none()
    return {"comparisons": differences.made, "commit": commits.path}


def _capture(setup: Setup, run: Callable[[], None]) -> Callable[[], None]:
    """As setup.capture, but what is captured has not run before."""
    if not setup.cuda:
        return run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _widened(setup: Setup, world: World) -> World:
    """The same weights and windows, on an fp32 copy of the state."""
    wide = World(setup, world.geometry.replace(state_dtype="float32"), layers=world.layers, slots=world.slots)
    wide.weights = world.weights
    for pool, source in zip(wide.pools, world.pools, strict=True):
        for name in ("state", "conv_state"):
            pool[name].copy_(source[name])
    return wide


def _snapshots(world: World, slots: Tensor, plain: World) -> list[World]:
    """Verifies a window of full length. Returns what decoding 0, 1, ... T of its tokens makes of ``plain``."""
    window, requests = world.geometry.window, len(slots)
    inputs = world.inputs(window * requests)
    starts = world.ints(range(0, window * requests + 1, window))
    worlds = [plain.twin()]
    for _ in decode_all(plain, inputs, [window] * requests, [window] * requests, slots):
        worlds.append(plain.twin())
    world.verify(inputs, starts, slots, torch.ones_like(slots))
    return worlds


def _replays(setup: Setup, geometry: VerifyGeometry, replays: int) -> Detail:
    world = World(setup, geometry, layers=3, slots=8)
    requests = world.ints([5, 2, 0, 6])  # the third is null
    for pool in world.pools:
        for slot in (0, 1, 3, 4, 7):
            poison(pool["state"][slot])
    worlds = _snapshots(world, requests, world.twin())
    accepted = torch.zeros_like(requests)
    begin = [pool["state"].clone() for pool in world.pools]
    wanted = [torch.stack([w.pools[layer]["state"] for w in worlds]) for layer in range(world.layers)]
    mismatches = torch.zeros((), dtype=torch.int64, device=setup.device)
    counts = torch.randint(0, 5, (replays, 4), generator=torch.Generator().manual_seed(0)).to(requests)

    def step() -> None:
        for pool, start in zip(world.pools, begin, strict=True):
            pool["state"].copy_(start)
        world.commit(accepted, requests)

    replay = setup.capture(step)
    by_slot = torch.zeros(world.slots, dtype=torch.int64, device=setup.device)
    every = torch.arange(world.slots, device=setup.device)
    for turn in range(replays):
        accepted.copy_(counts[turn])
        replay()
        by_slot.zero_()
        by_slot[requests.long()] = accepted.long()
        by_slot[0] = 0
        for pool, expected in zip(world.pools, wanted, strict=True):
            found = pool["state"].view(torch.int32)
            mismatches += (found != expected[by_slot, every].view(torch.int32)).any()
    require(int(mismatches) == 0, f"{int(mismatches)} of {replays} replays differ from decoding")
    return {"replays": replays, "mismatches": int(mismatches)}


def _places(setup: Setup, heads: int) -> Detail:
    differences = Differences(setup.device)
    for window, dtype in ((4, "float32"), (8, "float32"), (4, "bfloat16")):
        world = World(setup, kimi_k3(window, heads, state_dtype=dtype), layers=2, slots=16)
        slots = world.ints([1, 2, 3])
        # A bf16 state is folded in fp32 and rounded once: what decoding the widened state gives, rounded.
        worlds = _snapshots(world, slots, _widened(setup, world))
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
                        state[slot] = worlds[tokens].pools[layer]["state"][1 + n]  # assignment rounds
                        if tokens > 0:
                            conv[slot, :, :3] = before["conv_state"][1 + n, :, tokens - 1 : tokens + 2]
                differences.compare(after["state"], state)
                differences.compare(after["conv_state"], conv)
    differences.require_none()
    return {"comparisons": differences.made}


def _bf16(setup: Setup, rounds: int) -> Detail:
    """Both ways against the same rounds on an fp32 state (whose own error is thousands of times smaller)."""
    geometry = kimi_k3(4, 2, state_dtype="bfloat16")
    world = World(setup, geometry, layers=1, slots=4)
    exact = _widened(setup, world)
    plain, slots = world.twin(), world.ints([1, 2, 3])
    starts, worst = world.ints([0, 4, 8, 12]), {"commit": 0.0, "decode": 0.0}
    for _ in range(rounds):
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
    return {"rounds": rounds, **{f"worst_{name}": value for name, value in worst.items()}}
