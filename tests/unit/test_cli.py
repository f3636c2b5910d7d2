# SPDX-License-Identifier: Apache-2.0
"""The command: its statuses, its one-line errors, geometries by flags, and what each of its commands shows."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import click
import pytest

import flashkda
from flashkda import errors
from flashkda.capability import ARCHITECTURES, Reason
from flashkda.cli import app, bench, options, text
from flashkda.cli.status import Status
from flashkda.geometry import VerifyGeometry, preset
from tests.unit.test_readme import document, table

ROOT = Path(__file__).parent.parent.parent
K3 = ("--preset", "kimi-k3", "--tp", "8", "--window", "4")


def process(*command, **variables):
    """Run Python in a process of its own, on this checkout."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLASHKDA_")} | variables
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, cwd=ROOT)


def query_json(run, *arguments):
    status, out, _ = run("query", *arguments, "--json")
    assert status == Status.OK
    return json.loads(out)


# --- starting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [["--help"], ["query", "--help"], ["query", *K3, "--arch", "sm_90a"]], ids=" ".join
)
def test_starts_without_torch_or_the_dsl(arguments):
    heavy = ("torch", "cutlass", "tvm_ffi", "numpy")
    code = (
        f"import sys, flashkda.cli; s = flashkda.cli.main({arguments}); print([m for m in {heavy} if m in sys.modules])"
    )
    done = process("-c", code)
    assert done.stdout.split("\n")[-2] == "[]", done.stderr


def test_is_a_module_too():
    done = process("-m", "flashkda", "--version")
    assert (done.returncode, done.stdout) == (0, f"flashkda {flashkda.__version__}\n")
    done = process("-m", "flashkda", "query", "--heads", "0", "--window", "4")
    assert (done.returncode, done.stderr) == (2, "error: heads: expected an int in 1..96, found 0\n")


def test_without_click_it_says_what_to_install():
    code = "import sys; sys.modules['click'] = None; import flashkda.cli; sys.exit(flashkda.cli.main(['info']))"
    done = process("-c", code)
    assert (done.returncode, done.stdout) == (Status.MISSING, "")
    assert done.stderr == "error: the command needs click: pip install 'flashkda[cli]'\n"


def test_no_escape_codes_where_there_is_no_terminal():
    for arguments in (["--help"], ["info"], ["query", *K3, "--arch", "all"]):
        done = process("-m", "flashkda", *arguments, TERM="xterm-256color")
        assert done.returncode == 0 and done.stdout
        assert "\x1b" not in done.stdout + done.stderr


# --- statuses and errors --------------------------------------------------------------------------------------------


def test_the_statuses_are_documented(run):
    _, out, _ = run("--help")
    documented = {int(row[0]): row[1] for row in table(document("cli.md"), "status")}
    assert documented == {status.value: status.meaning for status in Status}
    for status in Status:
        assert re.search(rf"^ +{status.value:d} +{status.meaning}$", out, re.MULTILINE)


def test_without_a_command_it_shows_help_and_fails(run):
    status, out, err = run()
    assert (status, out) == (Status.USAGE, "") and "Commands:" in err


REASON = Reason("arch.cpu", "arch", "cpu", "another")
RAISED = [
    (errors.GeometryError.of([errors.Problem("a", "b", "c"), errors.Problem("d", "e", "f")]), 2,
     "2 problems with the geometry or plan: a: expected b, found c; d: expected e, found f"),
    (errors.ConfigError("FLASHKDA_X", "1", "2"), 2, "FLASHKDA_X: expected 1, found 2"),
    (errors.UnsupportedError("fused", [REASON, REASON]), 3, f"the fused path is refused: {REASON}; {REASON}"),
    (errors.KernelBuildError("no DSL", missing=["dsl"]), 4, "no DSL"),
    (errors.KernelBuildError("it does not compile"), 1, "it does not compile"),
    (ModuleNotFoundError("No module named 'torch'"), 4, "No module named 'torch'"),
    (PermissionError(13, "Permission denied", "/x"), 1, "[Errno 13] Permission denied: '/x'"),
    (RuntimeError("odd"), 1, "RuntimeError: odd (a fault of flashkda? -v shows where)"),
    (KeyboardInterrupt(), 130, None),
]  # fmt: skip


@pytest.mark.parametrize(("error", "status", "line"), RAISED, ids=lambda value: type(value).__name__)
def test_an_error_is_one_line_and_a_status(run, monkeypatch, error, status, line):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(flashkda, "query", fail)
    found = run("query", *K3)
    assert found[:2] == (status, "")
    assert found[2] == (f"error: {line}\n" if line is not None else "\n")


@pytest.mark.parametrize("arguments", [["-v", "query", "--heads", "0"], ["query", "-v", "--heads", "0"]], ids=" ".join)
def test_with_v_a_traceback_stands_before_the_line(run, arguments):
    status, _, err = run(*arguments, "--window", "4")
    assert status == Status.USAGE
    assert err.startswith("Traceback (most recent call last):")
    assert err.endswith("\nerror: heads: expected an int in 1..96, found 0\n")


SEE = " (see flashkda query --help)"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["no-such"], "No such command 'no-such' (see flashkda --help)"),
        (["query", "--tp", "8"], "--tp belongs to --preset" + SEE),
        (["query", "--heads", "8"], "a geometry is given by --preset, or by --heads and --window" + SEE),
        (["query", *K3, "--heads", "8"], "--heads follows from --preset and --tp: leave it out" + SEE),
        (["query", "--preset", "kimi-k3", "--tp", "7"],
         "tp: expected an int >= 1 that divides the 96 heads of kimi-k3, found 7"),
        (["query", *K3, "--alignment", "x"],
         "Invalid value for '--alignment': 'x' is not a valid integer" + SEE),
    ],
)  # fmt: skip
def test_a_wrong_command_line(run, arguments, line):
    assert run(*arguments) == (Status.USAGE, "", f"error: {line}\n")


def test_a_warning_is_one_line(run, monkeypatch):
    query = flashkda.query

    def warns(*arguments, **options):
        warnings.warn("a:\n  - b\n  - c", errors.FallbackWarning, stacklevel=2)
        return query(*arguments, **options)

    monkeypatch.setattr(flashkda, "query", warns)
    assert run("query", *K3, "--arch", "cpu")[2] == "warning: a: b; c\n"


def test_v_shows_what_the_library_logs(run, monkeypatch):
    query, log = flashkda.query, logging.getLogger("flashkda")

    def logs(*arguments, **options):
        log.getChild("part").info("an info")
        log.debug("a detail")
        return query(*arguments, **options)

    monkeypatch.setattr(flashkda, "query", logs)
    before = log.level, list(log.handlers)
    info, debug = "INFO flashkda.part: an info\n", "DEBUG flashkda: a detail\n"
    for flags, shown in ([], ""), (["-v"], info), (["-vv"], info + debug), (["-v", "-v"], info + debug):
        assert run("query", *K3, *flags, "--arch", "cpu")[2] == shown
    assert (log.level, log.handlers) == before


# --- query ----------------------------------------------------------------------------------------------------------


def test_query_lists_every_reason(run, monkeypatch):
    monkeypatch.setattr("flashkda.capability._importable", lambda module: False)
    flags = ["--heads", "4", "--window", "3", "--head-dim", "64", "--conv-width", "3", "--arch", "sm_80"]
    found = flashkda.query(VerifyGeometry(4, 3, head_dim=64, conv_width=3), "sm_80")
    assert len(found.fused.reasons) == 5
    status, out, _ = run("query", *flags)
    assert status == Status.OK
    assert all(f"\n  - {reason}\n" in out for reason in found.fused.reasons)
    (architecture,) = query_json(run, *flags)["architectures"]
    for path in ("fused", "decomposed", "reference"):
        support = found.support(path)
        assert architecture["paths"][path] == {
            "supported": support.supported,
            "measured": support.measured,
            "reasons": [reason.to_dict() for reason in support.reasons],
        }
    codes = {
        reason["code"]
        for reason in query_json(run, *flags, "--no-toolchain")["architectures"][0]["paths"]["fused"]["reasons"]
    }
    assert codes == {"arch.no_cluster", "geometry.head_dim", "geometry.conv_width"}


def test_query_fails_where_the_path_that_is_asked_for_is_refused(run):
    for arch, status in ("sm_90a", Status.OK), ("sm_80", Status.REFUSED), ("sm_90a,sm_80", Status.REFUSED):
        assert run("query", *K3, "--arch", arch, "--path", "fused")[0] == status
    assert run("query", *K3, "--arch", "sm_80")[0] == Status.OK


def test_architectures(run):
    assert options.archs_of(("sm_80, cpu", "sm_80")) == ["sm_80", "cpu"]
    assert options.archs_of(("cpu", "all")) == ["cpu", *ARCHITECTURES]
    found = query_json(run, *K3)  # of this machine
    assert [one["arch"] for one in found["architectures"]] == [flashkda.capability.detect_arch()]


FLAGS = {
    "heads": (["--heads", "7"], 7),
    "window": (["--window", "5"], 5),
    "state_dtype": (["--state-dtype", "bfloat16"], "bfloat16"),
    "conv_layout": (["--conv-layout", "DS"], "DS"),
    "conv_weight_dtype": (["--conv-weight-dtype", "bfloat16"], "bfloat16"),
    "norm_weight_dtype": (["--norm-weight-dtype", "bfloat16"], "bfloat16"),
    "gate": (["--gate", "softplus"], "softplus"),
    "lower_bound": (["--lower-bound", "-2.5"], -2.5),
    "norm": (["--no-norm"], False),
    "alignment": (["--alignment", "2"], 2),
    "null_slot": (["--null-slot", "-1"], -1),
    "index_dtype": (["--index-dtype", "int64"], "int64"),
    "has_num_accepted": (["--num-accepted"], True),
    "records": (["--records", "indices"], "indices"),
    "norm_eps": (["--norm-eps", "1e-6"], 1e-6),
    "head_dim": (["--head-dim", "64"], 64),
    "conv_width": (["--conv-width", "3"], 3),
}


def test_every_field_of_the_geometry_has_a_flag():
    fields = [field.name for field in dataclasses.fields(VerifyGeometry)]
    assert list(options._FIELDS) == list(FLAGS) == fields


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_reaches_the_geometry(run, name):
    flags, value = FLAGS[name]
    base = [part for key in ("heads", "window") if key != name for part in FLAGS[key][0]]
    geometry = VerifyGeometry.from_dict(query_json(run, *base, *flags, "--arch", "cpu")["geometry"])
    lower_bound = {"lower_bound": None} if name == "gate" else {}
    assert geometry == VerifyGeometry(7, 5).replace(**{name: value}, **lower_bound)


def test_a_preset_by_flags(run):
    found = query_json(run, "--preset", "kimi-linear", "--tp", "4", "--arch", "cpu")
    assert VerifyGeometry.from_dict(found["geometry"]) == preset("kimi-linear", tp=4)
    found = query_json(run, *K3, "--state-dtype", "bfloat16", "--arch", "cpu")
    assert VerifyGeometry.from_dict(found["geometry"]) == preset("kimi-k3", 8, 4, state_dtype="bfloat16")


# --- info, bench, demo ----------------------------------------------------------------------------------------------


def test_info(run, monkeypatch):
    monkeypatch.setenv("FLASHKDA_VERIFY_PATH", "reference")
    found = json.loads(run("info", "--json")[1])
    assert found["versions"]["flashkda"] == flashkda.__version__
    assert found["environment"]["FLASHKDA_VERIFY_PATH"] == "reference"
    assert [run["model"] for run in found["runs"]] == list(flashkda.PRESETS)
    assert {run["path"] for run in found["runs"]} == {"reference"}
    status, out, err = run("info")
    assert (status, err) == (Status.OK, "")
    assert re.search(r"^FLASHKDA_VERIFY_PATH +reference$", out, re.MULTILINE)
    assert re.search(r"^kimi-k3 +8 +12 +4 +\w+ +reference", out, re.MULTILINE)


def test_bench_is_that_of_a_checkout(run, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    status, out, err = run("bench")
    assert (status, out) == (Status.MISSING, "") and "checkout" in err and err.count("\n") == 1
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    script = tmp_path / "benchmarks" / "__main__.py"
    script.write_text(
        "import sys, json; json.dump(sys.argv[1:], open('got', 'w')); sys.exit((0, 0, 2, 5)[len(sys.argv) - 1])"
    )
    assert run("bench", "--quick")[0] == Status.OK
    assert json.loads((tmp_path / "got").read_text()) == ["--quick"]
    assert run("bench", "a", "b")[0] == Status.USAGE
    assert run("bench", "--", "--help", "--other", "1")[0] == Status.FAILED
    assert json.loads((tmp_path / "got").read_text()) == ["--help", "--other", "1"]


def test_demo(run, monkeypatch):
    from flashkda import demo

    given = []
    monkeypatch.setattr(demo, "main", lambda arguments: given.append(arguments) or len(given) - 1)
    assert [run("demo")[0], run("demo", "--window", "8")[0]] == [Status.OK, Status.FAILED]
    assert given == [["--window", "4"], ["--window", "8"]]


# --- text -----------------------------------------------------------------------------------------------------------


def test_tables_and_sizes():
    assert text.table(("a", "long"), [("wide", 1), ("b", "")]) == "a     long\nwide  1\nb"
    assert [text.size(n) for n in (0, 1023, 1536, 3 << 20)] == ["0 B", "1023 B", "1.5 KiB", "3.0 MiB"]
    assert text.one_line("") == ""
    assert text.one_line("head:\n  - a\n  - b") == "head: a; b"


def test_every_command_takes_v():
    def commands(group):
        for command in group.commands.values():
            yield from commands(command) if isinstance(command, click.Group) else [command]

    for command in commands(app.command):
        assert any("-v" in parameter.opts for parameter in command.params), command.name
        assert command.help and len(command.get_short_help_str(60)) < 60 and "..." not in command.get_short_help_str(60)
