# SPDX-License-Identifier: Apache-2.0
"""Plain text for terminals and pipes: tables, lists, sizes, one-line messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as they have to be, two spaces apart."""
    lines = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def listing(lines: Iterable[object]) -> str:
    """One line an item, with a dash."""
    return "\n".join(f"  - {line}" for line in lines)


def yes(value: bool) -> str:
    """A truth value as a table shows it."""
    return "yes" if value else "no"


def size(count: int) -> str:
    """Bytes for people."""
    if count < 1024:
        return f"{count} B"
    number, unit = float(count), 0
    while number >= 1024 and unit < 3:
        number, unit = number / 1024, unit + 1
    return f"{number:.1f} {' KMG'[unit]}iB"


def one_line(message: object) -> str:
    """A message whose lists, "head:" and then lines with a dash, are joined by semicolons."""
    first, *items = [line.strip() for line in str(message).splitlines() if line.strip()] or [""]
    return " ".join([first, "; ".join(item.removeprefix("- ") for item in items)]).strip()
