# SPDX-License-Identifier: Apache-2.0
"""`flashkda compile`: what is built, what is refused, what is shown."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashkda import kernel_sets
from flashkda.capability import ARCHITECTURES
from flashkda.cli import app, options
from flashkda.cli.status import Status
from flashkda.errors import KernelBuildError
from flashkda.geometry import VerifyGeometry, preset
from flashkda.jit.pool import Built

ROOT = Path(__file__).parent.parent.parent
K3 = ("--preset", "kimi-k3", "--tp", "8", "--window", "4")
GEOMETRY = preset("kimi-k3", tp=8, window=4)


@dataclasses.dataclass
class Builder:
    """In place of build_pack and prebuild: keeps what it is given, and builds nothing."""

    specs: list = dataclasses.field(default_factory=list)
    jobs: int | None = None
    folder: Path | None = None
    error: KernelBuildError | None = None

    def keys(self):
        return [function(*arguments)[0] for function, arguments in self.specs]

    def prebuild(self, specs, *, jobs, progress):
        self.specs, self.jobs = list(specs), jobs
        for done, key in enumerate(self.keys(), start=1):
            progress(done, len(self.specs), Built(key.name, key.digest, done % 2 == 1, 1.25))
        if self.error is not None:
            raise self.error

    def build_pack(self, specs, folder, *, jobs, progress):
        self.folder = folder
        self.prebuild(specs, jobs=jobs, progress=progress)

        class manifest:
            kernels = tuple(self.specs)
            total_bytes = 2048

        return manifest


@pytest.fixture
def builder(monkeypatch):
    builder = Builder()
    monkeypatch.setattr("flashkda.jit.build_pack", builder.build_pack, raising=False)
    monkeypatch.setattr("flashkda.jit.prebuild", builder.prebuild, raising=False)
    return builder


def keys_of(specs):
    return [function(*arguments)[0] for function, arguments in specs]


# --- what is built --------------------------------------------------------------------------------------------------


def test_the_kernels_of_a_preset(run, builder, tmp_path):
    status, out, err = run("compile", *K3, "--arch", "sm_90a,sm_80", "--out", str(tmp_path / "pack"), "--jobs", "3")
    assert status == Status.OK
    wanted = keys_of(kernel_sets.kernel_set(GEOMETRY, ["sm_90a", "sm_80"]))
    assert builder.keys() == wanted and (builder.folder, builder.jobs) == (tmp_path / "pack", 3)
    lines = err.splitlines()
    assert len(lines) == len(wanted)
    assert lines[0] == f"1/{len(wanted)} {wanted[0].name} compiled in 1.2 s"
    assert lines[1] == f"2/{len(wanted)} {wanted[1].name} is there already"
    half = len(wanted) // 2
    first, second = out.splitlines()
    assert first.startswith(f"{len(wanted)} kernels for sm_90a, sm_80: {len(wanted) - half} compiled, {half} kept, in ")
    assert second == f"the pack {tmp_path / 'pack'} has {len(wanted)} kernels, 2.0 KiB"


def test_into_the_cache(run, builder, monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHKDA_CACHE_DIR", str(tmp_path))
    status, out, _ = run("compile", *K3, "--arch", "sm_90a", "--cache", "--max-requests", "1")
    assert (status, builder.folder) == (Status.OK, None)
    assert builder.keys() == keys_of(kernel_sets.kernel_set(GEOMETRY, ["sm_90a"], max_requests=1))
    assert out.endswith(f"the cache is {tmp_path}\n")


def test_several_geometries_share_kernels(run, builder, tmp_path):
    # Kernels do not depend on the number of heads.
    one, other = GEOMETRY, GEOMETRY.replace(heads=6)
    file = tmp_path / "geometries.json"
    file.write_text(json.dumps([one.to_dict(), other.to_dict(), {"heads": 4, "window": 2}]))
    assert run("compile", "--geometry", str(file), "--arch", "sm_90a", "--cache")[0] == Status.OK
    sets = [kernel_sets.kernel_set(g, ["sm_90a"]) for g in (one, other, VerifyGeometry(4, 2))]
    assert builder.keys() == list(dict.fromkeys(key for specs in sets for key in keys_of(specs)))
    file.write_text(json.dumps(one.to_dict()))
    assert run("compile", "--geometry", str(file), "--arch", "sm_90a", "--cache")[0] == Status.OK
    assert builder.keys() == keys_of(sets[0])


def test_commit_kernels_by_their_flags(run, builder):
    flags = ["--commit", "plain", "--commit", "compact,dst,boundary,accepted-indices"]
    assert run("compile", *K3, "--arch", "sm_90a", "--cache", *flags)[0] == Status.OK
    commits = [{}, {"compact": True, "has_dst": True, "has_boundary": True, "has_accepted_indices": True}]
    assert builder.keys() == keys_of(kernel_sets.kernel_set(GEOMETRY, ["sm_90a"], commits=commits))


@st.composite
def geometries(draw):
    softplus = draw(st.booleans())
    base = (
        {"gate": "softplus", "lower_bound": None} if softplus else {"lower_bound": draw(st.sampled_from([-5.0, -2.5]))}
    )
    return VerifyGeometry(
        draw(st.sampled_from([1, 6, 12, 96])),
        draw(st.integers(1, 16)),
        state_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        conv_layout=draw(st.sampled_from(["SD", "DS"])),
        norm=draw(st.booleans()),
        alignment=draw(st.sampled_from([16, 2])),
        null_slot=draw(st.sampled_from([0, -1])),
        index_dtype=draw(st.sampled_from(["int32", "int64"])),
        has_num_accepted=draw(st.booleans()),
        records=draw(st.sampled_from(["slot", "request", "indices"])),
        norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        **base,
    )


@given(geometries())
def test_the_command_that_an_error_names_builds_that_geometry(geometry):
    program, name, *words = shlex.split(kernel_sets.compile_command(geometry, "sm_90a"))
    command = app.command.commands[name]
    context = command.make_context(name, words)
    assert program == "flashkda" and context.params["archs"] == ("sm_90a",)
    assert options.geometry_of(dict(context.params)) == geometry


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([*K3, "--arch", "sm_90a"], "say where to: --out DIR for a pack, or --cache"),
        ([*K3, "--arch", "sm_90a", "--cache", "--out", "x"], "say where to: --out DIR for a pack, or --cache"),
        ([*K3, "--cache"], f"name an architecture: --arch, of {', '.join(ARCHITECTURES)}, or all"),
        ([*K3, "--cache", "--arch", "sm_90a", "--commit", "compact,x"],
         "--commit: expected plain, or some of compact, dst, boundary, accepted-indices, found 'compact,x'"),
        ([*K3, "--cache", "--arch", "sm_90a", "--commit", "plain,compact"],
         "--commit: expected plain, or some of compact, dst, boundary, accepted-indices, found 'plain,compact'"),
        ([*K3, "--geometry", "-", "--cache"], "--geometry has whole geometries: leave out the flags of one"),
    ],
)  # fmt: skip
def test_a_wrong_command_line(run, builder, arguments, line):
    assert run("compile", *arguments) == (Status.USAGE, "", f"error: {line} (see flashkda compile --help)\n")
    assert builder.specs == []


def test_geometries_that_cannot_be_read(run, builder, tmp_path):
    file = tmp_path / "geometries.json"
    for text, said in (("[", "is not JSON"), ("[{}]", "heads: expected a value, found none"), ("3", "a mapping")):
        file.write_text(text)
        status, out, err = run("compile", "--geometry", str(file), "--arch", "sm_90a", "--cache")
        assert (status, out) == (Status.USAGE, "") and said in err and err.count("\n") == 1


def test_what_has_no_kernels_is_refused_with_every_reason(run, builder):
    status, out, err = run("compile", *K3, "--head-dim", "64", "--conv-width", "3", "--arch", "sm_75,cpu", "--cache")
    assert (status, out, builder.specs) == (Status.REFUSED, "", [])
    codes = ("arch.unknown", "arch.cpu", "geometry.head_dim", "geometry.conv_width")
    assert all(err.count(code) == 1 for code in codes) and err.count("\n") == 1


def test_without_the_dsl_it_says_what_to_install(run, builder, monkeypatch):
    monkeypatch.setattr("flashkda.capability._importable", lambda module: module != "cutlass")
    status, _, err = run("compile", *K3, "--arch", "sm_90a", "--cache")
    assert status == Status.MISSING
    assert err == "error: kernels are built with nvidia-cutlass-dsl: pip install nvidia-cutlass-dsl\n"


def test_a_kernel_that_fails_fails_the_command(run, builder):
    builder.error = KernelBuildError("1 of 2 kernels failed to build:\n  - commit: no")
    status, out, err = run("compile", *K3, "--arch", "sm_90a", "--cache", "--max-requests", "1")
    assert (status, out) == (Status.FAILED, "")
    assert err.endswith("\nerror: 1 of 2 kernels failed to build: commit: no\n")


# --- for real -------------------------------------------------------------------------------------------------------

# The fewest kernels that a geometry needs: no clusters, no norm, one tile, one commit.
FEW = ("--heads", "2", "--window", "1", "--no-norm", "--arch", "sm_80", "--max-requests", "1", "--commit", "plain")


def on_a_terminal(*arguments):
    """Run the command in a process whose output is a terminal: its status and what it showed."""
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "flashkda", *arguments]
    process = subprocess.Popen(command, stdout=child, stderr=child, stdin=child, env=environment, cwd=ROOT)
    os.close(child)
    shown = b""
    try:
        while part := os.read(parent, 4096):
            shown += part
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(parent)
    return process.wait(), shown.decode()


@pytest.mark.compile
def test_a_pack_is_built_checked_and_found_damaged(run, monkeypatch, tmp_path):
    pack = tmp_path / "pack"
    status, out, err = run("compile", *FEW, "--out", str(pack))
    assert status == Status.OK, err
    count = len(list(pack.glob("sm_80/*.so")))
    assert out.startswith(f"{count} kernels for sm_80: {count} compiled, 0 kept") and err.count("compiled in") == count
    assert run("compile", *FEW, "--out", str(pack))[1].startswith(
        f"{count} kernels for sm_80: 0 compiled, {count} kept"
    )
    assert run("cache", "verify", str(pack))[:2] == (Status.OK, f"{count} kernels in {pack}: all as they should be\n")
    monkeypatch.setenv("FLASHKDA_KERNEL_PATH", str(pack))
    assert f"pack {pack}, for sm_80: {count} of {count} kernels can be loaded here" in run("info")[1]
    status, shown = on_a_terminal("compile", *FEW, "--out", str(pack))
    assert status == Status.OK and f"0 compiled, {count} kept" in shown
    assert "compiling  [" in shown and "100%" in shown and "is there already" not in shown
    victim = next(pack.glob("sm_80/*.so"))
    binary = bytearray(victim.read_bytes())
    binary[len(binary) // 2] ^= 1
    victim.write_bytes(binary)
    status, out, _ = run("cache", "verify", str(pack))
    assert status == Status.FAILED and f"1 of {count} kernels" in out and str(victim) in out
