# SPDX-License-Identifier: Apache-2.0
"""Check the text files of the repository: whitespace, final newlines, licence lines and links between documents.

    python tools/check_text.py [root]

Prints one line a fault and exits with 1 if there is any.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

SPDX = "# SPDX-License-Identifier: Apache-2.0"
_FENCE = re.compile(r"^\s*(```|~~~)")
_CODE = re.compile(r"`[^`]*`")
_INLINE_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+[\"'][^)]*)?\s*\)")
_REFERENCE_LINK = re.compile(r"^\s{0,3}\[[^\]]+\]:\s*<?([^\s>]+)")
_ELSEWHERE = re.compile(r"^([a-z][a-z0-9+.-]*:|//|#)", re.IGNORECASE)


def repository_files(root: Path) -> list[Path]:
    """Files that git tracks or would track; all files outside hidden folders where root is no checkout."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout.decode().split("\0")
        paths = [root / name for name in listed if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [path for path in root.rglob("*") if not any(p.startswith(".") for p in path.relative_to(root).parts)]
    return sorted({path for path in paths if path.is_file() and not path.is_symlink()})


def read_text(path: Path) -> str | None:
    """The text of a file, None where it is binary."""
    data = path.read_bytes()
    if b"\0" in data:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def link_faults(path: Path, root: Path, lines: list[str]) -> Iterator[str]:
    """Relative links of a markdown file to files that are not there."""
    fenced = False
    for number, line in enumerate(lines, 1):
        if _FENCE.match(line):
            fenced = not fenced
            continue
        if fenced:
            continue
        prose = _CODE.sub("", line)
        for target in [*_INLINE_LINK.findall(prose), *_REFERENCE_LINK.findall(prose)]:
            name = unquote(target.split("#")[0])
            if _ELSEWHERE.match(target) or not name:
                continue
            base = root if name.startswith("/") else path.parent
            if not (base / name.lstrip("/")).exists():
                yield f"{number}: link to {target}, which does not exist"


def file_faults(path: Path, root: Path) -> Iterator[str]:
    """The faults of one file, as "line: what"."""
    text = read_text(path)
    if not text:
        return
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if line != line.rstrip():
            yield f"{number}: trailing whitespace"
        if path.suffix == ".py" and "\t" in line:
            yield f"{number}: tab in Python"
    if not text.endswith("\n"):
        yield f"{len(lines)}: no newline at the end"
    elif text.endswith("\n\n"):
        yield f"{len(lines) - 1}: empty lines at the end"
    if path.suffix == ".py" and SPDX not in lines[:2]:
        yield f"1: expected {SPDX!r}"
    if path.suffix == ".md":
        yield from link_faults(path, root, lines)


def main(root: Path) -> int:
    """Print the faults of all files below root; 1 if there are any, else 0."""
    faults = [
        f"{path.relative_to(root)}:{fault}" for path in repository_files(root) for fault in file_faults(path, root)
    ]
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()))
