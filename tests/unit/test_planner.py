# SPDX-License-Identifier: Apache-2.0
"""plan_verify: path, tile, fallback, refusal; the plan's fingerprint and JSON."""

from __future__ import annotations

import dataclasses
import json
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashkda import FallbackWarning, Plan, VerifyGeometry, capability, plan_verify, planner
from flashkda.errors import ConfigError, GeometryError, KernelBuildError, PlanMismatchError, UnsupportedError
from flashkda.planner import TILE_RULES, TILES, Tile, choose_tile, persistent_reasons, tile_fits

K3 = VerifyGeometry(12, 4)
ODD = K3.replace(head_dim=64, conv_width=3)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.delenv("FLASHKDA_VERIFY_PATH", raising=False)
    monkeypatch.setattr(planner, "_warned", set())
    monkeypatch.setattr(capability, "TOOLCHAIN", {"json": "stands-for-an-installed-package"})


@pytest.fixture
def no_toolchain(monkeypatch):
    monkeypatch.setattr(capability, "TOOLCHAIN", {"no_module_a": "package-a", "no_module_b": "package-b"})


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize(
    ("arch", "geometry", "path", "chosen", "codes"),
    [
        ("sm_90a", K3, "auto", "fused", []),
        ("sm_100a", K3, "auto", "fused", []),
        ("sm_90a", K3, "fused", "fused", []),
        ("sm_90a", K3, "decomposed", "decomposed", []),
        ("sm_90a", K3, "reference", "reference", []),
        ("sm_80", K3, "decomposed", "decomposed", []),
        ("sm_80", ODD, "reference", "reference", []),
        ("cpu", K3, "auto", "reference", ["arch.cpu"]),
        ("cpu", ODD, "auto", "reference", ["arch.cpu", "geometry.head_dim", "geometry.conv_width"]),
    ],
)
def test_path_without_a_warning(quiet, arch, geometry, path, chosen, codes):
    plan = plan_verify(geometry, 8, arch=arch, path=path)
    assert (plan.path, plan.arch, plan.geometry, plan.max_requests) == (chosen, arch, geometry, 8)
    assert (plan.tile is None) is (chosen == "reference")
    assert [reason.code for reason in plan.reasons] == codes


@pytest.mark.parametrize(
    ("arch", "geometry", "path", "chosen", "codes"),
    [
        ("sm_80", K3, "auto", "decomposed", ["arch.no_cluster"]),
        ("sm_89", K3, "fused", "decomposed", ["arch.no_cluster"]),
        ("sm_80", ODD, "auto", "reference", ["arch.no_cluster", "geometry.head_dim", "geometry.conv_width"]),
        ("sm_90a", ODD, "decomposed", "reference", ["geometry.head_dim", "geometry.conv_width"]),
        ("sm_75", K3, "auto", "reference", ["arch.unknown"]),
        ("cpu", K3, "fused", "reference", ["arch.cpu"]),
    ],
)
def test_fallback_warns_with_every_reason(arch, geometry, path, chosen, codes):
    with pytest.warns(FallbackWarning) as caught:
        plan = plan_verify(geometry, 8, arch=arch, path=path)
    assert plan.path == chosen
    assert [reason.code for reason in plan.reasons] == codes
    (warning,) = caught
    assert all(str(reason) in str(warning.message) for reason in plan.reasons)
    assert str(geometry) in str(warning.message)
    assert warning.filename == __file__

    with pytest.raises(UnsupportedError) as refused:
        plan_verify(geometry, 8, arch=arch, path=path, strict=True)
    assert refused.value.reasons == plan.reasons
    assert all(str(reason) in str(refused.value) for reason in plan.reasons)


def test_warns_once_a_geometry():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for geometry in (K3, K3, K3.replace(window=5), K3):
            plan_verify(geometry, 8, arch="sm_80")
            plan_verify(geometry, 64, arch="sm_80")
    assert len(caught) == 2


def test_a_warning_turned_into_an_error_is_raised_every_time(quiet):
    for _ in range(2):
        with pytest.raises(FallbackWarning):
            plan_verify(K3, 8, arch="sm_80")


def test_strict_is_silent_where_nothing_is_refused(quiet):
    assert plan_verify(K3, 8, arch="sm_90a", strict=True).path == "fused"
    assert plan_verify(K3, 8, arch="cpu", strict=True).path == "reference"


def test_switch(monkeypatch, quiet):
    for switch in ("decomposed", "reference", "fused"):
        monkeypatch.setenv("FLASHKDA_VERIFY_PATH", switch)
        assert plan_verify(K3, 8, arch="sm_90a").path == switch
        assert plan_verify(K3, 8, arch="sm_90a", path="decomposed").path == "decomposed"
    monkeypatch.setenv("FLASHKDA_VERIFY_PATH", "triton")
    with pytest.raises(ConfigError):
        plan_verify(K3, 8, arch="sm_90a")
    assert plan_verify(K3, 8, arch="sm_90a", path="fused").path == "fused"


def test_switch_to_a_refused_path_warns(monkeypatch):
    monkeypatch.setenv("FLASHKDA_VERIFY_PATH", "fused")
    with pytest.warns(FallbackWarning, match=r"arch\.cpu"):
        assert plan_verify(K3, 8, arch="cpu").path == "reference"


@pytest.mark.parametrize("path", ["fused", "decomposed"])
def test_asked_for_without_the_toolchain(no_toolchain, monkeypatch, path):
    with pytest.raises(KernelBuildError) as caught:
        plan_verify(K3, 8, arch="sm_90a", path=path)
    assert caught.value.missing == ("package-a", "package-b")
    assert "package-a" in str(caught.value)
    assert "package-b" in str(caught.value)
    monkeypatch.setenv("FLASHKDA_VERIFY_PATH", path)
    with pytest.raises(KernelBuildError, match=r"geometry\.head_dim"):
        plan_verify(ODD, 8, arch="sm_90a")


def test_auto_without_the_toolchain(no_toolchain):
    with pytest.warns(FallbackWarning, match=r"(?s)package-a.*package-b"):
        plan = plan_verify(K3, 8, arch="sm_90a")
    assert plan.path == "reference"
    with pytest.raises(UnsupportedError, match=r"(?s)package-a.*package-b"):
        plan_verify(K3, 8, arch="sm_90a", strict=True)


def test_bad_arguments_all_at_once():
    with pytest.raises(GeometryError) as caught:
        plan_verify("k3", 0, path="fastest", numerics="fastest", tile=(16, 2, 16))
    names = [problem.argument for problem in caught.value.problems]
    assert names == ["geometry", "max_requests", "path", "numerics", "tile"]


def test_device(monkeypatch, quiet):
    assert plan_verify(K3, 8, device="cpu").arch == "cpu"
    assert plan_verify(K3, 8, device=torch.device("cpu"), arch="cpu").arch == "cpu"
    with pytest.raises(GeometryError, match="arch: expected cpu"):
        plan_verify(K3, 8, device="cpu", arch="sm_90a")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    assert plan_verify(K3, 8, device="cuda:1").arch == "sm_120a"


def test_require():
    fused = plan_verify(K3, 8, arch="sm_90a")
    assert fused.require("fused") is fused
    with pytest.raises(UnsupportedError, match=r"plan\.path: path is fused"):
        fused.require("reference")
    with pytest.raises(GeometryError, match="path"):
        fused.require("fastest")


@pytest.mark.parametrize(
    ("geometry", "path", "codes"),
    [
        (K3, "reference", ["plan.path"]),
        (ODD, "decomposed", ["geometry.head_dim", "geometry.conv_width"]),
        (ODD, "fused", ["arch.no_cluster", "geometry.head_dim", "geometry.conv_width"]),
    ],
)
def test_require_gives_the_reasons_of_that_path(geometry, path, codes):
    with pytest.warns(FallbackWarning):
        plan = plan_verify(geometry, 8, arch="sm_80")
    with pytest.raises(UnsupportedError) as caught:
        plan.require(path)
    assert [reason.code for reason in caught.value.reasons] == codes


def test_require_keeps_reasons_from_where_the_plan_was_made(no_toolchain, monkeypatch):
    with pytest.warns(FallbackWarning):
        plan = plan_verify(K3, 8, arch="sm_90a")
    monkeypatch.setattr(capability, "TOOLCHAIN", {})
    with pytest.raises(UnsupportedError, match="package-a"):
        plan.require("fused")


def test_require_of_a_plan_that_was_asked_for():
    slower = plan_verify(K3, 8, arch="sm_90a", path="decomposed")
    with pytest.raises(UnsupportedError, match=r"plan\.path: path is decomposed"):
        slower.require("fused")
    refused_too = plan_verify(K3, 8, arch="sm_80", path="decomposed")
    assert refused_too.reasons == ()
    with pytest.raises(UnsupportedError, match=r"arch\.no_cluster"):
        refused_too.require("fused")


@given(st.integers(1, 96), st.integers(1, 16), st.integers(1, 4096), st.sampled_from(sorted(capability.ARCHITECTURES)))
def test_every_size_has_a_tile(heads, window, requests, arch):
    tile = choose_tile(VerifyGeometry(heads, window), requests, arch)
    assert tile in TILES and tile_fits(tile, VerifyGeometry(heads, window), arch)
    assert tile.rows * tile.cluster == 128
    assert tile.threads % 32 == 0


def test_rules_are_ordered_and_complete():
    assert TILE_RULES[-1].load is None
    assert TILE_RULES[-1].window == 16
    most = max(rule.load for rule in TILE_RULES if rule.load is not None)
    for rule in TILE_RULES[:-1]:  # no rule shadows a later one
        assert choose_tile(VerifyGeometry(1, rule.window), rule.load or most + 1, "sm_90a") == rule.tile
    assert choose_tile(VerifyGeometry(1, 16), most + 1, "sm_90a") == TILE_RULES[-1].tile


@pytest.mark.parametrize(
    ("change", "arch", "code"),
    [
        ({"alignment": 2}, "sm_90a", "geometry.alignment"),
        ({"conv_layout": "DS"}, "sm_100a", "geometry.conv_layout"),
        ({}, "sm_120a", "arch.shared_memory"),
    ],
)
def test_a_persistent_tile_is_chosen_and_taken_where_it_fits(change, arch, code):
    persistent = next(tile for tile in TILES if tile.persistent)
    geometry = K3.replace(**change)
    assert choose_tile(K3, 128, "sm_90a") == persistent
    assert not choose_tile(geometry, 128, arch).persistent
    assert [reason.code for reason in persistent_reasons(geometry, arch)] == [code]
    with pytest.raises(GeometryError, match=code.replace(".", r"\.")):
        plan_verify(geometry, 128, path="fused", arch=arch, tile=persistent, strict=True)
    assert plan_verify(K3, 128, path="fused", arch="sm_90a", tile=persistent, strict=True).tile == persistent
    with pytest.raises(GeometryError, match=r"plan\.numerics"):
        plan_verify(K3, 128, path="fused", arch="sm_90a", tile=persistent, numerics="chunked")


@pytest.mark.parametrize(
    ("sizes", "threads", "cluster"),
    [((16, 2, 16), 128, 8), ((32, 2, 16), 256, 4), ((64, 4, 8), 128, 2), ((128, 4, 8), 256, 1)],
)
def test_tile_sizes(sizes, threads, cluster):
    assert (Tile(*sizes).threads, Tile(*sizes).cluster) == (threads, cluster)


def test_load_is_requests_times_heads():
    for heads, requests in ((12, 8), (96, 1), (1, 96)):
        assert choose_tile(VerifyGeometry(heads, 4), requests, "sm_90a") == choose_tile(
            VerifyGeometry(2, 4), 48, "sm_90a"
        )
    few, many = (choose_tile(VerifyGeometry(12, 4), requests, "sm_90a") for requests in (1, 128))
    assert few.cluster > many.cluster


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ((8, 1, 8), "rows"),
        ((48, 2, 16), "rows"),
        ((16, 3, 16), "rows_per_thread"),
        ((16, 2, 12), "key_lanes"),
        ((128, 16, 2), "threads"),
        ((128, 1, 16), "threads"),
        ((16, 2, 0), "key_lanes"),
        ((16.0, 2, 16), "rows"),
    ],
)
def test_tile_refuses(sizes, named):
    with pytest.raises(GeometryError, match=f"{named}: expected"):
        Tile(*sizes)


def test_a_given_tile_is_taken():
    tile = Tile(64, 2, 16)
    assert plan_verify(K3, 8, arch="sm_90a", tile=tile).tile == tile
    assert plan_verify(K3, 8, arch="cpu", tile=tile).tile is None


CHANGES = {
    "geometry": K3.replace(window=5),
    "max_requests": 9,
    "arch": "sm_100a",
    "path": "decomposed",
    "tile": Tile(128, 2, 16),
    "numerics": "chunked",
    "kernels_version": "0" * 64,
}


@pytest.mark.parametrize("field", CHANGES)
def test_fingerprint_covers(field):
    plan = plan_verify(K3, 8, arch="sm_90a")
    assert getattr(plan, field) != CHANGES[field]
    changed = dataclasses.replace(plan, **{field: CHANGES[field]})
    assert changed.fingerprint != plan.fingerprint
    assert dataclasses.replace(plan).fingerprint == plan.fingerprint


def test_fingerprint_is_of_what_runs():
    plan = plan_verify(K3, 8, arch="sm_90a")
    assert len(plan.fingerprint) == 16
    assert int(plan.fingerprint, 16) >= 0
    reason = capability.Reason("a", "b", "c", "d")
    assert dataclasses.replace(plan, reasons=(reason,)).fingerprint == plan.fingerprint
    assert {field.name for field in dataclasses.fields(Plan)} == {*CHANGES, "reasons"}


@given(st.integers(1, 96), st.integers(1, 16), st.integers(1, 512), st.sampled_from(["sm_90a", "sm_120a", "cpu"]))
def test_json_round_trip(heads, window, requests, arch):
    plan = plan_verify(VerifyGeometry(heads, window), requests, arch=arch)
    copy = Plan.from_json(plan.to_json())
    assert copy == plan
    assert copy.fingerprint == plan.fingerprint


def edited(plan, **changes):
    return json.dumps({**json.loads(plan.to_json()), **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"max_requests": 9},
        {"path": "decomposed"},
        {"tile": {"rows": 64, "rows_per_thread": 2, "key_lanes": 8}},
        {"fingerprint": "0123456789abcdef"},
    ],
)
def test_edited_json_is_refused(changes):
    plan = plan_verify(K3, 8, arch="sm_90a")
    with pytest.raises(PlanMismatchError, match="fingerprint"):
        Plan.from_json(edited(plan, **changes))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 2}',
        '{"format": 1}',
        *(
            edited(Plan(K3, 8, "sm_90a", "fused", TILES[0], "exact", (), "0"), **changes)
            for changes in (
                {"geometry": {"heads": 0, "window": 4}},
                {"geometry": 3},
                {"tile": {"rows": 16}},
                {"tile": 4},
                {"path": "fastest"},
                {"numerics": "fastest"},
                {"max_requests": "8"},
                {"reasons": [{"code": "a"}]},
                {"reasons": 3},
            )
        ),
    ],
)
def test_unreadable_json_is_refused(text):
    with pytest.raises(PlanMismatchError, match="cannot be read"):
        Plan.from_json(text)


def test_other_kernels_are_refused():
    plan = dataclasses.replace(plan_verify(K3, 8, arch="sm_90a"), kernels_version="0" * 64)
    with pytest.raises(PlanMismatchError, match="kernels_version"):
        Plan.from_json(plan.to_json())


def test_another_switch_is_refused(monkeypatch):
    text = plan_verify(K3, 8, arch="sm_90a").to_json()
    monkeypatch.setenv("FLASHKDA_VERIFY_PATH", "fused")
    assert Plan.from_json(text).path == "fused"
    monkeypatch.setenv("FLASHKDA_VERIFY_PATH", "decomposed")
    with pytest.raises(PlanMismatchError, match="FLASHKDA_VERIFY_PATH"):
        Plan.from_json(text)


def test_the_switch_that_fell_back_agrees_with_its_own_plan(monkeypatch):
    monkeypatch.setenv("FLASHKDA_VERIFY_PATH", "fused")
    with pytest.warns(FallbackWarning):
        plan = plan_verify(K3, 8, arch="sm_80")
    assert plan.path == "decomposed"
    assert Plan.from_json(plan.to_json()) == plan
    monkeypatch.setenv("FLASHKDA_VERIFY_PATH", "reference")
    with pytest.raises(PlanMismatchError, match="FLASHKDA_VERIFY_PATH"):
        Plan.from_json(plan.to_json())


def test_every_mismatch_is_listed(monkeypatch):
    plan = dataclasses.replace(plan_verify(K3, 8, arch="sm_90a"), kernels_version="0" * 64)
    monkeypatch.setenv("FLASHKDA_VERIFY_PATH", "reference")
    with pytest.raises(PlanMismatchError, match=r"(?s)fingerprint.*kernels_version.*FLASHKDA_VERIFY_PATH"):
        Plan.from_json(edited(plan, max_requests=9))
