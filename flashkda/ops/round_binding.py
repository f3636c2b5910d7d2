# SPDX-License-Identifier: Apache-2.0
"""The binding of a folded round: `bind_round` (also `plan.bind` of a RoundPlan)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from flashkda.ops.launch import Binding
from flashkda.ops.validate import KERNELS

if TYPE_CHECKING:
    from flashkda.planner import Plan
    from flashkda.round import RoundPlan


class RoundBinding(Binding):
    """Commit of the window before and verify of this one. A run mutates out (every row), state (slots of requests that
    take part and have something to fold), conv_state, corrections and key_gate. Prepared when made."""

    arguments, written = KERNELS["fused_round"]

    def __init__(self, plan: Plan, tensors: Mapping[str, torch.Tensor | None], **options: Any) -> None:
        super().__init__(plan, tensors, **options)
        self.prepare()

    @classmethod
    def kinds(cls, plan: Plan) -> tuple[str, ...]:
        """The one kernel."""
        return ("fused_round",)


def bind_round(plan: RoundPlan, *, check_metadata: bool | None = None, **tensors: torch.Tensor | None) -> RoundBinding:
    """Bind a folded round and fetch its kernel. Tensors by their names in docs/tensors.md, those of a verify.

    A run folds the first num_accepted[n] tokens that request n's records hold into its state, writes the state back,
    and verifies the window from there; the records are then those of this window. A request without tokens takes no
    part: its records wait. It mutates out, state, conv_state, corrections and key_gate. Raises TensorError,
    KernelBuildError, and NotPreparedError where a kernel would have to be built under capture.
    """
    return RoundBinding(plan, tensors, check_metadata=check_metadata)
