# SPDX-License-Identifier: Apache-2.0
"""Packs of prebuilt kernels: built, found, passed over and refused. A stand-in compiles; no DSL and no GPU."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashkda.errors import KernelBuildError, KernelNotFoundError
from flashkda.jit import build_pack, cache, compiler, manifest, pack_entries, packs, runtime, search_path, store
from tests.unit import jit_fakes

ROOT = Path(__file__).parents[2]


@pytest.fixture
def trace(tmp_path, monkeypatch):
    """The stand-in installed, cache and search path of their own. The file holds a line for each compile."""
    monkeypatch.setenv("FLASHKDA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FLASHKDA_KERNEL_PATH", raising=False)
    monkeypatch.delenv("FLASHKDA_NO_JIT", raising=False)
    path = tmp_path / "trace"
    path.touch()
    jit_fakes.install(monkeypatch.setattr, path)
    monkeypatch.setattr(store, "_warned", False)
    monkeypatch.setattr(packs, "_said", set())
    cache.forget_loaded()
    yield path
    cache.forget_loaded()


@pytest.fixture
def pack(trace, tmp_path, monkeypatch):
    """A pack of two kernels, on the search path; nothing may be compiled."""
    folder = tmp_path / "pack"
    build_pack(specs(trace, 1, 2), folder, jobs=1)
    trace.write_text("")
    monkeypatch.setenv("FLASHKDA_KERNEL_PATH", str(folder))
    monkeypatch.setenv("FLASHKDA_NO_JIT", "1")
    return folder


def specs(trace, *tags, make=None):
    return [(jit_fakes.spec, (str(trace), tag, make)) for tag in tags]


def compiles(trace) -> int:
    return len(trace.read_text().splitlines())


def library(folder, tag=1):
    (found,) = (folder / k.file for k in manifest.read_manifest(folder).kernels if k.params == {"tag": tag})
    return found


def rewrite(folder, tag=1, **changes):
    """Change the fields of a kernel in the manifest."""
    path = folder / "manifest.json"
    values = json.loads(path.read_text())
    (kernel,) = (kernel for kernel in values["kernels"] if kernel["params"] == {"tag": tag})
    kernel |= changes
    path.write_text(json.dumps(values))


class TestBuilding:
    def test_a_pack_holds_libraries_and_what_they_are(self, trace, tmp_path):
        seen = []
        folder = tmp_path / "deep" / "pack"
        found = build_pack(specs(trace, 2, 1, 2), folder, jobs=2, progress=lambda *step: seen.append(step[:2]))
        assert seen == [(1, 2), (2, 2)] and compiles(trace) == 2
        assert [kernel.params for kernel in found.kernels] in ([{"tag": 1}, {"tag": 2}], [{"tag": 2}, {"tag": 1}])
        assert found == manifest.read_manifest(folder)
        for kernel in found.kernels:
            key = jit_fakes.key(kernel.params["tag"])
            assert (folder / kernel.file).read_bytes() == jit_fakes.content(key)
            assert kernel.size == len(jit_fakes.content(key)) and kernel.arch == key.arch
            assert (kernel.registers, kernel.shared_memory) == (32, 1024)
            assert {name: getattr(kernel, name) for name in key.identity()} == key.identity()
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        assert files == sorted(["manifest.json", *(kernel.file for kernel in found.kernels)])
        assert {oct(path.stat().st_mode & 0o777) for path in folder.rglob("*") if path.is_file()} == {"0o644"}

    def test_what_is_there_is_kept_and_the_rest_goes_on(self, trace, tmp_path):
        build_pack(specs(trace, 1), tmp_path / "pack", jobs=1)
        built = []
        build_pack(specs(trace, 1, 2), tmp_path / "pack", jobs=1, progress=lambda *step: built.append(step[2].compiled))
        assert built == [False, True] and compiles(trace) == 2
        library(tmp_path / "pack").write_bytes(b"object of nothing")
        assert len(build_pack(specs(trace, 1), tmp_path / "pack", jobs=1).kernels) == 2
        assert compiles(trace) == 3 and library(tmp_path / "pack").read_bytes() == jit_fakes.content(jit_fakes.key(1))

    def test_a_kernel_of_other_sources_is_replaced(self, trace, tmp_path):
        folder = tmp_path / "pack"
        build_pack(specs(trace, 1, 2), folder, jobs=1)
        old = "sm_90a/fake-" + 32 * "0" + ".so"
        library(folder).rename(folder / old)
        rewrite(folder, sources=64 * "0", file=old)
        found = build_pack(specs(trace, 1), folder, jobs=1)
        assert len(found.kernels) == 2 and compiles(trace) == 3
        assert not (folder / old).exists() and library(folder).exists()

    def test_all_failures_are_listed_and_the_rest_is_there(self, trace, tmp_path):
        with pytest.raises(KernelBuildError, match="2 of 3") as caught:
            wanted = [*specs(trace, 1, make="refused"), *specs(trace, 2), (jit_fakes.unnamed, ())]
            build_pack(wanted, tmp_path / "pack", jobs=1)
        assert "tag=1" in str(caught.value) and "no such geometry" in str(caught.value)
        assert [kernel.params for kernel in manifest.read_manifest(tmp_path / "pack").kernels] == [{"tag": 2}]

    def test_one_process_builds_in_a_folder(self, trace, tmp_path):
        from filelock import FileLock

        (tmp_path / "pack").mkdir()
        with FileLock(tmp_path / "pack" / ".lock"), pytest.raises(KernelBuildError, match="another process"):
            build_pack(specs(trace, 1), tmp_path / "pack")

    def test_the_cache_is_no_pack(self, trace, tmp_path):
        with pytest.raises(KernelBuildError, match="is the cache"):
            build_pack(specs(trace, 1), tmp_path / "cache")

    def test_a_folder_that_cannot_be_written_is_named(self, trace, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(KernelBuildError, match=str(tmp_path / "file")):
            build_pack(specs(trace, 1), tmp_path / "file" / "pack")

    def test_a_folder_whose_kernels_nobody_would_load_is_refused(self, trace, tmp_path):
        (tmp_path / "pack").mkdir()
        (tmp_path / "pack").chmod(0o777)
        with pytest.raises(KernelBuildError, match="chmod go-w"):
            build_pack(specs(trace, 1), tmp_path / "pack")
        assert compiles(trace) == 0

    def test_a_kernel_that_nobody_would_load_is_a_failure(self, trace, tmp_path):
        build_pack(specs(trace, 1), tmp_path / "pack", jobs=1)
        (tmp_path / "pack" / "sm_90a").chmod(0o775)
        with pytest.raises(KernelBuildError, match=r"fake\(tag=2\).*chmod go-w"):
            build_pack(specs(trace, 2), tmp_path / "pack", jobs=1)

    def test_a_killed_build_leaves_a_pack_and_the_next_one_goes_on(self, trace, tmp_path):
        folder, script = tmp_path / "pack", tmp_path / "build.py"
        script.write_text(
            "import sys; from pathlib import Path\n"
            "from flashkda.jit import build_pack; from tests.unit import jit_fakes\n"
            "if __name__ == '__main__':\n"
            "    specs = [(jit_fakes.slow_spec, (sys.argv[1], tag)) for tag in range(6)]\n"
            "    build_pack(specs, Path(sys.argv[2]), jobs=2)\n"
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(script), str(trace), str(folder)]
        process = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.DEVNULL)
        limit = time.monotonic() + 60
        while not (folder / "manifest.json").exists() and time.monotonic() < limit:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        done = manifest.read_manifest(folder).kernels
        assert 0 < len(done) < 6 and all(reason == "" for _, reason in pack_entries(folder))
        stray = folder / "sm_90a" / f"fake-{32 * '1'}.so"
        stray.write_bytes(b"half a kernel")
        stray.with_name(f".{stray.name}.tmp").write_bytes(b"less")
        kept = []
        found = build_pack(
            specs(trace, *range(6)), folder, jobs=1, progress=lambda *step: kept.append(step[2].compiled)
        )
        assert len(found.kernels) == 6 and kept.count(False) == len(done)
        assert len(list((folder / "sm_90a").iterdir())) == 6


class TestSearch:
    def test_a_pack_comes_before_the_cache(self, trace, pack, caplog):
        with caplog.at_level("INFO", logger="flashkda.jit"):
            assert cache.load_kernel(jit_fakes.key(1), None)() == jit_fakes.key(1)
        assert compiles(trace) == 0 and f"loaded from {pack}" in caplog.text
        assert not (pack.parent / "cache").exists()

    def test_folders_are_looked_through_in_order(self, trace, pack, tmp_path, monkeypatch):
        folders = [tmp_path / "missing", tmp_path / "other", pack]
        monkeypatch.setenv("FLASHKDA_KERNEL_PATH", os.pathsep.join(map(str, folders)))
        build_pack(specs(trace, 3), tmp_path / "other", jobs=1)
        trace.write_text("")
        assert search_path() == folders
        for tag in (1, 2, 3):
            assert cache.load_kernel(jit_fakes.key(tag), None)() == jit_fakes.key(tag)
        assert compiles(trace) == 0

    def test_a_miss_compiles_unless_that_is_forbidden(self, trace, pack, monkeypatch):
        with pytest.raises(KernelNotFoundError, match="FLASHKDA_NO_JIT") as caught:
            cache.load_kernel(jit_fakes.key(3), None)
        assert "fake(tag=3) for sm_90a" in str(caught.value) and compiles(trace) == 0
        assert len(caught.value.reasons) == 2 and str(pack) in caught.value.reasons[0]
        monkeypatch.setenv("FLASHKDA_NO_JIT", "0")
        assert cache.load_kernel(jit_fakes.key(3), None)() == jit_fakes.key(3) and compiles(trace) == 1

    def test_the_cache_serves_where_compiling_is_forbidden(self, trace, monkeypatch):
        cache.build_kernel(jit_fakes.key(5), None)
        monkeypatch.setenv("FLASHKDA_NO_JIT", "1")
        assert cache.load_kernel(jit_fakes.key(5), None)() == jit_fakes.key(5) and compiles(trace) == 1

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"arch": "sm_100a"}, "is for sm_100a, not sm_90a"),
            ({"sources": 64 * "0"}, "other sources of the kernels (00000000, here"),
            ({"recipe": 1}, "another recipe (1, here 2)"),
            ({"host": "aarch64"}, "another host"),
            ({"switches": {"CUTE_DSL_LINEINFO": "1"}}, "another switches"),
            ({"toolchain": {"nvidia-cutlass-dsl": "4.7.0"}}, "nvidia-cutlass-dsl 4.7.0, here is"),
            ({"toolchain": {}}, "nvidia-cutlass-dsl None"),
        ],
    )
    def test_what_was_built_for_another_place_is_passed_over(self, trace, pack, changes, reason, caplog):
        rewrite(pack, **changes)
        with caplog.at_level("INFO", logger="flashkda.jit"), pytest.raises(KernelNotFoundError) as caught:
            cache.load_kernel(jit_fakes.key(1), None)
        assert reason in str(caught.value) and reason in caplog.text
        # Those of the same GPU are mistakes, and said aloud; but once.
        warned = [record for record in caplog.records if record.levelname == "WARNING"]
        assert len(warned) == ("arch" not in changes)
        with pytest.raises(KernelNotFoundError):
            cache.load_kernel(jit_fakes.key(1), None)
        assert [record for record in caplog.records if record.levelname == "WARNING"] == warned
        assert cache.load_kernel(jit_fakes.key(2), None)() == jit_fakes.key(2)

    @pytest.mark.parametrize(
        ("package", "version", "runs"),
        [
            ("nvidia-cutlass-dsl", "4.8.2", False),
            ("apache-tvm-ffi", "0.2.0", False),
            ("apache-tvm-ffi", None, False),
            ("apache-tvm-ffi", "0.1.99", True),
            ("nvidia-cutlass-dsl-libs-cu13", "4.8.1", True),
        ],
    )
    def test_versions_that_run_what_was_built(self, trace, pack, monkeypatch, package, version, runs):
        """The flavour of the DSL that built the pack does not matter: a GPU's machine has another than a builder's."""
        here = {
            "nvidia-cutlass-dsl": "4.8.1",
            "apache-tvm-ffi": "0.1.15.post2",
            "nvidia-cutlass-dsl-libs-cu12": "4.8.1",
        }
        rewrite(pack, toolchain=here)
        there = {name: value for name, value in here.items() if "cu12" not in name or "cu13" not in package}
        monkeypatch.setattr(manifest, "toolchain_versions", lambda: {**there, package: version})
        with contextlib.nullcontext() if runs else pytest.raises(KernelNotFoundError, match=package):
            assert cache.load_kernel(jit_fakes.key(1), None)() == jit_fakes.key(1)

    def test_a_pack_of_another_release_costs_one_warning(self, trace, pack, caplog):
        for tag in (1, 2):
            rewrite(pack, tag, sources=64 * "0")
        for tag in (1, 2):
            with pytest.raises(KernelNotFoundError):
                cache.load_kernel(jit_fakes.key(tag), None)
        warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(warned) == 1 and f"the pack {pack} is passed over" in warned[0]

    def test_a_pack_that_changes_is_read_again(self, trace, pack):
        with pytest.raises(KernelNotFoundError):
            cache.load_kernel(jit_fakes.key(3), None)
        build_pack(specs(trace, 3), pack, jobs=1)
        assert cache.load_kernel(jit_fakes.key(3), None)() == jit_fakes.key(3)

    def test_a_library_that_the_loader_refuses_is_passed_over(self, trace, pack, monkeypatch):
        def refuse(key, binary):
            raise KernelBuildError(f"{key} cannot be loaded")

        monkeypatch.setattr(runtime, "load_bytes", refuse)
        with pytest.raises(KernelNotFoundError, match="cannot be loaded"):
            cache.load_kernel(jit_fakes.key(1), None)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def link_out(path):
    path.rename(path.parents[2] / "outside")
    path.symlink_to(path.parents[2] / "outside")


def give_away(path):
    os.chown(path, 12345, -1)


# What was done to the library, to its folder, or to the pack; what is then said.
HOSTILE = {
    "truncated": (lambda pack: library(pack).write_bytes(library(pack).read_bytes()[:-7]), "is not what the manifest"),
    "bit-flipped": (lambda pack: flip(library(pack)), "is not what the manifest says"),
    "another digest": (lambda pack: rewrite(pack, sha256=64 * "0"), "is not what the manifest says"),
    "missing": (lambda pack: library(pack).unlink(), "No such file"),
    "group-writable": (lambda pack: library(pack).chmod(0o664), "chmod go-w"),
    "world-writable": (lambda pack: library(pack).chmod(0o646), "chmod go-w"),
    "group-writable folder": (lambda pack: library(pack).parent.chmod(0o775), "chmod go-w"),
    "group-writable pack": (lambda pack: pack.chmod(0o775), "chmod go-w"),
    "group-writable manifest": (lambda pack: (pack / "manifest.json").chmod(0o664), "chmod go-w"),
    "link out": (lambda pack: link_out(library(pack)), "symbolic link"),
    "path out": (lambda pack: rewrite(pack, file="../outside.so"), "outside"),
    "absolute path": (lambda pack: rewrite(pack, file="/outside.so"), "outside"),
    "no manifest": (lambda pack: (pack / "manifest.json").unlink(), "No such file"),
    "half a manifest": (lambda pack: (pack / "manifest.json").write_text('{"format": 1, "ker'), "cannot be read"),
    "another format": (lambda pack: (pack / "manifest.json").write_text('{"format": 2}'), "not of format 1"),
    "a list": (lambda pack: (pack / "manifest.json").write_text("[]"), "not of format 1"),
    "a field too many": (lambda pack: rewrite(pack, more=1), "cannot be read"),
    "a field of another type": (lambda pack: rewrite(pack, file=3), "file of a kernel"),
    "wrong owner": (lambda pack: give_away(library(pack)), "belongs to user 12345"),
    "wrong owner of the folder": (lambda pack: give_away(library(pack).parent), "belongs to user 12345"),
    "wrong owner of the pack": (lambda pack: give_away(pack), "belongs to user 12345"),
    "wrong owner of the manifest": (lambda pack: give_away(pack / "manifest.json"), "belongs to user 12345"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_not_to_be_trusted_is_refused_and_compiled_instead(trace, pack, name, monkeypatch, caplog):
    if name.startswith("wrong owner") and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    change, said = HOSTILE[name]
    change(pack)
    with pytest.raises(KernelNotFoundError, match="FLASHKDA_NO_JIT") as caught:
        cache.load_kernel(jit_fakes.key(1), None)
    assert said in str(caught.value) and str(pack) in str(caught.value)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) >= 1 and said in warned[0]
    monkeypatch.delenv("FLASHKDA_NO_JIT")
    assert cache.load_kernel(jit_fakes.key(1), None)() == jit_fakes.key(1) and compiles(trace) == 1


@pytest.mark.parametrize("name", [name for name in HOSTILE if "pack" not in name and "manifest" not in name])
def test_the_list_of_a_pack_says_what_is_wrong(trace, pack, name):
    if name.startswith("wrong owner") and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    change, said = HOSTILE[name]
    change(pack)
    if name in ("another format", "a list", "a field too many", "a field of another type"):
        with pytest.raises(KernelBuildError, match=said):
            pack_entries(pack)
    else:
        reasons = {kernel.params["tag"]: reason for kernel, reason in pack_entries(pack)}
        assert said in reasons[1]
        assert (reasons[2] == "") == ("folder" not in name)


def test_compile_measured_is_what_a_pack_is_built_with(trace, tmp_path, monkeypatch):
    """Without cuobjdump the numbers are not there, and the kernel is."""
    key = jit_fakes.key(1)
    monkeypatch.setattr(compiler, "compile_measured", lambda key, make: compiler.Measured(b"x", None, None))
    from flashkda.jit import packing

    found = packing._build(key, None, str(tmp_path))[1]
    assert (found.registers, found.shared_memory, found.size) == (None, None, 1)
