# SPDX-License-Identifier: Apache-2.0
"""What a kernel may compute with: a scan of its PTX and of the IR that the DSL wrote for it.

Bits may not depend on what the compiler makes of an expression. Two texts are needed to see that. PTX shows operations
whose rounding is open (mul.f32 without .rn, which ptxas may contract) and slow or inexact ones. But a contraction that
the DSL's optimizer has already made is an ordinary fma.rn.f32 there; only the IR, before any pass, shows that the
source said x*y + z and not fma(x, y, z).

Both scans count operations on floating point and compare with lists of what is allowed: what is not listed is refused,
also what nobody has thought of yet.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

# Explicit rounding, or exact.
PTX_ARITHMETIC = frozenset(
    f"{operation}.{kind}"
    for operation in ("add.rn", "sub.rn", "mul.rn", "fma.rn")
    # From sm_100 on also on pairs, and with bf16 operands that the instruction widens, which is exact.
    for kind in ("f32", "f32x2", "f32.bf16")
) | {"neg.f32", "abs.f32", "cvt.f32.bf16", "cvt.rn.bf16.f32", "cvt.rn.bf16x2.f32"}
# The approximate instructions that flashkda.kernels.numerics has chosen.
PTX_APPROXIMATE = frozenset({"ex2.approx.ftz.f32", "rcp.approx.ftz.f32", "rsqrt.approx.ftz.f32"})
# Products in parts on tensor cores (flashkda.kernels.tf32), which cut off where they add, always in the same way.
PTX_TENSOR = frozenset({"cvt.rna.tf32.f32", "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"})
# First words of what moves, compares or chooses values.
PTX_MOVES = frozenset({"mov", "ld", "st", "selp", "setp", "shfl"})

_RN = "{rnd = #nvvm.fp_rnd_mode<rn>}"
IR_ARITHMETIC = frozenset(
    {"llvm.nvvm.mul.rn.f", f"nvvm.addf {_RN}", f"nvvm.fma {_RN}", "arith.negf", "arith.extf", "arith.truncf"}
)
IR_APPROXIMATE = frozenset({"llvm.nvvm.ex2.approx.ftz", "nvvm.rcp.approx.ftz.f", "llvm.nvvm.rsqrt.approx.ftz.f"})
IR_MOVES = frozenset(
    {
        "arith.bitcast", "arith.cmpf", "arith.constant", "arith.select", "builtin.unrealized_conversion_cast",
        "llvm.bitcast", "llvm.load", "llvm.store", "nvvm.shfl.sync", "scf.condition", "scf.for", "scf.if", "scf.while",
        "scf.yield", "vector.bitcast", "vector.extract", "vector.from_elements", "vector.insert", "vector.load",
        "vector.splat", "vector.store",
        # Text of our own, which is PTX: the other scan reads it.
        "llvm.inline_asm", "nvvm.inline_ptx",
        # Addresses and layouts, and copies by them. Not all of the dialect: it has matrix products too.
        "cute.add_offset", "cute.copy", "cute.get_iter", "cute.inttoptr", "cute.make_atom", "cute.make_view",
        "cute.memref.alloca", "cute.memref.load", "cute.memref.load_vec", "cute.memref.store", "cute.memref.store_vec",
        "cute.ptrtoint", "cute.recast_iter",
    }
)  # fmt: skip

_PTX_FLOAT = re.compile(r"(?:b?f(?:16|32|64)|tf32|e[2-5]m[0-9])")
_IR_FLOAT = re.compile(r"(?:\b|x)(?:b?f16|t?f32|f64|f8\w+)\b")


def ptx_operations(ptx: str) -> Counter[str]:
    """Opcodes with a floating point type in them, and how often each occurs."""
    opcodes = re.findall(r"^\s*(?:\{\s*)?(?:@!?%p\w+\s+)?([a-z]\w*(?:\.[\w:]+)+)\s", ptx, re.MULTILINE)
    return Counter(opcode for opcode in opcodes if any(_PTX_FLOAT.match(part) for part in opcode.split(".")[1:]))


def ir_operations(ir: str) -> Counter[str]:
    """Operations on lines with a floating point type: an intrinsic by its name, nvvm arithmetic with its rounding."""
    found: Counter[str] = Counter()
    for line in ir.splitlines():
        operation = re.match(r'\s*(?:%[\w:, %#]+ = )?"?([a-z_]\w*(?:\.\w+)+)', line)
        if operation is None or not _IR_FLOAT.search(line):
            continue
        name = operation[1]
        if name == "llvm.call_intrinsic" and (intrinsic := re.search(r'"([^"]+)"', line)):
            name = intrinsic[1]
        elif name in ("nvvm.addf", "nvvm.fma", "nvvm.subf", "nvvm.mulf"):
            attributes = re.search(r"\{[^}]*\}", line)
            name += f" {attributes[0]}" if attributes else ""
        found[name] += 1
    return found


def ptx_violations(operations: Mapping[str, int]) -> list[str]:
    """What PTX may not have, one text an opcode."""
    allowed = PTX_ARITHMETIC | PTX_APPROXIMATE | PTX_TENSOR
    return _texts(operations, (name for name in operations if name not in allowed and not _moves(name)))


def ir_violations(operations: Mapping[str, int]) -> list[str]:
    """What the IR may not have, one text an operation."""
    return _texts(operations, operations.keys() - IR_ARITHMETIC - IR_APPROXIMATE - IR_MOVES)


def _moves(opcode: str) -> bool:
    return opcode.split(".")[0] in PTX_MOVES


def _texts(operations: Mapping[str, int], names: Iterable[str]) -> list[str]:
    return sorted(f"{name} ({operations[name]} times)" for name in names)
