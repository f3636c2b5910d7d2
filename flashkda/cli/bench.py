# SPDX-License-Identifier: Apache-2.0
"""`flashkda bench`: the benchmarks of a source checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from flashkda.cli.failure import Failure
from flashkda.cli.status import Status

ROOT = Path(__file__).parents[2]  # of a checkout


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> int:
    """Run the benchmarks of a checkout.

    It is `python -m benchmarks` with these ARGUMENTS, in the checkout that this package is in.

    What they are: flashkda bench -- --help.
    """
    if not (ROOT / "benchmarks" / "__main__.py").is_file():
        raise Failure(
            Status.MISSING,
            "the benchmarks are not part of the installed package: take the source distribution or a checkout, "
            "and run `make bench` or `flashkda bench` there",
        )
    done = subprocess.run([sys.executable, "-m", "benchmarks", *arguments], cwd=ROOT)
    known = (Status.OK, Status.USAGE)
    return done.returncode if done.returncode in known else Status.FAILED
