# SPDX-License-Identifier: Apache-2.0
"""Bindings: tensors bound to a plan, ready to run.

`bind` (also `plan.bind`) makes a VerifyBinding of the plan's path: one launch (fused), three (decomposed) or torch
(reference). `bind_short_conv`, `bind_record` and `bind_gated_rms_norm` make bindings of the parts, which run as
launches of their own. A `VerifyLayer` holds a conv and a record binding as an engine makes them, and makes the whole
from the two, again whenever one is replaced.

A binding keeps the tensor objects it was given. A pool that is allocated anew needs a new binding, and a CUDA graph
that was captured with the old one needs a new capture. Storage that is swapped under a tensor (`parameter.data = ...`)
is used as it then is, unvalidated but for debug checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from flashkda.errors import NotPreparedError, PlanMismatchError, TensorError
from flashkda.ops.launch import Binding, is_capturing
from flashkda.ops.validate import KERNELS

if TYPE_CHECKING:
    from flashkda.planner import Plan


class VerifyBinding(Binding):
    """The whole verify. A run mutates out (every row), corrections, key_gate and conv_state. Prepared when made.

    The decomposed path needs qkv [M, C] and o [M, H, D], bf16, between its launches: allocated, unless given.
    """

    arguments, written = KERNELS["fused_verify"]
    scratch = ("qkv", "o")

    def __init__(self, plan: Plan, tensors: Mapping[str, torch.Tensor | None], **options: Any) -> None:
        super().__init__(plan, tensors, **options)
        self.prepare()

    @classmethod
    def kinds(cls, plan: Plan) -> tuple[str, ...]:
        """One kernel; on the decomposed path three, two without a norm."""
        if plan.path == "decomposed":
            return ("short_conv", *RecordBinding.kinds(plan))
        return (plan.kernel("fused_verify"),)


class ShortConvBinding(Binding):
    """The short conv. A run mutates qkv (rows of requests that take part) and conv_state."""

    arguments, written = KERNELS["short_conv"]
    output = None

    @classmethod
    def kinds(cls, plan: Plan) -> tuple[str, ...]:
        """The one kernel."""
        return ("short_conv",)


class RecordBinding(Binding):
    """From the conv's qkv on: the rule, then the norm if the geometry has one.

    A run mutates out (every row), corrections and key_gate. Between its two launches is o [M, H, D] bf16: allocated,
    unless given.
    """

    arguments = (
        *(name for name in KERNELS["record"].arguments if name not in ("o", "corrections", "key_gate")),
        *("output_gate", "norm_weight", "out", "corrections", "key_gate"),
    )
    written = ("out", "corrections", "key_gate")
    scratch = ("o",)

    @classmethod
    def kinds(cls, plan: Plan) -> tuple[str, ...]:
        """Two kernels, one without a norm."""
        return (*RuleBinding.kinds(plan), "gated_rms_norm") if plan.geometry.norm else RuleBinding.kinds(plan)


class RuleBinding(Binding):
    """The record kernel alone. A run mutates o (every row), corrections and key_gate."""

    arguments, written = KERNELS["record"]
    output = "o"

    @classmethod
    def kinds(cls, plan: Plan) -> tuple[str, ...]:
        """The one kernel."""
        return (plan.kernel("record"),)


class NormBinding(Binding):
    """The gated RMSNorm alone. A run mutates out (every row)."""

    arguments, written = KERNELS["gated_rms_norm"]

    @classmethod
    def kinds(cls, plan: Plan) -> tuple[str, ...]:
        """The one kernel."""
        return ("gated_rms_norm",)


class VerifyLayer:
    """A layer's verify made from the two bindings that an engine has, and made again when either is replaced.

    Set `conv` (a ShortConvBinding whose qkv is the record's) and `record` (a RecordBinding), both of this plan, then
    `finalize()` before a capture; `run()` outside a capture finalizes by itself. Setting another binding makes the
    VerifyBinding of the old one stale: running it raises StaleBindingError. A CUDA graph that holds its launches has to
    be captured again; a replay cannot be refused.
    """

    def __init__(self, plan: Plan, *, check_metadata: bool | None = None) -> None:
        self.plan = plan
        self._check_metadata = check_metadata
        self._conv: ShortConvBinding | None = None
        self._record: RecordBinding | None = None
        self._verify: VerifyBinding | None = None

    @property
    def conv(self) -> ShortConvBinding | None:
        """The conv binding. Setting one of another plan raises PlanMismatchError."""
        return self._conv

    @conv.setter
    def conv(self, binding: ShortConvBinding | None) -> None:
        self._replace("conv", self._conv, binding)
        self._conv = binding

    @property
    def record(self) -> RecordBinding | None:
        """The record binding. Setting one of another plan raises PlanMismatchError."""
        return self._record

    @record.setter
    def record(self, binding: RecordBinding | None) -> None:
        self._replace("record", self._record, binding)
        self._record = binding

    def finalize(self) -> VerifyBinding:
        """The VerifyBinding of the current parts, made if there is none; its kernels are fetched and scratch allocated.

        Raises NotPreparedError under CUDA graph capture or where a part is missing, and TensorError where the parts do
        not fit each other.
        """
        if self._verify is None:
            if is_capturing():
                raise NotPreparedError("a VerifyLayer is not finalized; call finalize() before the capture")
            if self._conv is None or self._record is None:
                missing = "conv" if self._conv is None else "record"
                raise NotPreparedError(f"a VerifyLayer has no {missing} binding; set layer.{missing} first")
            conv, record = self._conv.tensors, self._record.tensors
            for name in conv:
                if name in record:
                    _check_same(name, conv[name], record[name])
            self._verify = VerifyBinding(self.plan, {**conv, **record}, check_metadata=self._check_metadata)
        return self._verify

    def run(self, **overrides: torch.Tensor) -> None:
        """Finalize if need be (never under capture), and run: see Binding.run, with the tensors of `bind`."""
        verify = self._verify
        if verify is None:
            verify = self.finalize()
        verify.run(**overrides)

    def _replace(self, part: str, old: Binding | None, new: Binding | None) -> None:
        if new is not None and new.plan.fingerprint != self.plan.fingerprint:
            found = f"plan {new.plan.fingerprint}, the layer has {self.plan.fingerprint}"
            raise PlanMismatchError(f"layer.{part}: the binding has {found}; bind it with the layer's plan")
        if new is not old and self._verify is not None:
            text = f"the {part} binding that this verify was made from has been replaced"
            self._verify.mark_stale(f"{text}; take the layer's finalize() again, and capture its graphs again")
            self._verify = None


def _check_same(name: str, conv: torch.Tensor, record: torch.Tensor) -> None:
    def look(tensor: torch.Tensor) -> tuple[object, ...]:
        return tensor.data_ptr(), tensor.shape, tensor.stride()

    if look(conv) != look(record):
        hint = "bind the record with the conv's"
        raise TensorError(name, "the same tensor in the conv and the record binding", "two tensors", hint)


def bind(plan: Plan, *, check_metadata: bool | None = None, **tensors: torch.Tensor | None) -> VerifyBinding:
    """Bind the whole verify and fetch its kernels. Tensors by their names in docs/tensors.md:

    mixed_qkv, conv_weight, conv_state, raw_gate, raw_beta, A_log, dt_bias, state, output_gate, norm_weight,
    query_start_loc, state_indices, num_accepted, record_indices, out, corrections, key_gate. Those that the geometry
    does not have are left out or None. The scratch of the decomposed path, qkv [M, C] and o [M, H, D] bf16, may be
    given, to be shared by the layers of one stream. check_metadata: check the index tensors at each run, which
    synchronizes (None: as FLASHKDA_DEBUG_CHECKS says).

    Raises TensorError, KernelBuildError, and NotPreparedError where a kernel would have to be built under capture.
    """
    return VerifyBinding(plan, tensors, check_metadata=check_metadata)


def bind_short_conv(
    plan: Plan, *, check_metadata: bool | None = None, **tensors: torch.Tensor | None
) -> ShortConvBinding:
    """Bind the short conv: mixed_qkv, conv_weight, conv_state, query_start_loc, state_indices, num_accepted, and qkv
    [M, C] bf16 contiguous for the result. Its kernel is fetched by `prepare` or the first run: within a VerifyLayer of
    a fused plan it is never needed. Raises TensorError."""
    return ShortConvBinding(plan, tensors, check_metadata=check_metadata)


def bind_record(plan: Plan, *, check_metadata: bool | None = None, **tensors: torch.Tensor | None) -> RecordBinding:
    """Bind the rule and the norm: qkv (the conv's result), raw_gate, raw_beta, A_log, dt_bias, state, query_start_loc,
    state_indices, record_indices, output_gate, norm_weight, out, corrections, key_gate. Kernels and scratch come with
    `prepare` or the first run. Raises TensorError."""
    return RecordBinding(plan, tensors, check_metadata=check_metadata)


def bind_gated_rms_norm(
    plan: Plan, *, check_metadata: bool | None = None, **tensors: torch.Tensor | None
) -> NormBinding:
    """Bind the norm alone: o, output_gate, norm_weight, query_start_loc, state_indices, out. Its kernel comes with
    `prepare` or the first run. Raises TensorError."""
    return NormBinding(plan, tensors, check_metadata=check_metadata)
