# SPDX-License-Identifier: Apache-2.0
"""The binding of a decode: `bind_decode` (also `plan.bind` of a DecodePlan)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from flashkda.ops.launch import Binding
from flashkda.ops.validate import KERNELS

if TYPE_CHECKING:
    from flashkda.decode import DecodePlan
    from flashkda.planner import Plan


class DecodeBinding(Binding):
    """One token a request. A run mutates out (every row), state and conv_state. Prepared when made.

    The decomposed path needs qkv [M, C] and o [M, H, D], bf16, between its launches: allocated, unless given.
    """

    arguments, written = KERNELS["fused_decode"]
    scratch = ("qkv", "o")
    most_tokens = 1

    def __init__(self, plan: Plan, tensors: Mapping[str, torch.Tensor | None], **options: Any) -> None:
        super().__init__(plan, tensors, **options)
        self.prepare()

    @classmethod
    def kinds(cls, plan: Plan) -> tuple[str, ...]:
        """One kernel; on the decomposed path three, two without a norm."""
        if plan.path == "decomposed":
            return ("short_conv", "decode_rule", *(("gated_rms_norm",) if plan.geometry.norm else ()))
        return ("fused_decode",)


def bind_decode(
    plan: DecodePlan, *, check_metadata: bool | None = None, **tensors: torch.Tensor | None
) -> DecodeBinding:
    """Bind a decode and fetch its kernels. Tensors by their names in docs/tensors.md: those of a verify but for
    record_indices, corrections and key_gate. Each request has one token, or none: query_start_loc says which.

    A run leaves the token's conv history where num_accepted = 1 says. It mutates out, state and conv_state. Raises
    TensorError, KernelBuildError, and NotPreparedError where a kernel would have to be built under capture.
    """
    return DecodeBinding(plan, tensors, check_metadata=check_metadata)
