# SPDX-License-Identifier: Apache-2.0
"""What plans of every kind share when they go to JSON and come back: a fingerprint, and what must still hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from flashkda.errors import PlanMismatchError


class Storable(Protocol):
    """What a plan of any kind is, once it has been read from JSON."""

    @property
    def op(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def kernels_version(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...


def fingerprint(computation: Mapping[str, Any]) -> str:
    """16 hex digits of what a plan computes, the same in every process."""
    text = json.dumps(computation, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_stored(plan: Storable, stored: str, current: str, switch: str | None, leads_to: Iterable[str]) -> None:
    """Raise PlanMismatchError, with every reason, unless the plan is the one that was stored (by its fingerprint), for
    the kernels here (`current`), and of a path that FLASHKDA_VERIFY_PATH (`switch`, None if not set) leads to."""
    mismatches = []
    if stored != plan.fingerprint:
        mismatches.append(f"fingerprint: stored {stored}, its contents give {plan.fingerprint}")
    if plan.kernels_version != current:
        mismatches.append(f"kernels_version: the plan has {plan.kernels_version}, the kernels here are {current}")
    if switch is not None and plan.path not in leads_to:
        mismatches.append(f"FLASHKDA_VERIFY_PATH: the plan's path is {plan.path}, the switch asks for {switch}")
    if mismatches:
        lines = "".join(f"\n  - {line}" for line in mismatches)
        raise PlanMismatchError(f"the stored plan cannot be used here (make it again with plan_{plan.op}):{lines}")
