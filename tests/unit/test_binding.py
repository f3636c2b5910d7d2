# SPDX-License-Identifier: Apache-2.0
"""Bindings on the reference path, and what may be given at run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashkda.errors import TensorError
from flashkda.geometry import VerifyGeometry
from flashkda.ops import launch, reference, validate
from tests.bound import (
    BARE,
    CONV,
    FULL,
    PER_STEP,
    RECORD,
    arena_bits,
    case_of,
    empty_qkv,
    layer_of,
    pick,
    reference_plan,
)
from tests.inputs import Case, assert_same_bits, clone, make_case, written


def expected(case: Case) -> dict[str, Tensor]:
    case = clone(case)
    reference.verify(case.geometry, **case.tensors)
    return written(case)


# --- the reference path ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("geometry", [FULL, BARE], ids=["full", "bare"])
@pytest.mark.parametrize("how", ["whole", "parts", "layer"])
def test_every_way_to_bind_gives_the_same_bits(geometry: VerifyGeometry, how: str) -> None:
    case, plan = case_of(geometry), reference_plan(geometry)
    wanted = expected(case)
    if how == "whole":
        plan.bind(**case.tensors).run()
    elif how == "layer":
        layer_of(plan, case).run()
    else:
        qkv = empty_qkv(case)
        plan.bind_short_conv(**pick(case, CONV), qkv=qkv).run()
        plan.bind_record(**pick(case, RECORD), qkv=qkv).run()
    assert_same_bits(written(case), wanted)


def test_the_norm_alone() -> None:
    case, plan = case_of(), reference_plan(FULL)
    o = torch.randn(case["out"].shape).bfloat16()
    names = ("output_gate", "norm_weight", "query_start_loc", "state_indices")
    wanted = torch.empty_like(o)
    reference.gated_rms_norm(FULL, o=o, **pick(case, names), out=wanted)
    plan.bind_gated_rms_norm(o=o, **pick(case, names), out=case["out"]).run()
    assert torch.equal(case["out"], wanted)
    with pytest.raises(TensorError, match="output_gate: expected a geometry with norm=True"):
        reference_plan(BARE).bind_gated_rms_norm(o=o, query_start_loc=case["query_start_loc"], out=case["out"])


def test_weights_may_require_grad() -> None:
    case = case_of()
    wanted = expected(case)
    parameters = {name: torch.nn.Parameter(case[name]) for name in ("conv_weight", "A_log", "dt_bias", "norm_weight")}
    reference_plan(FULL).bind(**{**case.tensors, **parameters}).run()
    assert_same_bits(written(case), wanted)
    assert not case["out"].requires_grad


@pytest.mark.parametrize("lengths", [(), (0, 0)], ids=["no requests", "no tokens"])
@pytest.mark.parametrize("padding", [0, 4])
def test_nothing_to_do(lengths: tuple[int, ...], padding: int) -> None:
    case = make_case(FULL, lengths, seed=1, m_padding=padding)
    before = written(clone(case))
    reference_plan(FULL).bind(**case.tensors).run()
    assert not case["out"].any()
    assert_same_bits({**written(case), "out": before["out"]}, before)


# --- tensors at run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(3, 3, 2), (2, 1), (0, 1, 0)], ids=["as many", "fewer", "one"])
@pytest.mark.parametrize("how", ["whole", "layer"])
def test_tensors_at_run_replace_those_bound(how: str, lengths: tuple[int, ...]) -> None:
    bound, step, plan = case_of(lengths=(3, 3, 2)), case_of(lengths=lengths), reference_plan(FULL)
    wanted = clone(bound)
    out = torch.empty_like(step["out"])
    reference.verify(FULL, **{**wanted.tensors, **pick(step, PER_STEP), "out": out})
    kept = {name: arena for name, arena in arena_bits(bound).items() if name in PER_STEP}

    verify = plan.bind(**bound.tensors) if how == "whole" else layer_of(plan, bound)
    verify.run(**pick(step, PER_STEP))
    assert torch.equal(step["out"], out)
    found = written(bound)
    assert_same_bits(found, {**written(wanted), "out": found["out"]})
    after = arena_bits(bound)
    assert_same_bits({name: after[name] for name in kept}, kept)


def test_no_requests_at_run() -> None:
    bound, step = case_of(), make_case(FULL, [], seed=1, m_padding=2)
    binding = reference_plan(FULL).bind(**bound.tensors)
    before = arena_bits(bound)
    binding.run(**pick(step, PER_STEP))
    assert not step["out"].any()
    assert_same_bits(arena_bits(bound), before)


def wrong_steps() -> list[Any]:
    case = case_of()
    longer = case_of(lengths=(3, 2, 3))
    more = case_of(lengths=(3, 0, 2, 0))
    unaligned = torch.zeros(case["out"].numel() + 1, dtype=torch.bfloat16)[1:].view(case["out"].shape)
    rows = [
        ("mixed_qkv", longer["mixed_qkv"], "at most 6 rows"),
        ("state_indices", more["state_indices"], "at most 3 requests"),
        ("query_start_loc", more["query_start_loc"], "at most 3 requests"),
        ("out", case["out"][:5], "6 rows, as mixed_qkv|5 rows, as out"),
        ("num_accepted", case["num_accepted"][:2], "requests, as"),
        ("out", case["out"].half(), "dtype bfloat16"),
        ("out", unaligned, "aligned to 16 bytes"),
        ("raw_gate", case["raw_gate"].transpose(1, 2).contiguous().transpose(1, 2), "strides"),
        ("raw_beta", case["raw_beta"].to("meta"), "device cpu"),
        ("out", None, "torch.Tensor"),
        ("out", case["out"].tolist(), "torch.Tensor"),
        ("state", case["state"], "one of mixed_qkv"),
        ("conv_weight", case["conv_weight"], "one of mixed_qkv"),
        ("nonsense", case["out"], "one of mixed_qkv"),
    ]
    return [pytest.param(*row, id=f"{row[0]}: {row[2]}") for row in rows]


@pytest.mark.parametrize(("name", "tensor", "expected"), wrong_steps())
def test_a_wrong_tensor_at_run_is_refused_and_nothing_is_written(name: str, tensor: Any, expected: str) -> None:
    case = case_of()
    binding = reference_plan(FULL).bind(**case.tensors)
    before = arena_bits(case)
    for _ in range(2):  # a refused signature is not remembered
        with pytest.raises(TensorError, match=expected):
            binding.run(**{name: tensor})
    assert_same_bits(arena_bits(case), before)
    binding.run()


def test_a_seen_signature_is_not_validated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    binding = reference_plan(FULL).bind(**case_of(lengths=(3, 3, 2)).tensors)
    validated: list[str] = []

    def validate_step(plan: Any, name: str, *rest: Any) -> None:
        validated.append(name)
        validate.validate_step(plan, name, *rest)

    monkeypatch.setattr(launch, "validate_step", validate_step)
    for _ in range(3):
        binding.run(**pick(case_of(lengths=(1, 1)), PER_STEP))
    assert sorted(validated) == sorted(PER_STEP)
