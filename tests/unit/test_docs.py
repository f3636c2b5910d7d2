# SPDX-License-Identifier: Apache-2.0
"""The site of the documents: generated tables, code blocks and command lines hold, and broken links are refused."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from flashkda.cli.app import command
from flashkda.ops.validate import SPECS
from tools import op_tables
from tools.docs_hooks import _PAGES

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = [ROOT / name for name in _PAGES] + sorted((ROOT / "docs").rglob("*.md"))


def test_the_pages_of_the_ops_have_the_tensors_that_bindings_take():
    assert op_tables.main([]) == 0, "run: python tools/op_tables.py --write"
    assert {path.stem for path in (ROOT / "docs" / "ops").glob("*.md")} == set(op_tables.OPS)
    assert set(op_tables.specs()) == set(SPECS)


def test_a_stale_page_is_found_and_written(monkeypatch, tmp_path, capsys):
    docs = ROOT / "docs"
    (tmp_path / "ops").mkdir()
    (tmp_path / "tensors.md").write_text((docs / "tensors.md").read_text())
    for name in op_tables.OPS:
        (tmp_path / "ops" / f"{name}.md").write_text((docs / "ops" / f"{name}.md").read_text())
    stale = tmp_path / "ops" / "decode.md"
    stale.write_text(stale.read_text().replace("**mutated**", "read"))
    monkeypatch.setattr(op_tables, "_DOCS", tmp_path)
    assert op_tables.main([]) == 1 and str(stale) in capsys.readouterr().out
    assert op_tables.main(["--write"]) == 0
    assert stale.read_text() == (docs / "ops" / "decode.md").read_text()
    for text in ("", op_tables.BEGIN, op_tables.END + op_tables.BEGIN):
        with pytest.raises(ValueError, match="expected one"):
            op_tables.replace(text, "")


def test_the_quick_start_runs(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "quickstart.md").read_text(), re.DOTALL)
    names = {}
    exec(compile(block, "quickstart.md", "exec"), names)
    assert "torch.Size([3, 12, 128])" in capsys.readouterr().out
    assert names["step"]["out"].isfinite().all()
    assert names["tensors"]["num_accepted"].tolist() == [1, 1, 1]


def command_lines(text):
    """The lines of shell blocks that run `flashkda`, continued lines joined, without comments."""
    for block in re.findall(r"```(?:sh|bash|dockerfile)\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").split("\n"):
            words = shlex.split(line, comments=True)
            if "flashkda" in words:
                words = words[words.index("flashkda") + 1 :]
                yield words[: next((i for i, word in enumerate(words) if word in ("|", ">", "&&", "||")), None)]


LINES = [(path, words) for path in DOCUMENTS for words in command_lines(path.read_text())]


@pytest.mark.parametrize(
    ("path", "words"), LINES, ids=lambda value: " ".join(value) if isinstance(value, list) else value.name
)
def test_command_lines_are_understood(path, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "geometries.json").touch()  # of docs/cli.md
    group, context = command, None
    while isinstance(group, click.Group) and words and not words[0].startswith("-"):
        name, words = words[0], words[1:]
        context = click.Context(group, context, info_name="flashkda")
        assert name in group.commands, f"flashkda {name}"
        group = group.commands[name]
    if "--help" not in words:
        group.make_context(group.name, list(words), parent=context)


def test_the_reference_of_the_command_names_every_command():
    text = (ROOT / "docs" / "cli.md").read_text()
    assert all(f"`flashkda {name}" in text for name in command.commands)


# --- links ----------------------------------------------------------------------------------------------------------


def build(tmp_path, text):
    """The result of a strict build of one page in this repository's configuration, and the page."""
    (tmp_path / "docs").mkdir(exist_ok=True)
    (tmp_path / "docs" / "index.md").write_text(text)
    (tmp_path / "docs" / "other.md").write_text("# Other\n\n## Part\n")
    config = (
        (ROOT / "mkdocs.yml").read_text().split("\nnav:")[0].replace("tools/docs_hooks.py", str(tmp_path / "hooks.py"))
    )
    (tmp_path / "mkdocs.yml").write_text(config)
    hooks = (
        (ROOT / "tools" / "docs_hooks.py").read_text().replace("Path(__file__).parent.parent", "Path(__file__).parent")
    )
    (tmp_path / "hooks.py").write_text(hooks)
    for name in _PAGES:
        (tmp_path / name).write_text("# A page\n\nsee [other](docs/other.md#part)\n")
    (tmp_path / "code.py").write_text("x = 1\n")
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build"], cwd=tmp_path, capture_output=True, text=True)
    return done, tmp_path / "build" / "docs"


def test_links_out_of_the_documents_stay_in_the_site(tmp_path):
    done, site = build(
        tmp_path, "[a](other.md#part) [b](../code.py) [c](../CONTRIBUTING.md) [d](https://example.org/x)\n"
    )
    assert done.returncode == 0, done.stderr
    links = set(re.findall(r'href="([^"#]+(?:#part)?)"', (site / "index.html").read_text()))
    assert {"other.html#part", "source/code.py", "contributing.html", "https://example.org/x"} <= links
    assert (site / "source" / "code.py").read_text() == "x = 1\n"
    assert 'href="other.html#part"' in (site / "contributing.html").read_text()


@pytest.mark.parametrize("link", ["none.md", "other.md#none", "../none.py", "../../outside.md", "#none", "/other.md"])
def test_a_broken_link_is_refused(tmp_path, link):
    done, _ = build(tmp_path, f"see [this]({link})\n")
    assert done.returncode == 1 and "Aborted with" in done.stderr + done.stdout
