# SPDX-License-Identifier: Apache-2.0
"""Messages, base classes and pickling of the errors, and the environment variables."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from flashkda import config, errors
from flashkda.capability import Reason

REASONS = (Reason("a.one", "x", "1", "2"), Reason("b.two", "y", "3", "4"))

EVERY = [
    errors.GeometryError("heads", "an int in 1..96", 0),
    errors.GeometryError.of([errors.Problem("heads", "few", "many"), errors.Problem("window", "short", "long")]),
    errors.ConfigError("FLASHKDA_X", "0 or 1", "'2'"),
    errors.UnsupportedError("fused", REASONS, hint="strict"),
    errors.TensorError("state", "dtype float32", "float16", "convert it"),
    errors.MetadataError("state_indices", 3, "a slot below 8", 9),
    errors.NotPreparedError("prepare first"),
    errors.PlanMismatchError("other kernels"),
    errors.StaleBindingError("bind again"),
    errors.KernelBuildError("no compiler", missing=["nvidia-cutlass-dsl"]),
    errors.KernelNotFoundError("commit() for sm_90a", ["a is empty", "b is closed"]),
    errors.KernelNotFoundError("commit() for sm_90a", ["a is empty"]).of("CommitGeometry(...)", "flashkda compile"),
]


@pytest.mark.parametrize("error", EVERY, ids=lambda error: type(error).__name__)
def test_pickles_whole(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.GeometryError, ValueError),
        (errors.ConfigError, ValueError),
        (errors.TensorError, ValueError),
        (errors.MetadataError, ValueError),
        (errors.NotPreparedError, RuntimeError),
        (errors.PlanMismatchError, RuntimeError),
        (errors.StaleBindingError, RuntimeError),
        (errors.KernelBuildError, RuntimeError),
        (errors.KernelNotFoundError, errors.KernelBuildError),
        (errors.UnsupportedError, Exception),
    ],
)
def test_bases(kind, builtin):
    assert issubclass(kind, errors.FlashKDAError)
    assert issubclass(kind, builtin)
    assert not issubclass(errors.FallbackWarning, errors.FlashKDAError)


def test_tensor_error_message():
    error = errors.TensorError("state", "dtype float32", "float16", "convert it")
    assert str(error) == "state: expected dtype float32, found float16; convert it"
    assert str(errors.TensorError("state", "a tensor", None)) == "state: expected a tensor, found None"


def test_metadata_error_names_the_entry():
    assert str(errors.MetadataError("state_indices", 3, "a slot below 8", 9)).startswith("state_indices[3]: ")


def test_unsupported_error_lists_every_reason_one_a_line():
    lines = str(errors.UnsupportedError("fused", REASONS)).splitlines()
    assert len(lines) == 3
    assert "fused" in lines[0]
    for line, reason in zip(lines[1:], REASONS, strict=True):
        assert all(part in line for part in (reason.code, reason.argument, reason.found, reason.needed))


def test_geometry_error_keeps_the_first_and_lists_all():
    problems = [errors.Problem("heads", "few", "many"), errors.Problem("window", "short", "long")]
    error = errors.GeometryError.of(problems)
    assert (error.argument, error.expected, error.found) == ("heads", "few", "many")
    assert error.problems == tuple(problems)
    assert "heads: expected few, found many" in str(error)
    assert "window: expected short, found long" in str(error)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, None), ("", None), ("auto", None), ("fused", "fused"), (" Reference ", "reference")],
)
def test_verify_path(monkeypatch, value, expected):
    monkeypatch.delenv("FLASHKDA_VERIFY_PATH", raising=False)
    if value is not None:
        monkeypatch.setenv("FLASHKDA_VERIFY_PATH", value)
    assert config.verify_path() == expected


def test_verify_path_refuses_other_values(monkeypatch):
    monkeypatch.setenv("FLASHKDA_VERIFY_PATH", "fusde")
    with pytest.raises(errors.ConfigError, match=r"FLASHKDA_VERIFY_PATH.*decomposed.*'fusde'"):
        config.verify_path()


@pytest.mark.parametrize(
    ("value", "expected"), [("", False), ("0", False), ("off", False), ("1", True), ("TRUE", True), ("yes", True)]
)
@pytest.mark.parametrize(
    ("name", "ask"), [("FLASHKDA_DEBUG_CHECKS", config.debug_checks), ("FLASHKDA_NO_JIT", config.no_jit)]
)
def test_switches(monkeypatch, name, ask, value, expected):
    monkeypatch.setenv(name, value)
    assert ask() is expected


@pytest.mark.parametrize(
    ("name", "ask"), [("FLASHKDA_DEBUG_CHECKS", config.debug_checks), ("FLASHKDA_NO_JIT", config.no_jit)]
)
def test_switches_refuse_other_values(monkeypatch, name, ask):
    monkeypatch.setenv(name, "maybe")
    with pytest.raises(errors.ConfigError, match=f"{name}.*'maybe'"):
        ask()


def test_kernel_path(monkeypatch, tmp_path):
    monkeypatch.delenv("FLASHKDA_KERNEL_PATH", raising=False)
    assert config.kernel_path() == ()
    monkeypatch.setenv("FLASHKDA_KERNEL_PATH", f"{tmp_path}::~/kernels:here")
    assert config.kernel_path() == (tmp_path, Path.home() / "kernels", Path.cwd() / "here")


def test_a_kernel_that_is_not_prebuilt():
    error = errors.KernelNotFoundError("commit() for sm_90a", ["a is empty", "b is closed"])
    found = error.of("CommitGeometry(...)", "flashkda compile --heads 5")
    assert str(found).splitlines() == [
        "CommitGeometry(...): commit() for sm_90a is not prebuilt, and FLASHKDA_NO_JIT forbids to compile it; "
        "build it with `flashkda compile --heads 5` and set FLASHKDA_KERNEL_PATH=DIR. Looked at:",
        "  - a is empty",
        "  - b is closed",
    ]
    assert (found.kernel, found.command, found.reasons) == (error.kernel, "flashkda compile --heads 5", error.reasons)


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHKDA_CACHE_DIR", str(tmp_path))
    assert config.cache_dir() == tmp_path
    monkeypatch.setenv("FLASHKDA_CACHE_DIR", "~/kernels")
    assert config.cache_dir() == Path.home() / "kernels"
    monkeypatch.delenv("FLASHKDA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert config.cache_dir() == tmp_path / "xdg" / "flashkda"
