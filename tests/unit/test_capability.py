# SPDX-License-Identifier: Apache-2.0
"""query: each architecture's paths, and every reason."""

from __future__ import annotations

import pytest
import torch

from flashkda import VerifyGeometry, capability, query
from flashkda.capability import Reason, detect_arch, toolchain_reasons
from flashkda.errors import GeometryError

K3 = VerifyGeometry(12, 4)
ODD = K3.replace(head_dim=64, conv_width=3)


def codes(support):
    return [reason.code for reason in support.reasons]


@pytest.mark.parametrize(
    ("arch", "fused", "decomposed", "measured", "fused_codes", "decomposed_codes"),
    [
        ("sm_90a", True, True, True, [], []),
        ("sm_80", False, True, False, ["arch.no_cluster"], []),
        ("sm_86", False, True, False, ["arch.no_cluster"], []),
        ("sm_89", False, True, False, ["arch.no_cluster"], []),
        ("sm_100a", True, True, False, [], []),
        ("sm_103a", True, True, False, [], []),
        ("sm_120a", True, True, False, [], []),
        ("cpu", False, False, False, ["arch.cpu"], ["arch.cpu"]),
        ("sm_75", False, False, False, ["arch.unknown"], ["arch.unknown"]),
        ("sm_90", False, False, False, ["arch.unknown"], ["arch.unknown"]),
        ("rocm", False, False, False, ["arch.unknown"], ["arch.unknown"]),
    ],
)
def test_architectures(arch, fused, decomposed, measured, fused_codes, decomposed_codes):
    found = query(K3, arch, toolchain=False)
    assert (found.arch, found.geometry) == (arch, K3)
    assert (found.fused.supported, found.decomposed.supported, found.reference.supported) == (fused, decomposed, True)
    assert (found.fused.measured, found.decomposed.measured) == (measured, measured)
    assert found.reference.measured is (arch in ("cpu", "sm_90a"))
    assert (codes(found.fused), codes(found.decomposed), codes(found.reference)) == (fused_codes, decomposed_codes, [])
    for path in ("fused", "decomposed", "reference"):
        assert found.support(path).path == path


def test_every_reason_and_each_once():
    found = query(ODD, "sm_80", toolchain=False)
    assert codes(found.fused) == ["arch.no_cluster", "geometry.head_dim", "geometry.conv_width"]
    assert codes(found.decomposed) == ["geometry.head_dim", "geometry.conv_width"]
    assert found.reasons == found.fused.reasons
    assert found.fused.reasons[1] == Reason("geometry.head_dim", "head_dim", "64", "128")
    assert not query(ODD, "sm_90a", toolchain=False).fused.measured


@pytest.mark.parametrize("window", [1, 16])
@pytest.mark.parametrize("heads", [1, 6, 96])
def test_any_heads_and_window(heads, window):
    for changes in ({}, {"gate": "softplus", "lower_bound": None}, {"alignment": 2}, {"norm": False}):
        assert query(VerifyGeometry(heads, window, **changes), "sm_90a", toolchain=False).fused.supported


def test_reason_is_readable():
    text = str(Reason("geometry.head_dim", "head_dim", "64", "128"))
    assert text == "geometry.head_dim: head_dim is 64, needed: 128"


def test_missing_toolchain(monkeypatch):
    monkeypatch.setattr(capability, "TOOLCHAIN", {"no_such_module": "some-package", "json": "python"})
    (reason,) = toolchain_reasons()
    assert (reason.code, reason.argument) == ("dsl.missing", "some-package")
    found = query(K3, "sm_90a")
    assert not found.fused.supported
    assert not found.fused.measured
    assert found.fused.reasons == found.decomposed.reasons == (reason,)
    assert found.reference.supported
    assert query(K3, "sm_90a", toolchain=False).fused.supported


def test_unknown_path():
    with pytest.raises(GeometryError, match="path"):
        query(K3, "cpu").support("fastest")


@pytest.mark.parametrize(
    ("numbers", "arch"),
    [
        ((7, 5), "sm_75"),
        ((8, 0), "sm_80"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 3), "sm_103a"),
        ((12, 0), "sm_120a"),
    ],
)
def test_detects_cuda(monkeypatch, numbers, arch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: numbers)
    assert detect_arch() == arch
    assert detect_arch("cuda:1") == arch
    assert detect_arch("cpu") == "cpu"
    assert query(K3).arch == arch
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert detect_arch() == "rocm"


def test_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert detect_arch() == "cpu"
    assert query(K3).arch == "cpu"


def test_device_that_cannot_be_used():
    with pytest.raises(GeometryError, match="device: expected a device"):
        detect_arch("cuda:99")
    with pytest.raises(GeometryError, match="device: expected a device"):
        detect_arch("gpu")
