# SPDX-License-Identifier: Apache-2.0
"""Tensors against a geometry: one table, every check before anything is written.

`SPECS` says what each tensor is and `KERNELS` which tensors a kernel takes, in the order of its positional arguments,
and which of them it writes. `validate` walks the two; nothing else in the package checks a tensor.

Only host-visible properties are looked at here (nothing synchronizes); the values of the index tensors are the caller's
promise, which `flashkda.ops.checks` can verify.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from flashkda import capability
from flashkda.errors import TensorError

if TYPE_CHECKING:
    from flashkda.commit import CommitPlan
    from flashkda.geometry import VerifyGeometry
    from flashkda.planner import Plan

Tensors = Mapping[str, "torch.Tensor | None"]


@dataclass(frozen=True)
class TensorSpec:
    """What one tensor has to be.

    shape: the symbols of docs/tensors.md; M, N, S (state slots), S' (conv slots) and R (records) come from the tensors.
    dtype: a torch dtype's name, or the geometry's field that holds it.
    layout: "dense": row-major, no gaps; "outer": the first dimension's stride is free (no overlap), the rest is dense;
        "conv": as "outer", inside the slot as the geometry's conv_layout.
    aligned: the data pointer and the outer stride are multiples of the geometry's alignment (else of the element only).
    """

    shape: tuple[str, ...]
    dtype: str
    layout: Literal["dense", "outer", "conv"] = "dense"
    aligned: bool = False


# Not aligned is what the kernels read by the element: A_log (a rank's 6 heads start at a multiple of 24 bytes),
# raw_beta (rows of 24 bytes at 12 heads) and the index tensors.
SPECS: dict[str, TensorSpec] = {
    "mixed_qkv": TensorSpec(("M", "C"), "bfloat16", "outer", True),
    "conv_weight": TensorSpec(("C", "W"), "conv_weight_dtype", "dense", True),
    "conv_state": TensorSpec(("S'", "C", "T+2"), "bfloat16", "conv", True),
    "qkv": TensorSpec(("M", "C"), "bfloat16", "dense", True),
    "raw_gate": TensorSpec(("M", "H", "D"), "bfloat16", "outer", True),
    "raw_beta": TensorSpec(("M", "H"), "bfloat16", "outer"),
    "A_log": TensorSpec(("H",), "float32"),
    "dt_bias": TensorSpec(("H", "D"), "float32", "dense", True),
    "state": TensorSpec(("S", "H", "D", "D"), "state_dtype", "outer", True),
    "o": TensorSpec(("M", "H", "D"), "bfloat16", "outer", True),
    "output_gate": TensorSpec(("M", "H", "D"), "bfloat16", "outer", True),
    "norm_weight": TensorSpec(("D",), "norm_weight_dtype", "dense", True),
    "query_start_loc": TensorSpec(("N+1",), "int32"),
    "state_indices": TensorSpec(("N",), "index_dtype", "outer"),
    "num_accepted": TensorSpec(("N",), "int32"),
    "record_indices": TensorSpec(("N",), "index_dtype", "outer"),
    "out": TensorSpec(("M", "H", "D"), "bfloat16", "outer", True),
    "corrections": TensorSpec(("R", "H", "T", "D"), "float32", "outer", True),
    "key_gate": TensorSpec(("R", "H", "T", "2D"), "bfloat16", "outer", True),
}


class KernelArguments(NamedTuple):
    """A kernel's tensors in positional order, and those of them that it writes."""

    arguments: tuple[str, ...]
    written: tuple[str, ...]


_CONV = ("mixed_qkv", "conv_weight", "conv_state")
_RULE = ("raw_gate", "raw_beta", "A_log", "dt_bias", "state")
_NORM = ("output_gate", "norm_weight")
_BATCH = ("query_start_loc", "state_indices")
_RECORDS = ("corrections", "key_gate")

KERNELS: dict[str, KernelArguments] = {
    "short_conv": KernelArguments((*_CONV, *_BATCH, "num_accepted", "qkv"), ("qkv", "conv_state")),
    "record": KernelArguments(("qkv", *_RULE, *_BATCH, "record_indices", "o", *_RECORDS), ("o", *_RECORDS)),
    "gated_rms_norm": KernelArguments(("o", *_NORM, *_BATCH, "out"), ("out",)),
    "fused_verify": KernelArguments(
        (*_CONV, *_RULE, *_NORM, *_BATCH, "num_accepted", "record_indices", "out", *_RECORDS),
        ("out", *_RECORDS, "conv_state"),
    ),
    "decode_rule": KernelArguments(("qkv", *_RULE, *_BATCH, "o"), ("o", "state")),
    "fused_decode": KernelArguments(
        (*_CONV, *_RULE, *_NORM, *_BATCH, "num_accepted", "out"), ("out", "conv_state", "state")
    ),
}

_VERIFY = KERNELS["fused_verify"]
KERNELS["fused_round"] = KernelArguments(_VERIFY.arguments, (*_VERIFY.written, "state"))
KERNELS |= {f"{kind}_chunked": KERNELS[kind] for kind in ("record", "fused_verify")}

# What may be given anew at each run, by the size that may then be smaller than at bind.
ROWS = ("mixed_qkv", "qkv", "raw_gate", "raw_beta", "o", "output_gate", "out")
REQUESTS = ("state_indices", "num_accepted", "record_indices", "query_start_loc")


class Sizes(NamedTuple):
    rows: int
    requests: int


def is_used(geometry: VerifyGeometry, name: str) -> bool:
    """Whether a geometry has this tensor at all; one it has not must be absent."""
    if name == "num_accepted":
        return geometry.has_num_accepted
    if name == "record_indices":
        return geometry.records == "indices"
    return geometry.norm or name not in _NORM


def leading_size(name: str, tensor: torch.Tensor) -> int:
    """M of a row tensor, N of a request tensor."""
    return tensor.shape[0] - (name == "query_start_loc")


def validate(plan: Plan, names: Iterable[str], written: Iterable[str], tensors: Tensors) -> Sizes:
    """Check every tensor of a binding; raises TensorError for the first that is wrong, and has written nothing.

    names: the tensors that the binding takes; those of `tensors` that the geometry does not use must be None.
    written: the ones that a run writes: they may share no byte with any other.
    Returns M and N.
    """
    geometry = plan.geometry
    names = tuple(names)
    if "o" in names and "output_gate" in names and not geometry.norm:
        raise TensorError("output_gate", "a geometry with norm=True", "norm=False", "make the geometry with norm=True")
    for name, tensor in tensors.items():
        if name not in names and (tensor is not None or name not in SPECS):
            raise TensorError(
                name, f"one of {', '.join(names)}", "an unknown name", "remove it or correct its spelling"
            )
        if tensor is not None and not is_used(geometry, name):
            hint = f"leave it out, or make the geometry with {_WITH_AND_WITHOUT[name][0]}"
            raise TensorError(name, "None by this geometry", f"a tensor of shape {list(tensor.shape)}", hint)
    used = {name: _present(name, tensors.get(name)) for name in names if is_used(geometry, name)}
    # What most tensors have is taken as right: the one that differs is then the one named as wrong.
    sizes = Sizes(_common_size(used, ROWS), _common_size(used, REQUESTS))
    device = statistics.mode(tensor.device for tensor in used.values())
    check_device(plan, device)
    symbols = symbols_of(geometry, sizes)
    for name, tensor in used.items():
        check_tensor(geometry, name, tensor, symbols, device)
    _check_capacities(plan, used, sizes)
    _check_aliasing(used, written)
    return sizes


def validate_step(plan: Plan, name: str, tensor: object, capacity: Sizes, device: torch.device) -> None:
    """Check one tensor given at run: as at bind, with at most `capacity` rows or requests. Raises TensorError."""
    tensor = _present(name, tensor)
    bound = capacity.rows if name in ROWS else capacity.requests
    size = leading_size(name, tensor) if tensor.ndim else bound
    if not 0 <= size <= bound:
        hint = "bind again with the larger size"
        raise TensorError(name, f"room for at most {bound} {_unit(name)}, as bound", f"{size}", hint)
    check_tensor(plan.geometry, name, tensor, symbols_of(plan.geometry, Sizes(size, size)), device)


def check_device(plan: Plan | CommitPlan, device: torch.device) -> None:
    """The device has to be one that the plan's kernels were made for; the reference runs anywhere."""
    if plan.path == "reference":
        return
    if device.type != "cuda":
        hint = "move the tensors to the GPU, or make a plan with path='reference'"
        raise TensorError("device", f"cuda, for the {plan.path} kernels of {plan.arch}", str(device), hint)
    found = capability.detect_arch(device)
    if found != plan.arch:
        hint = f"make the plan with device={str(device)!r}"
        raise TensorError("device", f"{plan.arch}, the plan's architecture", f"{device}, which is {found}", hint)


def check_tensor(
    geometry: VerifyGeometry,
    name: str,
    tensor: torch.Tensor,
    symbols: dict[str, int],
    device: torch.device,
    spec: TensorSpec | None = None,
) -> None:
    """One tensor against its line of the table, or of another one. Free symbols of its shape are added to `symbols`."""
    spec = SPECS[name] if spec is None else spec
    if tensor.layout is not torch.strided:
        raise TensorError(name, "a strided tensor", str(tensor.layout), "make it dense")
    if tensor.device != device:
        raise TensorError(name, f"device {device}, as the other tensors", str(tensor.device), f"move it to {device}")
    dtype = getattr(geometry, spec.dtype, spec.dtype)
    if tensor.dtype is not getattr(torch, dtype):
        hint = (
            f"make the geometry with that {spec.dtype}"
            if dtype != spec.dtype
            else f"convert it with .to(torch.{dtype})"
        )
        raise TensorError(name, f"dtype {dtype}", str(tensor.dtype).removeprefix("torch."), hint)
    _check_shape(name, spec, tensor, symbols)
    if tensor.numel():
        _check_strides(geometry, name, spec, tensor)
    itemsize = tensor.element_size()
    alignment = max(geometry.alignment, itemsize) if spec.aligned else itemsize
    if tensor.data_ptr() % alignment:
        found = f"address {tensor.data_ptr():#x}"
        raise TensorError(name, f"data aligned to {alignment} bytes", found, _UNALIGNED)


_UNALIGNED = "copy it to aligned memory, or make the geometry with alignment=2"
# The geometry that has an optional tensor, and the one that has it not.
_WITH_AND_WITHOUT = {
    "num_accepted": ("has_num_accepted=True", "has_num_accepted=False"),
    "record_indices": ("records='indices'", "records='slot' or records='request'"),
    "output_gate": ("norm=True", "norm=False"),
    "norm_weight": ("norm=True", "norm=False"),
}


def _unit(name: str) -> str:
    return "rows" if name in ROWS else "requests"


def _present(name: str, tensor: object) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        hint = f"give {name}=..."
        if name in _WITH_AND_WITHOUT:
            hint += f", or make the geometry with {_WITH_AND_WITHOUT[name][1]}"
        raise TensorError(name, "a torch.Tensor", "nothing" if tensor is None else type(tensor).__name__, hint)
    return tensor


def _common_size(tensors: Mapping[str, torch.Tensor], group: tuple[str, ...]) -> int:
    sizes = [leading_size(name, tensors[name]) for name in group if name in tensors and tensors[name].ndim]
    return max(statistics.mode(sizes), 0) if sizes else 0


def symbols_of(geometry: VerifyGeometry, sizes: Sizes) -> dict[str, int]:
    """The sizes that a geometry and a batch fix, by their symbols in the table."""
    return {
        "M": sizes.rows,
        "N": sizes.requests,
        "N+1": sizes.requests + 1,
        "H": geometry.heads,
        "D": geometry.head_dim,
        "2D": 2 * geometry.head_dim,
        "C": geometry.channels,
        "W": geometry.conv_width,
        "T": geometry.window,
        "T+2": geometry.conv_columns,
    }


def _check_shape(name: str, spec: TensorSpec, tensor: torch.Tensor, symbols: dict[str, int]) -> None:
    shape = tensor.shape
    if len(shape) == len(spec.shape):
        expected = [symbols.setdefault(symbol, size) for symbol, size in zip(spec.shape, shape, strict=True)]
        if list(shape) == expected:
            return
    wanted = ", ".join(f"{symbol}={symbols[symbol]}" if symbol in symbols else symbol for symbol in spec.shape)
    hint = "the other tensors and the geometry give the sizes; correct whichever is wrong"
    raise TensorError(name, f"shape [{wanted}]", str(list(shape)), hint)


def _check_strides(geometry: VerifyGeometry, name: str, spec: TensorSpec, tensor: torch.Tensor) -> None:
    """A stride counts only where its dimension has more than one entry, as in torch's is_contiguous."""
    shape, strides = tensor.shape, tensor.stride()
    wanted = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        wanted[i] = wanted[i + 1] * shape[i + 1]
    if spec.layout == "conv" and geometry.conv_layout == "SD":
        wanted[1:] = 1, shape[1]
    inner = 0 if spec.layout == "dense" else 1
    wrong = any(shape[i] > 1 and strides[i] != wanted[i] for i in range(inner, len(shape)))
    if wrong or (inner and shape[0] > 1 and strides[0] < wanted[0]):
        free = f"at least {wanted[0]}" if inner else wanted[0]
        expected = f"strides ({', '.join(str(w) for w in [free, *wanted[1:]])})"
        hint = "copy it with .contiguous()"
        if spec.layout == "conv":
            hint = f"lay the slots out as conv_layout={geometry.conv_layout!r}, or make the geometry with the other"
        raise TensorError(name, expected, str(strides), hint)
    if inner and spec.aligned and shape[0] > 1 and strides[0] * tensor.element_size() % geometry.alignment:
        expected = f"an outer stride of a multiple of {geometry.alignment} bytes"
        raise TensorError(name, expected, f"{strides[0] * tensor.element_size()} bytes", _UNALIGNED)


def _check_capacities(plan: Plan, tensors: Mapping[str, torch.Tensor], sizes: Sizes) -> None:
    if sizes.requests > plan.max_requests:
        hint = "make the plan with a larger max_requests"
        raise TensorError("state_indices", f"at most {plan.max_requests} requests", str(sizes.requests), hint)
    if "corrections" in tensors and plan.geometry.records != "indices":
        by_slot = plan.geometry.records == "slot"
        needed = tensors["state"].shape[0] if by_slot else sizes.requests
        rows = tensors["corrections"].shape[0]
        if rows < needed:
            expected = f"at least {needed} rows, one for each {'state slot' if by_slot else 'request'}"
            hint = "allocate more, or make the geometry with records='indices'"
            raise TensorError("corrections", expected, str(rows), hint)


def _check_aliasing(tensors: Mapping[str, torch.Tensor], written: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in written:
        seen.add(name)
        for other, tensor in tensors.items():
            if other not in seen and overlap(tensors[name], tensor):
                hint = "give them memory of their own"
                raise TensorError(name, f"no memory in common with {other}", "the two overlap", hint)


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of the table share a byte.

    Exact for dense entries at one outer stride, which every layout of the table is: a conv state and a recurrent state
    that take turns in the pages of one pool have overlapping address ranges and no byte in common.
    """
    if not a.numel() or not b.numel():
        return False
    (start_a, count_a, stride_a, extent_a), (start_b, count_b, stride_b, extent_b) = _entries(a), _entries(b)
    end_a, end_b = start_a + (count_a - 1) * stride_a + extent_a, start_b + (count_b - 1) * stride_b + extent_b
    if end_a <= start_b or end_b <= start_a:
        return False
    # Entry i of a meets entry j of b when start_b + j*stride_b lies in (a_i - extent_b, a_i + extent_a).
    offset = torch.arange(count_a) * stride_a + (start_a - start_b)
    first = torch.div(offset - extent_b, stride_b, rounding_mode="floor") + 1
    last = -torch.div(-(offset + extent_a), stride_b, rounding_mode="floor") - 1
    return bool((first.clamp(min=0) <= last.clamp(max=count_b - 1)).any())


def _entries(tensor: torch.Tensor) -> tuple[int, int, int, int]:
    """Address, number, stride and extent of the outer entries, in bytes."""
    itemsize = tensor.element_size()
    count = tensor.shape[0]
    extent = tensor.numel() // count * itemsize
    stride = tensor.stride(0) * itemsize if count > 1 else extent
    return tensor.data_ptr(), count, stride, extent
