# SPDX-License-Identifier: Apache-2.0
"""`flashkda cache`: the folder of kernels that this user has built, and packs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashkda.cli.status import Status
from flashkda.cli.text import listing, size, table
from flashkda.config import cache_dir, cache_limit

if TYPE_CHECKING:
    from flashkda.jit import Entry

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@click.group()
def cache() -> None:
    """List, check or clear the cache of kernels."""


@cache.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(as_json: bool) -> None:
    """List the kernels in the cache.

    The least recently used first: it goes first when the cache is full (FLASHKDA_CACHE_LIMIT). A kernel that is stale
    was made from other sources or by other versions, and nothing here loads it.
    """
    from flashkda.jit import cache_entries

    entries = cache_entries()
    if as_json:
        kernels = [{**entry._asdict(), "path": str(entry.path)} for entry in entries]
        click.echo(json.dumps({"folder": str(cache_dir()), "limit": cache_limit(), "kernels": kernels}, indent=1))
        return
    rows = [
        (entry.name, entry.arch, entry.digest[:8], size(entry.bytes), _when(entry.last_use), entry.state)
        for entry in entries
    ]
    if rows:
        click.echo(table(("kernel", "arch", "digest", "size", "last used", "state"), rows) + "\n")
    click.echo(summary(entries))


def summary(entries: Sequence[Entry]) -> str:
    """How much is in the cache, in one line."""
    limit = cache_limit()
    bound = "without a limit" if limit is None else f"of at most {size(limit)}"
    return f"{len(entries)} kernels, {size(sum(entry.bytes for entry in entries))} {bound}, in {cache_dir()}"


@cache.command()
@click.argument("packs", nargs=-1, type=click.Path(path_type=Path))
def verify(packs: tuple[Path, ...]) -> int:
    """Check every kernel in the cache, or in PACKS.

    Whether each file is what was stored and may be trusted; of a pack also whether its kernels would be loaded here, or
    why not. Exits with 1 where anything is wrong.
    """
    from flashkda.jit import cache_entries, pack_entries, verify_cache

    problems: list[str] = []
    if packs:
        found = [(folder, kernel, problem) for folder in packs for kernel, problem in pack_entries(folder)]
        count, where = len(found), ", ".join(map(str, packs))
        problems = [f"{folder / kernel.file}: {problem}" for folder, kernel, problem in found if problem]
    else:
        count, where = len(cache_entries()), str(cache_dir())
        problems = [f"{entry.path}: {reason}" for entry, reason in verify_cache()]
    if not problems:
        click.echo(f"{count} kernels in {where}: all as they should be")
        return Status.OK
    click.echo(f"{len(problems)} of {count} kernels in {where} are not as they should be:\n{listing(problems)}")
    return Status.FAILED


class _Age(click.ParamType[float]):
    name = "age"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", value)
        if found is None:
            self.fail(f"expected a number with s, m, h or d behind it, as 30d, found {value!r}", parameter, context)
        return float(found[1]) * _SECONDS[found[2]]


@cache.command()
@click.option("--older-than", type=_Age(), help="Only what was last used longer ago than this: 30d, 12h.")
def clear(older_than: float | None) -> None:
    """Remove kernels from the cache, but for those in use."""
    from flashkda.jit import clear_cache

    count, freed = clear_cache(older_than=older_than)
    click.echo(f"removed {count} kernels, {size(freed)}, from {cache_dir()}")


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
