# SPDX-License-Identifier: Apache-2.0
"""The reference backend against the float64 oracle, and the contract's null, padding and untouched rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashkda.geometry import VerifyGeometry
from flashkda.ops import reference
from tests import oracle
from tests.inputs import KINDS, Case, assert_same_bits, bits, clone, make_case, written

CONV = ("mixed_qkv", "conv_weight", "conv_state", "query_start_loc", "state_indices", "num_accepted")
RECORD = (
    *("raw_gate", "raw_beta", "A_log", "dt_bias", "state", "query_start_loc", "state_indices", "record_indices"),
    *("corrections", "key_gate"),
)
NORM = ("output_gate", "norm_weight", "query_start_loc", "state_indices", "out")


def pick(case: Case, names: tuple[str, ...]) -> dict[str, Any]:
    """The tensors of one stage. A stage alone knows one pool or none, so a slot that a pool lacks is made null."""
    null = torch.tensor([case.is_null(n) for n in range(len(case.slots))], dtype=torch.bool)
    indices = case["state_indices"].masked_fill(null, case.geometry.null_slot)
    return {name: indices if name == "state_indices" else case.tensors[name] for name in names}


def run_stages(case: Case) -> tuple[Tensor, Tensor]:
    """The verification stage by stage, in place; returns qkv and o."""
    qkv = torch.full(case["mixed_qkv"].shape, torch.nan, dtype=torch.bfloat16)
    o = torch.full(case["out"].shape, torch.nan, dtype=torch.bfloat16) if case.geometry.norm else case["out"]
    reference.short_conv(case.geometry, **pick(case, CONV), qkv=qkv)
    reference.record(case.geometry, qkv=qkv, **pick(case, RECORD), o=o)
    if case.geometry.norm:
        reference.gated_rms_norm(case.geometry, o=o, **pick(case, NORM))
    return qkv, o


def run(case: Case) -> Case:
    """A verified clone, checked against the oracle and against its own stages."""
    staged, verified = clone(case), clone(case)
    qkv, o = run_stages(staged)
    reference.verify(case.geometry, **verified.tensors)
    oracle.check(case, staged, qkv=qkv, o=o)
    assert_same_bits(written(verified), written(staged))
    return verified


TABLE: list[tuple[str, dict[str, Any], list[int], dict[str, Any]]] = [
    ("one token", dict(heads=1, window=1), [1], {}),
    ("full windows", dict(heads=2, window=4), [4, 4], {}),
    ("ragged, softplus", dict(heads=2, window=5, gate="softplus", lower_bound=None), [5, 1, 3], {}),
    ("window 16", dict(heads=1, window=16), [16], {}),
    ("bf16 state and weights", dict(heads=1, window=3, state_dtype="bfloat16", conv_weight_dtype="bfloat16"), [3], {}),
    ("bf16 norm weight, DS", dict(heads=1, window=3, norm_weight_dtype="bfloat16", conv_layout="DS"), [2, 3], {}),
    ("no norm", dict(heads=2, window=3, norm=False), [3, 1], dict(m_padding=2)),
    ("other eps", dict(heads=1, window=2, norm_eps=0.1), [2], {}),
    ("other bound", dict(heads=1, window=2, lower_bound=-0.5), [2], {}),
    ("odd strides", dict(heads=2, window=3, alignment=2), [3, 2], dict(m_padding=1)),
    ("odd strides, DS, bf16", dict(heads=1, window=3, alignment=2, conv_layout="DS", state_dtype="bfloat16"), [3], {}),
    ("wide projection", dict(heads=1, window=2), [2, 1], dict(row_pads=(256, 64, 0), slot_pad=64)),
    ("padded rows", dict(heads=1, window=4), [2, 1], dict(m_padding=5)),
    ("strided column", dict(heads=1, window=2), [1, 2, 2], dict(index_stride=7)),
    ("int64 column", dict(heads=1, window=2, index_dtype="int64"), [1, 2], dict(index_stride=3)),
    ("accepted [0, 3]", dict(heads=1, window=4, has_num_accepted=True), [4, 2], dict(num_accepted=[0, 3])),
    ("accepted beyond T", dict(heads=1, window=3, has_num_accepted=True), [1, 3, 2], dict(num_accepted=[9, -2, 3])),
    ("accepted, DS", dict(heads=1, window=6, has_num_accepted=True, conv_layout="DS"), [6, 2], {}),
    ("records by request", dict(heads=1, window=3, records="request"), [2, 3], {}),
    ("records by index", dict(heads=1, window=3, records="indices"), [3, 1, 2], {}),
    ("a record row that is none", dict(heads=1, window=2, records="indices"), [2] * 3, dict(record_indices=[-1, 9, 4])),
    ("slot 0 usable", dict(heads=1, window=2, null_slot=-1), [2, 1], dict(slots=[0, 2])),
    ("null requests", dict(heads=1, window=3), [2, 1, 3, 1], dict(slots=[0, 3, -1, 1])),
    ("null up to 2", dict(heads=1, window=2, null_slot=2), [2, 1, 2], dict(slots=[2, 3, 1])),
    ("slots outside the pool", dict(heads=1, window=2), [2, 1, 2], dict(slots=[1, 700, 2], pool_slots=4)),
    ("small conv pool", dict(heads=1, window=2), [2, 1, 2], dict(slots=[4, 2, 1], pool_slots=(6, 3))),
    ("small state pool", dict(heads=1, window=2), [2, 1, 2], dict(slots=[4, 2, 1], pool_slots=(3, 6))),
    ("empty windows", dict(heads=1, window=3), [0, 2, 0, 1, 0], {}),
    ("longer than T", dict(heads=1, window=2), [5, 1], {}),
    ("no requests, padded rows", dict(heads=1, window=2), [], dict(m_padding=3)),
    ("no rows", dict(heads=1, window=2), [0], {}),
    ("all null", dict(heads=2, window=2), [2, 2], dict(slots=[0, 0])),
    ("other dims", dict(heads=3, window=3, head_dim=20, conv_width=3), [3, 2], {}),
    ("two taps", dict(heads=2, window=2, head_dim=5, conv_width=2, has_num_accepted=True), [1, 2], {}),
]


@pytest.mark.parametrize("geometry, lengths, options", [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_against_oracle(geometry: dict[str, Any], lengths: list[int], options: dict[str, Any]) -> None:
    run(make_case(VerifyGeometry(**geometry), lengths, seed=len(lengths), **options))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gate, lower_bound", [("bounded", -5.0), ("softplus", None)])
def test_inputs_of_every_kind(kind: str, gate: str, lower_bound: float | None) -> None:
    geometry = VerifyGeometry(2, 6, gate=gate, lower_bound=lower_bound)
    run(make_case(geometry, [6, 3], seed=5, kind=kind))


@pytest.mark.parametrize("norm", [True, False])
def test_rows_without_a_request_are_plus_zero(norm: bool) -> None:
    geometry = VerifyGeometry(1, 2, norm=norm, head_dim=16)
    case = run(make_case(geometry, [2, 4, 1, 2], seed=1, slots=[0, 1, 2, 900], pool_slots=4, m_padding=3))
    live = torch.zeros(12, dtype=torch.bool)
    live[[2, 3, 6]] = True  # request 1 has four rows for a window of two
    assert not bits(case["out"])[~live].any()
    assert (case["out"][live] != 0).any(-1).all()


def test_null_requests_write_nothing_else() -> None:
    geometry = VerifyGeometry(1, 2, head_dim=16, records="request")
    before = make_case(geometry, [2, 1], seed=1, slots=[0, -7])
    after = run(before)
    found, wanted = written(after), written(before)
    del found["out"], wanted["out"]
    assert_same_bits(found, wanted)


def test_tokens_outside_the_packed_rows_leave_others_alone() -> None:
    case = make_case(VerifyGeometry(1, 2, head_dim=16), [2, 2], seed=1)
    good = run(case)
    case["query_start_loc"].copy_(torch.tensor([0, 2, 2000], dtype=torch.int32))
    case["query_start_loc"][1] = 2
    reference.verify(case.geometry, **case.tensors)
    assert torch.equal(bits(case["out"][:2]), bits(good["out"][:2]))


def test_history_moves_with_the_accepted_count() -> None:
    geometry = VerifyGeometry(1, 4, has_num_accepted=True, head_dim=16)
    case = make_case(geometry, [2], seed=3, num_accepted=[3])
    slot = case.slots[0]
    old, tokens = case["conv_state"][slot].clone(), case["mixed_qkv"].clone()
    after = run(case)["conv_state"][slot]
    wanted = torch.stack((old[:, 3], old[:, 4], tokens[0], tokens[1], old[:, 4], old[:, 5]), dim=1)
    assert torch.equal(bits(after), bits(wanted))


def test_the_layouts_give_the_same_bits() -> None:
    results = []
    for layout in ("SD", "DS"):
        for alignment in (16, 2):
            geometry = VerifyGeometry(2, 3, conv_layout=layout, alignment=alignment, head_dim=16)
            case = make_case(geometry, [3, 1], seed=4)
            reference.verify(geometry, **case.tensors)
            results.append({name: bits(case[name]) for name in ("out", "corrections", "key_gate", "conv_state")})
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.parametrize("function", [torch.sigmoid, torch.exp, torch.nn.functional.softplus])
def test_pointwise_bits_do_not_depend_on_the_place(function: Any) -> None:
    x = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 5
    whole = reference.pointwise(function, x)
    alone = torch.cat([reference.pointwise(function, value[None]) for value in x])
    strided = reference.pointwise(function, torch.stack((x, x), dim=1)[:, 1])
    assert torch.equal(alone, whole) and torch.equal(strided, whole)
    assert torch.allclose(whole, function(x), rtol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 20, 128])
def test_tree_sum(size: int) -> None:
    x = torch.arange(3 * size, dtype=torch.float32).view(3, size)
    assert torch.equal(reference.tree_sum(x), x.sum(-1, keepdim=True))


def test_softplus_is_linear_above_20() -> None:
    zero = torch.zeros(1)
    gate = torch.tensor([[[19.0, 21.0, 200.0, -200.0]]])
    g = reference.log_decay(gate, zero, torch.zeros(1, 4), gate="softplus", lower_bound=None)
    assert g.tolist()[0][0][1:3] == [-21.0, -200.0]
    assert torch.allclose(g, -torch.log1p(gate.double().exp()).clamp(max=200).float())


def test_the_check_bites() -> None:
    """The oracle's check sees an error just beyond its tolerances, and one bit outside the views."""
    case = make_case(VerifyGeometry(1, 2, head_dim=16, has_num_accepted=True), [2, 1], seed=6)
    after = clone(case)
    qkv, o = run_stages(after)
    oracle.check(case, after, qkv=qkv, o=o)

    def spoiled(name: str, change: Any) -> tuple[Case, Tensor, Tensor]:
        bad, bad_qkv, bad_o = clone(after), qkv.clone(), o.clone()
        change({"qkv": bad_qkv, "o": bad_o, "arena": bad.arenas["state"]}.get(name, bad.tensors.get(name)))
        return bad, bad_qkv, bad_o

    row = case.slots[0]
    spoilers: list[tuple[str, Any]] = [
        ("qkv", lambda t: bits(t)[1, 3].add_(1)),
        ("o", lambda t: t[0].mul_(1.02)),
        ("out", lambda t: t[0].mul_(1.02)),
        ("corrections", lambda t: t[row, 0, 1].mul_(1 + 1e-4)),
        ("corrections", lambda t: t[row - 1 if row else row + 1].zero_()),
        ("key_gate", lambda t: bits(t)[row, 0, 0, 2].add_(1)),
        ("key_gate", lambda t: bits(t)[row, 0, 0, 17].add_(1)),
        ("conv_state", lambda t: bits(t)[row, 0, 0].add_(1)),
        ("arena", lambda t: bits(t)[-1].add_(1)),
        ("num_accepted", lambda t: t.add_(1)),
    ]
    for name, change in spoilers:
        bad, bad_qkv, bad_o = spoiled(name, change)
        with pytest.raises(AssertionError):
            oracle.check(case, bad, qkv=bad_qkv, o=bad_o)
