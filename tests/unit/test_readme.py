# SPDX-License-Identifier: Apache-2.0
"""What the README and the documents say, held against the code: commands, code blocks, tables and names."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from flashkda import errors, query
from flashkda.capability import ARCHITECTURES
from flashkda.geometry import MAX_HEADS, MAX_WINDOW, PRESETS, VerifyGeometry
from flashkda.ops import reference
from flashkda.ops.validate import SPECS
from tools import readme_table

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = DOCUMENTS[0].read_text()
K3 = VerifyGeometry(12, 4)


def document(name):
    return (ROOT / "docs" / name).read_text()


def table(text, first):
    """The rows of the Markdown table whose header begins with ``first``, as lists of cells without backticks."""
    lines = text.split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("`", "").replace("\\*", "*") for cell in line.strip("|").split(" | ")])
    return rows


# --- commands and code ----------------------------------------------------------------------------------------------


def test_the_python_block_runs(monkeypatch):
    for name in list(os.environ):
        if name.startswith("FLASHKDA_") and name != "FLASHKDA_CACHE_DIR":
            monkeypatch.delenv(name)
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.FallbackWarning)
        exec(compile(block, "README.md", "exec"), names)
    assert names["tensors"]["out"].isfinite().all()
    assert names["plan"].geometry == K3


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_exist(path):
    text = path.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE))
    assert named <= targets
    for script in re.findall(r"python ([a-z_/]+\.py)", text):
        assert (ROOT / script).is_file(), script
    if path.name == "README.md":
        assert {"demo", "test", "bench", "docs", "gpu-evidence"} <= named


def run(*command):
    """What a Python command prints, run in the checkout."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLASHKDA_VERIFY")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    environment["OMP_NUM_THREADS"] = "1"  # tensors this small are slower on more, and much slower on a busy machine
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_example_runs():
    printed = run("examples/engine_layer.py")
    assert printed.count("the same outputs") == 3


def test_the_command_lines_run():
    # `compile` of the same set takes its time: `make kernels` runs it, and tests/unit/test_docs.py looks at its flags.
    lines = [line.split("#")[0].split() for line in README.split("\n") if line.startswith("flashkda ")]
    assert [line[1] for line in lines] == ["info", "query", "compile"]
    makefile = (ROOT / "Makefile").read_text()
    assert " ".join(lines[2][:-1]) in makefile
    assert "would run" in run("-m", *lines[0])
    assert "supported" in run("-m", *lines[1])


# --- tables and names -----------------------------------------------------------------------------------------------


def test_the_support_table_is_what_query_says():
    yes = {"yes": True, "no": False}
    rows = {row[0].split()[0]: [yes[cell] for cell in row[1:]] for row in table(README, "architecture")}
    assert rows.keys() == {*ARCHITECTURES, "cpu"}
    for arch, cells in rows.items():
        found = query(K3, arch, toolchain=False)
        paths = [found.fused, found.decomposed, found.reference]
        assert cells == [*(path.supported for path in paths), any(path.measured for path in paths)], arch


def test_the_limits_and_presets():
    (row,) = [row for row in table(README, "geometry") if row[0].startswith("heads")]
    assert row[1] == f"1..{MAX_HEADS}, 1..{MAX_WINDOW}"
    assert all(f"`{name}`" in README for name in PRESETS)


def test_the_environment_variables():
    config = (ROOT / "flashkda" / "config.py").read_text()
    read = set(re.findall(r'(?:environ\.get|_switch)\("(FLASHKDA_\w+)"', config))
    assert {row[0] for row in table(README, "variable")} == read
    for path in DOCUMENTS:
        assert set(re.findall(r"\bFLASHKDA_\w+", path.read_text())) <= read


def test_the_tensors_are_those_that_bind_checks():
    rows = {row[0]: row[1:] for row in table(document("tensors.md"), "name")}
    assert list(rows) and set(rows) == set(SPECS)
    short = {"bfloat16": "bf16", "float32": "fp32"}
    for name, (shape, dtype, layout, aligned) in rows.items():
        spec = SPECS[name]
        # The conv's width is a number in the document: the kernels have no other.
        assert shape == f"[{', '.join(spec.shape)}]".replace("W", "4"), name
        assert dtype == short.get(spec.dtype, spec.dtype), name
        assert aligned == ("yes" if spec.aligned else "no"), name
        assert ("dense" in layout) == (spec.layout == "dense"), name


def test_the_reasons_and_errors():
    text = document("planner.md")
    archs = [*ARCHITECTURES, "cpu", "sm_75"]
    geometry = K3.replace(head_dim=64, conv_width=3)
    codes = {reason.code for arch in archs for reason in query(geometry, arch, toolchain=False).reasons}
    assert {row[0] for row in table(text, "code")} == {*codes, "dsl.missing"}
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]
    public = {kind.__name__ for kind in kinds if issubclass(kind, errors.FlashKDAError)} - {"FlashKDAError"}
    public = {name for name in public if not name.startswith("_")}
    assert {name for row in table(text, "error") for name in row[0].split(", ")} == public


def test_the_places_of_the_math():
    for row in table(document("math.md"), "stage"):
        assert callable(getattr(reference, row[3])), row
        assert (ROOT / "flashkda" / row[2]).is_file(), row


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_named_in_backticks_exist(path):
    roots = (ROOT, ROOT / "flashkda")
    for name in re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.(?:py|md))?)`", path.read_text()):
        made = name.startswith(("benchmarks/", "evidence/"))
        assert made or any((root / name).exists() for root in roots), name


# --- the tables of results ------------------------------------------------------------------------------------------


def row(impl, n, t, us, **more):
    return {"impl": impl, "N": n, "T": t, "H": 12, "state_dtype": "float32", "us_per_layer": us, "spread_us": 0, **more}


def test_the_readme_shows_the_results_that_are_kept():
    tables = readme_table.render(ROOT / "benchmarks" / "results")
    assert readme_table.replace(README, tables) == README, "run: python tools/readme_table.py --write"


def test_results_become_tables(tmp_path):
    rows = [row("other", 8, 4, 3), row("flashkda-decomposed", 1, 4, 9), row("flashkda-fused", 1, 4, 4.5)]
    rows.append(row("flashkda-fused", 1, 4, 4, state_dtype="bfloat16"))
    (tmp_path / "x-h200.json").write_text(json.dumps({"gpu": "X", "rows": rows, "host_us": 1}))
    lines = readme_table.render(tmp_path).split("\n")
    assert lines[0] == "Verify, microseconds a layer: X, 12 heads, float32 state (`benchmarks/results/x-h200.json`)"
    assert lines[2:8] == [
        "| | N1 T4 | N8 T4 |",
        "|---|---|---|",
        "| one launch | 4.50 | - |",
        "| three launches | 9.00 | - |",
        "| other | - | 3.00 |",
        "| three / one | 2.00 | - |",
    ]
    assert lines[9] == "Verify, microseconds a layer: X, 12 heads, bfloat16 state (`benchmarks/results/x-h200.json`)"
    (tmp_path / "x-h200.json").write_text(json.dumps([*rows[:1], row("flashkda-commit", 1, 4, 0.5)]))
    verify, of_round = readme_table.render(tmp_path).split("\n\nThe rest of a round, ")
    assert "commit" not in verify and "| commit, all layers in one launch | 0.50 |" in of_round
    (tmp_path / "x-h200.json").write_text(json.dumps([row("peer-y", 1, 4, 7, covers="the rule")]))
    text = readme_table.render(tmp_path)
    assert "X" not in text and "| peer-y: the rule | 7.00 |" in text


def test_rounds_stand_beside_those_of_others(tmp_path):
    published = json.loads(readme_table.PUBLISHED.read_text())
    rows = [row("flashkda-round", 128, 4, 60), row("flashkda-round", 1, 4, 3.25), row("flashkda-fused", 1, 4, 3)]
    (tmp_path / "x.json").write_text(json.dumps({"gpu": published["gpu"], "rows": rows}))
    *_, last = readme_table.render(tmp_path).split("\n\nA round, microseconds a layer, beside others' ")
    assert published["source"] in last
    assert last.split("\n")[2:] == [
        "| | N1 T4 | N32 T4 | N128 T4 |",
        "|---|---|---|---|",
        "| FlashKDA, verify and commit | 3.25 | - | 60.00 |",
        "| vLLM | 14.4 | 59 | 219 |",
        "| SGLang | 9.8 | - | - |",
        "| cuLA | - | 36.0 | 87.5 + its flush |",
    ]
    for other in ({"gpu": "Y", "rows": rows}, {"gpu": published["gpu"], "rows": rows[2:]}):
        (tmp_path / "x.json").write_text(json.dumps(other))
        assert "beside others" not in readme_table.render(tmp_path)


def test_wrong_results_and_marks_are_refused(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([row("one", 1, 4, 1), row("one", 1, 4, 2)]))
    with pytest.raises(ValueError, match="one has N1 T4 twice"):
        readme_table.render(tmp_path)
    for text in ("", readme_table.BEGIN, readme_table.END + readme_table.BEGIN):
        with pytest.raises(ValueError, match="expected one"):
            readme_table.replace(text, "")
    assert readme_table.render(tmp_path / "none") == readme_table.NOTHING
