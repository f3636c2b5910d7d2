# SPDX-License-Identifier: Apache-2.0
"""The chunked numerics: its plans, its reference against the oracle, and what holds within the mode to the bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashkda.decode import plan_decode
from flashkda.errors import GeometryError, PlanMismatchError
from flashkda.geometry import VerifyGeometry
from flashkda.ops import chunked_reference, reference
from flashkda.planner import CHUNKED_TILE_RULES, CHUNKED_TILES, Plan, choose_tile, plan_verify
from tests import oracle
from tests.bound import FULL, case_of, install_kernels, kernel_plan, layer_of
from tests.gpu.chunked import MOST_DIFFERENCE
from tests.inputs import KINDS, Case, assert_same_bits, clone, make_case, written
from tests.regroup import outcome, regroup

K3 = VerifyGeometry(12, 4)


def plan_of(geometry: VerifyGeometry, numerics: str = "chunked", path: str = "reference") -> Plan:
    return plan_verify(geometry, 8, path=path, device="cpu", numerics=numerics)


def verified(case: Case, numerics: str = "chunked") -> Case:
    after = clone(case)
    plan_of(case.geometry, numerics).bind(**after.tensors).run()
    return after


class TestPlan:
    def test_the_mode_is_the_callers_alone(self) -> None:
        for requests in (1, 512):
            assert plan_verify(K3, requests, arch="sm_90a").numerics == "exact"

    def test_it_is_part_of_what_a_plan_is(self) -> None:
        exact, chunked = (plan_of(K3, numerics) for numerics in ("exact", "chunked"))
        assert exact.fingerprint != chunked.fingerprint
        assert Plan.from_json(chunked.to_json()) == chunked
        with pytest.raises(PlanMismatchError, match="fingerprint"):
            Plan.from_json(chunked.to_json().replace('"chunked"', '"exact"'))

    def test_a_decode_has_the_exact_mode_alone(self) -> None:
        with pytest.raises(GeometryError, match="numerics: expected one of exact"):
            plan_decode(K3, 1, device="cpu", numerics="chunked")

    def test_every_size_has_a_tile(self) -> None:
        for requests in (1, 2, 3, 512):
            for window in (1, 4, 16):
                assert choose_tile(VerifyGeometry(12, window), requests, "chunked") in CHUNKED_TILES
        assert CHUNKED_TILE_RULES[-1].load is None and CHUNKED_TILE_RULES[-1].window == 16

    @pytest.mark.parametrize(
        ("path", "kinds"),
        [
            ("fused", ["fused_verify_chunked"]),
            ("decomposed", ["short_conv", "record_chunked", "gated_rms_norm"]),
        ],
    )
    def test_kernels_of_the_mode(self, monkeypatch: pytest.MonkeyPatch, path: str, kinds: list[str]) -> None:
        kernels, case = install_kernels(monkeypatch), case_of()
        plan = dataclasses.replace(kernel_plan(FULL, path), numerics="chunked")
        plan.bind(**case.tensors).run()
        assert [kind for kind, *_ in kernels.loads] == kinds == [kind for kind, _ in kernels.calls]
        layer = layer_of(plan, case)
        layer.run()
        assert [kind for kind, _ in kernels.calls[len(kinds) :]] == kinds


GEOMETRIES: list[tuple[str, dict[str, Any], list[int], dict[str, Any]]] = [
    ("one token", dict(heads=1, window=1), [1], {}),
    ("ragged", dict(heads=2, window=5), [5, 0, 3], {}),
    ("window 16, softplus", dict(heads=1, window=16, gate="softplus", lower_bound=None), [16], {}),
    ("bf16 state, DS", dict(heads=1, window=3, state_dtype="bfloat16", conv_layout="DS"), [3, 2], {}),
    ("no norm", dict(heads=2, window=3, norm=False), [3, 1], dict(m_padding=2)),
    ("records by index", dict(heads=1, window=3, records="indices", has_num_accepted=True), [3, 1, 2], {}),
    ("null requests", dict(heads=1, window=3, alignment=2), [2, 1, 3, 1], dict(slots=[0, 3, -1, 1])),
]


@pytest.mark.parametrize("geometry, lengths, options", [row[1:] for row in GEOMETRIES], ids=[g[0] for g in GEOMETRIES])
def test_against_oracle(geometry: dict[str, Any], lengths: list[int], options: dict[str, Any]) -> None:
    case = make_case(VerifyGeometry(**geometry), lengths, seed=len(lengths), **options)
    after, plan = clone(case), plan_of(case.geometry)
    qkv = torch.full(case["mixed_qkv"].shape, torch.nan, dtype=torch.bfloat16)
    o = torch.full(case["out"].shape, torch.nan, dtype=torch.bfloat16)
    conv = ("mixed_qkv", "conv_weight", "conv_state", "query_start_loc", "state_indices", "num_accepted")
    rest = {name: t for name, t in after.tensors.items() if name not in (*conv[:3], "num_accepted")}
    plan.bind_short_conv(**{name: after.tensors[name] for name in conv}, qkv=qkv).run()
    between: dict[str, Any] = {"o": o} if case.geometry.norm else {}
    plan.bind_record(**rest, qkv=qkv, **between).run()
    oracle.check(case, after, qkv=qkv, o=o if case.geometry.norm else after["out"])
    assert_same_bits(written(verified(case)), written(after))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("gate", "lower_bound"), [("bounded", -5.0), ("softplus", None)])
def test_it_is_near_the_exact_mode_and_not_the_same(kind: str, gate: str, lower_bound: float | None) -> None:
    geometry = VerifyGeometry(2, 8, gate=gate, lower_bound=lower_bound)
    case = make_case(geometry, [8, 5], seed=5, kind=kind)
    exact, chunked = verified(case, "exact"), verified(case)
    found, wanted = chunked["corrections"].double(), exact["corrections"].double()
    apart = ((found - wanted).abs() / wanted.abs().amax(-1, keepdim=True).clamp(min=1e-30)).nan_to_num(0.0).max().item()
    assert apart <= MOST_DIFFERENCE
    if kind == "random":
        assert apart > 0  # what is given up
    for name in ("key_gate", "conv_state", "state"):
        assert_same_bits({name: written(chunked)[name]}, {name: written(exact)[name]})


@pytest.mark.parametrize("window", [1, 2, 6])
def test_prefix_and_batch(window: int) -> None:
    """Neither later tokens, nor a wider window, nor other requests, nor the slot change a bit."""
    case = make_case(VerifyGeometry(2, 6, head_dim=16), [6, 4], seed=3)
    base = verified(case)
    alone = verified(regroup(case, [0], lengths=[window], slots=[3]))
    assert_same_bits(outcome(alone, 0), outcome(base, 0, tokens=window))


def test_extreme_gates() -> None:
    """Keys kept whole beside keys forgotten at once: exp(g) is 1 and 0, and a window's sum of g is far below -1000."""
    geometry = VerifyGeometry(1, 16, gate="softplus", lower_bound=None, norm=False)
    case = make_case(geometry, [16], seed=9)
    case["raw_gate"].copy_(torch.where(torch.rand(case["raw_gate"].shape) < 0.4, 200.0, -200.0))
    case["A_log"].fill_(3.0)
    after = verified(case)
    oracle.check(case, after)
    decays = reference.decay(case["raw_gate"], case["A_log"], case["dt_bias"], gate="softplus", lower_bound=None)
    assert (decays == 0).any() and (decays == 1).any()


def test_a_state_that_is_not_finite_spoils_its_own_tokens_only() -> None:
    """A later token's infinity does not reach an earlier one, not even times a coefficient of zero."""
    state, value = torch.zeros(1, 4, 4), torch.ones(3, 1, 4)
    value[2] = torch.inf
    key = torch.ones(3, 1, 4) / 2
    u, o = chunked_reference.chunk(state, key, key, value, torch.ones(3, 1, 4), torch.ones(3, 1))
    assert u[:2].isfinite().all() and o[:2].isfinite().all() and not u[2].isfinite().any()
