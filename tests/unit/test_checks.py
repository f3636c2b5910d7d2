# SPDX-License-Identifier: Apache-2.0
"""The debug checks name the first bad entry of the device metadata."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashkda.errors import MetadataError
from flashkda.ops.checks import check_metadata
from tests.bound import FULL, arena_bits, reference_plan, set_capturing
from tests.inputs import Case, assert_same_bits, make_case

WINDOW = FULL.window  # 3
POOL = 9


def case_of(**options: Any) -> Case:
    """Requests of 3, 0, 2 and 1 tokens in slots 4, 2, 7 and 1; two more rows than tokens."""
    options = {"slots": [4, 2, 7, 1], "pool_slots": POOL, "num_accepted": [0, 3, 1, 2], **options}
    return make_case(FULL, [3, 0, 2, 1], seed=1, m_padding=2, record_indices=[5, 0, 2, 6], **options)


def check(case: Case, **changed: list[int]) -> None:
    tensors = dict(case.tensors)
    for name, values in changed.items():
        tensors[name] = torch.tensor(values, dtype=case[name].dtype)
    check_metadata(FULL, tensors, case["out"].shape[0])


BAD = [
    ("query_start_loc", [1, 3, 3, 5, 6], 0, "0", "1"),
    ("query_start_loc", [0, 3, 2, 5, 6], 2, "3..6", "2"),
    ("query_start_loc", [0, 4, 4, 5, 6], 1, "0..3", "4"),
    ("query_start_loc", [0, 3, 6, 9, 9], 3, "at most 8", "9"),
    ("state_indices", [4, 2, POOL, 1], 2, "a slot of state, 0..8", "9"),
    ("state_indices", [4, 2, 4, 4], 2, "a slot of its own", "request 0's"),
    ("record_indices", [5, 0, 7, 6], 2, "0..6", "7"),
    ("record_indices", [5, 0, -1, 6], 2, "0..6", "-1"),
    ("record_indices", [5, 0, 2, 5], 3, "a row of its own", "request 0's"),
    ("num_accepted", [0, 3, 4, 2], 2, "0..3", "4"),
    ("num_accepted", [-1, 3, 1, 2], 0, "0..3", "-1"),
]


@pytest.mark.parametrize(("name", "values", "index", "expected", "found"), BAD)
def test_the_first_bad_entry_is_named(name: str, values: list[int], index: int, expected: str, found: str) -> None:
    with pytest.raises(MetadataError) as caught:
        check(case_of(), **{name: values})
    error = caught.value
    assert (error.argument, error.index) == (name, index)
    assert expected in error.expected and found in error.found


def test_good_metadata_passes() -> None:
    check(case_of())
    check_metadata(FULL, {"query_start_loc": torch.zeros(1, dtype=torch.int32)}, 4)


def test_a_slot_that_only_the_conv_pool_lacks_is_named() -> None:
    check(case_of(pool_slots=(POOL, 8)))
    with pytest.raises(MetadataError, match=r"state_indices\[2\]: expected a slot of conv_state, 0..6, found 7"):
        check(case_of(pool_slots=(POOL, 7)))


def test_requests_that_take_no_part_are_not_looked_at() -> None:
    # Request 1 has no tokens; request 3 becomes null.
    check(case_of(), state_indices=[4, 99, 7, 0], record_indices=[5, 5, 2, 99], num_accepted=[1, 99, 1, 99])
    check(case_of(), state_indices=[4, 4, 0, -7], record_indices=[5, 5, 5, 5])


@pytest.mark.parametrize("by_environment", [True, False])
def test_a_binding_checks_before_it_writes(monkeypatch: pytest.MonkeyPatch, by_environment: bool) -> None:
    case = case_of()
    case["state_indices"][2] = 99
    before = arena_bits(case)
    if by_environment:
        monkeypatch.setenv("FLASHKDA_DEBUG_CHECKS", "1")
    binding = reference_plan(FULL).bind(**case.tensors, check_metadata=None if by_environment else True)
    with pytest.raises(MetadataError, match="state_indices"):
        binding.run()
    with pytest.raises(MetadataError, match="record_indices"):
        binding.run(state_indices=torch.tensor([4, 2, 7, 1], dtype=torch.int32), record_indices=case["state_indices"])
    assert_same_bits(arena_bits(case), before)


def test_checks_are_off_by_default_and_by_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of()
    case["state_indices"][2] = 99
    reference_plan(FULL).bind(**case.tensors).run()
    monkeypatch.setenv("FLASHKDA_DEBUG_CHECKS", "1")
    reference_plan(FULL).bind(**case.tensors, check_metadata=False).run()


def test_nothing_is_checked_under_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.bound import install_kernels, kernel_plan

    kernels = install_kernels(monkeypatch)
    case = case_of()
    case["state_indices"][2] = 99
    binding = kernel_plan(FULL, "fused").bind(**case.tensors, check_metadata=True)
    set_capturing(monkeypatch, True)
    binding.run()
    assert [kind for kind, _ in kernels.calls] == ["fused_verify"]
