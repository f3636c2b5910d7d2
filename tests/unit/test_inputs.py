# SPDX-License-Identifier: Apache-2.0
"""The test inputs themselves: strides, poison, copies."""

from __future__ import annotations

import torch

from flashkda.geometry import VerifyGeometry
from tests.inputs import assert_same_bits, bits, clone, make_case, written
from tests.regroup import outcome, regroup, take_heads


def test_strides_and_bases_follow_the_alignment() -> None:
    for alignment, pads, slot_pad in ((16, (0, 0, 0), 0), (2, (7, 5, 11), 17)):
        geometry = VerifyGeometry(1, 2, alignment=alignment, conv_layout="DS")
        case = make_case(geometry, [2, 1], seed=0)
        names = ("mixed_qkv", "raw_gate", "output_gate", "out", "state", "conv_state")
        inner = (384, 128, 128, 128, 128 * 128, 384 * 4)
        gaps = (*pads, pads[2], slot_pad, slot_pad)
        for name, size, gap in zip(names, inner, gaps, strict=True):
            tensor = case[name]
            assert tensor.stride(0) == size + gap
            aligned = tensor.data_ptr() % 16 == 0 and tensor.stride(0) * tensor.element_size() % 16 == 0
            assert aligned == (alignment == 16), name
        for name in ("corrections", "key_gate", "conv_weight", "dt_bias", "norm_weight"):
            assert case[name].is_contiguous() and case[name].data_ptr() % 16 == 0
    assert case["state_indices"].stride() == (1,)
    assert make_case(geometry, [1, 1], seed=0, index_stride=5)["state_indices"].stride() == (5,)


def test_what_must_not_be_read_or_must_be_written_is_poison() -> None:
    geometry = VerifyGeometry(1, 2, head_dim=16)
    case = make_case(geometry, [2, 1, 1], seed=0, slots=[3, 0, 1], m_padding=2)
    poisoned = [m in (2, 4, 5) for m in range(6)]
    for name in ("mixed_qkv", "raw_gate", "raw_beta", "output_gate"):
        assert case[name].isnan().flatten(1).all(1).tolist() == poisoned
        assert case[name].isnan().flatten(1).any(1).tolist() == poisoned
    for name in ("state", "conv_state"):
        assert case[name].isnan().flatten(1).any(1).tolist() == [True] + [False] * 5
    for name in ("out", "corrections", "key_gate"):
        assert case.arenas[name].isnan().all()


def test_values_do_not_depend_on_the_layout() -> None:
    cases = [
        make_case(VerifyGeometry(1, 2, alignment=a, conv_layout=layout, head_dim=16), [2, 1], seed=7, index_stride=3)
        for a in (16, 2)
        for layout in ("SD", "DS")
    ]
    for name in cases[0].tensors:
        for other in cases[1:]:
            if cases[0].tensors[name] is not None:
                same = torch.equal(other[name].nan_to_num(), cases[0][name].nan_to_num())
                assert same, name


def test_clone_is_deep_and_keeps_the_layout() -> None:
    case = make_case(VerifyGeometry(1, 2, alignment=2, head_dim=16, records="indices"), [2, 1], seed=0)
    copy = clone(case)
    assert_same_bits(written(copy), written(case))
    for name, tensor in case.tensors.items():
        if tensor is not None:
            assert copy[name].stride() == tensor.stride()
            assert copy[name].storage_offset() == tensor.storage_offset()
            assert copy[name].data_ptr() != tensor.data_ptr()
    bits(copy["out"]).zero_()
    assert case["out"].isnan().all()


def test_large_tensors_repeat_with_no_two_slots_alike() -> None:
    case = make_case(VerifyGeometry(12, 1), [1], seed=0, pool_slots=8)
    state = case["state"][1:].flatten(1)
    assert len(torch.unique(state[:, :4], dim=0)) == 7


def test_regrouped_requests_keep_what_they_own() -> None:
    case = make_case(VerifyGeometry(4, 3, has_num_accepted=True, head_dim=16), [3, 1, 2], seed=1)
    other = regroup(case, [2, 0], lengths=[2, 1], slots=[4, 1])
    assert torch.equal(other["mixed_qkv"][0:3], case["mixed_qkv"][[4, 5, 0]])
    assert torch.equal(other["state"][[4, 1]], case["state"][[case.slots[2], case.slots[0]]])
    assert torch.equal(other["num_accepted"], case["num_accepted"][[2, 0]])
    part = take_heads(case, 1, 2)
    assert torch.equal(part["conv_weight"].view(3, 2, 16, 4), case["conv_weight"].view(3, 4, 16, 4)[:, 1:3])
    assert outcome(part, 0)["conv_state"].shape == (3, 2, 16, 5)
