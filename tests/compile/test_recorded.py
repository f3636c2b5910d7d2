# SPDX-License-Identifier: Apache-2.0
"""No kernel of an engine takes more of an SM than was written down; see record.py."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.compile.examine import Facts
from tests.compile.record import PATH, occupancy, recorded_cases, resources

pytestmark = pytest.mark.compile
pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

AGAIN = "if that is meant: python -m tests.compile.record"


def worse(found: dict[str, int], recorded: dict[str, int]) -> list[str]:
    """In what a kernel takes more than it did, or leaves fewer CTAs room."""
    lines = []
    for name, value in found.items():
        before = recorded[name]
        if value < before if name == "ctas_per_sm" else value > before:
            lines.append(f"{name}: {value}, recorded {before}")
    return lines


@pytest.mark.parametrize("kernel", recorded_cases(), ids=lambda kernel: kernel.id)
def test_takes_no_more_than_recorded(kernel, examiner):
    recorded = json.loads(PATH.read_text())
    assert kernel.id in recorded, AGAIN
    assert not worse(resources(examiner.facts(kernel.spec)), recorded[kernel.id]), AGAIN


def test_every_record_is_of_a_case():
    assert json.loads(PATH.read_text()).keys() == {case.id for case in recorded_cases()}, AGAIN


def test_sees_what_is_worse():
    facts = Facts(128, 0, 0, 0, 100 * 1024, 256, 2, {}, {}, "")
    before = resources(facts)
    assert before["ctas_per_sm"] == 2 and not worse(before, before)
    assert occupancy(replace(facts, registers=129)) == occupancy(replace(facts, shared_bytes=120 * 1024)) == 1
    assert worse({**before, "registers": 136, "ctas_per_sm": 1}, before) == [
        "registers: 136, recorded 128",
        "ctas_per_sm: 1, recorded 2",
    ]
    assert not worse({**before, "registers": 120, "ctas_per_sm": 3}, before)
