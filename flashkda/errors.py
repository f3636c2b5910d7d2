# SPDX-License-Identifier: Apache-2.0
"""The errors and warnings that FlashKDA raises.

Each names the argument, what was expected, what was found and, where there is one, the way out. All derive from
`FlashKDAError` and survive pickling, so that they cross an engine's worker processes whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from flashkda.capability import Reason


class Problem(NamedTuple):
    """One refused value: the argument's name, what it should have been and what it was."""

    argument: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.argument}: expected {self.expected}, found {self.found}"


def _listing(head: str, lines: Iterable[object]) -> str:
    return "\n".join([head, *(f"  - {line}" for line in lines)])


def _rebuild(cls: type[FlashKDAError], args: tuple[Any, ...], attributes: dict[str, Any]) -> FlashKDAError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(attributes)
    return error


class FlashKDAError(Exception):
    """Base of all errors of this package."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call the class with the finished message, which is not what the constructors take.
        return _rebuild, (type(self), self.args, self.__dict__)


class _ArgumentError(FlashKDAError, ValueError):
    """A refused value. `argument`, `expected` and `found` are those of the first problem; `problems` holds all."""

    subject = "argument"

    def __init__(self, argument: str, expected: str, found: object, *, more: Sequence[Problem] = ()) -> None:
        first = Problem(argument, expected, str(found))
        self.argument, self.expected, self.found = first
        self.problems: tuple[Problem, ...] = (first, *more)
        if more:
            super().__init__(_listing(f"{len(self.problems)} problems with the {self.subject}:", self.problems))
        else:
            super().__init__(str(first))


class GeometryError(_ArgumentError):
    """A geometry, or an argument of the planner, is outside what it may be. The message lists all problems."""

    subject = "geometry or plan"

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> GeometryError:
        """The error for one or more problems found together."""
        first, *more = problems
        return cls(*first, more=more)


class ConfigError(_ArgumentError):
    """An environment variable holds a value that is not one of its own."""

    subject = "environment"


class UnsupportedError(FlashKDAError):
    """A path was required and is refused. `path` is the refused path, `reasons` holds every reason."""

    def __init__(self, path: str, reasons: Sequence[Reason], hint: str = "") -> None:
        self.path = path
        self.reasons: tuple[Reason, ...] = tuple(reasons)
        head = f"the {path} path is refused" + (f" ({hint})" if hint else "") + ":"
        super().__init__(_listing(head, self.reasons))


class TensorError(FlashKDAError, ValueError):
    """A tensor given at bind or run does not fit the plan. Nothing has been written when this is raised."""

    def __init__(self, argument: str, expected: str, found: object, hint: str = "") -> None:
        self.argument, self.expected, self.found, self.hint = argument, expected, str(found), hint
        super().__init__(f"{argument}: expected {expected}, found {found}" + (f"; {hint}" if hint else ""))


class MetadataError(FlashKDAError, ValueError):
    """A debug check found a bad entry in device metadata: `index` is the first bad entry of `argument`."""

    def __init__(self, argument: str, index: int, expected: str, found: object) -> None:
        self.argument, self.index, self.expected, self.found = argument, index, expected, str(found)
        super().__init__(f"{argument}[{index}]: expected {expected}, found {found}")


class NotPreparedError(FlashKDAError, RuntimeError):
    """A first call happened under CUDA graph capture, where nothing can be compiled or loaded: prepare first."""


class PlanMismatchError(FlashKDAError, RuntimeError):
    """A stored plan, or a graph that carries one, does not match the plan or the kernels that would run it."""


class StaleBindingError(FlashKDAError, RuntimeError):
    """A binding was run after one of the bindings it was made from had been replaced."""


class KernelBuildError(FlashKDAError, RuntimeError):
    """A kernel can be neither built nor loaded. `missing` names the packages or files that are not there, if any."""

    def __init__(self, message: str, *, missing: Sequence[str] = ()) -> None:
        self.missing: tuple[str, ...] = tuple(missing)
        super().__init__(message)


class KernelNotFoundError(KernelBuildError):
    """FLASHKDA_NO_JIT forbids to compile, and a kernel is neither in a pack nor in the cache.

    kernel names it, reasons tell for each place that was looked at why it gave nothing, command would build it (""
    where it is not known).
    """

    def __init__(self, kernel: str, reasons: Sequence[str], command: str = "", what: str = "") -> None:
        self.kernel, self.command = kernel, command
        self.reasons: tuple[str, ...] = tuple(reasons)
        head = f"{what + ': ' if what else ''}{kernel} is not prebuilt, and FLASHKDA_NO_JIT forbids to compile it"
        out = f"; build it with `{command}` and set FLASHKDA_KERNEL_PATH=DIR" if command else ""
        super().__init__(_listing(f"{head}{out}. Looked at:", self.reasons))

    def of(self, what: object, command: str) -> KernelNotFoundError:
        """The same error, with what the kernel is wanted for and the command that builds it."""
        return type(self)(self.kernel, self.reasons, command, str(what))


class FallbackWarning(UserWarning):
    """The planner chose a slower path than the one asked for. Given once per geometry, with every reason."""
