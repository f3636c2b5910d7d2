# SPDX-License-Identifier: Apache-2.0
"""The compiler and the cache with real kernels, cross-compiled: no GPU is needed or used."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import types

import pytest

from flashkda.errors import KernelBuildError
from flashkda.jit import build_pack, cache
from flashkda.jit.compiler import check_object, compile_kernel, compile_measured, inspect_kernel
from flashkda.jit.key import KernelKey
from flashkda.jit.resources import cubin_number, embedded_cubins, find_cuobjdump
from flashkda.jit.runtime import find_runtime, is_library, load_bytes
from tests.compile import jit_toys

pytestmark = pytest.mark.compile
pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHKDA_CACHE_DIR", str(tmp_path / "cache"))
    cache.forget_loaded()
    yield
    cache.forget_loaded()


def vectors(*sizes):
    torch = pytest.importorskip("torch")
    return [torch.zeros(size) for size in sizes]


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"])
def test_the_object_is_for_the_architecture_asked_for(arch):
    key, make = jit_toys.axpy(arch=arch)
    binary = compile_kernel(key, make)
    assert [f"sm_{cubin_number(cubin)}" for cubin in embedded_cubins(binary)] == [arch.rstrip("a")]
    with pytest.raises(KernelBuildError, match="expected code for sm_70, found"):
        check_object(KernelKey(key.name, key.params, "sm_70"), binary)


def test_a_build_is_reproducible_in_another_process():
    key, make = jit_toys.axpy()
    script = (
        "import hashlib; from tests.compile import jit_toys; from flashkda.jit.compiler import compile_kernel\n"
        "print(hashlib.sha256(compile_kernel(*jit_toys.axpy())).hexdigest())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == hashlib.sha256(compile_kernel(key, make)).hexdigest()


@pytest.mark.parametrize("bias", [False, True])
def test_an_absent_argument_stays_in_its_place_as_none(bias):
    function = cache.load_kernel(*jit_toys.axpy(bias))
    x, a, y = vectors(8, 1, 8)
    # The arguments are checked before CUDA is touched: that x is on the CPU is refused only when their number is right.
    with pytest.raises(ValueError, match=r"argument #0 .*expected device_type=cuda"):
        function(x, a, x if bias else None, y)
    with pytest.raises(TypeError, match="Expects 4 parameters"):
        function(x, a, y)


def test_a_second_process_loads_what_the_first_one_built():
    key, make = jit_toys.axpy()
    assert cache.build_kernel(key, make) is True
    assert cache.build_kernel(key, make) is False
    assert not cache.is_loaded(key)
    assert load_elsewhere() == LOADED


@pytest.mark.parametrize("damage", ["truncated", "garbage", "sidecar"])
def test_a_damaged_entry_is_set_aside_and_built_again(damage):
    key, make = jit_toys.axpy()
    cache.build_kernel(key, make)
    path = cache.entry_path(key)
    whole = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "garbage":
        path.write_bytes(os.urandom(len(whole)))
    else:
        path.with_suffix(".json").write_text("{")
    assert callable(cache.load_kernel(key, make))
    assert path.read_bytes() == whole
    assert path.with_name(path.name + ".corrupt").exists()


def load_elsewhere(**settings):
    """What a fresh process says that loads the toy and calls it with too few arguments."""
    script = (
        "import sys; from tests.compile import jit_toys; from flashkda.jit import cache\n"
        "key, make = jit_toys.axpy()\n"
        "function = cache.load_kernel(key, None)\n"
        "try: function()\n"
        "except TypeError as error: print(str(error)[:20])\n"
        "print(*sorted({'cutlass', 'triton'} & sys.modules.keys()))\n"
        "print('/memfd:flashkda_toy_axpy' in open('/proc/self/maps').read())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **settings}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


# It takes arguments; neither the DSL nor another compiler was imported; what was loaded is memory, not the file.
LOADED = ["Expects 4 parameters", "", "True"]


@pytest.fixture
def pack(tmp_path):
    """A pack of one toy, and the environment to find it in."""
    build_pack([(jit_toys.axpy, ())], tmp_path / "pack", jobs=1)
    return {
        "FLASHKDA_KERNEL_PATH": str(tmp_path / "pack"),
        "FLASHKDA_CACHE_DIR": str(tmp_path / "none"),
        "FLASHKDA_NO_JIT": "1",
    }


def test_a_pack_loads_without_the_compiler(pack):
    assert load_elsewhere(**pack) == LOADED


def test_a_pack_loads_where_the_dsl_cannot_be_imported(pack, tmp_path):
    """All that loading needs of it is the runtime library."""
    (tmp_path / "block").mkdir()
    (tmp_path / "block" / "cutlass.py").write_text("raise ImportError('there is no compiler here')")
    path = os.pathsep.join([str(tmp_path / "block"), *(p for p in sys.path if p)])
    assert load_elsewhere(**pack, PYTHONPATH=path) == LOADED


def test_no_library_is_taken_for_another():
    """Descriptors are used again, and the loader goes by the path: each kernel has to be its own."""
    loaded = [cache.load_kernel(*jit_toys.axpy(bias=tag % 2 == 1, tag=tag)) for tag in range(4)]
    for tag, function in enumerate(loaded):
        with pytest.raises(TypeError, match="Expects 4 parameters") as caught:
            function()
        # It tells its signature.
        assert ("bias: Tensor(" in str(caught.value)) == (tag % 2 == 1), str(caught.value)


def test_memory_that_may_not_be_executed_falls_back_to_a_file(monkeypatch):
    def refuse(*arguments):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert callable(cache.load_kernel(*jit_toys.axpy()))


def test_without_a_linker_the_dsl_loads_the_object(monkeypatch, caplog):
    from flashkda.jit import compiler

    monkeypatch.setattr(compiler, "find_linker", lambda: None)
    key, make = jit_toys.axpy()
    cache.build_kernel(key, make)
    assert not is_library(cache.entry_path(key).read_bytes())
    assert load_elsewhere() == ["Expects 4 parameters", "cutlass", "False"]


def test_a_linker_that_fails_is_quoted(monkeypatch, tmp_path):
    from flashkda.jit import compiler

    (tmp_path / "ld").write_text("#!/bin/sh\necho no such option >&2\nexit 1\n")
    (tmp_path / "ld").chmod(0o755)
    monkeypatch.setattr(compiler, "find_linker", lambda: str(tmp_path / "ld"))
    with pytest.raises(KernelBuildError, match=r"cannot be linked by .*no such option"):
        compile_kernel(*jit_toys.axpy())


def test_the_linkers_that_are_looked_for(monkeypatch, tmp_path, caplog):
    from flashkda.jit import compiler

    monkeypatch.setenv("PATH", str(tmp_path))
    compiler.find_linker.cache_clear()
    try:
        assert compiler.find_linker() is None and "no linker" in caplog.text
        (tmp_path / "ld.lld").touch(0o755)
        compiler.find_linker.cache_clear()
        assert compiler.find_linker() == str(tmp_path / "ld.lld")
    finally:
        compiler.find_linker.cache_clear()


def test_a_missing_runtime_is_named(monkeypatch):
    from flashkda.jit import runtime

    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("CUTE_DSL_LIBS", raising=False)
    with pytest.raises(KernelBuildError, match="pip install nvidia-cutlass-dsl"):
        find_runtime()


def test_the_runtime_is_found_beside_the_dsl(monkeypatch):
    """Where the DSL's folder is on the path, and not the one above it."""
    from flashkda.jit import runtime

    expected, real = find_runtime(), runtime.importlib.util.find_spec
    monkeypatch.setattr(
        runtime.importlib.util, "find_spec", lambda name: None if name == "nvidia_cutlass_dsl" else real(name)
    )
    assert find_runtime() == expected


@pytest.mark.parametrize(("cuda", "chosen"), [("12.8", "cu12"), ("13.1", "cu13"), ("14.0", "cu13"), (None, "cu13")])
def test_the_flavour_that_goes_with_torch(monkeypatch, tmp_path, cuda, chosen):
    from flashkda.jit import runtime

    for flavour in ("cu12", "cu13"):
        (tmp_path / flavour / "lib").mkdir(parents=True)
        (tmp_path / flavour / "lib" / runtime.RUNTIME).touch()
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: spec)
    version = types.SimpleNamespace(cuda=cuda)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(version=version))
    monkeypatch.delenv("CUTE_DSL_LIBS", raising=False)
    assert find_runtime().parts[-3] == chosen
    (tmp_path / runtime.RUNTIME).touch()
    monkeypatch.setenv("CUTE_DSL_LIBS", f"/nowhere/{runtime.RUNTIME}:{tmp_path / runtime.RUNTIME}")
    assert find_runtime() == tmp_path / runtime.RUNTIME


def test_a_pack_says_what_its_kernels_use(pack):
    try:
        find_cuobjdump()
    except KernelBuildError as error:
        pytest.skip(str(error))
    key, make = jit_toys.rotate(values=16, shared=256)
    found = compile_measured(key, make)
    inspected = inspect_kernel(key, make)
    assert (found.registers, found.shared_bytes) == (inspected.registers, inspected.shared_bytes)
    assert is_library(found.binary)


def test_the_loader_refuses_garbage():
    key, make = jit_toys.axpy()
    with pytest.raises(KernelBuildError, match="cannot be loaded"):
        load_bytes(key, b"\x7fELF" + bytes(200))
    other = KernelKey("toy_other", key.params, key.arch)
    with pytest.raises(KernelBuildError, match="cannot be loaded"):
        load_bytes(other, compile_kernel(key, make))


def test_prebuild_builds_in_parallel_and_lists_every_failure():
    seen = []
    specs = [(jit_toys.axpy, (False, "sm_90a", 0)), (jit_toys.axpy, (True,)), (jit_toys.axpy, (False, "sm_90a", 0))]
    built = cache.prebuild(specs, jobs=2, progress=lambda done, total, one: seen.append((done, total)))
    assert [one.name for one in built] == ["toy_axpy"] * 3 and all(one.error is None for one in built)
    assert sum(one.compiled for one in built) == 2
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert all(cache.entry_path(function(*arguments)[0]).exists() for function, arguments in specs)
    with pytest.raises(KernelBuildError) as caught:
        cache.prebuild([(jit_toys.refused, ()), (jit_toys.axpy, (True,)), (jit_toys.fails, ("no geometry",))], jobs=1)
    text = str(caught.value)
    assert "2 of 3 kernels" in text and "no such tile" in text and "no geometry" in text


def test_a_refused_kernel_says_why():
    with pytest.raises(KernelBuildError, match=r"toy_refused.*does not compile.*no such tile"):
        cache.load_kernel(*jit_toys.refused())


def test_a_dry_run_of_the_dsl_is_an_error_here():
    script = (
        "from tests.compile import jit_toys; from flashkda.jit.compiler import compile_kernel\n"
        "compile_kernel(*jit_toys.axpy())"
    )
    path = os.pathsep.join(p for p in sys.path if p)
    environment = {**os.environ, "CUTE_DSL_DRYRUN": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert "KernelBuildError" in done.stderr and "CUTE_DSL_DRYRUN" in done.stderr


class TestResources:
    @pytest.fixture(autouse=True)
    def _tool(self):
        try:
            find_cuobjdump()
        except KernelBuildError as error:
            pytest.skip(str(error))

    def test_a_kernel_that_fits(self):
        found = inspect_kernel(*jit_toys.rotate(values=16, shared=256), sass=True)
        assert 16 <= found.registers <= 64
        assert (found.spill_bytes, found.local_bytes) == (0, 0)
        # 1024 bytes are reserved by sm_90.
        assert found.shared_bytes == 256 * 4 + 1024
        assert ".target sm_90a" in found.ptx and "FFMA" in (found.sass or "")

    @pytest.mark.filterwarnings("ignore:This static loop")
    def test_spills_and_local_memory_are_seen(self):
        found = inspect_kernel(*jit_toys.rotate(values=320, shared=128))
        assert found.spill_bytes > 0 and found.local_bytes > 0
        assert found.sass is None

    def test_without_shared_memory(self):
        assert inspect_kernel(*jit_toys.axpy(arch="sm_80")).shared_bytes == 0

    def test_inspecting_leaves_the_cache_alone(self):
        key, make = jit_toys.axpy()
        inspect_kernel(key, make)
        assert not cache.entry_path(key).exists() and not cache.is_loaded(key)
