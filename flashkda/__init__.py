# SPDX-License-Identifier: Apache-2.0
"""FlashKDA: Kimi Delta Attention verification in one launch. geometry -> plan -> bind -> run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashkda import errors
from flashkda.capability import Capability, query
from flashkda.errors import FallbackWarning, FlashKDAError
from flashkda.geometry import PRESETS, VerifyGeometry, preset
from flashkda.planner import Plan, plan_verify

if TYPE_CHECKING:
    from flashkda.ops.binding import VerifyBinding, VerifyLayer
    from flashkda.ops.custom_ops import register as register_ops

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "Capability",
    "FallbackWarning",
    "FlashKDAError",
    "Plan",
    "VerifyBinding",
    "VerifyGeometry",
    "VerifyLayer",
    "__version__",
    "errors",
    "plan_verify",
    "preset",
    "query",
    "register_ops",
]

# Names whose modules import torch, loaded on first use: module and name in it.
_LAZY = {
    "VerifyBinding": ("flashkda.ops.binding", "VerifyBinding"),
    "VerifyLayer": ("flashkda.ops.binding", "VerifyLayer"),
    "register_ops": ("flashkda.ops.custom_ops", "register"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module, attribute = _LAZY[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
