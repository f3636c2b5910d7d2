# SPDX-License-Identifier: Apache-2.0
"""Fake tensors that say what a compiled kernel may assume of its arguments: rank, dtype, static dims, alignment.

Everything an engine may vary (rows, requests, slots, heads, window, strides) is symbolic; binding checks the rest.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from .traits import HEAD_DIM, TAPS, CommitTraits

_DTYPES = {
    "float32": cutlass.Float32,
    "bfloat16": cutlass.BFloat16,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
}

_ARGUMENTS = {
    "short_conv": (
        "mixed_qkv", "conv_weight", "conv_state", "query_start_loc", "state_indices", "num_accepted", "qkv",
    ),
    "record": (
        "qkv", "raw_gate", "raw_beta", "A_log", "dt_bias", "state", "query_start_loc", "state_indices",
        "record_indices", "o", "corrections", "key_gate",
    ),
    "gated_rms_norm": ("o", "output_gate", "norm_weight", "query_start_loc", "state_indices", "out"),
    "fused_verify": (
        "mixed_qkv", "conv_weight", "conv_state", "raw_gate", "raw_beta", "A_log", "dt_bias", "state", "output_gate",
        "norm_weight", "query_start_loc", "state_indices", "num_accepted", "record_indices", "out", "corrections",
        "key_gate",
    ),
    "fused_decode": (
        "mixed_qkv", "conv_weight", "conv_state", "raw_gate", "raw_beta", "A_log", "dt_bias", "state", "output_gate",
        "norm_weight", "query_start_loc", "state_indices", "num_accepted", "out",
    ),
    "decode_rule": (
        "qkv", "raw_gate", "raw_beta", "A_log", "dt_bias", "state", "query_start_loc", "state_indices", "o",
    ),
    "commit": (
        "table", "state", "corrections", "key_gate", "conv_state", "accepted", "accepted_indices", "state_indices",
        "dst_indices", "record_indices", "boundary_length", "boundary_indices",
    ),
}  # fmt: skip
_ARGUMENTS["fused_round"] = _ARGUMENTS["fused_verify"]
_ARGUMENTS |= {f"{kind}_chunked": _ARGUMENTS[kind] for kind in ("record", "fused_verify")}


class _Fakes:
    def __init__(self, traits: Any):
        self.traits = traits
        self.aligned = traits.vector > 1

    def tensor(self, dtype: str, shape: tuple, stride: tuple, *, aligned: bool | None = None) -> Any:
        """``None`` in shape or stride is symbolic; symbolic strides keep 16-byte alignment where it is promised."""
        element = _DTYPES[dtype]
        aligned = self.aligned if aligned is None else aligned
        step = 16 * 8 // element.width if aligned else 1
        dims = tuple(cute.sym_int() if d is None else d for d in shape)
        strides = tuple(cute.sym_int64(divisibility=step) if s is None else s for s in stride)
        return make_fake_tensor(element, dims, strides, assumed_align=16 if aligned else element.width // 8)

    def rows(self) -> Any:
        """[M, C] bf16, row stride free."""
        return self.tensor("bfloat16", (None, None), (None, 1))

    def heads(self) -> Any:
        """[M, H, 128] bf16, row stride free."""
        return self.tensor("bfloat16", (None, None, HEAD_DIM), (None, HEAD_DIM, 1))

    def make(self, name: str) -> Any:
        traits = self.traits
        if name in ("mixed_qkv", "qkv"):
            return self.rows()
        if name in ("raw_gate", "o", "out"):
            return self.heads()
        if name == "output_gate":
            return self.heads() if traits.norm else None
        if name == "norm_weight":
            return self.tensor(traits.norm_weight_dtype, (HEAD_DIM,), (1,)) if traits.norm else None
        if name == "raw_beta":
            return self.tensor("bfloat16", (None, None), (None, 1), aligned=False)
        if name == "conv_weight":
            return self.tensor(traits.conv_weight_dtype, (None, TAPS), (TAPS, 1))
        if name == "conv_state":
            if isinstance(traits, CommitTraits) and not traits.compact:
                return None
            if traits.conv_layout == "SD":
                return self.tensor("bfloat16", (None, None, None), (None, 1, None))
            slot = cute.sym_int64(divisibility=8 if self.aligned else 1)
            return self.tensor("bfloat16", (None, None, None), (slot, cute.sym_int64(), 1))
        if name == "A_log":
            return self.tensor("float32", (None,), (1,), aligned=False)
        if name == "dt_bias":
            return self.tensor("float32", (None, HEAD_DIM), (HEAD_DIM, 1))
        if name == "state":
            square = HEAD_DIM * HEAD_DIM
            return self.tensor(traits.state_dtype, (None, None, HEAD_DIM, HEAD_DIM), (None, square, HEAD_DIM, 1))
        if name == "query_start_loc":
            return self.tensor("int32", (None,), (1,), aligned=False)
        if name == "state_indices":
            return self.tensor(traits.index_dtype, (None,), (None,), aligned=False)
        if name == "num_accepted":
            return self.tensor("int32", (None,), (1,), aligned=False) if traits.has_num_accepted else None
        if name == "record_indices":
            if traits.records != "indices":
                return None
            return self.tensor(traits.index_dtype, (None,), (None,), aligned=False)
        optional = {"dst_indices": "has_dst", "accepted_indices": "has_accepted_indices"}
        if name in optional or name == "boundary_indices":
            present = getattr(traits, optional.get(name, "has_boundary"))
            return self.tensor(traits.index_dtype, (None,), (None,), aligned=False) if present else None
        if name == "accepted" or (name == "boundary_length" and traits.has_boundary):
            return self.tensor("int32", (None,), (1,), aligned=False)
        if name == "boundary_length":
            return None
        if name == "table":
            return self.tensor("int64", (6, None), (None, 1), aligned=False)
        if name == "corrections":
            return self.tensor("float32", (None, None, None, HEAD_DIM), (None, None, HEAD_DIM, 1))
        if name == "key_gate":
            width = 2 * HEAD_DIM
            return self.tensor("bfloat16", (None, None, None, width), (None, None, width, 1))
        raise KeyError(name)


def fake_tensors(kind: str, traits: Any) -> tuple[Any, ...]:
    """Arguments of kernel ``kind`` in order, those of a persistent one behind the number of SMs; ``None`` where the
    geometry has no such tensor."""
    fakes = _Fakes(traits)
    persistent = kind.startswith("persistent_")
    tensors = tuple(fakes.make(name) for name in _ARGUMENTS[kind.replace("persistent_", "fused_")])
    return (cutlass.Int32(1), *tensors) if persistent else tensors
