# SPDX-License-Identifier: Apache-2.0
"""The compiler and the cache with real kernels, cross-compiled: no GPU is needed or used."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest

from flashkda.errors import KernelBuildError
from flashkda.jit import cache
from flashkda.jit.compiler import check_object, compile_kernel, inspect_kernel, load_bytes
from flashkda.jit.key import KernelKey
from flashkda.jit.resources import cubin_number, embedded_cubins, find_cuobjdump
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
    script = (
        "from tests.compile import jit_toys; from flashkda.jit import cache\n"
        "key, make = jit_toys.axpy()\n"
        "print(callable(cache.load_kernel(key, None)), cache.is_loaded(key))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


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
