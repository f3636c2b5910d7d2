# SPDX-License-Identifier: Apache-2.0
"""Progress of a long run: a bar at a terminal, a line a step elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    """What a run reports to."""

    def begin(self, step: str) -> None:
        """A step begins."""

    def say(self, text: str) -> None:
        """A line to keep."""

    def end(self) -> None:
        """The step is done."""


class Lines:
    """Lines with the seconds since the start."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def begin(self, step: str) -> None:
        """Nothing: the step's result will be a line."""

    def say(self, text: str) -> None:
        """Print it."""
        print(f"[{time.monotonic() - self._start:6.1f} s] {text}", flush=True)

    def end(self) -> None:
        """Nothing."""


@contextmanager
def progress(total: int) -> Iterator[Progress]:
    """A rich bar of ``total`` steps where stdout is a terminal and rich is installed, else lines."""
    if not sys.stdout.isatty():
        yield Lines()
        return
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Rich
    except ImportError:
        yield Lines()
        return

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Rich(*columns) as bar:
        task = bar.add_task("", total=total)

        class _Bar:
            def begin(self, step: str) -> None:
                bar.update(task, description=step)

            def say(self, text: str) -> None:
                bar.console.print(text, markup=False, highlight=False)

            def end(self) -> None:
                bar.advance(task)

        yield _Bar()
