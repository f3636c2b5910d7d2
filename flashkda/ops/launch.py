# SPDX-License-Identifier: Apache-2.0
"""What every binding does: validate once, fetch the kernels, and then `run`, which only launches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from flashkda import config
from flashkda.errors import KernelNotFoundError, NotPreparedError, StaleBindingError, TensorError
from flashkda.kernel_sets import compile_command
from flashkda.ops import checks, chunked_reference, decode_reference, reference, round_reference
from flashkda.ops.validate import KERNELS, REQUESTS, ROWS, SPECS, Sizes, is_used, leading_size, validate, validate_step

if TYPE_CHECKING:
    from typing_extensions import Self

    from flashkda.planner import Plan

_REFERENCE: dict[str, Callable[..., None]] = {
    "short_conv": reference.short_conv,
    "record": reference.record,
    "gated_rms_norm": reference.gated_rms_norm,
    "fused_verify": reference.verify,
    "fused_round": round_reference.round_,
    "record_chunked": functools.partial(reference.record, window_rule=chunked_reference.chunk),
    "fused_verify_chunked": functools.partial(reference.verify, window_rule=chunked_reference.chunk),
    "decode_rule": decode_reference.decode_rule,
    "fused_decode": decode_reference.decode,
}
# Signatures remembered for each per-step tensor; beyond, all are forgotten, so that odd callers do not leak.
_MOST_SIGNATURES = 4096

# Kernels whose code CUDA has loaded, by device.
_started: set[tuple[Callable[..., Any], torch.device]] = set()

_Launches = tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...]


def is_capturing() -> bool:
    """Whether a CUDA graph is capturing the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def start_once(kernel: Callable[..., Any], device: torch.device, launch: Callable[[], Any]) -> None:
    """Call `launch`, which launches the kernel and has it write nothing, unless the kernel has been started on this
    device: CUDA loads its code at its first launch, which must not come under capture."""
    if (kernel, device) not in _started:
        with torch.cuda.device(device):
            launch()
        _started.add((kernel, device))


@functools.cache
def _on_device(kernel: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """A persistent kernel with the first of its arguments, the device's number of SMs."""
    return functools.partial(kernel, torch.cuda.get_device_properties(device).multi_processor_count)


class Program:
    """The kernels of one kind of binding, in order, and the scratch between them. Holds no tensor.

    Raises NotPreparedError where a kernel would have to be built under CUDA graph capture, KernelBuildError where one
    cannot be had.
    """

    def __init__(self, plan: Plan, binding: type[Binding], device: torch.device) -> None:
        self._plan = plan
        # Without a norm the rule's o is the output itself.
        renamed = {"o": "out"} if "o" not in binding.arguments and not plan.geometry.norm else {}
        self._kernels = tuple(
            (load(plan, kind, device), tuple(renamed.get(name, name) for name in KERNELS[kind].arguments))
            for kind in binding.kinds(plan)
        )
        self.scratch = tuple(name for name in binding.scratch if any(name in names for _, names in self._kernels))

    def allocate(self, name: str, rows: int, device: torch.device) -> torch.Tensor:
        """One scratch tensor, uninitialized."""
        geometry = self._plan.geometry
        shape = (rows, geometry.channels) if name == "qkv" else (rows, geometry.heads, geometry.head_dim)
        return torch.empty(shape, dtype=torch.bfloat16, device=device)

    def launches(self, tensors: Mapping[str, Any]) -> _Launches:
        """Each kernel with its positional arguments out of the tensors and the scratch, by name."""
        return tuple([(kernel, tuple([tensors[name] for name in names])) for kernel, names in self._kernels])

    def start(self, tensors: Mapping[str, Any]) -> None:
        """Start each kernel, with one null request and no rows."""
        device = tensors["state_indices"].device
        if device.type != "cuda" or self._plan.path == "reference" or is_capturing():
            return
        nobody = {name: tensors[name][:0] for name in ROWS if tensors.get(name) is not None}
        for name in REQUESTS:
            if tensors.get(name) is not None:
                size = 2 if name == "query_start_loc" else 1
                nobody[name] = torch.zeros(size, dtype=tensors[name].dtype, device=device)
        nobody["state_indices"].fill_(self._plan.geometry.null_slot)
        for kernel, arguments in self.launches({**tensors, **nobody}):
            start_once(kernel, device, functools.partial(kernel, *arguments))


class _Call(NamedTuple):
    """What one run does: zero `output` where there is no request, else launch."""

    sizes: Sizes
    output: torch.Tensor | None
    tensors: Mapping[str, Any]
    launches: _Launches


class _PerStep(NamedTuple):
    """A tensor that may be given at run. known: the size, M or N, of each signature that has been validated."""

    known: dict[tuple[object, ...], int]
    size: int
    misaligned: int  # the bits of an address that have to be zero


class Binding:
    """Tensors bound to a plan. What a run mutates is `written`.

    plan: the Plan. tensors: by name, those of `arguments` that the geometry has, and those of `scratch` that the caller
    wants to share between bindings of one stream (else they are allocated).
    check_metadata: check the index tensors and every other promise at each run, which synchronizes (None: as
    FLASHKDA_DEBUG_CHECKS says).

    Raises TensorError for a tensor that does not fit; nothing has been written then.
    """

    arguments: ClassVar[tuple[str, ...]]
    written: ClassVar[tuple[str, ...]]
    scratch: ClassVar[tuple[str, ...]] = ()
    output: ClassVar[str | None] = "out"  # zeroed where there is no request
    most_tokens: ClassVar[int | None] = None  # of one request; None: the window

    def __init__(
        self, plan: Plan, tensors: Mapping[str, torch.Tensor | None], *, check_metadata: bool | None = None
    ) -> None:
        given = tuple(name for name in self.scratch if tensors.get(name) is not None)
        names = (*self.arguments, *given)
        self._sizes = validate(plan, names, (*self.written, *given), tensors)
        self.plan = plan
        self.tensors: dict[str, Any] = {name: tensors.get(name) for name in names}
        self._check = config.debug_checks() if check_metadata is None else check_metadata
        self._stale = ""
        self._call: _Call | None = None
        self._per_step: dict[str, _PerStep] = {}
        for name in self.arguments:
            if name in (*ROWS, *REQUESTS) and is_used(plan.geometry, name):
                size = self._sizes.rows if name in ROWS else self._sizes.requests
                mask = plan.geometry.alignment - 1 if SPECS[name].aligned else 0
                self._per_step[name] = _PerStep({signature(self.tensors[name]): size}, size, mask)

    @classmethod
    def kinds(cls, plan: Plan) -> tuple[str, ...]:
        """The kernels of a run, in order."""
        raise NotImplementedError

    def prepare(self) -> Self:
        """Fetch the kernels of a run, allocate its scratch, and return self. A second call does nothing.

        Raises NotPreparedError where a kernel would have to be built under CUDA graph capture, KernelBuildError where
        one cannot be had.
        """
        if self._call is None:
            rows, device = self._sizes.rows, self.tensors["state_indices"].device
            self._program = Program(self.plan, type(self), device)
            whole = {
                name: self.tensors[name] if name in self.tensors else self._program.allocate(name, rows, device)
                for name in self._program.scratch
            }
            self._scratch = {rows: whole}
            call = self._make_call(self._sizes, self.tensors)
            self._program.start(call.tensors)
            self._call = call
        return self

    def run(self, **overrides: torch.Tensor) -> None:
        """Run on the bound tensors, on torch's current stream. Allocates, synchronizes and compiles nothing, but for
        the first run of a binding that has not been prepared.

        overrides: tensors of this run in place of the bound ones: row tensors (mixed_qkv, qkv, raw_gate, raw_beta, o,
        output_gate, out) and request tensors (query_start_loc, state_indices, num_accepted, record_indices). A
        signature (shape, strides, dtype, device) that has been seen costs a look-up. A new one is validated by itself,
        may have fewer rows or requests than bound, and is remembered. That an override shares no memory with what is
        written is the caller's promise.

        Raises TensorError, MetadataError (with checks on), StaleBindingError, and NotPreparedError where the first run
        comes under capture; nothing has been written then.
        """
        if self._stale:
            raise StaleBindingError(self._stale)
        call = self._call
        if call is None:
            call = self._first_call()
        if overrides:
            call = self._override(call, overrides)
        if self._check and not is_capturing():
            validate(self.plan, self.arguments, self.written, {name: call.tensors[name] for name in self.arguments})
            checks.check_metadata(self.plan.geometry, call.tensors, call.sizes.rows, self.most_tokens)
        if 0 in call.sizes:
            if call.output is not None:
                call.output.zero_()
            return
        for kernel, arguments in call.launches:
            kernel(*arguments)

    def mark_stale(self, why: str) -> None:
        """Make every further run raise StaleBindingError with this text."""
        self._stale = why

    def _first_call(self) -> _Call:
        if is_capturing():
            text = f"the first run of a {type(self).__name__} comes under CUDA graph capture"
            raise NotPreparedError(f"{text}; call its prepare(), or run it once, before the capture")
        self.prepare()
        assert self._call is not None
        return self._call

    def _override(self, call: _Call, overrides: Mapping[str, torch.Tensor]) -> _Call:
        resized = False
        for name, tensor in overrides.items():
            step = self._per_step.get(name)
            if step is None:
                expected = f"one of {', '.join(self._per_step)} at run"
                raise TensorError(name, expected, "another name", "bind again to change another tensor")
            size = step.known.get(signature(tensor)) if isinstance(tensor, torch.Tensor) else None
            if size is None or tensor.data_ptr() & step.misaligned:
                size = self._learn(name, step, tensor)
            resized = resized or size != step.size
        sizes = self._resize(overrides) if resized else self._sizes
        return self._make_call(sizes, {**call.tensors, **overrides})

    def _learn(self, name: str, step: _PerStep, tensor: torch.Tensor) -> int:
        """Validate a per-step tensor by itself, and remember its signature."""
        validate_step(self.plan, name, tensor, self._sizes, self.tensors["state_indices"].device)
        if len(step.known) >= _MOST_SIGNATURES:
            step.known.clear()
        return step.known.setdefault(signature(tensor), leading_size(name, tensor))

    def _resize(self, overrides: Mapping[str, torch.Tensor]) -> Sizes:
        """M and N of a run in which either is smaller than bound: all tensors of the group have to agree."""
        sizes = []
        for group in (ROWS, REQUESTS):
            names = [name for name in group if name in self._per_step]
            tensors = {name: overrides.get(name, self.tensors[name]) for name in names}
            first = next((name for name in names if name in overrides), names[0])
            sizes.append(leading_size(first, tensors[first]))
            for name, tensor in tensors.items():
                if leading_size(name, tensor) != sizes[-1]:
                    unit = "rows" if group is ROWS else "requests"
                    hint = f"when their number changes, give every tensor of {unit} at run: {', '.join(names)}"
                    found = str(leading_size(name, tensor))
                    raise TensorError(name, f"{sizes[-1]} {unit}, as {first}", found, hint)
        return Sizes(*sizes)

    def _make_call(self, sizes: Sizes, tensors: Mapping[str, Any]) -> _Call:
        scratch = self._scratch.get(sizes.rows)
        if scratch is None:
            whole = self._scratch[self._sizes.rows]
            scratch = self._scratch[sizes.rows] = {name: tensor[: sizes.rows] for name, tensor in whole.items()}
        if scratch:
            tensors = {**tensors, **scratch}
        output = None if self.output is None else tensors[self.output]
        return _Call(sizes, output, tensors, self._program.launches(tensors))


def signature(tensor: torch.Tensor) -> tuple[object, ...]:
    """All that validation looks at but the address."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def load(plan: Plan, kind: str, device: torch.device) -> Callable[..., Any]:
    """The callable of a kernel on this plan's path and device; it takes the tensors of KERNELS[kind] in order."""
    if plan.path == "reference":
        return functools.partial(_run_reference, plan, kind)
    from flashkda.kernels import specs

    assert plan.tile is not None
    key = (kind, plan.geometry, plan.tile, plan.arch)
    if is_capturing() and not specs.is_loaded(*key):
        text = f"the {kind} kernel is not loaded, and nothing can be built or loaded under CUDA graph capture"
        raise NotPreparedError(f"{text}; bind and prepare, or run once, before the capture")
    try:
        kernel = specs.load(*key)
    except KernelNotFoundError as error:
        command = compile_command(plan.geometry, plan.arch, numerics=plan.numerics)
        raise error.of(plan.geometry, command) from None
    # Only the fused kernels have a persistent form.
    return _on_device(kernel, device) if plan.tile.persistent and kind.startswith("fused_") else kernel


def _run_reference(plan: Plan, kind: str, *arguments: torch.Tensor | None) -> None:
    if is_capturing():
        text = "the reference path reads metadata on the host and cannot be captured in a CUDA graph"
        raise NotPreparedError(f"{text}; capture a plan of the fused or decomposed path")
    _REFERENCE[kind](plan.geometry, **dict(zip(KERNELS[kind].arguments, arguments, strict=True)))
