# SPDX-License-Identifier: Apache-2.0
"""plan_round and the folded round on the reference backend: the bits of a commit and a verify."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashkda import RoundPlan, VerifyGeometry, plan_round, preset
from flashkda.commit import CommitGeometry
from flashkda.errors import GeometryError, UnsupportedError
from flashkda.ops import commit_reference, reference
from flashkda.planner import ROUND_TILE_RULES, Tile
from tests.inputs import assert_same_bits, clone, make_case, written

K3 = preset("kimi-k3", tp=8, window=4, has_num_accepted=True)


def drawn(geometry, lengths, seed=0, **options):
    """A case whose records hold the window before."""
    case = make_case(geometry, lengths, seed=seed, **options)
    generator = torch.Generator().manual_seed(seed)
    for name in ("corrections", "key_gate"):
        case[name].copy_(torch.randn(case[name].shape, generator=generator))
    return case


def apart(case):
    lengths = case["query_start_loc"].diff()
    names = ("state", "corrections", "key_gate", "A_log", "dt_bias")
    commit_reference.commit(
        CommitGeometry(case.geometry, 1),
        **{name: [case[name]] for name in names},
        accepted=torch.where(lengths > 0, case["num_accepted"], 0),
        state_indices=case["state_indices"],
        record_indices=case.tensors["record_indices"],
    )
    reference.verify(case.geometry, **case.tensors)
    return case


def folded(case):
    plan_round(case.geometry, max(1, len(case.lengths)), path="reference").bind(**case.tensors).run()
    return case


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("records", ["slot", "request", "indices"])
def test_has_the_bits_of_a_commit_and_a_verify(state_dtype, records):
    geometry = VerifyGeometry(2, 3, state_dtype=state_dtype, records=records, has_num_accepted=True)
    case = drawn(geometry, [3, 0, 1, 2], slots=[2, 3, 0, 1], num_accepted=[3, 2, 1, 0])
    one, two = folded(clone(case)), apart(clone(case))
    assert_same_bits(written(one), written(two))
    assert not torch.equal(one["state"][2], case["state"][2])  # three tokens were folded
    assert torch.equal(one["state"][3], case["state"][3])  # no token, no part
    assert torch.equal(one["state"][1], case["state"][1])  # nothing accepted


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 5)), min_size=1, max_size=4), st.integers(0, 9))
def test_any_counts_and_lengths(requests, seed):
    geometry = VerifyGeometry(1, 3, has_num_accepted=True)
    lengths, counts = (list(values) for values in zip(*requests, strict=True))
    case = drawn(geometry, lengths, seed, num_accepted=counts)
    assert_same_bits(written(folded(clone(case))), written(apart(clone(case))))


def test_a_request_that_is_null_folds_nothing():
    case = drawn(K3.replace(heads=1), [4, 4], slots=[0, 1], num_accepted=[4, 4])
    after = folded(clone(case))
    assert torch.equal(after["state"][0].view(torch.int32), case["state"][0].view(torch.int32))
    assert not torch.equal(after["state"][1], case["state"][1])


def test_tiles_leave_registers_for_the_fold():
    for load, tile in ((1, Tile(16, 2, 16)), (2, Tile(32, 2, 16)), (128, Tile(128, 8, 8, persistent=True))):
        assert plan_round(K3, load, path="fused", arch="sm_90a").tile == tile
    assert plan_round(K3, 128, path="fused", arch="sm_120a").tile == Tile(64, 4, 16)
    assert plan_round(K3.replace(alignment=2), 128, path="fused", arch="sm_90a").tile == Tile(64, 4, 16)
    assert all(
        rule.tile.persistent or rule.tile.rows_per_thread * 128 // rule.tile.key_lanes < 64 for rule in ROUND_TILE_RULES
    )
    with pytest.raises(GeometryError, match="tile"):
        plan_round(K3, 1, path="fused", arch="sm_90a", tile=Tile(128, 4, 8))


def test_refuses_what_it_cannot_do():
    with pytest.raises(GeometryError, match="has_num_accepted"):
        plan_round(K3.replace(has_num_accepted=False), 1)
    with pytest.raises(GeometryError, match="path"):
        plan_round(K3, 1, path="decomposed")
    with pytest.raises(UnsupportedError, match=r"arch\.no_cluster") as refused:
        plan_round(K3, 1, path="fused", arch="sm_80")
    assert "commit and a verify" in str(refused.value)
    with pytest.raises(UnsupportedError, match=r"geometry\.head_dim"):
        plan_round(K3.replace(head_dim=64), 1, path="fused", arch="sm_90a")


def test_the_switch_is_followed(monkeypatch):
    monkeypatch.setenv("FLASHKDA_VERIFY_PATH", "reference")
    assert plan_round(K3, 1, arch="sm_90a").path == "reference"
    assert plan_round(K3, 1, path="fused", arch="sm_90a").path == "fused"
    monkeypatch.setenv("FLASHKDA_VERIFY_PATH", "auto")
    assert plan_round(K3, 1, arch="sm_90a").path == "fused" and plan_round(K3, 1, arch="cpu").path == "reference"
    monkeypatch.setenv("FLASHKDA_VERIFY_PATH", "decomposed")
    with pytest.raises(UnsupportedError, match="FLASHKDA_VERIFY_PATH is decomposed"):
        plan_round(K3, 1, arch="sm_90a")


def test_a_plan_survives_json_and_differs_from_a_verify():
    plan = plan_round(K3, 8, path="fused", arch="sm_90a")
    assert RoundPlan.from_json(plan.to_json()) == plan
    assert plan.op == "round"
