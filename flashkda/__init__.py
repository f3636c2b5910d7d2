# SPDX-License-Identifier: Apache-2.0
"""FlashKDA: Kimi Delta Attention verification in one launch, its commit and decode. geometry -> plan -> bind -> run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashkda import errors
from flashkda.capability import Capability, query
from flashkda.errors import FallbackWarning, FlashKDAError
from flashkda.geometry import PRESETS, VerifyGeometry, preset
from flashkda.planner import Plan, plan_verify

if TYPE_CHECKING:
    from flashkda.commit import CommitGeometry, CommitPlan, plan_commit
    from flashkda.decode import DecodePlan, plan_decode
    from flashkda.ops.binding import VerifyBinding, VerifyLayer
    from flashkda.ops.custom_ops import register as register_ops
    from flashkda.records import memory_report, records_spec
    from flashkda.round import RoundPlan, plan_round

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "Capability",
    "CommitGeometry",
    "CommitPlan",
    "DecodePlan",
    "FallbackWarning",
    "FlashKDAError",
    "Plan",
    "RoundPlan",
    "VerifyBinding",
    "VerifyGeometry",
    "VerifyLayer",
    "__version__",
    "errors",
    "memory_report",
    "plan_commit",
    "plan_decode",
    "plan_round",
    "plan_verify",
    "preset",
    "query",
    "records_spec",
    "register_ops",
]

# Names of modules that import torch, or that a verify alone does not need, loaded on first use: module and name in it.
_LAZY = {
    "CommitGeometry": ("flashkda.commit", "CommitGeometry"),
    "CommitPlan": ("flashkda.commit", "CommitPlan"),
    "DecodePlan": ("flashkda.decode", "DecodePlan"),
    "RoundPlan": ("flashkda.round", "RoundPlan"),
    "VerifyBinding": ("flashkda.ops.binding", "VerifyBinding"),
    "VerifyLayer": ("flashkda.ops.binding", "VerifyLayer"),
    "memory_report": ("flashkda.records", "memory_report"),
    "plan_commit": ("flashkda.commit", "plan_commit"),
    "plan_decode": ("flashkda.decode", "plan_decode"),
    "plan_round": ("flashkda.round", "plan_round"),
    "records_spec": ("flashkda.records", "records_spec"),
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
