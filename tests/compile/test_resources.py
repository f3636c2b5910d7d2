# SPDX-License-Identifier: Apache-2.0
"""Every kernel fits its architecture: no spilled register, no local memory, shared memory and registers within bounds.

Which kernels: see cases.py. A run takes the quick set; pytest tests/compile --compile=full takes every option with
every tile on every architecture (about ten times as long).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashkda.capability import ARCHITECTURES
from flashkda.jit.resources import Resources, sass_local_accesses
from tests.compile import jit_toys, rounding_toys
from tests.compile.examine import Facts

pytestmark = pytest.mark.compile
pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

KIB = 1024
# The most shared memory of a CTA. From sm_90 on the 1 KiB that the system reserves is counted (see Resources).
SHARED_LIMIT = {
    "sm_80": 163 * KIB,
    "sm_86": 99 * KIB,
    "sm_89": 99 * KIB,
    "sm_90a": (227 + 1) * KIB,
    "sm_100a": (227 + 1) * KIB,
    "sm_103a": (227 + 1) * KIB,
    "sm_120a": (99 + 1) * KIB,
}
THREAD_REGISTERS = 255
SM_REGISTERS = 64 * KIB
# Registers are given to a warp in such portions.
REGISTER_PORTION = 256
WARP = 32


def excesses(facts: Facts, arch: str) -> list[str]:
    """Everything in which a kernel does not fit."""
    portions = -(-facts.registers * WARP // REGISTER_PORTION)
    registers = -(-facts.threads // WARP) * portions * REGISTER_PORTION * facts.min_blocks
    bounds = {
        "bytes of spilled registers": (facts.spill_bytes, 0),
        "bytes of stack and local memory": (facts.local_bytes, 0),
        "LDL and STL instructions": (facts.local_accesses, 0),
        "bytes of shared memory": (facts.shared_bytes, SHARED_LIMIT[arch]),
        "registers a thread": (facts.registers, THREAD_REGISTERS),
        "registers of the CTAs that must fit an SM": (registers, SM_REGISTERS),
    }
    return [f"{found} {what}, at most {most}" for what, (found, most) in bounds.items() if found > most]


def test_a_kernel_fits(case, examiner):
    found = excesses(examiner.facts(case.spec), case.arch)
    assert not found, "; ".join(found)


def test_every_architecture_has_its_limit():
    assert SHARED_LIMIT.keys() == ARCHITECTURES.keys()


class TestTheChecksSee:
    def test_spilled_registers(self, examiner):
        facts = examiner.facts((jit_toys.rotate, (320, 128)))
        assert facts.spill_bytes and facts.local_bytes and facts.local_accesses
        assert len(excesses(facts, "sm_90a")) == 3

    def test_an_array_in_local_memory_without_a_spill(self, examiner):
        facts = examiner.facts((rounding_toys.local_array, ()))
        assert facts.spill_bytes == 0 and facts.local_bytes >= 256 and facts.local_accesses
        assert len(excesses(facts, "sm_90a")) == 2

    def test_more_shared_memory_than_there_is(self, examiner):
        facts = examiner.facts((jit_toys.rotate, (16, 50 * KIB)))
        assert facts.shared_bytes == 4 * 50 * KIB + KIB and facts.threads == 128
        assert excesses(facts, "sm_90a") == []
        assert excesses(facts, "sm_120a") == [f"{facts.shared_bytes} bytes of shared memory, at most {100 * KIB}"]

    @pytest.mark.parametrize(("arch", "reserved"), [("sm_80", 0), ("sm_89", 0), ("sm_90a", KIB), ("sm_120a", KIB)])
    def test_the_reserved_shared_memory_where_it_is_counted(self, arch, reserved, examiner):
        facts = examiner.facts((jit_toys.rotate, (16, 256, arch)))
        assert facts.shared_bytes == 256 * 4 + reserved

    def test_more_registers_than_there_are(self):
        fits = Facts(128, 0, 0, 0, 0, 512, 1, {}, {}, "")
        assert excesses(fits, "sm_90a") == []
        assert len(excesses(replace(fits, registers=129), "sm_90a")) == 1
        assert len(excesses(replace(fits, min_blocks=2), "sm_90a")) == 1
        assert len(excesses(replace(fits, registers=256, threads=32), "sm_90a")) == 1

    def test_local_accesses_in_sass(self):
        sass = """
                /*0280*/                   STL [R1+0x30], R5 ;               /* 0x0000300501007387 */
                /*1a60*/              @!P0 LDL.LU.64 R74, [R1+0x8] ;         /* 0x0000084a01007387 */
                /*1a70*/             @UPT0 LDL R74, [R1+0x8] ;               /* 0x0000084a01007387 */
                /*1a80*/                   LDG.E.128 R4, [R8.64] ;           /* LDL */
                /*1a90*/                   LDS R4, [R8] ;                    /* 0x0000084a01007387 */
        """
        assert sass_local_accesses(sass) == 3
        assert Resources(8, 0, 0, 0, "", sass).local_accesses == 3
        assert Resources(8, 0, 0, 0, "").local_accesses is None
