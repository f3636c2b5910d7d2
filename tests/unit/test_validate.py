# SPDX-License-Identifier: Apache-2.0
"""Each tensor broken in each way: the error names it, and nothing has been written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flashkda import capability
from flashkda.errors import TensorError
from flashkda.geometry import VerifyGeometry
from flashkda.ops import validate
from tests.bound import BARE, FULL, arena_bits, kernel_plan, reference_plan
from tests.inputs import Case, assert_same_bits, make_case

ALIGNED = (
    *("mixed_qkv", "conv_weight", "conv_state", "raw_gate", "dt_bias", "state", "output_gate", "norm_weight", "out"),
    *("corrections", "key_gate"),
)
STRIDED = ("mixed_qkv", "conv_state", "raw_gate", "state", "output_gate", "out", "corrections", "key_gate")
# A dimension whose size no other tensor and no field fixes.
FREE = {("state", 0), ("conv_state", 0), ("corrections", 0)}


def case_of(geometry: VerifyGeometry = FULL) -> Case:
    return make_case(geometry, [3, 0, 2], seed=1, m_padding=2)


def resized(tensor: Tensor, dim: int, by: int) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] += by
    return torch.zeros(shape, dtype=tensor.dtype)


def restrided(tensor: Tensor, dim: int, by: int) -> Tensor:
    """The shape, in new memory, with one stride changed by so much."""
    strides = list(tensor.stride())
    strides[dim] += by
    size = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True))
    return torch.zeros(size, dtype=tensor.dtype).as_strided(tensor.shape, strides)


def shifted(tensor: Tensor) -> Tensor:
    """A copy whose base is one element off."""
    size = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return torch.zeros(size + 1, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride(), 1)


def breakages() -> list[Any]:
    """(name, how, break) for every way in which a tensor of FULL can be wrong."""
    rows: list[tuple[str, str, Callable[[Tensor], Any]]] = []
    for name, tensor in case_of().tensors.items():
        assert tensor is not None
        other = torch.float16 if tensor.is_floating_point() else torch.int16
        rows += [
            (name, "absent", lambda t: None),
            (name, "a list", lambda t: t.tolist()),
            (name, "dtype", partial(Tensor.to, dtype=other)),
            (name, "device", lambda t: torch.empty_like(t, device="meta")),
            (name, "one dimension more", lambda t: t[None]),
            (name, "a scalar", lambda t: t.new_zeros(())),
        ]
        for dim in range(tensor.ndim):
            if (name, dim) not in FREE:
                rows.append((name, f"dim {dim} longer", partial(resized, dim=dim, by=1)))
                rows.append((name, f"dim {dim} shorter", partial(resized, dim=dim, by=-1)))
            if dim:
                rows.append((name, f"stride {dim}", partial(restrided, dim=dim, by=8)))
        if tensor.ndim > 1:
            rows.append((name, "rows overlap", partial(restrided, dim=0, by=-1)))
        if name in ALIGNED:
            rows.append((name, "base unaligned", shifted))
        if name in STRIDED:
            rows.append((name, "stride unaligned", partial(restrided, dim=0, by=1)))
    dense = ("query_start_loc", "num_accepted", "A_log", "norm_weight")
    rows += [(name, "every other element", partial(restrided, dim=0, by=1)) for name in dense]
    rows += [(name, "stride 0", lambda t: t[:1].expand(t.shape)) for name in ("state_indices", "record_indices")]
    return [pytest.param(name, broken, id=f"{name}: {how}") for name, how, broken in rows]


@pytest.mark.parametrize(("name", "broken"), breakages())
def test_a_broken_tensor_is_named_and_nothing_is_written(name: str, broken: Callable[[Tensor], Any]) -> None:
    case = case_of()
    before = arena_bits(case)
    wrong = broken(case[name])
    with pytest.raises(TensorError) as caught:
        reference_plan(FULL).bind(**{**case.tensors, name: wrong}).run()
    assert caught.value.argument == name
    assert str(caught.value).startswith(f"{name}: expected ") and caught.value.hint
    assert_same_bits(arena_bits(case), before)


def test_a_sparse_tensor_is_refused() -> None:
    case = case_of()
    sparse = torch.zeros(case["raw_beta"].shape, dtype=torch.bfloat16).to_sparse()
    with pytest.raises(TensorError, match="raw_beta: expected a strided tensor"):
        reference_plan(FULL).bind(**{**case.tensors, "raw_beta": sparse})


def sharing_memory(case: Case, name: str, other: str) -> dict[str, Tensor]:
    """The two tensors of a case, both at the start of one piece of memory."""
    arena = torch.zeros(1 << 20, dtype=torch.uint8)

    def at_start(tensor: Tensor) -> Tensor:
        return arena.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    return {name: at_start(case[name]), other: at_start(case[other])}


WRITTEN = ("out", "corrections", "key_gate", "conv_state")
PAIRS = [(name, other) for name in WRITTEN for other in case_of().tensors if other != name]


@pytest.mark.parametrize(("name", "other"), PAIRS)
def test_what_is_written_shares_memory_with_nothing(name: str, other: str) -> None:
    case = case_of()
    before = arena_bits(case)
    with pytest.raises(TensorError, match="overlap") as caught:
        reference_plan(FULL).bind(**{**case.tensors, **sharing_memory(case, name, other)})
    assert {name, other} & set(WRITTEN) >= {caught.value.argument}
    assert name in str(caught.value) and other in str(caught.value)
    assert_same_bits(arena_bits(case), before)


def test_what_is_only_read_may_share_memory() -> None:
    case = case_of()
    wide = torch.zeros(7, 48 + 16 + 16, dtype=torch.bfloat16)
    views = {
        "mixed_qkv": wide[:, :48],
        "raw_gate": wide[:, 48:64].unflatten(1, (2, 8)),
        "output_gate": wide[:, 64:].unflatten(1, (2, 8)),
    }
    reference_plan(FULL).bind(**{**case.tensors, **views})


def paged(case: Case, overlap: int) -> dict[str, Tensor]:
    """Conv state and recurrent state by turns in the pages of one pool, `overlap` bytes too close."""
    slots = case["state"].shape[0]
    state_bytes, conv_bytes = case["state"][0].numel() * 4, case["conv_state"][0].numel() * 2
    page = state_bytes + conv_bytes
    pool = torch.zeros(slots * page + 64, dtype=torch.uint8)
    return {
        "state": pool.view(torch.float32).as_strided(case["state"].shape, (page // 4, 64, 8, 1)),
        "conv_state": pool.view(torch.bfloat16).as_strided(
            case["conv_state"].shape, (page // 2, 1, 48), (state_bytes - overlap) // 2
        ),
    }


def test_pools_may_take_turns_in_pages() -> None:
    case = case_of()
    reference_plan(FULL).bind(**{**case.tensors, **paged(case, 0)})
    with pytest.raises(TensorError, match="conv_state: expected no memory in common with state"):
        reference_plan(FULL).bind(**{**case.tensors, **paged(case, 16)})


STRIPES = st.tuples(st.integers(0, 40), st.integers(1, 6), st.integers(0, 9), st.integers(1, 7))


@given(STRIPES, STRIPES)
def test_overlap_is_exact(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    arena = torch.zeros(256, dtype=torch.uint8)

    def tensor(start: int, count: int, gap: int, extent: int) -> tuple[Tensor, set[int]]:
        stride = extent + gap
        return arena.as_strided((count, extent), (stride, 1), start), {
            start + i * stride + j for i in range(count) for j in range(extent)
        }

    (x, in_x), (y, in_y) = tensor(*a), tensor(*b)
    assert validate.overlap(x, y) == bool(in_x & in_y)


@pytest.mark.parametrize("name", ["num_accepted", "record_indices", "output_gate", "norm_weight"])
def test_a_tensor_that_the_geometry_has_not_is_refused(name: str) -> None:
    case = case_of(BARE)
    given_too = {**case.tensors, name: case_of()[name]}
    with pytest.raises(TensorError, match=f"{name}: expected None by this geometry.*make the geometry with"):
        reference_plan(BARE).bind(**given_too)


def test_an_unknown_name_is_refused() -> None:
    case = case_of()
    with pytest.raises(TensorError, match=r"z: expected one of mixed_qkv, .*unknown name"):
        reference_plan(FULL).bind(**case.tensors, z=case["out"])


def test_capacities() -> None:
    case = case_of()
    with pytest.raises(TensorError, match=r"state_indices: expected at most 2 requests, found 3; .*max_requests"):
        reference_plan(FULL, max_requests=2).bind(**case.tensors)
    for records, what in (("slot", "state slot"), ("request", "request")):
        geometry = BARE.replace(records=records)
        case = case_of(geometry)
        few = case["state"].shape[0] - 1 if records == "slot" else 2
        short = {name: case[name][:few] for name in ("corrections", "key_gate")}
        with pytest.raises(TensorError, match=f"corrections: expected at least {few + 1} rows, one for each {what}"):
            reference_plan(geometry).bind(**{**case.tensors, **short})


def test_unaligned_tensors_are_taken_at_alignment_2() -> None:
    geometry = FULL.replace(alignment=2)
    case = make_case(geometry, [3, 0, 2], seed=1)  # odd bases, rows and slots
    reference_plan(geometry).bind(**case.tensors)
    with pytest.raises(TensorError, match=r"mixed_qkv: .*aligned|multiple of 16.*alignment=2"):
        reference_plan(FULL).bind(**case.tensors)


@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_the_other_conv_layout_is_refused(layout: str) -> None:
    case = case_of(FULL.replace(conv_layout=layout))
    other = FULL.replace(conv_layout="DS" if layout == "SD" else "SD")
    reference_plan(case.geometry).bind(**case.tensors)
    with pytest.raises(TensorError, match=r"conv_state: expected strides .*conv_layout"):
        reference_plan(other).bind(**case.tensors)


def test_indices_may_be_a_column_of_a_table() -> None:
    case = make_case(FULL, [3, 0, 2], seed=1, index_stride=5)
    assert case["state_indices"].stride() == (5,)
    reference_plan(FULL).bind(**case.tensors)


def test_the_stride_of_a_single_row_does_not_matter() -> None:
    case = make_case(FULL, [1], seed=1)
    one = torch.zeros(53, dtype=torch.bfloat16).as_strided((1, 48), (53, 1))
    reference_plan(FULL).bind(**{**case.tensors, "mixed_qkv": one})


def test_kernels_want_the_device_they_were_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = VerifyGeometry(1, 1)
    plan = kernel_plan(geometry, "fused")
    with pytest.raises(TensorError, match="device: expected cuda, for the fused kernels of sm_90a, found cpu"):
        plan.bind(**make_case(geometry, [1], seed=1).tensors)
    monkeypatch.setattr(capability, "detect_arch", lambda device: "sm_89")
    with pytest.raises(TensorError, match=r"device: expected sm_90a, .*sm_89"):
        validate.check_device(plan, torch.device("cuda", 0))
    validate.check_device(dataclasses.replace(plan, arch="sm_89"), torch.device("cuda", 0))
