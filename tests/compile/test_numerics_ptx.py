# SPDX-License-Identifier: Apache-2.0
"""No kernel leaves a rounding to the compiler: scans of the PTX and of the IR of every kernel (rounding.py).

pytest tests/compile --compile=full scans every option with every tile on every architecture.
"""

from __future__ import annotations

import pytest

from tests.compile import rounding_toys
from tests.compile.rounding import ir_operations, ir_violations, ptx_operations, ptx_violations

pytestmark = pytest.mark.compile
pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

# Expression of rounding_toy_kernels -> what each scan must name. The contracted x*y+z leaves no trace in the PTX.
REFUSED = {
    "x*y": (["mul.f32"], ["arith.mulf"]),
    "x+y": (["add.f32"], ["arith.addf"]),
    "x-y": (["sub.f32"], ["arith.subf"]),
    "x/y": (["div.rn.f32"], ["arith.divf"]),
    "x*y+z": ([], ["arith.addf", "arith.mulf"]),
    "x*y+z*x": (["mul.f32"], ["arith.addf", "arith.mulf"]),
    "mul.rn then +": (["add.f32"], ["arith.addf"]),
    "* then add.rn": (["mul.f32"], ["arith.mulf"]),
    "fma.rz": (["fma.rz.f32"], ["nvvm.fma {rnd = #nvvm.fp_rnd_mode<rz>}"]),
    "add.ftz": (["add.rn.ftz.f32"], ["nvvm.addf {ftz = true, rnd = #nvvm.fp_rnd_mode<rn>}"]),
    "exp of the DSL": (["add.f32", "cvt.sat.f32.f32", "fma.rm.f32", "mul.f32"], ["math.exp"]),
    "fast exp of the DSL": (["mul.f32"], ["math.exp"]),
    "bf16 product": (["mul.bf16"], ["arith.mulf"]),
    "f16": (["cvt.f32.f16", "cvt.rn.f16.f32"], []),
}


def names(violations):
    return [text.rsplit(" (", 1)[0] for text in violations]


def test_every_rounding_of_a_kernel_is_written_out(case, examiner):
    facts = examiner.facts(case.spec)
    # Every kernel multiplies: finding nothing at all would mean that the scan is blind.
    assert facts.ptx_operations["mul.rn.f32"] and facts.ir_operations["llvm.nvvm.mul.rn.f"]
    found = ptx_violations(facts.ptx_operations) + ir_violations(facts.ir_operations)
    assert not found, "; ".join(found)


@pytest.mark.parametrize("name", REFUSED)
def test_an_open_rounding_is_refused(name, examiner):
    facts = examiner.facts((rounding_toys.expression, (name,)))
    assert (names(ptx_violations(facts.ptx_operations)), names(ir_violations(facts.ir_operations))) == REFUSED[name]


def test_arithmetic_on_vectors_is_refused(examiner):
    facts = examiner.facts((rounding_toys.expression, ("moves", "sm_90a", True)))
    assert names(ir_violations(facts.ir_operations)) == ["arith.mulf"]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_an_explicit_product_is_not_contracted(arch, examiner):
    facts = examiner.facts((rounding_toys.expression, ("mul then add", arch)))
    assert facts.ptx_operations == {"mul.rn.f32": 1, "add.rn.f32": 1}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", ["numerics", "moves"])
def test_the_functions_of_numerics_are_allowed(name, arch, examiner):
    facts = examiner.facts((rounding_toys.expression, (name, arch)))
    assert (ptx_violations(facts.ptx_operations), ir_violations(facts.ir_operations)) == ([], [])


def test_the_ptx_scan_reads_predicates_blocks_and_packed_types():
    ptx = """
        // mul.f32 in a comment
        .reg .f32 %f<3>;
        @%p1 mul.f32 %f1, %f2, %f3;
        @!%p2 add.rn.f32x2 %rd1, %rd2, %rd3;
        { fma.rn.bf16x2 %r1, %r2, %r3, %r4; }
        mul.wide.u32 %rd3, %r1, 4;
        ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];
        st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%r1], %f1, [%r2];
        red.global.add.f32 [%rd1], %f1;
    """
    found = ptx_operations(ptx)
    assert found["mul.f32"] == found["add.rn.f32x2"] == found["fma.rn.bf16x2"] == 1
    assert "mul.wide.u32" not in found
    assert names(ptx_violations(found)) == ["fma.rn.bf16x2", "mul.f32", "red.global.add.f32"]


def test_the_ir_scan_reads_results_in_tuples_and_generic_forms():
    ir = """
        %5:2 = scf.for %i = %a to %b step %c iter_args(%x = %y, %z = %w) -> (f32, f32)  : i32 {
        %8 = "arith.mulf"(%3, %5) <{fastmath = #arith.fastmath<none>}> : (f32, f32) -> f32
        %9 = arith.muli %3, %5 : i32
        %10 = vector.reduction <add>, %8 : vector<4xf32> into f32
        %11 = llvm.call_intrinsic "llvm.nvvm.add.rn.sat.f"(%3, %5) : (f32, f32) -> f32
        %12 = cute.memref.load(%arg0, %coord) : (!memref_gmem_f32, !cute.coord<"?">) -> f32
    """
    assert names(ir_violations(ir_operations(ir))) == ["arith.mulf", "llvm.nvvm.add.rn.sat.f", "vector.reduction"]
