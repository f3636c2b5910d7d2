# SPDX-License-Identifier: Apache-2.0
"""The command `flashkda`, also `python -m flashkda`: see docs/cli.md.

status    exit statuses
app       the group of commands, errors in one line, -v
options   a geometry by flags
text      tables and lists
Each command has a module of its own, and imports torch only when it runs and needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from flashkda.cli.status import Status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (default: the process's) and return its exit status."""
    try:
        import click  # noqa: F401  the extra `cli`
    except ModuleNotFoundError:
        print("error: the command needs click: pip install 'flashkda[cli]'", file=sys.stderr)
        return Status.MISSING
    from flashkda.cli.app import run

    return run(arguments)
