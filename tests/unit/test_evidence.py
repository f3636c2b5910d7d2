# SPDX-License-Identifier: Apache-2.0
"""The checks of tests/gpu, with the reference in place of the kernels: they pass, and they fail on a broken promise."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flashkda.geometry import VerifyGeometry
from flashkda.ops import launch
from tests.gpu import accuracy, evidence, invariance, layer, matrix, pairwise, replays, reported, sanitizer
from tests.gpu.evidence import Evidence
from tests.gpu.sanitize_target import RAN
from tests.gpu.setup import Check, Failure, Setup, kernel_specs
from tests.inputs import bits

SETUP = Setup("cpu", reference=True, small=True)
Kernel = Callable[..., None]


def named(group: Any, name: str) -> Check:
    checks: list[Check] = group.checks(SETUP)
    return next(check for check in checks if name in check.name)


def break_kernels(monkeypatch: pytest.MonkeyPatch, spoil: Callable[..., object], *kinds: str) -> None:
    """Let ``spoil(tensors)`` follow every run of these kernels."""

    def broken(kernel: Kernel) -> Kernel:
        def run(geometry: VerifyGeometry, **tensors: Any) -> None:
            kernel(geometry, **tensors)
            spoil(tensors)

        return run

    for kind in kinds:
        monkeypatch.setitem(launch._REFERENCE, kind, broken(launch._REFERENCE[kind]))


def flip(name: str, index: int) -> Callable[..., object]:
    """Change one bit of entry ``index``."""

    def spoil(tensors: dict[str, Any]) -> None:
        if len(tensors[name]):
            entry = bits(tensors[name])[index]
            entry[(0,) * entry.ndim].bitwise_xor_(1)

    return spoil


def test_every_pair_of_options_is_covered() -> None:
    rows = pairwise.covering_array()
    covered = set().union(*(pairwise.pairs(row) for row in rows))
    for a, b in itertools.combinations(pairwise.OPTIONS, 2):
        for x, y in itertools.product(pairwise.OPTIONS[a], pairwise.OPTIONS[b]):
            # A persistent tile does not take every geometry, and then there is no such row.
            assert ((a, x, b, y) in covered) == pairwise.together({a: x, b: y})
    assert len(pairwise.table()) == len(rows) < 25


def test_the_command_passes_on_the_reference_and_writes_its_file(tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"
    only = ("matrix: T=3", "pairwise", "reported", "replays: 1 rows", "accuracy: K3")
    options = [word for name in only for word in ("--only", name)]
    command = ["--device", "cpu", "--path", "reference", "--output", str(path), *options]
    assert evidence.main(command) == 0
    values = json.loads(path.read_text())
    assert values["complete"] and values["partial"] and values["failed"] == 0
    assert values["replays"] == [{"rows": 1, "replays": 24, "mismatches": 0}]
    assert 0 < values["worst"]["corrections"] < values["tolerances"]["corrections"]
    assert {test["result"] for test in values["tests"]} == {"passed"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert evidence.main([]) == 2
    assert "CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "index"),
    [("out", 0), ("out", -1), ("corrections", 1), ("key_gate", 2), ("conv_state", -1), ("state", 1), ("raw_gate", -1)],
)
def test_the_matrix_sees_one_bit_that_differs(monkeypatch: pytest.MonkeyPatch, name: str, index: int) -> None:
    break_kernels(monkeypatch, flip(name, index), "fused_verify")
    with pytest.raises(AssertionError, match=name):
        named(matrix, "T=3").run()


def test_the_matrix_sees_what_both_paths_get_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    break_kernels(monkeypatch, flip("corrections", 0), "fused_verify", "record")  # a row of the null slot
    with pytest.raises(AssertionError, match="corrections"):
        named(matrix, "T=3").run()


@pytest.mark.parametrize(
    ("group", "name"),
    [
        (matrix, "T=3"),
        (pairwise, "row 5"),
        (reported, "slots beyond"),
        (reported, "records beyond"),
        (reported, "column"),
        (reported, "num_accepted"),
        (reported, "behind the last"),
        (reported, "fewer slots"),
        (accuracy, "K3"),
        (replays, "5 rows"),
        (layer, "4 rows"),
        (layer, "replaced"),
    ],
)
def test_every_check_fails_where_one_launch_differs(monkeypatch: pytest.MonkeyPatch, group: Any, name: str) -> None:
    break_kernels(monkeypatch, flip("out", 0), "fused_verify")
    with pytest.raises(AssertionError):
        named(group, name).run()


def test_accuracy_fails_where_both_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    break_kernels(monkeypatch, lambda tensors: tensors["out"].mul_(1.02), "fused_verify", "gated_rms_norm")
    with pytest.raises(AssertionError, match="out"):
        named(accuracy, "K3").run()


@pytest.mark.parametrize("name", ["batch, slot and drafts, K3", "heads of a rank"])
def test_invariance_fails_where_bits_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        tensors["out"].mul_(1 + 2.0**-6 * (len(tensors["state_indices"]) + tensors["out"].shape[1]))

    break_kernels(monkeypatch, spoil, "fused_verify", "gated_rms_norm")
    with pytest.raises(AssertionError):
        named(invariance, name).run()


def test_replays_count_their_mismatches(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()

    def spoil(tensors: dict[str, Any]) -> None:
        if next(calls) in (7, 15):
            flip("conv_state", 1)(tensors)

    break_kernels(monkeypatch, spoil, "fused_verify")
    with pytest.raises(Failure) as failure:
        named(replays, "5 rows").run()
    assert failure.value.detail["mismatches"] == 2 and failure.value.detail["replays"] == 24


def test_what_fails_or_does_not_run_counts_as_failed(tmp_path: Path) -> None:
    def fail() -> dict[str, Any]:
        raise Failure("broken", {"seen": 1})

    found = Evidence(tmp_path / "evidence.json", SETUP)
    evidence.run_checks(found, [Check("a", "good", lambda: {"x": 1}), Check("a", "bad", fail)], budget=1e9)
    evidence.run_checks(found, [Check("b", "late", lambda: {})], budget=-1.0)
    values = json.loads((tmp_path / "evidence.json").read_text())
    assert [test["result"] for test in values["tests"]] == ["passed", "failed", "not run"]
    assert values["failed"] == 2 and values["tests"][1]["detail"] == {"seen": 1} and not values["complete"]


def test_reports_of_the_sanitizer() -> None:
    assert sanitizer.summary("========= ERROR SUMMARY: 0 errors\n") == ("ERROR SUMMARY: 0 errors", 0)
    races = "========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)"
    assert sanitizer.summary(f"noise\n{races}\n") == (races.removeprefix("========= "), 3)
    assert sanitizer.summary("nothing ran") is None


@pytest.mark.parametrize(
    ("lines", "code", "passes"),
    [
        ("{ran} N=1 T=1\n{ran} N=1 T=4\n{ran} N=1 T=16\nERROR SUMMARY: 0 errors", 0, True),
        ("{ran} N=1 T=1\n{ran} N=1 T=4\n{ran} N=1 T=16\nERROR SUMMARY: 1 error", 0, False),
        ("{ran} N=1 T=1\n{ran} N=1 T=4\n{ran} N=1 T=16\nERROR SUMMARY: 0 errors", 3, False),
        ("{ran} N=1 T=1\nERROR SUMMARY: 0 errors", 0, False),
        ("{ran} N=1 T=1\n{ran} N=1 T=4\n{ran} N=1 T=16", 0, False),
    ],
)
def test_a_run_of_the_sanitizer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: str, code: int, passes: bool
) -> None:
    program = tmp_path / "compute-sanitizer"
    text = lines.format(ran=RAN)
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("FLASHKDA_CACHE_DIR", str(tmp_path))
    run = sanitizer.Run("memcheck", 1)
    if passes:
        assert run.result()["exit"] == 0
    else:
        with pytest.raises(Failure):
            run.result()


def test_without_the_sanitizer_its_checks_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Failure, match="not run"):
        sanitizer.Run("memcheck", 1).result()


def test_kernels_are_built_once_and_none_for_the_reference() -> None:
    assert kernel_specs(plan for check in evidence.all_checks(SETUP) for plan in check.plans) == []
