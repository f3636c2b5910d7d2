# SPDX-License-Identifier: Apache-2.0
"""The exit statuses of the command. They are documented in docs/cli.md and in `flashkda --help`, and they stay."""

from __future__ import annotations

import enum


class Status(enum.IntEnum):
    """What the command's exit status says."""

    OK = 0
    FAILED = 1
    USAGE = 2
    REFUSED = 3
    MISSING = 4
    INTERRUPTED = 130

    @property
    def meaning(self) -> str:
        """For the help and for the documentation."""
        return _MEANING[self]


_MEANING = {
    Status.OK: "done",
    Status.FAILED: "a check failed, or something that was tried did not work",
    Status.USAGE: "the command line, a geometry or an environment variable is wrong",
    Status.REFUSED: "a path or an architecture that was asked for is not supported",
    Status.MISSING: "a package, or the source checkout, is not here",
    Status.INTERRUPTED: "interrupted from the keyboard",
}
