# SPDX-License-Identifier: Apache-2.0
"""`flashkda compile`: kernels built ahead, into a pack or into the user's cache."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from flashkda.capability import ARCHITECTURES, query, toolchain_reasons
from flashkda.cli.failure import Failure
from flashkda.cli.options import arch_option, archs_of, geometry_of, geometry_options, is_geometry_given
from flashkda.cli.status import Status
from flashkda.cli.text import size
from flashkda.errors import UnsupportedError
from flashkda.geometry import VerifyGeometry
from flashkda.planner import NUMERICS

if TYPE_CHECKING:
    from flashkda.jit import Built, Spec
    from flashkda.jit.pool import Progress

_COMMIT_FLAGS = ("compact", "dst", "boundary", "accepted-indices")


@click.command("compile")
@geometry_options
@click.option("--geometry", "file", type=click.File(), help="JSON: a geometry, or a list of them; - is stdin.")
@arch_option
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder of the pack, made if need be.")
@click.option("--cache", "into_cache", is_flag=True, help="Into the user's own cache.")
@click.option("--max-requests", type=int, help="Only what plans for up to this many requests need.")
@click.option(
    "--commit",
    "commits",
    multiple=True,
    metavar="FLAGS",
    help=f"A commit kernel: plain, or some of {', '.join(_COMMIT_FLAGS)}, with commas; several: repeat it. "
    "Not given: plain and compact.",
)
@click.option(
    "--numerics", multiple=True, type=click.Choice(NUMERICS), help="Modes of the verify (exact); several: repeat it."
)
@click.option("--jobs", type=click.IntRange(min=1), help="Processes that compile (one a usable core).")
def compile_(
    file: TextIO | None,
    archs: tuple[str, ...],
    out: Path | None,
    into_cache: bool,
    max_requests: int | None,
    commits: tuple[str, ...],
    numerics: tuple[str, ...],
    jobs: int | None,
    **values: Any,
) -> None:
    """Build kernels ahead, without a GPU.

    All that verify, decode and commit of a geometry need. What is there already, whole and of the same sources, is
    kept.

    \b
    flashkda compile --preset kimi-k3 --tp 8 --window 4 --arch sm_90a --out DIR
    flashkda compile --geometry geometries.json --arch sm_90a,sm_100a --out DIR
    flashkda compile --preset kimi-k3 --tp 8 --window 4 --arch sm_90a --cache
    """
    if (out is None) != into_cache:
        raise click.UsageError("say where to: --out DIR for a pack, or --cache")
    if file is not None and is_geometry_given(values):
        raise click.UsageError("--geometry has whole geometries: leave out the flags of one")
    geometries = [geometry_of(values)] if file is None else _read(file)
    wanted = archs_of(archs)
    if not wanted:
        raise click.UsageError(f"name an architecture: --arch, of {', '.join(ARCHITECTURES)}, or all")
    specs = _specs(geometries, wanted, max_requests, commits, numerics or NUMERICS[:1])
    compiled = 0
    start = time.perf_counter()
    with _progress(len(specs)) as show:

        def progress(done: int, total: int, built: Built) -> None:
            nonlocal compiled
            compiled += built.compiled
            show(done, total, built)

        there = _build(specs, out, jobs, progress)
    seconds = time.perf_counter() - start
    kept = len(specs) - compiled
    click.echo(f"{len(specs)} kernels for {', '.join(wanted)}: {compiled} compiled, {kept} kept, in {seconds:.1f} s")
    click.echo(there)


def _read(file: TextIO) -> list[VerifyGeometry]:
    try:
        values = json.load(file)
    except ValueError as error:
        raise click.UsageError(f"{file.name} is not JSON: {error}") from error
    return [VerifyGeometry.from_dict(one) for one in (values if isinstance(values, list) else [values])]


def _specs(
    geometries: list[VerifyGeometry],
    archs: list[str],
    max_requests: int | None,
    commits: tuple[str, ...],
    numerics: tuple[str, ...],
) -> list[Spec]:
    """What is to be built, each kernel once. Raises UnsupportedError, with every reason, and Failure."""
    from flashkda.kernel_sets import COMMITS, kernel_set

    refused = [
        reason
        for geometry in geometries
        for arch in archs
        for reason in query(geometry, arch, toolchain=False).decomposed.reasons
    ]
    if refused:
        raise UnsupportedError("decomposed", list(dict.fromkeys(refused)), hint="so there are no kernels to build")
    missing = toolchain_reasons()
    if missing:
        names = " ".join(reason.argument for reason in missing)
        raise Failure(Status.MISSING, f"kernels are built with {names}: pip install {names}")
    flags = [_commit(text) for text in commits] or COMMITS
    found: dict[Any, Spec] = {}
    for geometry in geometries:
        for function, arguments in kernel_set(
            geometry, archs, max_requests=max_requests, commits=flags, numerics=numerics
        ):
            found.setdefault(function(*arguments)[0], (function, arguments))
    return list(found.values())


def _commit(text: str) -> dict[str, bool]:
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in ("plain", *_COMMIT_FLAGS)]
    if unknown or ("plain" in names and len(names) > 1):
        raise click.UsageError(f"--commit: expected plain, or some of {', '.join(_COMMIT_FLAGS)}, found {text!r}")
    fields = [name if name == "compact" else f"has_{name.replace('-', '_')}" for name in names if name != "plain"]
    return dict.fromkeys(fields, True)


def _build(specs: list[Spec], out: Path | None, jobs: int | None, progress: Progress) -> str:
    """Build. Returns what there is now, and where."""
    from flashkda import config
    from flashkda.jit import build_pack, prebuild

    if out is None:
        prebuild(specs, jobs=jobs, progress=progress)
        return f"the cache is {config.cache_dir()}"
    manifest = build_pack(specs, out, jobs=jobs, progress=progress)
    return f"the pack {out} has {len(manifest.kernels)} kernels, {size(manifest.total_bytes)}"


@contextmanager
def _progress(total: int) -> Iterator[Progress]:
    """A bar on stderr where that is a terminal, else a line for each kernel."""
    if not sys.stderr.isatty():
        yield _say
        return
    with click.progressbar(length=total, label="compiling", file=sys.stderr, item_show_func=_shown) as bar:

        def progress(done: int, total: int, built: Built) -> None:
            bar.update(1, built.name)

        yield progress


def _shown(name: str | None) -> str | None:
    return name


def _say(done: int, total: int, built: Built) -> None:
    click.echo(f"{done}/{total} {_line(built)}", err=True)


def _line(built: Built) -> str:
    if built.error is not None:
        return f"{built.name} failed"
    return f"{built.name} compiled in {built.seconds:.1f} s" if built.compiled else f"{built.name} is there already"
