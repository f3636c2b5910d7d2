# SPDX-License-Identifier: Apache-2.0
"""`flashkda cache`, and what `flashkda info` tells of cache and packs."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from flashkda import config, kernel_sets
from flashkda.cli.status import Status
from flashkda.errors import ConfigError
from flashkda.geometry import PRESETS, preset
from flashkda.jit.cleaning import Entry

ENTRIES = [
    Entry(Path("/c/sm_90a/record-aa.so"), "record", "sm_90a", "a" * 32, 2048, 1.0, "stale", "made with other sources"),
    Entry(Path("/c/sm_80/commit-bb.so"), "commit", "sm_80", "b" * 32, 1024, time.time(), "ok", ""),
]


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A cache of ENTRIES; what `clear_cache` was called with."""
    monkeypatch.setenv("FLASHKDA_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FLASHKDA_CACHE_LIMIT", "2G")
    cleared = []
    monkeypatch.setattr("flashkda.jit.cache_entries", lambda: ENTRIES, raising=False)
    monkeypatch.setattr("flashkda.jit.verify_cache", lambda: [], raising=False)
    monkeypatch.setattr(
        "flashkda.jit.clear_cache", lambda *, older_than: cleared.append(older_than) or (2, 3072), raising=False
    )
    return cleared


def test_cache_list(run, cache, tmp_path, monkeypatch):
    status, out, _ = run("cache", "list")
    lines = [line.split() for line in out.splitlines()]
    assert status == Status.OK
    assert [line[0] for line in lines[:3]] == ["kernel", "record", "commit"]
    assert lines[1][1:5] == ["sm_90a", "aaaaaaaa", "2.0", "KiB"] and lines[1][-1] == "stale"
    assert out.endswith(f"\n\n2 kernels, 3.0 KiB of at most 2.0 GiB, in {tmp_path}\n")
    found = json.loads(run("cache", "list", "--json")[1])
    assert (found["folder"], found["limit"]) == (str(tmp_path), 2 << 30)
    assert found["kernels"] == [{**entry._asdict(), "path": str(entry.path)} for entry in ENTRIES]
    monkeypatch.setattr("flashkda.jit.cache_entries", lambda: [], raising=False)
    monkeypatch.setenv("FLASHKDA_CACHE_LIMIT", "unlimited")
    assert run("cache", "list")[1] == f"0 kernels, 0 B without a limit, in {tmp_path}\n"


def test_cache_verify(run, cache, monkeypatch, tmp_path):
    assert run("cache", "verify") == (Status.OK, f"2 kernels in {tmp_path}: all as they should be\n", "")
    monkeypatch.setattr("flashkda.jit.verify_cache", lambda: [(ENTRIES[0], "it is another's")], raising=False)
    status, out, _ = run("cache", "verify")
    assert status == Status.FAILED
    assert (
        out.startswith(f"1 of 2 kernels in {tmp_path} are not") and f"  - {ENTRIES[0].path}: it is another's\n" in out
    )


def test_cache_clear(run, cache, tmp_path):
    line = f"removed 2 kernels, 3.0 KiB, from {tmp_path}\n"
    for flags, seconds in ([], None), (["--older-than", "30d"], 30 * 86400), (["--older-than", "1.5h"], 5400):
        assert run("cache", "clear", *flags) == (Status.OK, line, "")
        assert cache.pop() == seconds
    status, _, err = run("cache", "clear", "--older-than", "soon")
    assert (status, cache) == (Status.USAGE, []) and "as 30d, found 'soon'" in err


def test_a_pack_that_is_not_there(run, tmp_path):
    status, out, err = run("cache", "verify", str(tmp_path / "none"))
    assert (status, out) == (Status.FAILED, "") and str(tmp_path / "none") in err and err.count("\n") == 1


def test_info_tells_what_is_built(run, cache, monkeypatch, tmp_path):
    monkeypatch.setattr("flashkda.capability.detect_arch", lambda device=None: "sm_90a")
    monkeypatch.setattr("flashkda.planner.detect_arch", lambda device=None: "sm_90a")
    monkeypatch.setenv("FLASHKDA_KERNEL_PATH", str(tmp_path / "none"))
    specs = kernel_sets.kernel_set(preset("kimi-k3", tp=8, window=4), ["sm_90a"], max_requests=8)
    (function, arguments), total = specs[0], len(specs)
    first = function(*arguments)[0]
    built = ENTRIES[1]._replace(name=first.name, arch="sm_90a", digest=first.digest)
    monkeypatch.setattr("flashkda.jit.cache_entries", lambda: [ENTRIES[0], built], raising=False)
    found = json.loads(run("info", "--json")[1])
    assert found["cache"] == {
        "folder": str(tmp_path),
        "limit": 2 << 30,
        "bytes": 3072,
        "kernels": {"stale": 1, "ok": 1},
    }
    runs = {one["model"]: one for one in found["runs"]}
    assert runs["kimi-k3"]["path"] == "fused" and runs["kimi-k3"]["ready"] == [1, total]
    assert set(runs) == set(PRESETS)
    (pack,) = found["packs"]
    assert pack["kernels"] == 0 and str(tmp_path / "none") in pack["problems"][0]
    out = run("info")[1]
    assert f"cache {tmp_path}: 1 ok, 1 stale, 3.0 KiB of at most 2.0 GiB\n" in out
    assert f"1 of {total}\n" in out and f"pack {tmp_path / 'none'}: 0 of 0" in out


def test_info_without_a_home(run, cache, monkeypatch):
    def homeless():
        raise ConfigError("FLASHKDA_CACHE_DIR", "a folder", "no home")

    monkeypatch.setattr(config, "cache_dir", homeless)
    monkeypatch.setattr("flashkda.jit.cache_entries", homeless, raising=False)
    assert json.loads(run("info", "--json")[1])["cache"] == {
        "folder": None,
        "problem": str(ConfigError("FLASHKDA_CACHE_DIR", "a folder", "no home")),
    }
    status, out, _ = run("info")
    assert status == Status.OK and "no cache: FLASHKDA_CACHE_DIR: expected a folder, found no home\n" in out
