# SPDX-License-Identifier: Apache-2.0
"""The static shape of a verification: everything that changes the code of a kernel, and nothing else."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from flashkda.errors import GeometryError, Problem

if TYPE_CHECKING:
    import torch

MAX_HEADS = 96
MAX_WINDOW = 16


class _Refused(Exception):
    """Raised by a rule, with what it expects."""


def _integer(low: int, high: int | None = None) -> Callable[[Any], int]:
    expected = f"an int >= {low}" if high is None else f"an int in {low}..{high}"

    def rule(value: Any) -> int:
        if isinstance(value, bool):
            raise _Refused(expected)
        try:
            number = operator.index(value)
        except TypeError:
            raise _Refused(expected) from None
        if number < low or (high is not None and number > high):
            raise _Refused(expected)
        return number

    return rule


def _choice(*choices: Any) -> Callable[[Any], Any]:
    def rule(value: Any) -> Any:
        for choice in choices:
            if isinstance(value, type(choice)) and not isinstance(value, bool) and value == choice:
                return choice
        raise _Refused(f"one of {', '.join(map(repr, choices))}")

    return rule


def _dtype(*names: str) -> Callable[[Any], str]:
    def rule(value: Any) -> str:
        name = str(value).removeprefix("torch.")  # torch.float32 prints so, and torch need not be imported to know it
        if name not in names:
            raise _Refused(f"torch.dtype or str, one of {', '.join(names)}")
        return name

    return rule


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Refused("a bool")
    return value


def _positive_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _Refused("a finite float > 0")
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise _Refused("a finite float > 0")
    return number


def _lower_bound(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _Refused("a float or None")
    return float(value)


_FLOATS = ("float32", "bfloat16")
_RULES: Mapping[str, Callable[[Any], Any]] = {
    "heads": _integer(1, MAX_HEADS),
    "window": _integer(1, MAX_WINDOW),
    "state_dtype": _dtype(*_FLOATS),
    "conv_layout": _choice("SD", "DS"),
    "conv_weight_dtype": _dtype(*_FLOATS),
    "norm_weight_dtype": _dtype(*_FLOATS),
    "gate": _choice("bounded", "softplus"),
    "lower_bound": _lower_bound,
    "norm": _boolean,
    "alignment": _choice(16, 2),
    "null_slot": _integer(-1, 2**31 - 1),
    "index_dtype": _dtype("int32", "int64"),
    "has_num_accepted": _boolean,
    "records": _choice("slot", "request", "indices"),
    "norm_eps": _positive_float,
    "head_dim": _integer(1),
    "conv_width": _integer(2),
}


@dataclass(frozen=True)
class VerifyGeometry:
    """The static shape of one layer's verification on one rank. Frozen, hashable and JSON-able.

    heads               H, heads on this rank, 1..96
    window              T, the most tokens of one request, 1..16
    state_dtype         "float32" or "bfloat16" (or the torch.dtype; kept as its name): the recurrent state
    conv_layout         "SD": conv_state strides (s, 1, C); "DS": (s, T+2, 1)
    conv_weight_dtype, norm_weight_dtype   "float32" or "bfloat16"
    gate, lower_bound   "bounded" with a finite lower_bound < 0, or "softplus" with lower_bound=None
    norm                False: no output gate and no RMSNorm, the verify ends with o
    alignment           16: rows and slots are 16-byte aligned; 2: any, with narrower loads and the same bits
    null_slot           a request whose slot is <= null_slot is null; -1 makes slot 0 usable
    index_dtype         "int32" or "int64": state_indices and record_indices
    has_num_accepted    the verify reads num_accepted (the engine does not compact the conv window)
    records             a request's row of the records: its "slot", its place in the batch ("request") or
                        record_indices ("indices")
    norm_eps            eps of the RMSNorm, > 0
    head_dim, conv_width   the kernels have 128 and 4 only; the reference takes any head_dim >= 1, conv_width >= 2

    Raises GeometryError, with every problem.
    """

    heads: int
    window: int
    _: KW_ONLY
    state_dtype: str = "float32"
    conv_layout: str = "SD"
    conv_weight_dtype: str = "float32"
    norm_weight_dtype: str = "float32"
    gate: str = "bounded"
    lower_bound: float | None = -5.0
    norm: bool = True
    alignment: int = 16
    null_slot: int = 0
    index_dtype: str = "int32"
    has_num_accepted: bool = False
    records: str = "slot"
    norm_eps: float = 1e-5
    head_dim: int = 128
    conv_width: int = 4

    if TYPE_CHECKING:  # the generated __init__, but for the dtypes, which may come as torch.dtype

        def __init__(
            self,
            heads: int,
            window: int,
            *,
            state_dtype: str | torch.dtype = ...,
            conv_layout: str = ...,
            conv_weight_dtype: str | torch.dtype = ...,
            norm_weight_dtype: str | torch.dtype = ...,
            gate: str = ...,
            lower_bound: float | None = ...,
            norm: bool = ...,
            alignment: int = ...,
            null_slot: int = ...,
            index_dtype: str | torch.dtype = ...,
            has_num_accepted: bool = ...,
            records: str = ...,
            norm_eps: float = ...,
            head_dim: int = ...,
            conv_width: int = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        problems: list[Problem] = []
        for name, rule in _RULES.items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, rule(value))
            except _Refused as refused:
                problems.append(Problem(name, str(refused), repr(value)))
        bound = self.lower_bound
        if not any(problem.argument == "lower_bound" for problem in problems):
            if self.gate == "bounded" and (bound is None or not (math.isfinite(bound) and bound < 0)):
                problems.append(Problem("lower_bound", 'a finite float < 0 with gate="bounded"', repr(bound)))
            if self.gate == "softplus" and bound is not None:
                problems.append(Problem("lower_bound", 'None with gate="softplus"', repr(bound)))
        if problems:
            raise GeometryError.of(problems)

    @property
    def channels(self) -> int:
        """C, the conv channels: q, k and v of every head."""
        return 3 * self.heads * self.head_dim

    @property
    def conv_columns(self) -> int:
        """Columns of a request's conv window: the history that stays, then the window's tokens (T+2 at width 4)."""
        return self.window + self.conv_width - 2

    def replace(self, **changes: Any) -> VerifyGeometry:
        """A copy with some fields changed. Raises GeometryError."""
        return _build({**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {name: getattr(self, name) for name in _RULES}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> VerifyGeometry:
        """The inverse of to_dict; a field that is left out takes its default. Raises GeometryError."""
        return _build(values)

    def __str__(self) -> str:
        shown = [f"heads={self.heads}", f"window={self.window}"]
        for field in dataclasses.fields(self)[2:]:
            value = getattr(self, field.name)
            if value != field.default:
                shown.append(f"{field.name}={value}")
        return f"VerifyGeometry({', '.join(shown)})"


def _build(values: Mapping[str, Any]) -> VerifyGeometry:
    if not isinstance(values, Mapping):
        raise GeometryError("geometry", "a mapping of field names to values", type(values).__name__)
    known = f"one of {', '.join(_RULES)}"
    problems = [Problem(f"field {name!r}", known, "an unknown name") for name in values if name not in _RULES]
    problems += [Problem(name, "a value", "none") for name in ("heads", "window") if name not in values]
    if problems:
        raise GeometryError.of(problems)
    return VerifyGeometry(**values)


@dataclass(frozen=True)
class ModelPreset:
    """What a published model fixes: its size, and its part of the geometry."""

    hidden: int
    layers: int
    kda_layers: int
    heads: int
    gate: str
    lower_bound: float | None
    norm_eps: float


PRESETS: Mapping[str, ModelPreset] = MappingProxyType(
    {
        "kimi-k3": ModelPreset(7168, 93, 69, 96, "bounded", -5.0, 1e-5),
        "glm-5.3-flash": ModelPreset(4096, 45, 34, 64, "bounded", -5.0, 1e-5),
        "kimi-linear": ModelPreset(2304, 27, 20, 32, "softplus", None, 1e-5),
    }
)


def preset(name: str, tp: int = 1, window: int = 8, **overrides: Any) -> VerifyGeometry:
    """The geometry of one rank of a known model.

    name is a key of PRESETS, tp the tensor-parallel size (it must divide the model's heads), overrides any fields
    of VerifyGeometry. Raises GeometryError.
    """
    model = PRESETS.get(name)
    if model is None:
        raise GeometryError("name", f"one of {', '.join(PRESETS)}", repr(name))
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1 or model.heads % tp:
        raise GeometryError("tp", f"an int >= 1 that divides the {model.heads} heads of {name}", repr(tp))
    base = {"gate": model.gate, "lower_bound": model.lower_bound, "norm_eps": model.norm_eps}
    return _build({"heads": model.heads // tp, "window": window, **base, **overrides})
