# SPDX-License-Identifier: Apache-2.0
"""The cache folder as a whole: its list, its bound, its size, and homes in which nothing can be kept."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from flashkda.errors import ConfigError, KernelBuildError
from flashkda.jit import cache, cache_entries, cleaning, clear_cache, files, store, verify_cache
from tests.unit import jit_fakes

ROOT = Path(__file__).parents[2]
HOUR = 3600.0


@pytest.fixture
def trace(tmp_path, monkeypatch):
    """The stand-in installed, the cache empty and its own. The file holds a line for each compile."""
    monkeypatch.setenv("FLASHKDA_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("FLASHKDA_KERNEL_PATH", "FLASHKDA_NO_JIT", "FLASHKDA_CACHE_LIMIT"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "trace"
    path.touch()
    jit_fakes.install(monkeypatch.setattr, path)
    monkeypatch.setattr(store, "_warned", False)
    cache.forget_loaded()
    yield path
    cache.forget_loaded()


def build(*tags, hours_ago=0.0):
    for tag in tags:
        cache.build_kernel(jit_fakes.key(tag), None)
        if hours_ago:
            used(tag, hours_ago)


def used(tag, hours_ago):
    then = time.time() - hours_ago * HOUR
    os.utime(cache.entry_path(jit_fakes.key(tag)).with_suffix(".json"), (then, then))


def tags_left():
    return sorted(tag for tag in range(10) if cache.entry_path(jit_fakes.key(tag)).exists())


def entry_bytes(monkeypatch):
    """Bytes of one entry."""
    build(9)
    size = cleaning.cache_entries()[0].bytes
    clear_cache()
    return size


class TestList:
    def test_entries_the_oldest_first(self, trace):
        assert cache_entries() == [] and verify_cache() == [] and clear_cache() == (0, 0)
        build(1, hours_ago=1)
        build(2, hours_ago=3)
        build(3, hours_ago=2)
        found = cache_entries()
        keys = [jit_fakes.key(tag) for tag in (2, 3, 1)]
        assert [(e.name, e.arch, e.digest, e.path) for e in found] == [
            (key.name, key.arch, key.digest, cache.entry_path(key)) for key in keys
        ]
        assert {entry.state for entry in found} == {"ok"} and found[0].last_use < found[1].last_use
        assert all(entry.bytes > len(jit_fakes.content(keys[0])) for entry in found)

    def test_use_counts(self, trace):
        build(1, 2, hours_ago=2)
        cache.load_kernel(jit_fakes.key(1), None)
        assert [entry.digest for entry in cache_entries()] == [jit_fakes.key(2).digest, jit_fakes.key(1).digest]

    def test_what_is_wrong_is_said(self, trace, monkeypatch):
        build(1, 2, 3, 4)
        paths = {tag: cache.entry_path(jit_fakes.key(tag)) for tag in (1, 2, 3, 4)}
        paths[1].write_bytes(b"object of another thing")
        paths[2].with_suffix(".json").unlink()
        paths[3].chmod(0o666)
        problems = {entry.path: problem for entry, problem in verify_cache()}
        assert problems.keys() == {paths[1], paths[2], paths[3]}
        assert "not what was stored" in problems[paths[1]] and "is missing" in problems[paths[2]]
        assert "chmod go-w" in problems[paths[3]]
        # Only the content shows that the first is bad.
        assert {entry.path for entry in cache_entries() if entry.state == "bad"} == {paths[2]}
        monkeypatch.setattr(cleaning, "source_digest", lambda: 64 * "0")
        stale = next(entry for entry in cache_entries() if entry.path == paths[4])
        assert stale.state == "stale" and "other sources" in stale.reason

    def test_clearing(self, trace):
        build(1, 2, hours_ago=5)
        build(3)
        stray = cache.entry_path(jit_fakes.key(1)).parent / "notes.txt"
        stray.write_text("not ours")
        count, freed = clear_cache(older_than=HOUR)
        assert count == 2 and freed > 0 and tags_left() == [3]
        assert clear_cache()[0] == 1 and tags_left() == []
        assert list(stray.parent.iterdir()) == [stray]

    def test_what_is_in_use_is_not_cleared(self, trace):
        build(1, 2, 3)
        sidecar = cache.entry_path(jit_fakes.key(1)).with_suffix(".json")
        with sidecar.open() as reader, files.locked(cache.entry_path(jit_fakes.key(2)).with_suffix(".lock"), 0.0):
            fcntl.flock(reader, fcntl.LOCK_SH)
            assert clear_cache()[0] == 1 and tags_left() == [1, 2]
        assert clear_cache()[0] == 2


class TestBound:
    def test_the_least_recently_used_goes_first(self, trace, monkeypatch):
        size = entry_bytes(monkeypatch)
        build(1, hours_ago=1)
        build(2, hours_ago=3)
        build(3, hours_ago=2)
        monkeypatch.setenv("FLASHKDA_CACHE_LIMIT", str(3 * size))
        build(4)
        assert tags_left() == [1, 3, 4]
        cache.load_kernel(jit_fakes.key(3), None)
        build(5)
        assert tags_left() == [3, 4, 5]

    def test_a_kernel_larger_than_the_bound_is_kept_until_the_next(self, trace, monkeypatch):
        monkeypatch.setenv("FLASHKDA_CACHE_LIMIT", "0")
        build(1)
        assert tags_left() == [1]
        build(2)
        assert tags_left() == [2]

    def test_what_is_read_or_written_stays(self, trace, monkeypatch):
        build(1, 2, 3, hours_ago=1)
        monkeypatch.setenv("FLASHKDA_CACHE_LIMIT", "0")
        sidecar = cache.entry_path(jit_fakes.key(1)).with_suffix(".json")
        with sidecar.open() as reader, files.locked(cache.entry_path(jit_fakes.key(2)).with_suffix(".lock"), 0.0):
            fcntl.flock(reader, fcntl.LOCK_SH)
            build(4)
        assert tags_left() == [1, 2, 4]

    def test_a_reader_does_not_take_what_is_going(self, trace, monkeypatch):
        build(1)
        with cleaning._nobody_reads(cache.entry_path(jit_fakes.key(1)).with_suffix(".json")):
            place = store.Place(jit_fakes.key(1), cleaning.config.cache_dir())
            with pytest.raises(store.Unusable, match="evicted"):
                place.read()
        assert place.read() == jit_fakes.content(jit_fakes.key(1))

    @pytest.mark.parametrize("limit", ["1G", "unlimited"])
    def test_what_killed_writers_left_is_taken_away(self, trace, monkeypatch, limit):
        monkeypatch.setenv("FLASHKDA_CACHE_LIMIT", limit)
        build(1)
        folder = cache.entry_path(jit_fakes.key(1)).parent
        left = [folder / f".{cache.entry_path(jit_fakes.key(tag)).name}.tmp" for tag in (2, 3)]
        for path in left:
            path.write_bytes(b"half")
        with files.locked(cache.entry_path(jit_fakes.key(3)).with_suffix(".lock"), 0.0):
            build(4)
            assert [path.exists() for path in left] == [False, True]  # its writer lives
        build(5)
        assert not left[1].exists()


class TestManyEntries:
    def test_a_hit_does_not_depend_on_how_many_there_are(self, trace, tmp_path):
        """A folder of as many entries as three seconds make, a million at the most: a hit opens its own files."""
        key = jit_fakes.key(1)
        cache.load_kernel(key, None)
        folder = cache.entry_path(key).parent

        def fastest():
            best = 1.0
            for _ in range(20):
                cache.forget_loaded()
                start = time.perf_counter()
                cache.load_kernel(key, None)
                best = min(best, time.perf_counter() - start)
            return best

        alone = fastest()
        source, made, limit = folder / "source", 0, time.monotonic() + 3.0
        source.touch()
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            while made < 1_000_000 and time.monotonic() < limit:
                for _ in range(1000):
                    os.close(os.open(f"fake-{made:032x}.so", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=descriptor))
                    made += 1
        finally:
            os.close(descriptor)
        assert made >= 10_000
        among_many = fastest()
        print(f"{made} entries: {1e6 * alone:.0f} us alone, {1e6 * among_many:.0f} us among them")
        assert among_many < 5 * alone + 0.001 and trace.read_text().count("\n") == 1

    def test_a_hit_lists_no_folder(self, trace, monkeypatch):
        cache.load_kernel(jit_fakes.key(1), None)
        cache.forget_loaded()

        def listed(*arguments):
            raise AssertionError("a folder was listed")

        for name in ("listdir", "scandir"):
            monkeypatch.setattr(os, name, listed)
        assert cache.load_kernel(jit_fakes.key(1), None)() == jit_fakes.key(1)


class TestNothingCanBeKept:
    @pytest.fixture(autouse=True)
    def _several(self, trace):
        self.keys = [jit_fakes.key(tag) for tag in (1, 2, 3)]

    def load_all(self):
        """Load all kernels; how many warnings that cost."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for key in self.keys:
                assert cache.load_kernel(key, None)() == key
        assert all(warning.category is RuntimeWarning for warning in caught)
        return [str(warning.message) for warning in caught]

    def test_a_full_disk(self, trace, monkeypatch):
        """Every write fails half way, as the kernel's own limit makes it do."""
        monkeypatch.setattr(jit_fakes, "content", lambda key: f"object of {key}".encode() * 10_000)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            said = self.load_all()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert len(said) == 1 and "File too large" in said[0]
        left = [path for path in cleaning.config.cache_dir().rglob("*") if path.is_file() and path.suffix != ".lock"]
        assert left == []
        cache.forget_loaded()
        assert self.load_all() == [] and verify_cache() == []

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")
    def test_a_full_file_system(self, trace, tmp_path, monkeypatch):
        monkeypatch.setattr(jit_fakes, "content", lambda key: f"object of {key}".encode() * 10_000)
        home = tmp_path / "tiny"
        home.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(home)], capture_output=True)
        if done.returncode != 0:
            pytest.skip(f"mount is not permitted here: {done.stderr.decode().strip()}")
        try:
            monkeypatch.setenv("FLASHKDA_CACHE_DIR", str(home / "cache"))
            said = self.load_all()
            assert len(said) == 1 and "No space left" in said[0]
            assert [path for path in home.rglob("*") if path.is_file() and path.suffix != ".lock"] == []
        finally:
            subprocess.run(["umount", str(home)], check=True)

    def test_a_read_only_home(self, trace, monkeypatch):
        def refuse(path, *arguments, **options):
            raise OSError(30, "Read-only file system", str(path))

        monkeypatch.setattr(Path, "mkdir", refuse)
        said = self.load_all()
        assert len(said) == 1 and "Read-only file system" in said[0]

    def test_a_cache_that_became_read_only_still_serves(self, trace, monkeypatch):
        """What is there is loaded; nothing has to be written for it."""
        cache.load_kernel(self.keys[0], None)
        cache.forget_loaded()
        used(1, hours_ago=2)

        def refuse(*arguments, **options):
            raise OSError(30, "Read-only file system")

        for name in ("utime", "replace", "mkdir"):
            monkeypatch.setattr(os, name, refuse)
        monkeypatch.setattr(files, "locked", refuse)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert cache.load_kernel(self.keys[0], None)() == self.keys[0]
        assert trace.read_text().count("\n") == 1

    def test_no_home_at_all(self, trace, tmp_path):
        script = (
            "import os, sys, warnings; from pathlib import Path\n"
            "import pwd; pwd.getpwuid = lambda uid: (_ for _ in ()).throw(KeyError(uid))\n"
            "from tests.unit import jit_fakes; from flashkda.jit import cache\n"
            "jit_fakes.install(setattr, Path(sys.argv[1]))\n"
            "with warnings.catch_warnings(record=True) as caught:\n"
            "    warnings.simplefilter('always')\n"
            "    for tag in (1, 2):\n"
            "        assert cache.load_kernel(jit_fakes.key(tag), None)() == jit_fakes.key(tag)\n"
            "print(len(caught), caught[0].message, os.listdir('.'))"
        )
        gone = ("HOME", "XDG_CACHE_HOME", "FLASHKDA_CACHE_DIR")
        environment = {name: value for name, value in os.environ.items() if name not in gone}
        environment["PYTHONPATH"] = str(ROOT)
        (tmp_path / "empty").mkdir()
        command = [sys.executable, "-c", script, str(trace)]
        done = subprocess.run(command, env=environment, cwd=tmp_path / "empty", capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("1 ") and "a home folder for it" in done.stdout
        assert done.stdout.rstrip().endswith("[]")  # and no folder called ~


class TestSilence:
    def test_what_happens_is_told_to_those_who_listen(self, trace, caplog, monkeypatch):
        with caplog.at_level("INFO", logger="flashkda"):
            cache.load_kernel(jit_fakes.key(1), None)
        said = [record.getMessage() for record in caplog.records]
        path = cache.entry_path(jit_fakes.key(1))
        assert "compiling (" in said[0] and "is missing" in said[0] and "compiled in" in said[1]
        assert {record.name for record in caplog.records} == {"flashkda.jit"}
        caplog.clear()
        cache.forget_loaded()
        with caplog.at_level("INFO", logger="flashkda"):
            cache.load_kernel(jit_fakes.key(1), None)
        assert [record.getMessage().split(" in ")[0] for record in caplog.records] == [
            f"{jit_fakes.key(1)}: loaded from {path}"
        ]

    def test_nothing_is_printed_unless_asked_for(self, trace, capfd):
        for tag in (1, 2):
            cache.load_kernel(jit_fakes.key(tag), None)
        cache.forget_loaded()
        cache.load_kernel(jit_fakes.key(1), None)
        assert capfd.readouterr() == ("", "")


class TestSettings:
    @pytest.mark.parametrize(
        ("text", "limit"),
        [("", 1 << 30), ("0", 0), ("1000", 1000), ("2k", 2048), ("500M", 500 << 20), ("2G", 2 << 30), ("1GiB", 1 << 30),
         ("1 T", 1 << 40), ("unlimited", None)],
    )  # fmt: skip
    def test_the_bound(self, monkeypatch, text, limit):
        monkeypatch.setenv("FLASHKDA_CACHE_LIMIT", text)
        assert cleaning.config.cache_limit() == limit

    @pytest.mark.parametrize("text", ["-1", "many", "1.5G", "2X"])
    def test_a_bound_that_is_none(self, monkeypatch, text):
        monkeypatch.setenv("FLASHKDA_CACHE_LIMIT", text)
        with pytest.raises(ConfigError, match="FLASHKDA_CACHE_LIMIT"):
            cleaning.config.cache_limit()

    def test_a_compile_is_not_lost_to_a_bad_bound(self, trace, monkeypatch):
        monkeypatch.setenv("FLASHKDA_CACHE_LIMIT", "many")
        with pytest.raises(ConfigError):
            cache.load_kernel(jit_fakes.key(1), None)
        assert trace.read_text() == ""


def test_a_kernel_that_cannot_be_kept_is_an_error_of_prebuild(trace, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASHKDA_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning), pytest.raises(KernelBuildError, match="cannot be kept"):
        cache.build_kernel(jit_fakes.key(1), None)
    assert trace.read_text() == ""
