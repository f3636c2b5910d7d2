# SPDX-License-Identifier: Apache-2.0
"""Laws of the speculative round on the reference backend, to the bit: of commits, and of verify with commit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashkda.commit import CommitGeometry, plan_commit
from flashkda.decode import plan_decode
from flashkda.geometry import VerifyGeometry
from flashkda.planner import plan_verify
from tests.commits import CommitCase, make_commit
from tests.inputs import assert_same_bits, bits

quick = settings(max_examples=10, deadline=None, derandomize=True, database=None)
GATES = {"bounded": -5.0, "softplus": None}
ROWS = ("mixed_qkv", "raw_gate", "raw_beta", "output_gate")


@st.composite
def geometries(draw: st.DrawFn, /, **fixed: Any) -> CommitGeometry:
    gate, alignment = draw(st.sampled_from(sorted(GATES))), draw(st.sampled_from([16, 2]))
    verify = VerifyGeometry(
        draw(st.integers(1, 3)),
        draw(st.integers(2, 6)),
        head_dim=16 if alignment == 16 else 10,  # 10: no whole number of vectors in a head
        gate=gate,
        lower_bound=GATES[gate],
        conv_layout=draw(st.sampled_from(["SD", "DS"])),
        alignment=alignment,
        records=draw(st.sampled_from(["slot", "request"])),
    )
    return CommitGeometry(verify, draw(st.integers(1, 3)), **fixed)


def run(case: CommitCase, **overrides: Any) -> None:
    plan_commit(case.geometry, 8, arch="cpu").bind(**case.tensors, check_metadata=True).run(**overrides)


def states(case: CommitCase) -> dict[str, Tensor]:
    return {name: value for name, value in case.bits().items() if name.startswith("state")}


def counts(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# --- commits --------------------------------------------------------------------------------------------------------


@quick
@given(geometries(), st.data())
def test_commit_in_two_parts(geometry: CommitGeometry, data: st.DataObject) -> None:
    """commit(a), then commit(b) of what is left of the window, is commit(a + b)."""
    window = geometry.verify.window
    first = data.draw(st.lists(st.integers(0, window), min_size=1, max_size=4))
    second = [data.draw(st.integers(0, window - a)) for a in first]
    parts, whole = make_commit(geometry, first, seed=7), make_commit(geometry, first, seed=7)
    run(whole, accepted=counts([a + b for a, b in zip(first, second, strict=True)]))
    run(parts)
    for name in ("corrections", "key_gate"):
        for records in parts.tensors[name]:
            for n, a in enumerate(first):
                row = parts.row(n)
                records[row] = records[row].roll(-a, dims=1)
    run(parts, accepted=counts(second))
    assert_same_bits(states(parts), states(whole))


@quick
@given(geometries(compact=True), st.data())
def test_permuting_requests_permutes_results(geometry: CommitGeometry, data: st.DataObject) -> None:
    geometry = geometry.replace(verify=geometry.verify.replace(records="slot"))
    accepted = data.draw(st.lists(st.integers(0, geometry.verify.window), min_size=2, max_size=5))
    order = torch.tensor(data.draw(st.permutations(range(len(accepted)))))
    one, other = make_commit(geometry, accepted, seed=3), make_commit(geometry, accepted, seed=3)
    run(one)
    run(other, **{name: tensor[order].contiguous() for name, tensor in other.requests.items()})
    assert_same_bits(other.bits(), one.bits())


@quick
@given(geometries(compact=True, has_dst=True, has_boundary=True), st.data())
def test_a_copy_and_a_checkpoint_are_commits_of_their_own(geometry: CommitGeometry, data: st.DataObject) -> None:
    window = geometry.verify.window
    accepted, length = data.draw(st.integers(1, window)), data.draw(st.integers(1, window))
    case = make_commit(geometry, [accepted], dst=[5], boundary=[(length, 6)], seed=9)
    before = make_commit(geometry, [accepted], dst=[5], boundary=[(length, 6)], seed=9)
    run(case)
    in_place = geometry.replace(has_dst=False, has_boundary=False)
    for slot, tokens in ((5, accepted), (6, length)):
        alone = make_commit(in_place, [tokens], seed=9)
        run(alone)
        for found, wanted, old in zip(case.layers, alone.layers, before.layers, strict=True):
            wrote = slot == 5 or tokens <= accepted
            source, place = (wanted, 1) if wrote else (old, slot)
            assert torch.equal(bits(found["state"][slot]), bits(source["state"][place]))
            assert torch.equal(bits(found["conv_state"][slot, :, :3]), bits(source["conv_state"][place, :, :3]))
            assert torch.equal(bits(found["state"][1]), bits(old["state"][1]))


# --- rounds ---------------------------------------------------------------------------------------------------------


class World:
    """Layers with pools, in which requests are verified and committed, or decoded."""

    def __init__(self, geometry: VerifyGeometry, *, layers: int, slots: int, compact: bool) -> None:
        self.geometry, self.compact, self.slots = geometry, compact, slots
        draw = torch.Generator().manual_seed(1)
        heads, dim = geometry.heads, geometry.head_dim
        self.weights = [
            {
                "conv_weight": torch.randn(geometry.channels, 4, generator=draw) * 0.5,
                "A_log": torch.randn(heads, generator=draw) * 0.7,
                "dt_bias": torch.randn(heads, dim, generator=draw) * 0.5,
                "norm_weight": torch.randn(dim, generator=draw),
            }
            for _ in range(layers)
        ]
        self.state = torch.full((layers, slots, heads, dim, dim), torch.nan)
        conv_shape = (layers, slots, geometry.conv_columns, geometry.channels)
        self.conv_state = torch.full(conv_shape, torch.nan, dtype=torch.bfloat16).mT
        self.corrections = torch.full((layers, slots, heads, geometry.window, dim), torch.nan)
        self.key_gate = torch.full((layers, slots, heads, geometry.window, 2 * dim), torch.nan, dtype=torch.bfloat16)
        self.num_accepted = torch.ones(slots, dtype=torch.int32)  # as the windows lie, by slot
        self.verify_plan = plan_verify(geometry, slots, arch="cpu")
        self.decode_plan = plan_decode(geometry, slots, arch="cpu")
        self.commit_plan = plan_commit(CommitGeometry(geometry, layers, compact=compact), slots, arch="cpu")

    def admit(self, slot: int) -> None:
        """A new request: nothing before its first token."""
        self.state[:, slot], self.conv_state[:, slot, :, :3], self.num_accepted[slot] = 0, 0, 1

    def _batch(self, slots: list[int], windows: list[dict[str, Tensor]]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        lengths = [window["raw_beta"].shape[1] for window in windows]
        indices = torch.tensor(slots, dtype=torch.int32)
        batch = {"query_start_loc": counts([0, *lengths]).cumsum(0, dtype=torch.int32), "state_indices": indices}
        if self.geometry.has_num_accepted:
            batch["num_accepted"] = self.num_accepted[indices]
        return batch, {name: torch.cat([window[name] for window in windows], dim=1) for name in ROWS}

    def _run(self, plan: Any, slots: list[int], windows: list[dict[str, Tensor]], records: bool) -> Tensor:
        batch, rows = self._batch(slots, windows)
        outs = torch.full_like(rows["output_gate"], torch.nan)
        for i, weights in enumerate(self.weights):
            tensors = {name: tensor[i] for name, tensor in rows.items()}
            if records:
                tensors |= {"corrections": self.corrections[i], "key_gate": self.key_gate[i]}
            pools = {"state": self.state[i], "conv_state": self.conv_state[i]}
            plan.bind(**weights, **tensors, **pools, **batch, out=outs[i], check_metadata=True).run()
        return outs

    def verify(self, slots: list[int], windows: list[dict[str, Tensor]]) -> Tensor:
        return self._run(self.verify_plan, slots, windows, True)

    def commit(self, slots: list[int], accepted: list[int]) -> None:
        conv = {"conv_state": self.conv_state} if self.compact else {}
        self.commit_plan.bind(
            state=self.state,
            corrections=self.corrections,
            key_gate=self.key_gate,
            A_log=[weights["A_log"] for weights in self.weights],
            dt_bias=[weights["dt_bias"] for weights in self.weights],
            accepted=counts(accepted),
            state_indices=torch.tensor(slots, dtype=torch.int32),
            check_metadata=True,
            **conv,
        ).run()
        for slot, count in zip(slots, accepted, strict=True):
            if count and not self.compact:
                self.num_accepted[slot] = count

    def decode(self, slots: list[int], tokens: list[dict[str, Tensor]]) -> Tensor:
        out = self._run(self.decode_plan, slots, tokens, False)
        self.num_accepted[slots] = 1
        return out

    def history(self, slot: int) -> Tensor:
        """The inputs that the next token's conv sees."""
        first = 0 if self.compact else int(self.num_accepted[slot]) - 1
        return self.conv_state[:, slot, :, first : first + 3]


def draw_window(geometry: VerifyGeometry, layers: int, length: int, draw: torch.Generator) -> dict[str, Tensor]:
    """Rows [layers, tokens, ...] of a request."""
    shapes = {
        "mixed_qkv": (geometry.channels,),
        "raw_gate": (geometry.heads, geometry.head_dim),
        "raw_beta": (geometry.heads,),
        "output_gate": (geometry.heads, geometry.head_dim),
    }
    return {name: torch.randn(layers, length, *shape, generator=draw).bfloat16() for name, shape in shapes.items()}


def play(geometry: VerifyGeometry, rounds: int, *, layers: int = 1, requests: int = 3, seed: int = 0) -> None:
    """Rounds of ragged windows with random accepted counts, beside decoding of the accepted tokens alone.

    Requests come and go, one leaves its slot to the next; a request may sit a round out, end with nothing accepted, or
    decode where it has one token.
    """
    compact = not geometry.has_num_accepted
    slots = requests + 2
    world = World(geometry, layers=layers, slots=slots, compact=compact)
    plain = World(geometry.replace(window=1, has_num_accepted=False), layers=layers, slots=slots, compact=True)
    chance, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    live: list[int] = []
    for _ in range(rounds):
        while live and chance.random() < 0.1:
            live.remove(chance.choice(live))
        while len(live) < requests and (not live or chance.random() < 0.5):
            slot = chance.choice([slot for slot in range(1, slots) if slot not in live])
            world.admit(slot)
            plain.admit(slot)
            live.append(slot)
        batch = chance.sample(live, chance.randint(1, len(live)))
        windows = [draw_window(geometry, layers, chance.randint(1, geometry.window), draw) for _ in batch]
        lengths = [window["raw_beta"].shape[1] for window in windows]
        if max(lengths) == 1 and chance.random() < 0.5:
            accepted = lengths
            outs = world.decode(batch, windows)
        else:
            accepted = [chance.randint(1, length) if chance.random() < 0.9 else 0 for length in lengths]
            outs = world.verify(batch, windows)
            world.commit(batch, accepted)
        start = 0
        for slot, window, length, count in zip(batch, windows, lengths, accepted, strict=True):
            for token in range(count):
                one = {name: rows[:, token : token + 1] for name, rows in window.items()}
                wanted = plain.decode([slot], [one])
                assert torch.equal(bits(outs[:, start + token]), bits(wanted[:, 0]))
            start += length
            assert torch.equal(bits(world.state[:, slot]), bits(plain.state[:, slot]))
            if count:
                assert torch.equal(bits(world.history(slot)), bits(plain.history(slot)))
            else:  # a verify has rolled the window: without an accepted token its request cannot go on
                live.remove(slot)
    assert world.state[:, 0].isnan().all() and world.corrections[:, 0].isnan().all()


@pytest.mark.parametrize("counted", [False, True], ids=["compacted", "counted"])
@pytest.mark.parametrize("gate", GATES)
def test_200_rounds_of_one_head(gate: str, counted: bool) -> None:
    play(VerifyGeometry(1, 4, gate=gate, lower_bound=GATES[gate], has_num_accepted=counted), 200)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("heads", "rounds"), [(12, 40), (96, 6)])
def test_rounds_of_more_heads(heads: int, rounds: int, gate: str, pytestconfig: pytest.Config) -> None:
    rounds = 200 if pytestconfig.getoption("--all-rounds") else rounds
    play(VerifyGeometry(heads, 4, gate=gate, lower_bound=GATES[gate]), rounds)


@quick
@given(geometries(), st.booleans(), st.integers(0, 2**20))
def test_rounds_are_decoding(geometry: CommitGeometry, counted: bool, seed: int) -> None:
    verify = geometry.verify.replace(records="slot", conv_layout="SD", has_num_accepted=counted)
    play(verify, 6, layers=geometry.layers, seed=seed)
