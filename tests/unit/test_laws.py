# SPDX-License-Identifier: Apache-2.0
"""Laws of the verification, to the bit, on the reference: what a request's result may depend on, and losslessness."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashkda.geometry import VerifyGeometry
from flashkda.ops import reference
from tests.inputs import Case, assert_same_bits, bits, clone, make_case
from tests.regroup import outcome, regroup, take_heads

quick = settings(max_examples=12, deadline=None, derandomize=True, database=None)


@st.composite
def geometries(draw: st.DrawFn, /, **fixed: Any) -> VerifyGeometry:
    gate, lower_bound = draw(st.sampled_from([("bounded", -5.0), ("softplus", None)]))
    options: dict[str, Any] = dict(
        heads=draw(st.integers(1, 3)),
        window=draw(st.integers(1, 5)),
        head_dim=draw(st.sampled_from([10, 16, 128])),  # 10: no whole number of vectors in a head
        gate=gate,
        lower_bound=lower_bound,
        state_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        conv_layout=draw(st.sampled_from(["SD", "DS"])),
        alignment=draw(st.sampled_from([16, 2])),
        norm=draw(st.booleans()),
        records=draw(st.sampled_from(["slot", "request", "indices"])),
        has_num_accepted=draw(st.booleans()),
    )
    return VerifyGeometry(**{**options, **fixed})


@st.composite
def cases(draw: st.DrawFn, /, **fixed: Any) -> Case:
    geometry = draw(geometries(**fixed))
    lengths = draw(st.lists(st.integers(1, geometry.window), min_size=1, max_size=4))
    kind = draw(st.sampled_from(["random", "large_gate", "tiny_gate"]))
    return make_case(geometry, lengths, seed=draw(st.integers(0, 2**20)), kind=kind, m_padding=draw(st.integers(0, 2)))


def verified(case: Case) -> Case:
    after = clone(case)
    reference.verify(case.geometry, **after.tensors)
    return after


@quick
@given(cases(), st.data())
def test_batch_and_slot_invariance(case: Case, data: st.DataObject) -> None:
    """Some of the requests, in any order and in other slots, get the same bits."""
    order = data.draw(st.permutations(range(len(case.lengths))))
    order = order[: data.draw(st.integers(1, len(order)))]
    slots = data.draw(st.permutations(range(1, 8)))[: len(order)]
    whole, part = verified(case), verified(regroup(case, order, slots=slots))
    for i, n in enumerate(order):
        assert_same_bits(outcome(part, i), outcome(whole, n))


@quick
@given(cases(), st.data())
def test_prefix_invariance(case: Case, data: st.DataObject) -> None:
    """Tokens do not depend on the drafts after them."""
    prefix = [data.draw(st.integers(1, length)) for length in case.lengths]
    other = regroup(case, range(len(prefix)), lengths=prefix)
    whole, part = verified(case), verified(other)
    for n, tokens in enumerate(prefix):
        assert_same_bits(outcome(part, n), outcome(whole, n, tokens=tokens))


@quick
@given(cases(heads=4), st.data())
def test_a_head_is_the_same_on_any_rank(case: Case, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, 3))
    count = data.draw(st.integers(1, 4 - first))
    whole, part = verified(case), verified(take_heads(case, first, count))
    for n in range(len(case.lengths)):
        assert_same_bits(outcome(part, n), outcome(whole, n, heads=slice(first, first + count)))


def test_kimi_k3_at_any_tp() -> None:
    """96, 12 and 6 heads a rank: large enough for torch to split one operation over threads."""
    case = make_case(VerifyGeometry(96, 2), [2], seed=0)
    whole = verified(case)
    for count in (12, 6):
        heads = slice(96 - count, 96)
        assert_same_bits(outcome(verified(take_heads(case, 96 - count, count)), 0), outcome(whole, 0, heads=heads))


class Stream:
    """A request fed window by window, its state moved on from the records as a commit does."""

    def __init__(self, source: Case) -> None:
        self.source = source
        self.case = clone(source)
        self.accepted = 1  # as the source's history lies
        self.position = 0
        self.outs: list[Tensor] = []

    def step(self, accept: int, drafts: int) -> None:
        """Verify the next ``accept`` tokens and ``drafts`` wrong ones, then commit the former."""
        case, geometry = self.case, self.case.geometry
        slot, length = case.slots[0], accept + drafts
        good = slice(self.position, self.position + accept)
        rows = {}
        for name in ("mixed_qkv", "raw_gate", "raw_beta", "output_gate"):
            if case.tensors[name] is not None:
                wrong = case[name][self.position].float().neg().add(drafts).to(torch.bfloat16)
                rows[name] = torch.cat((self.source[name][good], wrong.expand(drafts, *wrong.shape)))
        out = torch.full((length, *case["out"].shape[1:]), torch.nan, dtype=torch.bfloat16)
        case["num_accepted"].fill_(self.accepted)
        case["query_start_loc"].copy_(torch.tensor([0, length]))
        reference.verify(geometry, **{**case.tensors, **rows, "out": out})

        row = case.record_row(0)
        state = case["state"][slot]
        for t in range(accept):
            key, gate = case["key_gate"][row, :, t].chunk(2, dim=-1)
            decays = reference.decay(
                gate, case["A_log"], case["dt_bias"], gate=geometry.gate, lower_bound=geometry.lower_bound
            )
            correction = case["corrections"][row, :, t]
            state.copy_(reference.update_state(state, decays, reference.normalize_key(key), correction))
        self.accepted, self.position = accept, self.position + accept
        self.outs.append(out[:accept])

    def result(self) -> dict[str, Tensor]:
        """The outputs of all accepted tokens, the state, and the conv history that the next token would see."""
        slot = self.case.slots[0]
        history = self.case["conv_state"][slot][:, self.accepted - 1 : self.accepted + 2]
        state = bits(self.case["state"][slot])
        return {"out": bits(torch.cat(self.outs)), "state": state, "history": bits(history)}


@quick
@given(geometries(has_num_accepted=True, state_dtype="float32"), st.integers(0, 2**20), st.data())
def test_lossless(geometry: VerifyGeometry, seed: int, data: st.DataObject) -> None:
    """Verify and commit, whatever is drafted and accepted, give the bits of one token at a time."""
    window = geometry.window
    steps = data.draw(st.lists(st.integers(1, window), min_size=1, max_size=4))
    source = make_case(geometry, [sum(steps)], seed=seed, num_accepted=[1])
    by_windows, by_tokens = Stream(source), Stream(source)
    for accept in steps:
        by_windows.step(accept, data.draw(st.integers(0, window - accept)))
    for _ in range(sum(steps)):
        by_tokens.step(1, 0)
    assert_same_bits(by_windows.result(), by_tokens.result())
