# SPDX-License-Identifier: Apache-2.0
"""The decode: a verify of one token with the state written in place, and what its binding launches."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashkda.decode import DecodePlan, plan_decode
from flashkda.errors import MetadataError, TensorError
from flashkda.geometry import VerifyGeometry
from flashkda.ops import decode_reference, reference
from flashkda.planner import TILES
from tests.bound import BARE, FULL, arena_bits, install_kernels
from tests.inputs import Case, assert_same_bits, bits, clone, make_case

# The kernels' positional arguments, as flashkda.kernels.specs documents them.
CONV = ("mixed_qkv", "conv_weight", "conv_state", "query_start_loc", "state_indices", "num_accepted", "qkv")
RULE = ("qkv", "raw_gate", "raw_beta", "A_log", "dt_bias", "state", "query_start_loc", "state_indices", "o")
NORM = ("o", "output_gate", "norm_weight", "query_start_loc", "state_indices", "out")
FUSED = (
    *("mixed_qkv", "conv_weight", "conv_state", "raw_gate", "raw_beta", "A_log", "dt_bias", "state", "output_gate"),
    *("norm_weight", "query_start_loc", "state_indices", "num_accepted", "out"),
)
NOT_DECODED = ("record_indices", "corrections", "key_gate")


def plan_of(geometry: VerifyGeometry, path: str = "reference") -> DecodePlan:
    plan = plan_decode(geometry, 8, path="reference", device="cpu")
    return plan if path == "reference" else dataclasses.replace(plan, path=path, arch="sm_90a", tile=TILES[0])


def tensors_of(case: Case) -> dict[str, Any]:
    return {name: tensor for name, tensor in case.tensors.items() if name not in NOT_DECODED}


def committed(case: Case) -> Case:
    """A verify, and the whole window folded into the state."""
    after = clone(case)
    reference.verify(case.geometry, **after.tensors)
    for n, length in enumerate(case.lengths):
        if length and not case.is_null(n):
            row, state = after.record_row(n), after["state"][case.slots[n]]
            key, gate = after["key_gate"][row, :, 0].chunk(2, dim=-1)
            bound = case.geometry.lower_bound
            decays = reference.decay(gate, after["A_log"], after["dt_bias"], gate=case.geometry.gate, lower_bound=bound)
            key = reference.normalize_key(key)
            state.copy_(reference.update_state(state.float(), decays, key, after["corrections"][row, :, 0]))
    for name in ("corrections", "key_gate"):  # which a decode does not touch
        after.arenas[name].copy_(case.arenas[name])
    return after


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("geometry", [FULL, BARE], ids=["full", "bare"])
def test_is_a_verify_of_one_token_and_its_commit(geometry: VerifyGeometry, state_dtype: str) -> None:
    """With null and empty requests, padding, and a window wider than a token; all other bits stay."""
    geometry = geometry.replace(state_dtype=state_dtype)
    case = make_case(geometry, [1, 0, 1, 1], slots=[2, 3, 0, 4], seed=5, m_padding=2)
    wanted = committed(case)
    plan_of(geometry).bind(**tensors_of(case), check_metadata=True).run()
    assert_same_bits(arena_bits(case), arena_bits(wanted))


@pytest.mark.parametrize("geometry", [FULL, BARE], ids=["full", "bare"])
def test_the_parts_are_the_whole(geometry: VerifyGeometry) -> None:
    case = make_case(geometry, [1, 1, 0], seed=6, m_padding=1)
    whole = clone(case)
    decode_reference.decode(geometry, **tensors_of(whole))
    tensors = {**case.tensors, "qkv": torch.zeros_like(case["mixed_qkv"])}
    tensors["o"] = torch.zeros_like(case["out"]) if geometry.norm else case["out"]
    reference.short_conv(geometry, **{name: tensors[name] for name in CONV})
    decode_reference.decode_rule(geometry, **{name: tensors[name] for name in RULE})
    if geometry.norm:
        reference.gated_rms_norm(geometry, **{name: tensors[name] for name in NORM})
    assert_same_bits(arena_bits(case), arena_bits(whole))


def test_a_request_keeps_to_its_first_token() -> None:
    case = make_case(BARE, [2, 1], seed=7)
    alone = make_case(BARE, [1], slots=case.slots[:1], seed=8)
    for name in ("mixed_qkv", "raw_gate", "raw_beta"):
        alone[name][0] = case[name][0]
    for name in ("conv_weight", "A_log", "dt_bias"):
        alone[name].copy_(case[name])
    slot = case.slots[0]
    for name in ("state", "conv_state"):
        alone[name][slot] = case[name][slot]
    for one in (case, alone):
        decode_reference.decode(BARE, **tensors_of(one))
    assert torch.equal(bits(case["state"][slot]), bits(alone["state"][slot]))
    assert torch.equal(bits(case["out"][0]), bits(alone["out"][0])) and not case["out"][1].any()


@pytest.mark.parametrize("pools", [(6, 4), (4, 6)])
def test_a_slot_that_either_pool_lacks_is_null(pools: tuple[int, int]) -> None:
    case = make_case(BARE, [1], slots=[3], pool_slots=pools, seed=2)
    case["state_indices"].fill_(5)
    before = arena_bits(case)
    decode_reference.decode(BARE, **tensors_of(case))
    assert not case["out"].any()
    assert_same_bits({**arena_bits(case), "out": before["out"]}, before)


def test_what_bind_and_checks_refuse() -> None:
    case = make_case(FULL, [2, 1], seed=7)
    before = arena_bits(case)
    with pytest.raises(
        MetadataError, match=r"query_start_loc\[1\]: expected 0..1 \(0..1 tokens for request 0\), found"
    ):
        plan_of(FULL).bind(**tensors_of(case), check_metadata=True).run()
    for name in ("corrections", "record_indices"):
        with pytest.raises(TensorError, match=f"{name}: expected one of"):
            plan_of(FULL).bind(**{**tensors_of(case), name: case[name]})
    with pytest.raises(TensorError, match="state: expected no memory in common with dt_bias"):
        plan_of(FULL).bind(**{**tensors_of(case), "dt_bias": case["state"][0, 0, :2]})
    assert_same_bits(arena_bits(case), before)


@pytest.mark.parametrize("geometry", [FULL, BARE], ids=["full", "bare"])
def test_launches(monkeypatch: pytest.MonkeyPatch, geometry: VerifyGeometry) -> None:
    kernels, case = install_kernels(monkeypatch), make_case(geometry, [1, 0], seed=1)
    plan_of(geometry, "fused").bind(**tensors_of(case)).run()
    ((kind, arguments),) = kernels.calls
    assert kind == "fused_decode"
    for name, argument in zip(FUSED, arguments, strict=True):
        assert argument is case.tensors[name]
    kernels.calls.clear()
    plan_of(geometry, "decomposed").bind(**tensors_of(case)).run()
    order = {"short_conv": CONV, "decode_rule": RULE, "gated_rms_norm": NORM}
    calls = [(kind, dict(zip(order[kind], arguments, strict=True))) for kind, arguments in kernels.calls]
    assert [kind for kind, _ in calls] == list(order)[: 3 if geometry.norm else 2]
    assert calls[0][1]["qkv"] is calls[1][1]["qkv"]
    assert calls[1][1]["state"] is case["state"]
    last = calls[2][1]["o"] if geometry.norm else case["out"]
    assert calls[1][1]["o"] is last


def test_without_requests_the_output_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, case = install_kernels(monkeypatch), make_case(BARE, [1], seed=1)
    none = {"query_start_loc": torch.zeros(1, dtype=torch.int32), "state_indices": case["state_indices"][:0]}
    plan_of(BARE, "fused").bind(**tensors_of(case)).run(**none)
    assert not kernels.calls and not case["out"].any()
