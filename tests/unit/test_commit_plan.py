# SPDX-License-Identifier: Apache-2.0
"""The commit's and the decode's geometry and plan, and what records take."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

import flashkda
from flashkda import CommitGeometry, CommitPlan, DecodePlan, VerifyGeometry, plan_commit, plan_decode, planner
from flashkda.errors import FallbackWarning, GeometryError, KernelBuildError, PlanMismatchError, UnsupportedError
from flashkda.ops.commit_validate import LAYERED, REQUEST_SPECS
from flashkda.records import memory_report, records_spec
from tests.commits import make_commit

K3 = flashkda.preset("kimi-k3", tp=8, window=4)
GEOMETRY = CommitGeometry(K3, 69, compact=True, has_boundary=True)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_warned", set())
    monkeypatch.delenv("FLASHKDA_VERIFY_PATH", raising=False)


def with_toolchain(monkeypatch: pytest.MonkeyPatch, present: bool) -> None:
    monkeypatch.setattr("flashkda.capability._importable", lambda module: present)


def test_a_geometry_goes_to_a_dict_and_back() -> None:
    assert CommitGeometry.from_dict(json.loads(json.dumps(GEOMETRY.to_dict()))) == GEOMETRY
    assert GEOMETRY.replace(has_dst=True) == CommitGeometry(K3, 69, True, True, True)
    assert "compact, has_boundary" in str(GEOMETRY)


def test_a_bad_geometry_lists_every_problem() -> None:
    with pytest.raises(GeometryError) as caught:
        CommitGeometry(4, 0, compact=1)  # type: ignore[arg-type]
    assert [problem.argument for problem in caught.value.problems] == ["verify", "layers", "compact"]
    with pytest.raises(GeometryError, match="rows"):
        GEOMETRY.replace(rows=3)
    with pytest.raises(GeometryError, match="layers"):
        CommitGeometry.from_dict({"verify": K3.to_dict()})


def test_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    with_toolchain(monkeypatch, True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan_commit(GEOMETRY, 8, arch="cpu").path == "reference"
        for arch in ("sm_80", "sm_90a", "sm_100a"):  # no clusters are needed
            assert plan_commit(GEOMETRY, 8, arch=arch).path == "kernel"
        assert plan_commit(GEOMETRY, 8, arch="sm_90a", path="reference").path == "reference"
    odd = GEOMETRY.replace(verify=K3.replace(head_dim=64))
    with pytest.warns(FallbackWarning, match="FlashKDA commits .*head_dim") as caught:
        plan = plan_commit(odd, 8, arch="sm_90a")
    assert plan.path == "reference" and plan.reasons[0].code == "geometry.head_dim"
    assert caught[0].filename == __file__
    with pytest.raises(UnsupportedError):
        plan_commit(odd, 8, arch="sm_90a", strict=True)
    with_toolchain(monkeypatch, False)
    with pytest.raises(KernelBuildError, match="nvidia-cutlass-dsl"):
        plan_commit(GEOMETRY, 8, arch="sm_90a", path="kernel")
    with pytest.raises(GeometryError, match="3 problems"):
        plan_commit(K3, 0, path="fused")  # type: ignore[arg-type]


def test_the_switch_keeps_verify_and_commit_on_one_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    with_toolchain(monkeypatch, True)
    text = plan_commit(GEOMETRY, 8, arch="sm_90a").to_json()
    monkeypatch.setenv("FLASHKDA_VERIFY_PATH", "decomposed")
    assert plan_commit(GEOMETRY, 8, arch="sm_90a").path == CommitPlan.from_json(text).path == "kernel"
    monkeypatch.setenv("FLASHKDA_VERIFY_PATH", "reference")
    assert plan_commit(GEOMETRY, 8, arch="sm_90a").path == "reference"
    with pytest.raises(PlanMismatchError, match="FLASHKDA_VERIFY_PATH"):
        CommitPlan.from_json(text)


def test_a_plan_goes_to_text_and_back() -> None:
    plan = plan_commit(GEOMETRY, 8, arch="cpu")
    assert CommitPlan.from_json(plan.to_json()) == plan
    other = plan_commit(GEOMETRY.replace(layers=68), 8, arch="cpu")
    assert other.fingerprint != plan.fingerprint
    values = json.loads(plan.to_json())
    for change in ({"max_requests": 9}, {"kernels_version": "0"}, {"op": "verify"}, {"path": "fused"}, {"format": 0}):
        with pytest.raises(PlanMismatchError):
            CommitPlan.from_json(json.dumps({**values, **change}))
    with pytest.raises(PlanMismatchError):
        CommitPlan.from_json("{}")


def test_a_decode_plan_is_no_verify_plan() -> None:
    decode, verify = plan_decode(K3, 8, arch="cpu"), flashkda.plan_verify(K3, 8, arch="cpu")
    assert isinstance(decode, DecodePlan) and decode.path == "reference"
    assert decode.fingerprint != verify.fingerprint
    assert DecodePlan.from_json(decode.to_json()) == decode
    for kind, plan in ((DecodePlan, verify), (flashkda.Plan, decode)):
        with pytest.raises(PlanMismatchError, match=f"to {kind.op}"):
            kind.from_json(plan.to_json())


def test_a_decode_plan_falls_back_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with_toolchain(monkeypatch, True)
    with pytest.warns(FallbackWarning, match="FlashKDA decodes") as caught:
        assert plan_decode(K3, 8, arch="sm_80").path == "decomposed"
    assert caught[0].filename == __file__


def test_a_decode_has_the_tile_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with_toolchain(monkeypatch, True)
    one, more = planner.TILES[:2]
    rules = (planner.TileRule(1, None, one), planner.TileRule(16, None, more))
    monkeypatch.setattr(planner, "TILE_RULES", rules)
    assert plan_decode(K3, 1, arch="sm_90a").tile == one
    assert flashkda.plan_verify(K3, 1, arch="sm_90a").tile == more


@pytest.mark.parametrize("records", ["slot", "request", "indices"])
def test_records_spec_is_what_a_commit_binds(records: str) -> None:
    verify = VerifyGeometry(2, 3, head_dim=8, records=records)
    geometry = CommitGeometry(verify, 2)
    spec = records_spec(geometry, 3)
    case = make_commit(geometry, [1, 2, 3], pool=4, record_indices=[0, 1, 2] if records == "indices" else None)
    made = {
        name: [torch.zeros(a.shape, dtype=getattr(torch, a.dtype)) for _ in range(spec.layers)]
        for name, a in (("corrections", spec.corrections), ("key_gate", spec.key_gate))
    }
    plan_commit(geometry, 3, arch="cpu").bind(**{**case.tensors, **made}).run()
    assert sum(t.numel() * t.element_size() for group in made.values() for t in group) == spec.bytes
    rows = 4 if records == "slot" else 3
    assert spec.corrections.shape == (rows, 2, 3, 8) and spec.key_gate.shape == (rows, 2, 3, 16)
    assert records_spec(verify, 3).bytes * 2 == spec.bytes


def test_records_spec_of_a_larger_pool() -> None:
    assert records_spec(K3, 8, slots=100).corrections.shape == (100, 12, 4, 128)
    assert records_spec(K3.replace(records="request"), 8, slots=100).corrections.shape[0] == 8
    with pytest.raises(GeometryError, match="2 problems"):
        records_spec(K3, 0, slots=1)
    with pytest.raises(GeometryError, match="geometry"):
        records_spec("kimi-k3", 1)  # type: ignore[arg-type]


def test_memory_report() -> None:
    """69 layers, 12 heads, 64 KiB a state; a record of a token is a 64th of it."""
    report = memory_report(GEOMETRY)
    assert report.state == 69 * 12 * 64 * 2**10
    assert report.kept_states == 4 * report.state
    assert report.records == 69 * 12 * 4 * 2**10 and report.saved == 64
    assert report.conv == 69 * 3 * (3 * 12 * 128) * 2
    spec = records_spec(GEOMETRY, 8)
    assert report.records == spec.bytes // spec.corrections.shape[0]
    assert "records of 4 tokens" in str(report) and "207.00 MiB" in str(report)
    assert memory_report(K3.replace(state_dtype="bfloat16")).saved == 32


def test_the_document_has_the_tensors_that_bind_checks() -> None:
    text = (Path(__file__).parents[2] / "docs" / "commit.md").read_text()
    rows = [[cell.strip(" `[]") for cell in line.split("|")[1:-1]] for line in text.split("\n") if line[:3] == "| `"]
    shared = {row[0]: tuple(row[1:3]) for row in rows if len(row) == 4}
    assert shared == {name: (", ".join(spec.shape), spec.dtype) for name, spec in REQUEST_SPECS.items()}
    layered = {name.strip(" `") for row in rows if len(row) == 2 for name in row[0].split(",")}
    assert layered == set(LAYERED)
