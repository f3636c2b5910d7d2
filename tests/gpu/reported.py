# SPDX-License-Identifier: Apache-2.0
"""What other projects had reported against them, right here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from flashkda.errors import MetadataError
from flashkda.geometry import VerifyGeometry
from tests.gpu.accuracy import measure
from tests.gpu.cases import WRITTEN, assert_inputs_kept, assert_only_touched, device_case, fork, inputs_of, poison
from tests.gpu.environment import ROOT, use_local_kernel_cache
from tests.gpu.setup import Check, Detail, Setup, kimi_k3, require
from tests.inputs import Case, assert_same_bits, clone, make_case, written
from tests.regroup import outcome, regroup

_LINE = 2**31


def checks(setup: Setup) -> list[Check]:
    """One check a report."""
    heads = 1 if setup.small else 12
    wide, eight = kimi_k3(16, heads), kimi_k3(8, heads)
    indexed, accepted = kimi_k3(16, heads, records="indices"), kimi_k3(8, heads, has_num_accepted=True)
    table: list[tuple[str, Callable[[Setup, VerifyGeometry], Detail], VerifyGeometry, tuple[int, ...]]] = [
        ("slots beyond 2^31 elements", _far_slots, wide, (3,)),
        ("records beyond 2^31 elements", _far_records, indexed, (3,)),
        ("state_indices a column of a table", _column, eight, (6,)),
        ("num_accepted = [0, 3]", _accepted, accepted, (2,)),
        ("rows behind the last request", _padding, eight, (1, 2, 4)),
        ("a conv pool with fewer slots", _small_conv_pool, eight, (2, 3)),
    ]
    if not setup.small:
        table.append(("a capture right after bind", _capture, kimi_k3(4, heads), (3,)))
    return [
        Check(
            "reported",
            name,
            partial(run, setup, geometry),
            tuple(plan for n in requests for plan in setup.both(geometry, n)),
        )
        for name, run, geometry, requests in table
    ]


def _capture(setup: Setup, geometry: VerifyGeometry) -> Detail:
    command = [sys.executable, "-m", "tests.gpu.capture_target"]
    use_local_kernel_cache()
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    require(found.returncode == 0, (found.stdout + found.stderr)[-2000:])
    return {"window": geometry.window}


def _far_slots(setup: Setup, geometry: VerifyGeometry) -> Detail:
    per_slot = {"state": geometry.heads * 128 * 128, "conv_state": geometry.channels * geometry.conv_columns}
    pool = 40 if setup.small else _LINE // min(per_slot.values()) + 12
    far = _far(setup, geometry, (pool - 1, 3, pool - 7), pool_slots=pool)
    return {"slots": list(far.slots), "elements": {name: pool * size for name, size in per_slot.items()}}


def _far_records(setup: Setup, geometry: VerifyGeometry) -> Detail:
    per_row = {
        "corrections": geometry.heads * geometry.window * 128,
        "key_gate": geometry.heads * geometry.window * 256,
    }
    rows = 40 if setup.small else _LINE // min(per_row.values()) + 12
    records = (rows - 1, 2, rows - 7)
    _far(setup, geometry, (1, 4, 2), pool_slots=6, record_rows=rows, records=records)
    return {"records": list(records), "elements": {name: rows * size for name, size in per_row.items()}}


def _far(
    setup: Setup,
    geometry: VerifyGeometry,
    slots: tuple[int, ...],
    *,
    pool_slots: int,
    record_rows: int | None = None,
    records: tuple[int, ...] = (),
) -> Case:
    """A verification in huge pools gives the bits of one in small pools, and does not touch the neighbours."""
    near = device_case(geometry, (16, 5, 11), seed=3, device=setup.device, slots=(1, 2, 3), pool_slots=5)
    options = {"slots": slots, "pool_slots": pool_slots, "record_rows": record_rows}
    far = device_case(geometry, (16, 5, 11), seed=3, device=setup.device, fill_pools=False, **options)  # type: ignore[arg-type]
    for name, view in near.tensors.items():
        if view is not None and name not in (*WRITTEN, "state", "state_indices", "record_indices"):
            far[name].copy_(view)
    if records:
        far["record_indices"].copy_(torch.tensor(records))
    used = records or slots
    rows = {"conv_state": slots, "corrections": used, "key_gate": used}
    neighbours = [far[name][row] for name, taken in rows.items() for row in _neighbours(far[name], taken)]
    for neighbour in neighbours:
        poison(neighbour)
    expected = fork(near)
    setup.run_parts(expected)
    for run in (setup.run_whole, setup.run_parts):
        for slot, source in zip(slots, near.slots, strict=True):
            for name in ("state", "conv_state"):
                far[name][slot].copy_(near[name][source])
        for row in used:
            poison(far["corrections"][row])
            poison(far["key_gate"][row])
        poison(far.arenas["out"])
        run(far)
        for n in range(3):
            assert_same_bits(outcome(far, n), outcome(expected, n))
        require(all(neighbour.isnan().all() for neighbour in neighbours), "a neighbour in the pool has been written")
    return far


def _neighbours(tensor: Tensor, used: tuple[int, ...]) -> list[int]:
    near = {0, 1, 2, *(row + side for row in used for side in (-1, 1))}
    return sorted(row for row in near if 0 <= row < tensor.shape[0] and row not in used)


def _column(setup: Setup, geometry: VerifyGeometry) -> Detail:
    case = device_case(geometry, (8, 3, 0, 8, 1, 5), seed=4, device=setup.device)
    wanted, whole, parts = fork(case), fork(case), fork(case)
    setup.run_parts(wanted)
    table = torch.full((6, 7), 2**30, dtype=case["state_indices"].dtype, device=setup.device)
    table[:, 2] = case["state_indices"]
    for found, run in ((whole, setup.run_whole), (parts, setup.run_parts)):
        found.tensors["state_indices"] = table[:, 2]
        run(found)
        assert_same_bits(written(found), written(wanted))
    return {"stride": table.stride(0)}


def _accepted(setup: Setup, geometry: VerifyGeometry) -> Detail:
    def verify(counts: tuple[int, int]) -> tuple[Case, dict[str, float]]:
        case = make_case(geometry, (8, 5), seed=5, device=setup.device, slots=(2, 4), num_accepted=counts)
        for slot in range(case["conv_state"].shape[0]):
            if slot not in case.slots:
                poison(case["conv_state"][slot])
                poison(case["state"][slot])
        before, whole = clone(case), clone(case)
        qkv, o = setup.run_parts(case)
        setup.run_whole(whole)
        assert_same_bits(written(whole), written(case))
        return case, measure(before, case, qkv, o)

    found, errors = verify((0, 3))
    assert_same_bits(written(found), written(verify((1, 3))[0]))  # 0 is taken as 1
    return {"worst": errors}


def _padding(setup: Setup, geometry: VerifyGeometry) -> Detail:
    rows = []
    for lengths, padding in (((8, 3, 0, 5), 1), ((1, 1), 14), ((0, 0), 5), ((2,), 300)):
        case = device_case(geometry, lengths, seed=padding, device=setup.device, padding=padding)
        before, whole, parts = inputs_of(case), fork(case), fork(case)
        setup.run_whole(whole)
        setup.run_parts(parts)
        assert_same_bits(written(whole), written(parts))
        assert_only_touched(case, whole)  # rows behind the last request are zero
        assert_inputs_kept(case, before)
        rows.append([sum(lengths), sum(lengths) + padding])
    return {"query_start_loc[N] and M": rows}


def _small_conv_pool(setup: Setup, geometry: VerifyGeometry) -> Detail:
    case = make_case(geometry, (8, 4, 6), seed=6, device=setup.device, slots=(2, 6, 3), pool_slots=(8, 4))
    wanted = regroup(case, (0, 2))
    setup.run_parts(wanted)
    before = clone(case)
    for run in (setup.run_whole, setup.run_parts):
        checked = clone(case)
        try:
            run(checked, check_metadata=True)
        except MetadataError as error:
            require("state_indices" in str(error) and "conv_state" in str(error), f"not named: {error}")
            named = str(error)
        else:
            raise AssertionError(f"{run.__name__}: no MetadataError")
        assert_same_bits(written(checked), written(before))
        found = clone(case)
        run(found)  # without the check the other requests are right all the same
        for i, n in enumerate((0, 2)):
            assert_same_bits(outcome(found, n), outcome(wanted, i))
    return {"error": named}
