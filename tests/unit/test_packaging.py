# SPDX-License-Identifier: Apache-2.0
"""sdist and wheel: built, looked into, and the wheel tried in a fresh environment; versions and pins agree."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import flashkda
from tools import check_text, smoke_wheel

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Folder with sdist and wheel, the wheel built from the sdist, as `make dist` does."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = [path.relative_to(ROOT).as_posix() for path in check_text.repository_files(ROOT)]
    assert names == {name for name in sources if name.startswith("flashkda/")}


def test_the_sdist_has_the_checkout(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    sources = {path.relative_to(ROOT).as_posix() for path in check_text.repository_files(ROOT)}
    assert names - sources == {"PKG-INFO"}
    assert {name for name in sources - names if not name.startswith(".ci/")} == set()


def test_the_wheel_works_in_a_fresh_environment(wheel, capsys):
    assert smoke_wheel.main([str(wheel)]) == 0
    assert capsys.readouterr().out.count("ok  ") == 5


def test_a_broken_wheel_is_found(wheel, tmp_path, capsys):
    broken = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(broken, "w") as new:
        for name in old.namelist():
            if name != "flashkda/geometry.py":
                new.writestr(name, old.read(name))
    assert smoke_wheel.main([str(broken)]) == 1
    assert "No module named 'flashkda.geometry'" in capsys.readouterr().err


def test_the_metadata(metadata):
    assert metadata["Name"] == "flashkda" and metadata["Version"] == flashkda.__version__
    assert set(metadata.get_all("Provides-Extra")) == {"bench", "cli", "dev", "docs"}
    required = [Requirement(text) for text in metadata.get_all("Requires-Dist")]
    # Engines carry these: a new one is a decision, and has a line in docs/dependencies.md.
    always = {requirement.name for requirement in required if requirement.marker is None}
    documented = re.findall(r"^\| ([a-z-]+) \|", (ROOT / "docs" / "dependencies.md").read_text(), re.MULTILINE)
    assert always == set(documented) - {"package"}


def test_what_is_required_is_pinned(metadata):
    lines = (ROOT / "constraints.txt").read_text().split("\n")
    pins = {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines if "==" in line[:60]}
    required = [Requirement(text) for text in metadata.get_all("Requires-Dist")]
    for requirement in required:
        name = canonicalize_name(requirement.name)
        if name not in ("flashkda", "cuda-python"):  # itself; and what builds of torch pin themselves
            assert requirement.specifier.contains(pins[name]), name


def test_the_changelog():
    text = (ROOT / "CHANGELOG.md").read_text()
    first, *versions = re.findall(r"^## \[([^\]]+)\]", text, re.MULTILINE)
    dated = re.findall(r"^## \[[^\]]+\] - \d{4}-\d\d-\d\d$", text, re.MULTILINE)
    assert first == "Unreleased" and len(dated) == len(versions)
    assert versions == sorted(versions, key=Version, reverse=True)
    assert all(Version(version) <= Version(flashkda.__version__) for version in versions)
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= kinds
