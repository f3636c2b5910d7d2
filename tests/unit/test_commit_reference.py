# SPDX-License-Identifier: Apache-2.0
"""The reference commit against a float64 replay, and each of its rules, to the bit of every pool."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashkda.commit import CommitGeometry
from flashkda.geometry import VerifyGeometry
from flashkda.ops.commit_reference import commit
from tests.commits import SMALL, CommitCase, make_commit
from tests.inputs import assert_same_bits, bits

STATE, BOTH = ("state",), ("state", "conv_state")


def run(case: CommitCase) -> None:
    commit(case.geometry, **case.tensors)


def expect(case: CommitCase, writes: list[tuple[int, int, int]], *, windows: bool = False) -> dict[str, Tensor]:
    """All bits after a commit that writes, for each (request, tokens, slot), the state after so many tokens to the
    slot, and with ``windows`` the conv history after them to its columns 0..2."""
    wanted = {}
    for i, layer in enumerate(case.layers):
        arenas = {name: layer.arenas[name].clone() for name in layer.arenas}
        pools = {
            name: arenas[name].as_strided(layer[name].shape, layer[name].stride(), layer[name].storage_offset())
            for name in BOTH
        }
        for n, tokens, slot in writes:
            pools["state"][slot] = case.after(i, n, tokens)
            if windows and tokens:
                source = layer["conv_state"][int(case.requests["state_indices"][n])]
                pools["conv_state"][slot, :, :3] = source[:, tokens - 1 : tokens + 2]
        wanted.update({key: value for key, value in case.bits().items() if key.endswith(f"[{i}]")})
        wanted.update({f"{name}[{i}]": bits(arenas[name]) for name in BOTH})
    return wanted


def check(case: CommitCase, writes: list[tuple[int, int, int]], *, windows: bool = False) -> None:
    wanted = expect(case, writes, windows=windows)
    run(case)
    assert_same_bits(case.bits(), wanted)


@pytest.mark.parametrize(("gate", "bound"), [("bounded", -5.0), ("softplus", None)])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_against_a_float64_replay(gate: str, bound: float | None, state_dtype: str) -> None:
    verify = VerifyGeometry(2, 4, head_dim=16, gate=gate, lower_bound=bound, state_dtype=state_dtype)
    case = make_commit(CommitGeometry(verify, 2), [4, 1, 3])
    wanted = []
    for layer in case.layers:
        rate = layer["A_log"].double().exp()[:, None]
        for n, count in enumerate([4, 1, 3]):
            state = layer["state"][n + 1].double()
            for t in range(count):
                key, raw = layer["key_gate"][n + 1, :, t].double().chunk(2, dim=-1)
                x = raw + layer["dt_bias"].double()
                g = -5 * torch.sigmoid(rate * x) if gate == "bounded" else -rate * torch.nn.functional.softplus(x)
                unit = key / (key.square().sum(-1, keepdim=True) + 1e-6).sqrt()
                u = layer["corrections"][n + 1, :, t].double()
                state = state * g.exp()[:, None] + torch.einsum("hv,hk->hvk", u, unit)
            wanted.append(state)
    run(case)
    found = [layer["state"][n].double() for layer in case.layers for n in (1, 2, 3)]
    tolerance = 1e-5 if state_dtype == "float32" else 2**-7
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("records", ["slot", "request", "indices"])
def test_folds_the_accepted_prefix_in_place(records: str, state_dtype: str) -> None:
    geometry = CommitGeometry(SMALL.replace(records=records, state_dtype=state_dtype), 3)
    rows = [5, 9, 0, 7] if records == "indices" else None
    case = make_commit(geometry, [3, 0, 1, 2], slots=[4, 2, 7, 1], record_indices=rows)
    check(case, [(0, 3, 4), (2, 1, 7), (3, 2, 1)])


def test_who_takes_no_part() -> None:
    """Null slots, slots outside the pool, and nothing accepted; counts are clamped to 0..T."""
    geometry = CommitGeometry(SMALL.replace(null_slot=1, records="request"), 2, compact=True)
    case = make_commit(geometry, [3, 3, 3, -4, 9], slots=[2, 1, 5, 3, 4], pool=6)
    case.requests["state_indices"][2] = 6
    check(case, [(0, 3, 2), (4, 3, 4)], windows=True)


@pytest.mark.parametrize("row", [-1, 12])
def test_a_record_row_outside_the_records_takes_no_part(row: int) -> None:
    geometry = CommitGeometry(SMALL.replace(records="indices"), 1, has_boundary=True)
    case = make_commit(geometry, [3, 2], record_indices=[row, 5], boundary=[(0, 8), (0, 9)])
    check(case, [(1, 2, 2), (1, 0, 9)])


def test_accepted_indices() -> None:
    geometry = CommitGeometry(SMALL.replace(index_dtype="int64"), 2, has_accepted_indices=True)
    case = make_commit(geometry, [0, 2, 9, 1], slots=[1, 2, 3, 4], accepted_indices=[3, 1, 4, -1])
    check(case, [(0, 1, 1), (1, 2, 2)])


@pytest.mark.parametrize("compact", [False, True])
def test_a_destination_leaves_the_source(compact: bool) -> None:
    geometry = CommitGeometry(SMALL, 2, compact=compact, has_dst=True)
    case = make_commit(geometry, [3, 1, 0, 2, 2, 1], dst=[8, 2, 9, 0, 12, 10])
    check(case, [(0, 3, 8), (1, 1, 2), (5, 1, 10)], windows=compact)


def test_two_destinations_of_one_source() -> None:
    geometry = CommitGeometry(SMALL.replace(records="request"), 1, compact=True, has_dst=True)
    case = make_commit(geometry, [3, 1], slots=[4, 4], dst=[5, 6])
    check(case, [(0, 3, 5), (1, 1, 6)], windows=True)


BOUNDARIES = {
    "at 0": (2, 0, True),
    "inside": (3, 2, True),
    "at the count": (2, 2, True),
    "at the count, which is T": (3, 3, True),
    "past the count": (2, 3, False),
    "past the window": (3, 4, False),
    "negative": (3, -1, False),
    "at 0, nothing accepted": (0, 0, True),
    "past 0, nothing accepted": (0, 1, False),
}


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("has_dst", [False, True])
@pytest.mark.parametrize("name", BOUNDARIES)
def test_a_boundary(name: str, has_dst: bool, compact: bool) -> None:
    count, length, is_written = BOUNDARIES[name]
    geometry = CommitGeometry(SMALL, 2, compact=compact, has_dst=has_dst, has_boundary=True)
    # Request 1 has no slot for a checkpoint, and request 2 one outside the pool.
    boundary = [(length, 9), (1, 0), (1, 12)]
    case = make_commit(geometry, [count, 2, 2], boundary=boundary, dst=[6, 7, 8] if has_dst else None)
    targets = [6, 7, 8] if has_dst else [1, 2, 3]
    writes = [(0, count, targets[0])] if count else []
    writes += [(1, 2, targets[1]), (2, 2, targets[2])]
    check(case, [*writes, *([(0, length, 9)] if is_written else [])], windows=compact)


def test_a_checkpoint_may_replace_the_source_of_a_copy() -> None:
    geometry = CommitGeometry(SMALL, 1, has_dst=True, has_boundary=True)
    case = make_commit(geometry, [3], dst=[5], boundary=[(1, 1)])
    check(case, [(0, 3, 5), (0, 1, 1)])


def test_a_window_outside_a_smaller_conv_pool_is_left() -> None:
    geometry = CommitGeometry(SMALL, 1, compact=True)
    case = make_commit(geometry, [2, 3])
    wanted = expect(case, [(0, 2, 1), (1, 3, 2)])
    wanted.pop("conv_state[0]")
    columns = case.layers[0]["conv_state"][1, :, 1:4].clone()
    case.tensors["conv_state"] = [case.layers[0]["conv_state"][:2]]
    second = bits(case.layers[0]["conv_state"][2]).clone()
    run(case)
    assert torch.equal(case.layers[0]["conv_state"][1, :, :3], columns)
    assert torch.equal(bits(case.layers[0]["conv_state"][2]), second)
    assert_same_bits({k: v for k, v in case.bits().items() if k != "conv_state[0]"}, wanted)


def test_one_tensor_with_a_layer_dimension_is_the_same() -> None:
    geometry = CommitGeometry(SMALL, 3, compact=True)
    case = make_commit(geometry, [3, 1])
    stacked: dict[str, Any] = {
        name: torch.stack(value) if isinstance(value, list) else value for name, value in case.tensors.items()
    }
    run(case)
    commit(geometry, **stacked)
    for name in BOTH:
        for layer in range(3):
            assert torch.equal(bits(stacked[name][layer][1:]), bits(case.tensors[name][layer][1:]))
