# SPDX-License-Identifier: Apache-2.0
"""Which files may become code of the process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flashkda.jit.trust import Untrusted, open_trusted, read_trusted


@pytest.fixture
def root(tmp_path):
    """A folder with a/b/file in it."""
    folder = tmp_path / "root"
    (folder / "a" / "b").mkdir(parents=True)
    for one in (folder, folder / "a", folder / "a" / "b"):
        one.chmod(0o755)
    (folder / "a" / "b" / "file").write_bytes(b"code")
    (folder / "a" / "b" / "file").chmod(0o644)
    return folder


NAME = "a/b/file"
PARTS = ("", "a", "a/b", NAME)


def test_what_is_ones_own_is_read(root):
    assert read_trusted(root, NAME) == b"code"


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o1777])
def test_what_others_can_write_to_is_refused(root, part, mode):
    (root / part).chmod(mode)
    with pytest.raises(Untrusted, match="chmod go-w") as caught:
        read_trusted(root, NAME)
    assert caught.value.path == root / part and str(root / part) in str(caught.value)


@pytest.mark.parametrize("part", PARTS)
def test_what_belongs_to_another_user_is_refused(root, part, monkeypatch):
    if os.geteuid() == 0:
        os.chown(root / part, 12345, -1)
    else:  # all of it is another user's then; the outermost is named
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        part = ""
    with pytest.raises(Untrusted, match="belongs to user") as caught:
        read_trusted(root, NAME)
    assert caught.value.path == root / part


def test_what_belongs_to_root_is_trusted_by_others(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    system = Path("/usr/bin/env").resolve()
    if system.stat().st_uid != 0:
        pytest.skip("the system's own files do not belong to root here (a user namespace)")
    assert read_trusted(system.parent, system.name)


@pytest.mark.parametrize("part", PARTS[1:])
@pytest.mark.parametrize("where", ["out", "in"])
def test_links_are_refused_below_the_root(root, tmp_path, part, where):
    target = (tmp_path if where == "out" else root) / "elsewhere"
    (root / part).rename(target)
    (root / part).symlink_to(target)
    with pytest.raises(Untrusted, match="symbolic link") as caught:
        read_trusted(root, NAME)
    assert caught.value.path == root / part


def test_the_root_itself_may_be_reached_by_a_link(root, tmp_path):
    (tmp_path / "link").symlink_to(root)
    assert read_trusted(tmp_path / "link", NAME) == b"code"


@pytest.mark.parametrize("name", ["../root/a/b/file", "a/../a/b/file", "/etc/passwd", "a//b/file", "./a/b/file", ""])
def test_names_that_lead_out_are_refused(root, name):
    with pytest.raises(Untrusted, match="outside"):
        read_trusted(root, name)


def test_what_is_no_file_is_refused_at_once(root):
    (root / "pipe").unlink(missing_ok=True)
    os.mkfifo(root / "pipe", 0o600)  # to open one waits for a writer
    for name in ("pipe", "a/b"):
        with pytest.raises(Untrusted, match="not a regular file"):
            read_trusted(root, name)


def test_a_missing_file_is_named(root):
    with pytest.raises(FileNotFoundError, match="a/b/none"):
        read_trusted(root, "a/b/none")
    with pytest.raises(FileNotFoundError, match="a/none"):
        read_trusted(root, "a/none/file")


def test_a_swap_after_the_check_changes_nothing(root, tmp_path):
    """What was opened is what was checked: another file of the same name comes too late."""
    with open_trusted(root, NAME) as descriptor:
        (tmp_path / "other").write_bytes(b"evil")
        os.replace(tmp_path / "other", root / NAME)
        assert os.read(descriptor, 10) == b"code"


def test_no_descriptor_is_left_open(root):
    before = len(os.listdir("/proc/self/fd"))
    read_trusted(root, NAME)
    (root / "a").chmod(0o777)
    for name in (NAME, "a/none", "none", "../x"):
        with pytest.raises((Untrusted, OSError)):
            read_trusted(root, name)
    assert len(os.listdir("/proc/self/fd")) == before
