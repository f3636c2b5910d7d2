# SPDX-License-Identifier: Apache-2.0
"""The group of commands, and what is common to them: -v, exit statuses, errors in one line."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import click

import flashkda
from flashkda.cli.bench import bench
from flashkda.cli.cache import cache
from flashkda.cli.compile import compile_
from flashkda.cli.demo import demo
from flashkda.cli.failure import Failure
from flashkda.cli.info import info
from flashkda.cli.query import query
from flashkda.cli.status import Status
from flashkda.cli.text import one_line
from flashkda.errors import ConfigError, FlashKDAError, GeometryError, KernelBuildError, UnsupportedError

_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


@dataclass
class _Session:
    verbosity: int = 0


def _louder(context: click.Context, _: click.Parameter, count: int) -> None:
    session = context.ensure_object(_Session)
    session.verbosity = min(session.verbosity + count, len(_LEVELS) - 1)
    logging.getLogger("flashkda").setLevel(_LEVELS[session.verbosity])


def _take_verbose(command: click.Command) -> None:
    """Let the command, and the commands of a group, take -v: it may stand before or after a command's name."""
    text = "Show what the library logs, and tracebacks; -vv shows more."
    option = click.Option(["-v", "--verbose"], count=True, expose_value=False, callback=_louder, help=text)
    command.params.append(option)
    for child in getattr(command, "commands", {}).values():
        _take_verbose(child)


@click.group(epilog="\n".join(["\b", "Exit status:", *(f"  {s:<4d} {s.meaning}" for s in Status)]))
@click.version_option(flashkda.__version__, message="flashkda %(version)s")
def command() -> None:
    """Kimi Delta Attention for speculative decoding: what runs where, kernels built ahead, the cache of kernels."""


for _command in (info, query, compile_, cache, bench, demo):
    command.add_command(_command)
_take_verbose(command)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status; an error is one line on stderr, with -v after its traceback."""
    session = _Session()
    log = logging.getLogger("flashkda")
    handler, level = logging.StreamHandler(), log.level
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    log.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return _invoke(arguments, session)
    except Exception as error:
        if session.verbosity:
            traceback.print_exc()
        return _fail(error)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _invoke(arguments: Sequence[str] | None, session: _Session) -> int:
    try:
        result = command.main(arguments, prog_name="flashkda", standalone_mode=False, obj=session)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return Status.USAGE
    except click.Abort:
        return Status.INTERRUPTED
    return Status.OK if result is None else int(result)


def _fail(error: Exception) -> int:
    """Print the one line, and return the status."""
    message, status = one_line(error), Status.FAILED
    if isinstance(error, click.ClickException):
        message = one_line(error.format_message())
        status = error.status if isinstance(error, Failure) else Status(error.exit_code)
        if isinstance(error, click.UsageError) and error.ctx is not None:
            message = f"{message.rstrip('.')} (see {error.ctx.command_path} --help)"
    elif isinstance(error, (GeometryError, ConfigError)):
        status = Status.USAGE
    elif isinstance(error, UnsupportedError):
        status = Status.REFUSED
    elif isinstance(error, ModuleNotFoundError) or (isinstance(error, KernelBuildError) and error.missing):
        status = Status.MISSING
    elif not isinstance(error, (FlashKDAError, OSError)):
        message = f"{type(error).__name__}: {message} (a fault of flashkda? -v shows where)"
    click.echo(f"error: {message}", err=True)
    return status


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    click.echo(f"warning: {one_line(message)}", err=True)
