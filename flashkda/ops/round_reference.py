# SPDX-License-Identifier: Apache-2.0
"""A folded round in plain torch: the commit of the window before, then the verify of this one."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkda.commit import CommitGeometry
from flashkda.geometry import VerifyGeometry
from flashkda.ops import commit_reference, reference


@torch.no_grad()
def round_(
    geometry: VerifyGeometry,
    *,
    state: Tensor,
    corrections: Tensor,
    key_gate: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
    num_accepted: Tensor,
    record_indices: Tensor | None = None,
    **verify: Tensor | None,
) -> None:
    """``commit_reference.commit`` of num_accepted tokens for the requests that take part, then ``reference.verify``."""
    takes_part = query_start_loc[1:] > query_start_loc[:-1]
    commit_reference.commit(
        CommitGeometry(geometry, 1),
        state=[state],
        corrections=[corrections],
        key_gate=[key_gate],
        A_log=[A_log],
        dt_bias=[dt_bias],
        accepted=torch.where(takes_part, num_accepted, torch.zeros_like(num_accepted)),
        state_indices=state_indices,
        record_indices=record_indices,
    )
    reference.verify(
        geometry,
        state=state,
        corrections=corrections,
        key_gate=key_gate,
        A_log=A_log,
        dt_bias=dt_bias,
        query_start_loc=query_start_loc,
        state_indices=state_indices,
        num_accepted=num_accepted,
        record_indices=record_indices,
        **verify,  # type: ignore[arg-type]
    )
