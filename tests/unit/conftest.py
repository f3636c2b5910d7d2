# SPDX-License-Identifier: Apache-2.0
"""hypothesis without a deadline, since a busy machine is no fault of the code; and the command `flashkda` run here."""

from __future__ import annotations

import pytest
from hypothesis import settings

from flashkda import cli

settings.register_profile("flashkda", deadline=None)
settings.load_profile("flashkda")


@pytest.fixture
def run(capsys):
    """Run the command with these arguments: its status, stdout and stderr."""

    def run(*arguments):
        status = cli.main(arguments)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run
