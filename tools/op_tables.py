# SPDX-License-Identifier: Apache-2.0
"""Write the tensors of each op into its page in docs/ops, between its two comments.

    python tools/op_tables.py --write

Shapes, dtypes and layouts are those of docs/tensors.md, what an op takes and mutates is what its binding says. A test
compares the pages with what would be written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from flashkda.ops.binding import NormBinding, RecordBinding, ShortConvBinding, VerifyBinding
from flashkda.ops.commit_validate import LAYERED
from flashkda.ops.decode_binding import DecodeBinding
from flashkda.ops.round_binding import RoundBinding

BEGIN, END = "<!-- tensors: begin -->", "<!-- tensors: end -->"
_DOCS = Path(__file__).parent.parent / "docs"


class Op(NamedTuple):
    """The tensors that an op takes, and those of them that it mutates."""

    arguments: Sequence[str]
    written: Sequence[str]


OPS: Mapping[str, Op] = {
    "verify": Op(VerifyBinding.arguments, VerifyBinding.written),
    "short-conv": Op(ShortConvBinding.arguments, ShortConvBinding.written),
    "record": Op(RecordBinding.arguments, RecordBinding.written),
    "gated-rms-norm": Op(NormBinding.arguments, NormBinding.written),
    "commit": Op(LAYERED, ("state", "conv_state")),
    "decode": Op(DecodeBinding.arguments, DecodeBinding.written),
    "round": Op(RoundBinding.arguments, RoundBinding.written),
}


def specs() -> dict[str, list[str]]:
    """The rows of the table of docs/tensors.md by tensor: shape, dtype, layout, aligned."""
    lines = (_DOCS / "tensors.md").read_text().split("\n")
    start = lines.index("| name | shape | dtype | layout | aligned |") + 2
    rows = {}
    for line in lines[start : lines.index("", start)]:
        name, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
        rows[name.strip("`")] = cells
    return rows


def render(op: Op) -> str:
    """The table of an op, in the order of its arguments."""
    known = specs()
    lines = ["| tensor | | shape | dtype | layout | aligned |", "|---|---|---|---|---|---|"]
    for name in op.arguments:
        cells = [f"`{name}`", "**mutated**" if name in op.written else "read", *known[name]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def replace(text: str, table: str) -> str:
    """The page with this table between its comments. Raises ValueError where it has not exactly one pair."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in after:
        raise ValueError(f"expected one {BEGIN} and one {END} behind it")
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def pages() -> dict[Path, str]:
    """What each page should be."""
    paths = {name: _DOCS / "ops" / f"{name}.md" for name in OPS}
    return {path: replace(path.read_text(), render(OPS[name])) for name, path in paths.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Name the pages that differ, or write them; 1 where pages differ and are not written."""
    parser = argparse.ArgumentParser(description="The tensors of each op in docs/ops")
    parser.add_argument("--write", action="store_true", help="write the pages")
    write = parser.parse_args(arguments).write
    stale = {path: text for path, text in pages().items() if path.read_text() != text}
    for path, text in stale.items():
        if write:
            path.write_text(text)
        else:
            print(f"{path} is not what it would be; run: python tools/op_tables.py --write")
    return 1 if stale and not write else 0


if __name__ == "__main__":
    sys.exit(main())
