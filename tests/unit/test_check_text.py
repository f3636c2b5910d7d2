# SPDX-License-Identifier: Apache-2.0
"""tools/check_text.py finds each fault it is there for, and passes clean files."""

from __future__ import annotations

import pytest

from tools import check_text

SPDX = "# SPDX-License-Identifier: Apache-2.0\n"


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("a.py", SPDX + "x = 1 \n", "2: trailing whitespace"),
        ("a.py", SPDX + "if x:\n\ty = 1\n", "3: tab in Python"),
        ("a.py", SPDX + "x = 1", "2: no newline at the end"),
        ("a.py", SPDX + "x = 1\n\n", "3: empty lines at the end"),
        ("a.py", "x = 1\n", "1: expected '# SPDX"),
        ("a.py", "x = 1\ny = 2\n" + SPDX, "1: expected '# SPDX"),
        ("a.md", "see [b](b.md)\n", "1: link to b.md"),
        ("a.md", "see [b](docs/b.md#part)\n", "1: link to docs/b.md#part"),
        ("a.md", "see [b]\n\n[b]: b.md\n", "3: link to b.md"),
        ("a.md", "![picture](p.png 'title')\n", "1: link to p.png"),
    ],
)
def test_finds(tmp_path, capsys, name, text, fault):
    (tmp_path / name).write_text(text)
    assert check_text.main(tmp_path) == 1
    assert f"{name}:{fault}" in capsys.readouterr().out


def test_passes(tmp_path, capsys):
    (tmp_path / "a.py").write_text("#!/usr/bin/env python3\n" + SPDX + "x = 1\n")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "Makefile").write_text("all:\n\techo\n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0 \n\n")
    (tmp_path / "a.md").write_text(
        "[a](a.py#top) [web](https://example.org/x) [mail](mailto:a@example.org) [part](#part)\n"
        "`[not](a-link.md)`\n\n```\n[not](a-link.md)\n```\n"
    )
    assert check_text.main(tmp_path) == 0
    assert capsys.readouterr().out == ""
