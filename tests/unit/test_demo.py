# SPDX-License-Identifier: Apache-2.0
"""The demo: what it checks holds, and is seen to be broken when it is."""

from __future__ import annotations

import importlib.util
import subprocess

import pytest
import torch

from flashkda import demo, preset, query
from flashkda.errors import KernelBuildError
from flashkda.geometry import VerifyGeometry
from flashkda.ops import launch, reference
from flashkda.planner import plan_verify

SMALL = VerifyGeometry(2, 3, head_dim=8)
FULL = SMALL.replace(conv_layout="DS", has_num_accepted=True, records="indices", index_dtype="int64", null_slot=-1)
BARE = SMALL.replace(norm=False, records="request", state_dtype="bfloat16")


def reference_plan(geometry):
    return plan_verify(geometry, 4, path="reference", device="cpu")


@pytest.mark.parametrize("geometry", [SMALL, FULL, BARE], ids=["small", "full", "bare"])
def test_example_tensors_bind_and_run(geometry):
    tensors = demo.example_tensors(geometry, (3, 0, 2))
    after = demo.run_copy(reference_plan(geometry), tensors)
    assert after["out"].isfinite().all()
    assert tensors["out"].isnan().all()
    assert demo.same_bits(after["state"], tensors["state"])
    again = demo.example_tensors(geometry, (3, 0, 2))
    assert all(torch.equal(tensors[name], again[name]) for name in tensors if name not in demo.WRITTEN)


def test_the_prefix_law_holds_and_can_be_broken():
    plan, before = reference_plan(SMALL), demo.example_tensors(SMALL, (3, 2))
    after = demo.run_copy(plan, before)
    assert demo.prefix_law(plan, before, after, 0, 2)
    assert demo.prefix_law(plan, before, after, 1, 1)
    for name in demo.WRITTEN:
        broken = {**after, name: torch.zeros_like(after[name])}
        assert not demo.prefix_law(plan, before, broken, 0, 2), name


@pytest.mark.parametrize("accepted", [1, 2])
def test_the_accepted_law_holds_and_can_be_broken(monkeypatch, accepted):
    tensors = demo.example_tensors(SMALL, (3,))
    assert demo.accepted_law(SMALL, tensors, accepted)
    short_conv = reference.short_conv

    def off_by_one(geometry, **arguments):
        short_conv(geometry, **{**arguments, "num_accepted": arguments["num_accepted"] + 1})

    monkeypatch.setitem(launch._REFERENCE, "short_conv", off_by_one)
    assert not demo.accepted_law(SMALL, tensors, accepted)


def test_compare_names_what_differs(monkeypatch):
    plans = [reference_plan(SMALL)] * 2
    tensors = demo.example_tensors(SMALL, (3, 1))
    assert demo.compare(plans, tensors) == []
    run_copy, runs = demo.run_copy, []

    def second_differs(plan, tensors):
        copy = run_copy(plan, tensors)
        runs.append(copy)
        if len(runs) == 2:
            copy["key_gate"].view(torch.int16)[0, 0, 0, 0] ^= 1
        return copy

    monkeypatch.setattr(demo, "run_copy", second_differs)
    assert demo.compare(plans, tensors) == ["key_gate"]


def test_the_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(demo, "cross_compile", lambda geometry, requests: None)
    monkeypatch.setattr(demo, "language_model", lambda: False)
    assert demo.main([]) == 1
    monkeypatch.setattr(demo, "language_model", lambda: True)
    capsys.readouterr()
    assert demo.main([]) == 0
    assert capsys.readouterr().out.count("  ok") == 3
    monkeypatch.setattr(demo, "accepted_law", lambda *arguments: False)
    assert demo.main(["--window", "8"]) == 1
    assert capsys.readouterr().out.count("  BROKEN") == 1

    def missing(geometry, requests):
        raise KernelBuildError("no DSL")

    monkeypatch.setattr(demo, "cross_compile", missing)
    assert demo.main([]) == 1
    assert "no DSL" in capsys.readouterr().err


def test_the_language_model(monkeypatch, tmp_path, capsys):
    for status, held in ((0, True), (1, False)):
        done = subprocess.CompletedProcess([], status)
        monkeypatch.setattr(subprocess, "run", lambda command, cwd, done=done: done)
        assert demo.language_model() is held
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert demo.language_model()
    assert "it needs safetensors and rich" in capsys.readouterr().out
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    assert demo.language_model()
    assert "without the examples" in capsys.readouterr().out


@pytest.mark.compile
def test_the_fused_kernel_is_cross_compiled(capsys):
    demo.cross_compile(preset("kimi-k3", tp=8, window=4), 3)
    printed = capsys.readouterr().out
    assert "sm_90a" in printed and "registers a thread" in printed
    assert "0 bytes spilled, 0 bytes of local memory" in printed


@pytest.mark.gpu
def test_on_a_gpu(capsys):
    if not query(preset("kimi-k3", tp=8)).fused.supported:
        pytest.skip("this GPU does not take the fused path")
    assert demo.main([]) == 0
    printed = capsys.readouterr().out
    assert printed.count("the same bits") == len(demo.COMPARED)
    assert printed.count("us a layer") == 2
