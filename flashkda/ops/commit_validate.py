# SPDX-License-Identifier: Apache-2.0
"""The tensors of a commit against its geometry: every check before anything is written. Nothing synchronizes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from flashkda.errors import TensorError
from flashkda.ops.validate import SPECS, Sizes, TensorSpec, check_device, check_tensor, overlap, symbols_of

if TYPE_CHECKING:
    from flashkda.commit import CommitGeometry, CommitPlan

# One tensor a layer, as the verify has them, in the order of the kernel's table of addresses.
LAYERED = ("state", "corrections", "key_gate", "conv_state", "A_log", "dt_bias")

# Shared by the layers, and given anew at a run if need be. A: accepted counts, of which N are read.
REQUEST_SPECS: dict[str, TensorSpec] = {
    "accepted": TensorSpec(("A",), "int32"),
    "accepted_indices": TensorSpec(("N",), "index_dtype", "outer"),
    "state_indices": TensorSpec(("N",), "index_dtype", "outer"),
    "dst_indices": TensorSpec(("N",), "index_dtype", "outer"),
    "record_indices": TensorSpec(("N",), "index_dtype", "outer"),
    "boundary_length": TensorSpec(("N",), "int32"),
    "boundary_indices": TensorSpec(("N",), "index_dtype", "outer"),
}
# Read by debug checks alone, to know the length of each request's window.
CHECKS_SPECS = {"query_start_loc": TensorSpec(("N+1",), "int32")}
_SPECS = {**REQUEST_SPECS, **CHECKS_SPECS}
NAMES = (*LAYERED, *_SPECS)

# The geometry that has an optional tensor, and the one that has it not.
_OPTION = {
    "conv_state": ("compact=True", "compact=False"),
    "accepted_indices": ("has_accepted_indices=True", "has_accepted_indices=False"),
    "dst_indices": ("has_dst=True", "has_dst=False"),
    "record_indices": ("records='indices'", "records='slot' or records='request'"),
    "boundary_length": ("has_boundary=True", "has_boundary=False"),
    "boundary_indices": ("has_boundary=True", "has_boundary=False"),
}


class Given(NamedTuple):
    """What has been validated: each layered name's tensors, the request tensors, and their number of requests."""

    layers: dict[str, tuple[torch.Tensor, ...]]
    requests: dict[str, torch.Tensor]
    size: int


def is_used(geometry: CommitGeometry, name: str) -> bool:
    """Whether a commit of this geometry has the tensor at all; one it has not must be absent."""
    return {
        "conv_state": geometry.compact,
        "accepted_indices": geometry.has_accepted_indices,
        "dst_indices": geometry.has_dst,
        "record_indices": geometry.verify.records == "indices",
        "boundary_length": geometry.has_boundary,
        "boundary_indices": geometry.has_boundary,
    }.get(name, True)


def validate_commit(plan: CommitPlan, tensors: Mapping[str, object]) -> Given:
    """Check every tensor of a commit. Raises TensorError for the first that is wrong; nothing has been written.

    A layered tensor is a sequence of L tensors, or one with a leading dimension of L. All layers have one shape and
    one set of strides. A layer's state, and its conv_state where windows are compacted, share no byte with anything
    else. query_start_loc may be left out.
    """
    geometry = plan.geometry
    for name, value in tensors.items():
        if name not in NAMES:
            raise TensorError(name, f"one of {', '.join(NAMES)}", "an unknown name", "remove it or correct its name")
        if value is not None and not is_used(geometry, name):
            hint = f"leave it out, or make the geometry with {_OPTION[name][0]}"
            raise TensorError(name, "None by this geometry", type(value).__name__, hint)
    layers = {name: _layers(geometry, name, tensors.get(name)) for name in LAYERED if is_used(geometry, name)}
    requests = {name: _tensor(name, tensors.get(name)) for name in REQUEST_SPECS if is_used(geometry, name)}
    if tensors.get("query_start_loc") is not None:
        requests["query_start_loc"] = _tensor("query_start_loc", tensors["query_start_loc"])
    everything = [tensor for group in layers.values() for tensor in group] + list(requests.values())
    device = statistics.mode(tensor.device for tensor in everything)
    check_device(plan, device)
    size = check_requests(plan, requests, device)
    _check_layers(geometry, layers, device, size)
    _check_aliasing(geometry, layers, requests)
    return Given(layers, requests, size)


def check_requests(plan: CommitPlan, tensors: Mapping[str, torch.Tensor], device: torch.device) -> int:
    """Check the request tensors by themselves, and return N. Raises TensorError."""
    geometry = plan.geometry.verify
    sizes = [
        tensor.shape[0] - (name == "query_start_loc")
        for name, tensor in tensors.items()
        if tensor.ndim and name != "accepted"
    ]
    size = max(statistics.mode(sizes), 0) if sizes else 0
    symbols = symbols_of(geometry, Sizes(0, size))
    for name, tensor in tensors.items():
        check_tensor(geometry, name, tensor, symbols, device, _SPECS[name])
    if size > plan.max_requests:
        hint = "make the plan with a larger max_requests"
        raise TensorError("state_indices", f"at most {plan.max_requests} requests", str(size), hint)
    least = 1 if plan.geometry.has_accepted_indices else size
    if tensors["accepted"].shape[0] < least:
        hint = "give a count for each request, or make the geometry with has_accepted_indices=True"
        raise TensorError("accepted", f"at least {least} counts", str(tensors["accepted"].shape[0]), hint)
    return size


def _tensor(name: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        hint = f"give {name}=..."
        if name in _OPTION:
            hint += f", or make the geometry with {_OPTION[name][1]}"
        raise TensorError(name, "a torch.Tensor", "nothing" if value is None else type(value).__name__, hint)
    return value


def _layers(geometry: CommitGeometry, name: str, value: object) -> tuple[torch.Tensor, ...]:
    """The L tensors of one layered name."""
    dimensions = len(SPECS[name].shape)
    expected = f"{geometry.layers} tensors, or one with a leading dimension of {geometry.layers}"
    if isinstance(value, torch.Tensor):
        if value.ndim != dimensions + 1 or value.shape[0] != geometry.layers:
            raise TensorError(name, expected, f"one of shape {list(value.shape)}", "stack the layers, or give a list")
        return value.unbind(0)
    if not isinstance(value, Sequence):
        hint = f"give {name}=[...]"
        if name in _OPTION:
            hint += f", or make the geometry with {_OPTION[name][1]}"
        raise TensorError(name, expected, "nothing" if value is None else type(value).__name__, hint)
    if len(value) != geometry.layers:
        raise TensorError(name, expected, str(len(value)), "make the geometry with that number of layers")
    return tuple(_tensor(f"{name}[{layer}]", tensor) for layer, tensor in enumerate(value))


def _check_layers(
    geometry: CommitGeometry, layers: Mapping[str, tuple[torch.Tensor, ...]], device: torch.device, size: int
) -> None:
    verify = geometry.verify
    symbols = symbols_of(verify, Sizes(0, size))
    for name, tensors in layers.items():
        first = tensors[0]
        for layer, tensor in enumerate(tensors):
            check_tensor(verify, f"{name}[{layer}]", tensor, symbols, device, SPECS[name])
            if tensor.stride() != first.stride():
                hint = "the layers are read by one set of strides; allocate them alike"
                raise TensorError(f"{name}[{layer}]", f"strides {first.stride()}, as layer 0", tensor.stride(), hint)
    check_records(geometry, layers, size)


def check_records(geometry: CommitGeometry, layers: Mapping[str, tuple[torch.Tensor, ...]], size: int) -> None:
    """The records have a row for each slot, or for each of `size` requests. Raises TensorError."""
    verify = geometry.verify
    if verify.records != "indices":
        by_slot = verify.records == "slot"
        needed = layers["state"][0].shape[0] if by_slot else size
        rows = layers["corrections"][0].shape[0]
        if rows < needed:
            expected = f"at least {needed} rows, one for each {'state slot' if by_slot else 'request'}"
            hint = "give the verify's records, or make the geometry as the verify's"
            raise TensorError("corrections", expected, str(rows), hint)


def _check_aliasing(
    geometry: CommitGeometry,
    layers: Mapping[str, tuple[torch.Tensor, ...]],
    requests: Mapping[str, torch.Tensor],
) -> None:
    """Only pairs whose address ranges meet are looked at closely: layers are many."""
    written = {"state", "conv_state"} if geometry.compact else {"state"}
    spans = []
    for name, tensor in [
        *((f"{name}[{i}]", tensor) for name, group in layers.items() for i, tensor in enumerate(group)),
        *requests.items(),
    ]:
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            end = tensor.data_ptr() + (last + 1) * tensor.element_size()
            spans.append((tensor.data_ptr(), end, name, tensor))
    spans.sort(key=lambda span: span[:2])
    open_spans: list[tuple[int, int, str, torch.Tensor]] = []
    for span in spans:
        start, _, name, tensor = span
        open_spans = [other for other in open_spans if other[1] > start]
        for _, _, other_name, other in open_spans:
            first, second = sorted((name, other_name), key=lambda n: n.split("[")[0] not in written)
            if first.split("[")[0] in written and overlap(tensor, other):
                hint = "give them memory of their own"
                raise TensorError(first, f"no memory in common with {second}", "the two overlap", hint)
        open_spans.append(span)
