# SPDX-License-Identifier: Apache-2.0
"""Render benchmarks/results/*.json as the tables of README.md, between its two comments.

    python tools/readme_table.py           print the tables
    python tools/readme_table.py --write   put them into README.md

A result file is a list of rows, or an object that holds it as "rows" and may name its "gpu". A row has impl, N, T, H,
state_dtype and us_per_layer; other keys are left alone. Numbers reach README.md no other way: a test compares the two.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
NOTHING = "No results are kept here yet: `make bench` on a GPU writes `benchmarks/results/<gpu>.json`."
_ROOT = Path(__file__).parent.parent
#: Times of other projects, which were measured apart from ours.
PUBLISHED = _ROOT / "benchmarks" / "published.json"
_FUSED, _DECOMPOSED = "flashkda-fused", "flashkda-decomposed"
_NAMES = {
    _FUSED: "one launch",
    "flashkda-fused-chunked": "one launch, chunked numerics",
    _DECOMPOSED: "three launches",
    "floor-empty": "floor: an empty launch",
    "floor-state-read": "floor: one read of the state",
}
_ROUND_OF_TWO = "flashkda-round"
_ROUND = {
    "flashkda-commit": "commit, all layers in one launch",
    "floor-state-copy": "floor: one copy of the same states",
    _ROUND_OF_TWO: "verify and commit",
    "flashkda-round-folded": "verify with the previous commit, in one launch",
    "flashkda-decode-fused": "decode, one launch",
    "flashkda-decode-decomposed": "decode, three launches",
}

Row = Mapping[str, Any]


def render(folder: Path) -> str:
    """The Markdown of all result files in ``folder``. Raises KeyError or ValueError for a file of another form."""
    tables = [table for path in sorted(folder.glob("*.json")) for table in file_tables(path)]
    return "\n\n".join(tables) or NOTHING


def file_tables(path: Path) -> Iterator[str]:
    """For each number of heads and each dtype of the state a table of the verify, one of the rest of a round and, where
    others' rounds were measured, one beside those."""
    content = json.loads(path.read_text())
    rows: Sequence[Row] = content if isinstance(content, list) else content["rows"]
    gpu = "" if isinstance(content, list) else content.get("gpu", "")
    for heads, dtype in dict.fromkeys((row["H"], row["state_dtype"]) for row in rows):
        what = ", ".join(filter(None, [gpu, f"{heads} heads", f"{dtype} state"]))
        chosen = [row for row in rows if (row["H"], row["state_dtype"]) == (heads, dtype)]
        for title, of_round in (("Verify", False), ("The rest of a round", True)):
            part = [row for row in chosen if (row["impl"] in _ROUND) == of_round]
            if part:
                caption = f"{title}, microseconds a layer: {what} (`benchmarks/results/{path.name}`)"
                yield f"{caption}\n\n{table(part)}"
        published = json.loads(PUBLISHED.read_text())
        if (gpu, heads, dtype) == tuple(published[name] for name in ("gpu", "H", "state_dtype")):
            yield from round_table(chosen, published)


def round_table(rows: Sequence[Row], published: Mapping[str, Any]) -> Iterator[str]:
    """Our rounds beside those of others, which were measured apart. Nothing where rows have none of ours."""
    points = list(dict.fromkeys(point for times in published["rounds"].values() for point in times))
    points.sort(key=lambda point: [int(number) for number in point.split(",")])
    lines = {
        f"FlashKDA, {_ROUND[impl]}": {
            f"{row['N']},{row['T']}": f"{row['us_per_layer']:.2f}" for row in rows if row["impl"] == impl
        }
        for impl in (_ROUND_OF_TWO, "flashkda-round-folded")
    }
    lines = {name: times for name, times in lines.items() if times.keys() & set(points)}
    if lines:
        head = " | ".join("N{} T{}".format(*point.split(",")) for point in points)
        body = [
            f"| {name} | {' | '.join(times.get(point, '-') for point in points)} |"
            for name, times in [*lines.items(), *published["rounds"].items()]
        ]
        caption = f"A round, microseconds a layer, beside others' ({published['source']}; `benchmarks/published.json`)"
        yield "\n".join([caption, "", f"| | {head} |", "|---" * (len(points) + 1) + "|", *body])


def table(rows: Sequence[Row]) -> str:
    """Implementations by points (N, T). A point that an implementation lacks is a dash."""
    points = sorted({(row["N"], row["T"]) for row in rows})
    times: dict[str, dict[tuple[int, int], float]] = {}
    for row in rows:
        of_impl = times.setdefault(row["impl"], {})
        if (row["N"], row["T"]) in of_impl:
            raise ValueError(f"{row['impl']} has N{row['N']} T{row['T']} twice")
        of_impl[row["N"], row["T"]] = float(row["us_per_layer"])
    covers = {row["impl"]: f"{row['impl']}: {row['covers']}" for row in rows if "covers" in row}
    known = _NAMES | _ROUND | covers
    names = [*(name for name in known if name in times), *(name for name in times if name not in known)]

    def line(first: str, numbers: Mapping[tuple[int, int], float]) -> str:
        return f"| {' | '.join([first, *(f'{numbers[p]:.2f}' if p in numbers else '-' for p in points)])} |"

    lines = [f"| | {' | '.join(f'N{n} T{t}' for n, t in points)} |", "|---" * (len(points) + 1) + "|"]
    lines += [line(known.get(name, name), times[name]) for name in names]
    if _FUSED in times and _DECOMPOSED in times:
        one, three = times[_FUSED], times[_DECOMPOSED]
        both = one.keys() & three.keys()
        lines.append(line("three / one", {point: three[point] / one[point] for point in both}))
    return "\n".join(lines)


def replace(text: str, tables: str) -> str:
    """``text`` with the tables between its comments. Raises ValueError where it has not exactly one pair."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in after:
        raise ValueError(f"expected one {BEGIN} and one {END} behind it")
    return f"{before}{BEGIN}\n{tables}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print or write; the exit status."""
    parser = argparse.ArgumentParser(description="Tables of benchmarks/results/*.json for README.md")
    parser.add_argument("--write", action="store_true", help="put them into README.md")
    tables = render(_ROOT / "benchmarks" / "results")
    if parser.parse_args(arguments).write:
        readme = _ROOT / "README.md"
        readme.write_text(replace(readme.read_text(), tables))
    else:
        print(tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())
