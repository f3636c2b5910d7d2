# SPDX-License-Identifier: Apache-2.0
"""torch.ops.flashkda: the verify and its three parts as custom ops, for torch.compile and torch.export.

Importing this module, or calling flashkda.register_ops(), registers

    short_conv         mixed_qkv, conv_weight, conv_state, query_start_loc, state_indices, num_accepted?, qkv
                       mutates qkv (rows of requests that take part), conv_state
    kda_record         qkv, raw_gate, raw_beta, A_log, dt_bias, state, query_start_loc, state_indices, record_indices?,
                       o, corrections, key_gate
                       mutates o (every row), corrections, key_gate
    gated_rms_norm     o, output_gate, norm_weight, query_start_loc, state_indices, out
                       mutates out (every row)
    kda_record_fused   mixed_qkv, conv_weight, conv_state, raw_gate, raw_beta, A_log, dt_bias, state, output_gate?,
                       norm_weight?, query_start_loc, state_indices, num_accepted?, record_indices?, out, corrections,
                       key_gate
                       mutates out (every row), corrections, key_gate, conv_state

    kda_commit         see flashkda.ops.commit_op

and each takes `plan` last: a plan as JSON text (`Plan.to_json()`), which a compiled or exported graph then carries. The
tensors are positional or by name; None for those (?) that the geometry does not have. Nothing is returned. The fused op
runs the plan's path, whichever it is.

The ops look at every tensor at every call: an eager caller is better served by a binding. They raise TensorError before
anything is written; PlanMismatchError where the plan was made for other kernels or FLASHKDA_VERIFY_PATH now asks for
another path; MetadataError with FLASHKDA_DEBUG_CHECKS=1; NotPreparedError where a kernel would have to be built under
CUDA graph capture.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

import flashkda.ops.commit_op  # noqa: F401  registers kda_commit
from flashkda import config
from flashkda.ops.binding import NormBinding, RuleBinding, ShortConvBinding, VerifyBinding
from flashkda.ops.checks import check_metadata
from flashkda.ops.launch import Binding, Program, is_capturing, signature
from flashkda.ops.validate import Sizes, validate
from flashkda.planner import Plan

_OPS: dict[str, type[Binding]] = {
    "short_conv": ShortConvBinding,
    "kda_record": RuleBinding,
    "gated_rms_norm": NormBinding,
    "kda_record_fused": VerifyBinding,
}
# Verdicts of validation that an op remembers for a plan; beyond, all are forgotten.
_MOST_VERDICTS = 1024
# Tensors that an op takes as None where the geometry has none. (A norm alone without its gate is no op.)
_OPTIONAL = {
    "short_conv": ("num_accepted",),
    "kda_record": ("record_indices",),
    "gated_rms_norm": (),
    "kda_record_fused": ("output_gate", "norm_weight", "num_accepted", "record_indices"),
}


class _Runner:
    """One op under one plan: what has been validated, and the kernels."""

    def __init__(self, binding: type[Binding], plan: Plan) -> None:
        self._binding, self._plan = binding, plan
        self._program: Program | None = None
        self._validated: dict[tuple[object, ...], Sizes] = {}

    def __call__(self, tensors: dict[str, Any]) -> None:
        sizes = self._validate(tensors)
        if config.debug_checks() and not is_capturing():
            check_metadata(self._plan.geometry, tensors, sizes.rows)
        program = self._program
        if program is None:
            device = tensors["state_indices"].device
            program = self._program = Program(self._plan, self._binding, device)
        if 0 in sizes:
            if self._binding.output is not None:
                tensors[self._binding.output].zero_()
            return
        # Allocated by the call: under capture the scratch belongs to the graph.
        device = tensors["state_indices"].device
        scratch = {name: program.allocate(name, sizes.rows, device) for name in program.scratch}
        for kernel, arguments in program.launches({**tensors, **scratch}):
            kernel(*arguments)

    def _validate(self, tensors: dict[str, Any]) -> Sizes:
        # Addresses come back, from one step of an engine to the next, and with them the verdict.
        key = tuple([None if t is None else (t.data_ptr(), *signature(t)) for t in tensors.values()])
        sizes = self._validated.get(key)
        if sizes is None:
            sizes = validate(self._plan, self._binding.arguments, self._binding.written, tensors)
            if len(self._validated) >= _MOST_VERDICTS:
                self._validated.clear()
            self._validated[key] = sizes
        return sizes


@lru_cache(maxsize=256)
def _runner(name: str, text: str, switch: str | None) -> _Runner:
    # The switch is part of the key: when it changes, the plan is judged anew.
    return _Runner(_OPS[name], Plan.from_json(text))


def _implementation(name: str) -> Callable[..., None]:
    names = _OPS[name].arguments

    def run(*arguments: Any) -> None:
        *tensors, text = arguments
        _runner(name, text, config.verify_path())(dict(zip(names, tensors, strict=True)))

    return run


def _schema(name: str, binding: type[Binding]) -> str:
    def argument(i: int, tensor: str) -> str:
        mutated = f"(a{i}!)" if tensor in binding.written else ""
        return f"Tensor{mutated}{'?' if tensor in _OPTIONAL[name] else ''} {tensor}"

    return f"({', '.join(argument(i, tensor) for i, tensor in enumerate(binding.arguments))}, str plan) -> ()"


def _fake(*arguments: Any) -> None:
    """Nothing is returned, so a trace has nothing to learn."""


for _name, _binding in _OPS.items():
    torch.library.custom_op(
        f"flashkda::{_name}",
        _implementation(_name),
        mutates_args=_binding.written,
        schema=_schema(_name, _binding),
    ).register_fake(_fake)


def register() -> Any:
    """The namespace torch.ops.flashkda, with the ops in it: importing this module registered them."""
    return torch.ops.flashkda
