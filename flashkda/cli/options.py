# SPDX-License-Identifier: Apache-2.0
"""A geometry by flags: a preset and its tensor-parallel size, or heads; and any field of VerifyGeometry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from flashkda.capability import ARCHITECTURES
from flashkda.geometry import PRESETS, VerifyGeometry, preset

F = TypeVar("F", bound=Callable[..., Any])

_FLOATS = click.Choice(["float32", "bfloat16"])
# Field of VerifyGeometry: its flag and what the flag takes. Not given means the geometry's own default.
_FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "heads": ("--heads", {"type": int, "help": "Heads on this rank (of a preset: from --tp)."}),
    "window": ("--window", {"type": int, "help": "The most tokens of a request's window (of a preset: 8)."}),
    "state_dtype": ("--state-dtype", {"type": _FLOATS}),
    "conv_layout": ("--conv-layout", {"type": click.Choice(["SD", "DS"])}),
    "conv_weight_dtype": ("--conv-weight-dtype", {"type": _FLOATS}),
    "norm_weight_dtype": ("--norm-weight-dtype", {"type": _FLOATS}),
    "gate": ("--gate", {"type": click.Choice(["bounded", "softplus"])}),
    "lower_bound": ("--lower-bound", {"type": float, "help": "Of a bounded gate, below 0."}),
    "norm": ("--norm/--no-norm", {"help": "Whether the verify ends with the gated RMSNorm."}),
    "alignment": ("--alignment", {"type": int, "help": "Bytes: 16, or 2 for any view."}),
    "null_slot": ("--null-slot", {"type": int, "help": "Slots up to this one are null; -1 makes slot 0 usable."}),
    "index_dtype": ("--index-dtype", {"type": click.Choice(["int32", "int64"])}),
    "has_num_accepted": ("--num-accepted/--no-num-accepted", {"help": "Whether the verify reads num_accepted."}),
    "records": ("--records", {"type": click.Choice(["slot", "request", "indices"])}),
    "norm_eps": ("--norm-eps", {"type": float}),
    "head_dim": ("--head-dim", {"type": int}),
    "conv_width": ("--conv-width", {"type": int}),
}


def geometry_options(function: F) -> F:
    """The flags that geometry_of reads."""
    for name, (flag, settings) in reversed(_FIELDS.items()):
        function = click.option(flag, name, default=None, **settings)(function)
    function = click.option("--tp", type=int, help="Tensor-parallel size of a preset (1).")(function)
    return click.option("--preset", type=click.Choice(list(PRESETS)), help="A known model.")(function)


def arch_option(function: F) -> F:
    """--arch, for several."""
    text = f"An architecture, as {next(iter(ARCHITECTURES))}; several: repeat it, or commas; all: those with kernels."
    return click.option("--arch", "archs", multiple=True, metavar="NAME", help=text)(function)


def archs_of(given: tuple[str, ...]) -> list[str]:
    """The architectures of --arch in order, each once."""
    names = [name.strip() for text in given for name in text.split(",") if name.strip()]
    return list(dict.fromkeys(arch for name in names for arch in (ARCHITECTURES if name == "all" else (name,))))


def is_geometry_given(values: dict[str, Any]) -> bool:
    """Whether any flag of a geometry is given."""
    return any(values[name] is not None for name in ("preset", "tp", *_FIELDS))


def geometry_of(values: dict[str, Any]) -> VerifyGeometry:
    """The geometry of the flags. Raises click.UsageError where flags contradict each other, GeometryError."""
    model, tp = values.pop("preset"), values.pop("tp")
    fields = {name: values[name] for name in _FIELDS if values[name] is not None}
    if fields.get("gate") == "softplus" and "lower_bound" not in fields:
        fields["lower_bound"] = None
    if model is not None:
        if "heads" in fields:
            raise click.UsageError("--heads follows from --preset and --tp: leave it out")
        return preset(model, tp=1 if tp is None else tp, **fields)
    if tp is not None:
        raise click.UsageError("--tp belongs to --preset")
    if not {"heads", "window"} <= fields.keys():
        raise click.UsageError("a geometry is given by --preset, or by --heads and --window")
    return VerifyGeometry.from_dict(fields)
