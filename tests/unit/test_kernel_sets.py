# SPDX-License-Identifier: Apache-2.0
"""Which kernels are built ahead: all that bindings ask for, and no others; and the command that builds them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashkda import plan_decode, plan_round, plan_verify, preset
from flashkda.capability import ARCHITECTURES
from flashkda.commit import CommitGeometry, plan_commit
from flashkda.decode import DecodePlan
from flashkda.errors import GeometryError, KernelBuildError, KernelNotFoundError
from flashkda.geometry import PRESETS, VerifyGeometry
from flashkda.kernel_sets import COMMITS, compile_command, kernel_set
from flashkda.kernels import specs
from flashkda.ops import launch
from flashkda.ops.binding import VerifyBinding
from flashkda.ops.commit_binding import CommitProgram
from flashkda.ops.decode_binding import DecodeBinding
from flashkda.planner import Plan

ROOT = Path(__file__).parents[2]
K3 = preset("kimi-k3", tp=8)


def keys(*arguments, **options):
    found = [function(*values)[0] for function, values in kernel_set(*arguments, **options)]
    assert len(set(found)) == len(found)
    return set(found)


def asked_for(geometry, arch, requests):
    """Keys of the kernels that plans of so many requests load."""
    found = set()
    paths = ("fused", "decomposed") if ARCHITECTURES[arch].cluster else ("decomposed",)
    for path in paths:
        verify = plan_verify(geometry, requests, path=path, arch=arch, strict=True)
        decode = plan_decode(geometry, requests, path=path, arch=arch, strict=True)
        for plan, binding in ((verify, VerifyBinding), (decode, DecodeBinding)):
            found |= {specs.make_spec(kind, geometry, plan.tile, arch)[0] for kind in binding.kinds(plan)}
    if geometry.has_num_accepted and "fused" in paths:
        tile = plan_round(geometry, requests, path="fused", arch=arch).tile
        found.add(specs.make_spec("fused_round", geometry, tile, arch)[0])
    return found


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    "geometry",
    [K3, preset("kimi-linear", window=4), K3.replace(norm=False, has_num_accepted=True, records="request")],
    ids=str,
)
def test_all_that_plans_ask_for_and_no_more(geometry, arch):
    commits = {specs.make_commit_spec(CommitGeometry(geometry, 69, **flags), arch)[0] for flags in COMMITS}
    every = set().union(*(asked_for(geometry, arch, requests) for requests in (1, 2, 3, 8, 64, 1024)))
    assert keys(geometry, [arch]) == every | commits
    for requests in (1, 2, 40):
        some = set().union(*(asked_for(geometry, arch, n) for n in range(1, requests + 1)))
        assert keys(geometry, [arch], max_requests=requests) == some | commits


def test_the_set_of_a_kimi_k3_rank():
    names = sorted(function(*values)[0].name for function, values in kernel_set(K3, ["sm_90a"]))
    assert names == sorted(
        [
            *3 * ["record", "decode_rule"],
            *2 * ["fused_verify", "fused_decode"],
            "persistent_verify",
            "persistent_decode",
            "short_conv",
            "gated_rms_norm",
            *2 * ["commit"],
        ]
    )


def test_modes_and_the_folded_round():
    names = {key.name for key in keys(K3, ["sm_90a"], numerics=["chunked"])}
    assert {"fused_verify_chunked", "record_chunked"} <= names and not {"fused_verify", "record"} & names
    counted = {key.name for key in keys(K3.replace(has_num_accepted=True), ["sm_90a"])}
    assert {"fused_round", "persistent_round"} <= counted


def test_several_architectures_and_commits():
    both = keys(K3, ["sm_90a", "sm_80"])
    assert both == keys(K3, ["sm_90a"]) | keys(K3, ["sm_80"])
    flags = [{"compact": True, "has_dst": True}]
    wanted = specs.make_commit_spec(CommitGeometry(K3, 1, **flags[0]), "sm_90a")[0]
    assert {key for key in keys(K3, ["sm_90a"], commits=flags) if key.name == "commit"} == {wanted}


@pytest.mark.parametrize(("archs", "options"), [(["sm_70"], {}), (["sm_90a"], {"max_requests": 0})])
def test_what_there_is_no_kernel_for_is_refused(archs, options):
    with pytest.raises(GeometryError, match=r"sm_70|max_requests"):
        kernel_set(K3, archs, **options)


def test_a_set_is_named_without_the_compiler():
    script = (
        "import sys, pickle, flashkda; from flashkda.kernel_sets import kernel_set\n"
        "found = kernel_set(flashkda.preset('kimi-k3', tp=8), ['sm_90a'])\n"
        "print(len(pickle.loads(pickle.dumps(found))), sorted({'cutlass', 'tvm_ffi', 'torch'} & sys.modules.keys()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "16 []"


class TestCommand:
    @pytest.mark.parametrize("name", PRESETS)
    def test_a_preset_is_recognized(self, name):
        """Or another one of the same geometry."""
        geometry = preset(name, tp=2, window=4)
        words = compile_command(geometry, "sm_90a").split()
        assert words[:3] == ["flashkda", "compile", "--preset"] and words[-4:] == ["--arch", "sm_90a", "--out", "DIR"]
        assert words[4::2][:2] == ["--tp", "--window"] and len(words) == 12
        assert preset(words[3], tp=int(words[5]), window=int(words[7])) == geometry

    def test_kimi_k3(self):
        expected = "flashkda compile --preset kimi-k3 --tp 8 --window 8 --arch sm_90a --out DIR"
        assert compile_command(K3, "sm_90a") == expected

    def test_what_differs_is_said(self):
        geometry = K3.replace(state_dtype="bfloat16", norm=False, has_num_accepted=True, null_slot=-1)
        expected = "--state-dtype bfloat16 --no-norm --null-slot -1 --num-accepted"
        found = compile_command(geometry, "sm_100a")
        assert all(flag in found for flag in expected.split(" --")) and "--preset kimi-k3 --tp 8" in found

    def test_a_geometry_of_no_preset(self):
        found = compile_command(VerifyGeometry(heads=5, window=3), "sm_90a")
        assert found == "flashkda compile --heads 5 --window 3 --arch sm_90a --out DIR"

    def test_a_mode_and_a_commit(self):
        found = compile_command(K3, "sm_90a", numerics="chunked", commit={"compact": True, "has_dst": True})
        assert "--numerics chunked --commit compact,dst --arch" in found
        assert "--commit" not in compile_command(K3, "sm_90a", commit={"compact": True, "has_dst": False})


class TestMiss:
    @pytest.fixture(autouse=True)
    def _nothing_prebuilt(self, tmp_path, monkeypatch):
        monkeypatch.setenv("FLASHKDA_CACHE_DIR", str(tmp_path))
        monkeypatch.setenv("FLASHKDA_NO_JIT", "1")
        monkeypatch.delenv("FLASHKDA_KERNEL_PATH", raising=False)

    @pytest.mark.parametrize("kind", [Plan, DecodePlan])
    def test_a_binding_names_the_geometry_and_the_command(self, kind):
        geometry = K3.replace(null_slot=77)
        plan = kind(geometry, 4, "sm_90a", "fused", specs_tile(), "exact", (), "")
        with pytest.raises(KernelNotFoundError) as caught:
            launch.load(plan, "fused_verify", torch.device("cuda", 0))
        text = str(caught.value)
        command = compile_command(geometry, "sm_90a")
        assert str(geometry) in text and f"`{command}`" in text and "FLASHKDA_KERNEL_PATH" in text
        assert caught.value.command == command and "persistent_verify(" in caught.value.kernel
        assert isinstance(caught.value, KernelBuildError)

    def test_a_commit_does_too(self):
        geometry = CommitGeometry(K3.replace(null_slot=77), 69)
        plan = plan_commit(geometry, 4, path="kernel", arch="sm_90a")
        with pytest.raises(KernelNotFoundError) as caught:
            CommitProgram(plan)
        assert compile_command(geometry.verify, "sm_90a") in str(caught.value) and "commit(" in caught.value.kernel

    def test_the_command_has_what_the_plan_differs_in(self):
        geometry = CommitGeometry(K3.replace(null_slot=77), 69, has_dst=True)
        with pytest.raises(KernelNotFoundError) as caught:
            CommitProgram(plan_commit(geometry, 4, path="kernel", arch="sm_90a"))
        assert "--commit dst " in caught.value.command
        plan = plan_verify(K3.replace(null_slot=77), 4, path="fused", arch="sm_90a", numerics="chunked")
        with pytest.raises(KernelNotFoundError) as caught:
            launch.load(plan, "fused_verify_chunked", torch.device("cuda", 0))
        assert "--numerics chunked " in caught.value.command


def specs_tile():
    """The tile for many requests."""
    return plan_verify(K3, 64, path="fused", arch="sm_90a").tile


def test_choices_are_told_to_those_who_listen(caplog):
    with caplog.at_level(logging.INFO, logger="flashkda"):
        plan_verify(K3, 8, arch="sm_90a")
        plan_decode(K3, 8, arch="sm_90a")
        plan_commit(CommitGeometry(K3, 69), 8, arch="sm_90a")
    said = [record.getMessage() for record in caplog.records if record.name == "flashkda.planner"]
    assert [text.split(" ")[0] for text in said] == ["verifies", "decodes", "commits"]
    assert "by the fused path" in said[0] and "Tile(" in said[0] and "kernel path" in said[2]
    assert not torch.cuda.is_initialized()
