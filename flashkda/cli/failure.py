# SPDX-License-Identifier: Apache-2.0
"""An error of the command itself."""

from __future__ import annotations

import click

from flashkda.cli.status import Status


class Failure(click.ClickException):
    """Ends the command with this status and this line."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status
