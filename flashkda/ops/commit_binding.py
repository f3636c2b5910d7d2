# SPDX-License-Identifier: Apache-2.0
"""The binding of a commit: the tensors of all layers bound to a plan, ready to run (also `plan.bind`).

The kernel finds a layer's tensors by a table of addresses, which is made at bind. So a pool that is allocated anew, or
storage that is swapped under a tensor (`parameter.data = ...`), needs a new binding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from flashkda import config
from flashkda.errors import KernelNotFoundError, NotPreparedError, TensorError
from flashkda.kernel_sets import compile_command
from flashkda.ops import commit_checks, commit_reference
from flashkda.ops.commit_validate import LAYERED, check_records, check_requests, validate_commit
from flashkda.ops.launch import is_capturing, signature, start_once

if TYPE_CHECKING:
    from typing_extensions import Self

    from flashkda.commit import CommitPlan

    LayerTensors = torch.Tensor | Sequence[torch.Tensor]

# The kernel's request tensors, in the order of its arguments.
ORDER = (
    *("accepted", "accepted_indices", "state_indices", "dst_indices", "record_indices"),
    *("boundary_length", "boundary_indices"),
)

Layers = Mapping[str, tuple[torch.Tensor, ...]]

# Sets of signatures that a binding remembers; beyond, all are forgotten, so that odd callers do not leak.
_MOST_SIGNATURES = 4096


class CommitProgram:
    """The commit of a plan: its kernel, or the reference. Holds no tensor.

    Raises NotPreparedError where the kernel would have to be built under CUDA graph capture, KernelBuildError where it
    cannot be had.
    """

    def __init__(self, plan: CommitPlan) -> None:
        self._plan = plan
        self._kernel: Callable[..., None] | None = None
        if plan.path == "kernel":
            from flashkda.kernels import specs

            if is_capturing() and not specs.is_commit_loaded(plan.geometry, plan.arch):
                text = "the commit kernel is not loaded, and nothing can be built or loaded under CUDA graph capture"
                raise NotPreparedError(f"{text}; bind, or run once, before the capture")
            try:
                self._kernel = specs.load_commit(plan.geometry, plan.arch)
            except KernelNotFoundError as error:
                flags = {name: value for name, value in plan.geometry.to_dict().items() if isinstance(value, bool)}
                command = compile_command(plan.geometry.verify, plan.arch, commit=flags)
                raise error.of(plan.geometry, command) from None

    def table(self, layers: Layers) -> torch.Tensor | None:
        """The kernel's table of addresses, int64 [6, L] on the device; the reference needs none."""
        if self._kernel is None:
            return None
        if is_capturing():
            text = "the table of the layers' addresses cannot be made under CUDA graph capture"
            raise NotPreparedError(f"{text}; bind, or run once on the same tensors, before the capture")
        none = [0] * self._plan.geometry.layers
        addresses = [[t.data_ptr() for t in layers[name]] if name in layers else none for name in LAYERED]
        return torch.tensor(addresses, dtype=torch.int64, device=layers["state"][0].device)

    def on(self, layers: Layers, table: torch.Tensor | None) -> Callable[..., None]:
        """The callable that commits these layers; it takes the request tensors in the order of ORDER."""
        if self._kernel is None:
            return functools.partial(self._run_reference, layers)
        return functools.partial(self._kernel, table, *[layers[n][0] if n in layers else None for n in LAYERED[:4]])

    def start(self, call: Callable[..., None], requests: Mapping[str, torch.Tensor]) -> None:
        """Start the kernel, with one null request."""
        device = requests["state_indices"].device
        if self._kernel is None or device.type != "cuda" or is_capturing():
            return
        nobody = {name: torch.zeros(1, dtype=t.dtype, device=device) for name, t in requests.items()}
        nobody["state_indices"].fill_(self._plan.geometry.verify.null_slot)
        start_once(self._kernel, device, functools.partial(call, *[nobody.get(name) for name in ORDER]))

    def _run_reference(self, layers: Layers, *requests: torch.Tensor | None) -> None:
        if is_capturing():
            text = "the reference path reads metadata on the host and cannot be captured in a CUDA graph"
            raise NotPreparedError(f"{text}; capture a plan of the kernel path")
        named: dict[str, Any] = {**layers, **dict(zip(ORDER, requests, strict=True))}
        commit_reference.commit(self._plan.geometry, **named)


class CommitBinding:
    """Tensors bound to a plan of a commit. A run mutates state and, where windows are compacted, conv_state: the slots
    of destinations and checkpoints.

    check_metadata: check the values of the request tensors at each run, which synchronizes (None: as
    FLASHKDA_DEBUG_CHECKS says). Raises TensorError for a tensor that does not fit; nothing has been written then.
    """

    def __init__(
        self, plan: CommitPlan, tensors: Mapping[str, LayerTensors | None], *, check_metadata: bool | None = None
    ) -> None:
        given = validate_commit(plan, tensors)
        self.plan = plan
        self.layers, self.requests = given.layers, given.requests
        self._size = given.size
        self._check = config.debug_checks() if check_metadata is None else check_metadata
        self._known: dict[tuple[object, ...], int] = {}
        self._call: Callable[..., None] | None = None
        self.prepare()

    def prepare(self) -> Self:
        """Fetch the kernel and make its table of addresses, and return self. Done when the binding is made; a second
        call does nothing. Raises NotPreparedError under CUDA graph capture, KernelBuildError."""
        if self._call is None:
            program = CommitProgram(self.plan)
            call = program.on(self.layers, program.table(self.layers))
            program.start(call, self.requests)
            self._call = call
        return self

    def run(self, **overrides: torch.Tensor) -> None:
        """Commit all layers, on torch's current stream, in one launch. Allocates, synchronizes and compiles nothing.

        overrides: request tensors of this run in place of the bound ones (accepted, accepted_indices, state_indices,
        dst_indices, record_indices, boundary_length, boundary_indices, query_start_loc). A set of signatures that has
        been seen costs a look-up, a new one is validated by itself. With another number of requests than bound, up to
        the plan's max_requests, all have to be given. That they share no memory with what is written is the caller's
        promise.

        Raises TensorError, and MetadataError with checks on; nothing has been written then.
        """
        requests, size = self.requests, self._size
        if overrides:
            requests, size = self._override(overrides)
        if self._check and not is_capturing():
            check_values(self.plan, self.layers, requests)
        if size:
            assert self._call is not None
            self._call(*[requests.get(name) for name in ORDER])

    def _override(self, overrides: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], int]:
        for name, tensor in overrides.items():
            if name not in self.requests:
                hint = "bind again to change another tensor"
                raise TensorError(name, f"one of {', '.join(self.requests)} at run", "another name", hint)
            if not isinstance(tensor, torch.Tensor):
                raise TensorError(name, "a torch.Tensor", type(tensor).__name__, f"give {name}=...")
        requests = {**self.requests, **overrides}
        key = tuple([(signature(t), t.data_ptr() % t.element_size()) for t in requests.values()])
        size = self._known.get(key)
        if size is None:
            size = check_requests(self.plan, requests, self.layers["state"][0].device)
            check_records(self.plan.geometry, self.layers, size)
            if len(self._known) >= _MOST_SIGNATURES:
                self._known.clear()
            self._known[key] = size
        return requests, size


def check_values(plan: CommitPlan, layers: Layers, requests: Mapping[str, torch.Tensor]) -> None:
    """The debug checks of a run. Raises MetadataError."""
    commit_checks.check_commit(
        plan.geometry,
        requests,
        slots=layers["state"][0].shape[0],
        conv_slots=layers["conv_state"][0].shape[0] if plan.geometry.compact else None,
        records=layers["corrections"][0].shape[0],
    )


def bind_commit(
    plan: CommitPlan, *, check_metadata: bool | None = None, **tensors: LayerTensors | None
) -> CommitBinding:
    """Bind a commit, and fetch its kernel. Tensors by their names in docs/commit.md:

    state, corrections, key_gate, A_log, dt_bias and, with compact, conv_state: a sequence of L tensors, or one with a
    leading dimension of L; all layers alike in shape and strides. accepted, state_indices, and by the geometry
    accepted_indices, dst_indices, record_indices, boundary_length and boundary_indices. query_start_loc of the verify
    may be given for the debug checks, which then know each request's length. Others are left out or None.

    Raises TensorError, KernelBuildError, and NotPreparedError under CUDA graph capture.
    """
    return CommitBinding(plan, tensors, check_metadata=check_metadata)
