# SPDX-License-Identifier: Apache-2.0
"""torch.ops.flashkda.kda_commit: the commit as a custom op, for torch.compile and torch.export.

    kda_commit     state, corrections, key_gate, conv_state, A_log, dt_bias (lists of L tensors), accepted,
                   accepted_indices?, state_indices, dst_indices?, record_indices?, boundary_length?, boundary_indices?
                   mutates state and conv_state, in the slots of destinations and checkpoints

and `plan` last: `CommitPlan.to_json()`. Tensors (?) that the geometry does not have are None, and conv_state is an
empty list where windows are not compacted. It raises what the ops of flashkda.ops.custom_ops raise. The addresses of a
set of layers are remembered, so under CUDA graph capture the op must have run on the same tensors before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from flashkda import config
from flashkda.commit import CommitPlan
from flashkda.ops.commit_binding import ORDER, CommitProgram, check_values
from flashkda.ops.commit_validate import LAYERED, validate_commit
from flashkda.ops.launch import is_capturing, signature

_OPTIONAL = ("accepted_indices", "dst_indices", "record_indices", "boundary_length", "boundary_indices")
_WRITTEN = ("state", "conv_state")
# Sets of tensors that an op remembers for a plan; beyond, all are forgotten.
_MOST_VERDICTS = 256


class _Verdict(NamedTuple):
    size: int
    table: torch.Tensor | None


class _Runner:
    """The op under one plan: what has been validated, the tables of addresses, and the kernel."""

    def __init__(self, plan: CommitPlan) -> None:
        self._plan = plan
        self._program: CommitProgram | None = None
        self._verdicts: dict[tuple[object, ...], _Verdict] = {}

    def __call__(self, layers: dict[str, Sequence[torch.Tensor]], requests: dict[str, torch.Tensor]) -> None:
        groups = (*layers.values(), requests.values())
        key = tuple([tuple([(t.data_ptr(), *signature(t)) for t in group]) for group in groups])
        verdict = self._verdicts.get(key)
        if verdict is None:
            size = validate_commit(self._plan, {**layers, **requests}).size
            if self._program is None:
                self._program = CommitProgram(self._plan)
            tuples = {name: tuple(group) for name, group in layers.items()}
            verdict = _Verdict(size, self._program.table(tuples))
            if len(self._verdicts) >= _MOST_VERDICTS:
                self._verdicts.clear()
            self._verdicts[key] = verdict
        assert self._program is not None
        tuples = {name: tuple(group) for name, group in layers.items()}
        if config.debug_checks() and not is_capturing():
            check_values(self._plan, tuples, requests)
        if verdict.size:
            self._program.on(tuples, verdict.table)(*[requests.get(name) for name in ORDER])


@lru_cache(maxsize=64)
def _runner(text: str, switch: str | None) -> _Runner:
    # The switch is part of the key: when it changes, the plan is judged anew.
    return _Runner(CommitPlan.from_json(text))


def _run(*arguments: Any) -> None:
    *tensors, text = arguments
    named = dict(zip((*LAYERED, *ORDER), tensors, strict=True))
    layers = {name: named[name] for name in LAYERED if len(named[name])}
    requests = {name: named[name] for name in ORDER if named[name] is not None}
    _runner(text, config.verify_path())(layers, requests)


def _schema() -> str:
    lists = [f"Tensor{f'(a{i}!)' if name in _WRITTEN else ''}[] {name}" for i, name in enumerate(LAYERED)]
    singles = [f"Tensor{'?' if name in _OPTIONAL else ''} {name}" for name in ORDER]
    return f"({', '.join([*lists, *singles])}, str plan) -> ()"


def _fake(*arguments: Any) -> None:
    """Nothing is returned, so a trace has nothing to learn."""


torch.library.custom_op("flashkda::kda_commit", _run, mutates_args=_WRITTEN, schema=_schema()).register_fake(_fake)
