# SPDX-License-Identifier: Apache-2.0
"""Keys, digests and the cache's rules, with a stand-in for the compiler: needs neither the DSL nor a GPU."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import stat
import struct
import subprocess
import sys
import types
import warnings
from concurrent.futures import ProcessPoolExecutor

import pytest

from flashkda.errors import KernelBuildError, NotPreparedError
from flashkda.jit import cache, compiler, digest, files, resources, store
from flashkda.jit.key import KernelKey
from tests.unit import jit_fakes

SPAWN = multiprocessing.get_context("spawn")


class TestDigest:
    @pytest.fixture
    def package(self, tmp_path):
        (tmp_path / "sub").mkdir()
        (tmp_path / "a.py").write_text("x = 1\n")
        (tmp_path / "sub" / "b.py").write_text("y = 2\n")
        return tmp_path

    def test_same_files_same_digest(self, package):
        before = digest.digest_files(package)
        (package / "notes.txt").write_text("not a source")
        assert digest.digest_files(package) == before

    @pytest.mark.parametrize("change", ["content", "name", "new", "merged"])
    def test_every_change_of_a_source_shows(self, package, change):
        before = digest.digest_files(package)
        if change == "content":
            (package / "a.py").write_text("x = 2\n")
        elif change == "name":
            (package / "a.py").rename(package / "c.py")
        elif change == "new":
            (package / "sub" / "c.py").write_text("")
        else:
            (package / "a.py").write_text("x = 1\nsub/b.pyy = 2\n")
            (package / "sub" / "b.py").unlink()
        assert digest.digest_files(package) != before

    def test_the_kernels_are_digested_without_being_imported(self):
        script = (
            "import sys; from flashkda.jit.digest import source_digest, toolchain_versions\n"
            "print(len(source_digest()), len(toolchain_versions()) >= 2)\n"
            "print(sorted({'torch', 'cutlass', 'tvm_ffi', 'flashkda.kernels'} & set(sys.modules)))"
        )
        done = _python(script)
        assert done.splitlines() == ["64 True", "[]"]

    def test_a_package_without_sources_is_named(self):
        with pytest.raises(KernelBuildError, match=r"flashkda\.no_such_package"):
            digest.source_digest("flashkda.no_such_package")


class TestKey:
    def test_order_of_parameters_does_not_matter(self):
        one = KernelKey("k", (("a", 1), ("b", "x")), "sm_90a")
        two = KernelKey("k", (("b", "x"), ("a", 1)), "sm_90a")
        assert one == two and one.digest == two.digest

    @pytest.mark.parametrize(
        "other",
        [
            KernelKey("j", (("a", 1),), "sm_90a"),
            KernelKey("k", (("a", 2),), "sm_90a"),
            KernelKey("k", (("b", 1),), "sm_90a"),
            KernelKey("k", (("a", 1), ("b", None)), "sm_90a"),
            KernelKey("k", (("a", 1),), "sm_100a"),
        ],
    )
    def test_everything_that_changes_the_code_changes_the_digest(self, other):
        assert KernelKey("k", (("a", 1),), "sm_90a").digest != other.digest

    @pytest.mark.parametrize("source", ["source_digest", "toolchain_versions", "dsl_switches"])
    def test_sources_toolchain_and_switches_count(self, monkeypatch, source):
        key = KernelKey("k", (), "sm_90a")
        before = key.digest
        monkeypatch.setattr(f"flashkda.jit.key.{source}", lambda: {"of": "another world"})
        assert key.digest != before

    def test_a_switch_of_the_dsl_is_seen(self, monkeypatch):
        monkeypatch.delenv("CUTE_DSL_LINEINFO", raising=False)
        key = KernelKey("k", (), "sm_90a")
        before = key.digest
        monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
        assert key.digest != before

    @pytest.mark.parametrize(
        ("name", "params", "arch"),
        [
            ("../k", (), "sm_90a"),
            ("k", (("a", [1]),), "sm_90a"),
            ("k", (("a", float("nan")),), "sm_90a"),
            ("k", (("a", float("inf")),), "sm_90a"),
            ("k", (("a", 1), ("a", 2)), "sm_90a"),
            ("k", (), "hopper"),
        ],
    )
    def test_what_cannot_be_a_key_is_refused(self, name, params, arch):
        with pytest.raises(KernelBuildError):
            KernelKey(name, params, arch)


@pytest.fixture
def trace(tmp_path, monkeypatch):
    """The stand-in installed, the cache empty and its own. The file holds a line for each compile."""
    monkeypatch.setenv("FLASHKDA_CACHE_DIR", str(tmp_path / "deep" / "cache"))
    path = tmp_path / "trace"
    path.touch()
    jit_fakes.install(monkeypatch.setattr, path)
    monkeypatch.setattr(store, "_warned", False)
    cache.forget_loaded()
    yield path
    cache.forget_loaded()


def compiles(trace) -> int:
    return len(trace.read_text().splitlines())


class TestCache:
    def test_compiled_once_then_memory_then_disk(self, trace):
        key = jit_fakes.key()
        assert not cache.is_loaded(key)
        first = cache.load_kernel(key, None)
        assert first() == key and cache.is_loaded(key)
        assert cache.load_kernel(key, None) is first
        cache.forget_loaded()
        assert not cache.is_loaded(key)
        assert cache.load_kernel(key, None)() == key
        assert compiles(trace) == 1

    def test_folders_and_files_are_the_users_own(self, trace):
        key = jit_fakes.key()
        cache.load_kernel(key, None)
        path = cache.entry_path(key)
        modes = [stat.S_IMODE(one.stat().st_mode) for one in (path.parents[1], path.parent, path)]
        assert modes == [0o700, 0o700, 0o600]
        assert sorted(one.suffix for one in path.parent.iterdir() if one.suffix != ".lock") == [".json", ".so"]

    def test_a_folder_left_open_is_closed(self, trace):
        path = cache.entry_path(jit_fakes.key())
        path.parent.mkdir(parents=True)
        path.parent.chmod(0o777)
        cache.load_kernel(jit_fakes.key(), None)
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    @pytest.mark.parametrize("missing", [".json", ".so"])
    def test_half_an_entry_is_built_again_without_ado(self, trace, missing, caplog):
        key = jit_fakes.key()
        cache.load_kernel(key, None)
        path = cache.entry_path(key)
        path.with_suffix(missing).unlink()
        cache.forget_loaded()
        assert cache.load_kernel(key, None)() == key and compiles(trace) == 2
        assert not list(path.parent.glob("*.corrupt")) and not caplog.records
        cache.forget_loaded()
        assert cache.load_kernel(key, None)() == key and compiles(trace) == 2

    @pytest.mark.parametrize("damage", ["truncated", "flipped", "other key", "not JSON"])
    def test_a_bad_entry_is_set_aside_and_built_again(self, trace, damage, caplog):
        key = jit_fakes.key()
        cache.load_kernel(key, None)
        path = cache.entry_path(key)
        sidecar = path.with_suffix(".json")
        good, note = path.read_bytes(), sidecar.read_text()
        if damage == "truncated":
            path.write_bytes(good[:-1])
        elif damage == "flipped":
            path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        elif damage == "other key":
            sidecar.write_text(note.replace('"tag": 0', '"tag": 1'))
        else:
            sidecar.write_text(note[:-2])
        cache.forget_loaded()
        with caplog.at_level("WARNING", logger="flashkda"):
            assert cache.load_kernel(key, None)() == key
        assert compiles(trace) == 2
        assert (path.read_bytes(), sidecar.read_text()) == (good, note)
        assert list(path.parent.glob("*.corrupt")) and "set aside" in caplog.text

    def test_an_object_that_the_loader_refuses_is_built_again(self, trace):
        key = jit_fakes.key()
        cache.load_kernel(key, None)
        path = cache.entry_path(key)
        sidecar = path.with_suffix(".json")
        # Object and sidecar agree with each other, but the object is not the kernel's.
        note = json.loads(sidecar.read_text()) | {"sha256": hashlib.sha256(b"code for another GPU").hexdigest()}
        for again, obtain in enumerate((cache.build_kernel, cache.load_kernel), start=2):
            path.write_bytes(b"code for another GPU")
            sidecar.write_text(json.dumps(note))
            cache.forget_loaded()
            assert obtain(key, None)
            assert compiles(trace) == again and path.read_bytes() == jit_fakes.content(key)

    def test_a_failed_write_leaves_nothing_behind(self, trace, monkeypatch):
        def full(source, target):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

        key = jit_fakes.key()
        monkeypatch.setattr(files.os, "replace", full)
        with pytest.warns(RuntimeWarning, match="No space left"):
            assert cache.load_kernel(key, None)() == key
        assert [one for one in cache.entry_path(key).parent.iterdir() if one.suffix != ".lock"] == []

    def test_an_unusable_folder_costs_a_warning(self, trace, tmp_path, monkeypatch):
        (tmp_path / "file").touch()
        monkeypatch.setenv("FLASHKDA_CACHE_DIR", str(tmp_path / "file" / "cache"))
        key = jit_fakes.key()
        with pytest.warns(RuntimeWarning, match="FLASHKDA_CACHE_DIR"):
            assert cache.load_kernel(key, None)() == key
        assert cache.is_loaded(key) and compiles(trace) == 1
        with warnings.catch_warnings(), pytest.raises(KernelBuildError, match="cannot be kept"):
            warnings.simplefilter("error")  # it has been said
            cache.build_kernel(key, None)

    def test_a_folder_of_somebody_else_is_not_used(self, trace, monkeypatch):
        key = jit_fakes.key()
        cache.load_kernel(key, None)
        cache.forget_loaded()
        folder = cache.entry_path(key).parent
        if os.geteuid() == 0:
            os.chown(folder, 12345, -1)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
        with pytest.warns(RuntimeWarning, match="belongs to user"):
            cache.load_kernel(key, None)
        assert compiles(trace) == 2

    def test_a_refused_kernel_is_not_remembered(self, trace):
        key = jit_fakes.key()
        for _ in range(2):
            with pytest.raises(KernelBuildError, match="does not compile"):
                cache.load_kernel(key, "refused")
        assert not cache.is_loaded(key) and not cache.entry_path(key).exists()
        assert cache.load_kernel(key, None)() == key

    def test_a_lock_that_stays_held_is_named(self, trace, monkeypatch):
        from filelock import FileLock

        key = jit_fakes.key()
        path = cache.entry_path(key)
        path.parent.mkdir(parents=True)
        monkeypatch.setattr(store, "LOCK_SECONDS", 0.1)
        with FileLock(path.with_suffix(".lock")), pytest.raises(KernelBuildError, match=r"\.lock"):
            cache.load_kernel(key, None)

    def test_processes_compile_a_key_once(self, trace):
        with ProcessPoolExecutor(max_workers=3, mp_context=SPAWN) as pool:
            futures = [pool.submit(jit_fakes.load_in_worker, str(trace), 1.0) for _ in range(3)]
            assert {future.result() for future in futures} == {str(jit_fakes.key())}
        assert compiles(trace) == 1


class TestCapture:
    @pytest.fixture
    def capturing(self, monkeypatch):
        asked = []
        cuda = types.SimpleNamespace(
            is_initialized=lambda: True, is_current_stream_capturing=lambda: asked.append(1) or True
        )
        monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
        return asked

    def test_nothing_is_loaded_or_compiled_under_capture(self, trace, capturing):
        with pytest.raises(NotPreparedError, match="prepare first"):
            cache.load_kernel(jit_fakes.key(), None)
        assert compiles(trace) == 0 and not cache.is_loaded(jit_fakes.key())

    def test_a_loaded_kernel_is_had_under_capture_without_asking(self, trace, monkeypatch, request):
        first = cache.load_kernel(jit_fakes.key(), None)
        asked = request.getfixturevalue("capturing")
        assert cache.load_kernel(jit_fakes.key(), None) is first and asked == []

    def test_torch_without_cuda_does_not_capture(self, trace):
        pytest.importorskip("torch")
        assert cache.load_kernel(jit_fakes.key(), None)() == jit_fakes.key()


class TestPrebuild:
    def test_in_order_and_once(self, trace):
        specs = [(jit_fakes.spec, (str(trace), tag)) for tag in (3, 1, 3)]
        progress = []
        built = cache.prebuild(iter(specs), jobs=2, progress=lambda *seen: progress.append(seen[:2]))
        assert [one.digest for one in built] == [jit_fakes.key(tag).digest for tag in (3, 1, 3)]
        assert progress == [(1, 3), (2, 3), (3, 3)] and compiles(trace) == 2
        assert not any(one.compiled for one in cache.prebuild(specs[:2], jobs=1))
        assert compiles(trace) == 2
        assert cache.load_kernel(jit_fakes.key(1), None)() == jit_fakes.key(1) and compiles(trace) == 2

    def test_all_failures_are_listed(self, trace):
        specs = [(jit_fakes.spec, (str(trace), tag, make)) for tag, make in ((1, "refused"), (2, None), (3, "refused"))]
        with pytest.raises(KernelBuildError, match="2 of 3") as caught:
            cache.prebuild(specs, jobs=1)
        assert "tag=1" in str(caught.value) and "tag=3" in str(caught.value) and "tag=2" not in str(caught.value)
        assert cache.entry_path(jit_fakes.key(2)).exists()

    def test_a_process_that_dies_is_an_error(self, trace):
        with pytest.raises(KernelBuildError, match="process died"):
            cache.prebuild([(jit_fakes.dies, ())], jobs=1)

    def test_nothing_to_build(self):
        assert cache.prebuild([]) == []


class TestToolchain:
    def test_what_is_missing_is_named(self, monkeypatch):
        monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(KernelBuildError, match="pip install nvidia-cutlass-dsl apache-tvm-ffi") as caught:
            compiler.compile_kernel(jit_fakes.key(), lambda: (None, ()))
        assert caught.value.missing == ("nvidia-cutlass-dsl", "apache-tvm-ffi")

    def test_a_missing_cuobjdump_is_named(self, monkeypatch):
        from importlib import metadata

        def missing(name):
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(metadata, "distribution", missing)
        monkeypatch.setattr(resources.shutil, "which", lambda name: None)
        resources.find_cuobjdump.cache_clear()
        try:
            with pytest.raises(KernelBuildError, match="pip install nvidia-cuda-cuobjdump"):
                resources.find_cuobjdump()
        finally:
            resources.find_cuobjdump.cache_clear()


def elf(machine: int, abi: int = 7, flags: int = 0x5A0D5A, sections: int = 2) -> bytes:
    """An ELF header with its section headers right behind it."""
    ident = b"\x7fELF\x02\x01\x01\x33" + bytes([abi]) + bytes(7)
    return (
        ident
        + struct.pack("<HHIQQQIHHHHHH", 2, machine, 1, 0, 0, 64, flags, 64, 56, 0, 64, sections, 1)
        + bytes(64 * sections)
    )


class TestMachineCode:
    def test_gpu_code_is_found_inside_an_object(self):
        cubin = elf(190)
        assert resources.embedded_cubins(elf(62) + b"text" + cubin + b"more" + cubin) == [cubin, cubin]
        assert resources.embedded_cubins(elf(62)) == [] == resources.embedded_cubins(cubin[:30])

    @pytest.mark.parametrize(
        ("abi", "flags", "number"),
        [(7, 0x500550, 80), (7, 0x5A0D5A, 90), (8, 0x6005A04, 90), (8, 0x600640A, 100), (8, 0x6007802, 120)],
    )
    def test_architecture(self, abi, flags, number):
        assert resources.cubin_number(elf(190, abi, flags)) == number

    def test_an_unknown_layout_is_refused(self):
        with pytest.raises(KernelBuildError, match="ABI"):
            resources.cubin_number(elf(190, abi=9))

    def test_report_of_ptxas(self):
        log = "\x1b[96mptxas\x1b[0m . 1392 bytes stack frame, 3888 bytes spill stores, 4380 bytes spill\n      loads"
        assert resources.ptxas_spills(log) == 3888 + 4380
        with pytest.raises(KernelBuildError, match="ptxas"):
            resources.ptxas_spills("nothing here")

    def test_a_module_without_a_launch_is_refused(self):
        with pytest.raises(KernelBuildError, match="shared memory"):
            resources.dynamic_shared_bytes("llvm.func @f() { llvm.return }")


def _python(script: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_importing_the_package_imports_no_toolchain():
    script = "import sys, flashkda.jit.cache; print({'cutlass', 'tvm_ffi', 'torch', 'filelock'} & set(sys.modules))"
    assert _python(script).strip() == "set()"
