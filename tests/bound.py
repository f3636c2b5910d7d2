# SPDX-License-Identifier: Apache-2.0
"""What the tests of bindings share: small plans and cases, and a stand-in for the compiled kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import flashkda.kernels
from flashkda.geometry import VerifyGeometry
from flashkda.ops import binding, custom_ops, launch, validate
from flashkda.ops.binding import VerifyLayer
from flashkda.planner import TILES, Plan, plan_verify
from tests.inputs import Case, bits, make_case

# Every optional tensor; small enough that a case takes a millisecond.
FULL = VerifyGeometry(2, 3, head_dim=8, has_num_accepted=True, records="indices")
BARE = VerifyGeometry(2, 3, head_dim=8, norm=False)

CONV = ("mixed_qkv", "conv_weight", "conv_state", "query_start_loc", "state_indices", "num_accepted")
RECORD = (
    *("raw_gate", "raw_beta", "A_log", "dt_bias", "state", "query_start_loc", "state_indices", "record_indices"),
    *("output_gate", "norm_weight", "out", "corrections", "key_gate"),
)
PER_STEP = (
    *("mixed_qkv", "raw_gate", "raw_beta", "output_gate", "out"),
    *("query_start_loc", "state_indices", "num_accepted", "record_indices"),
)


def reference_plan(geometry: VerifyGeometry, max_requests: int = 8) -> Plan:
    return plan_verify(geometry, max_requests, path="reference", device="cpu")


def kernel_plan(geometry: VerifyGeometry, path: str) -> Plan:
    """A plan of the kernels, made by hand: the planner needs the DSL for one."""
    return dataclasses.replace(reference_plan(geometry), path=path, arch="sm_90a", tile=TILES[0])


def case_of(geometry: VerifyGeometry = FULL, lengths: tuple[int, ...] = (3, 0, 2), **options: Any) -> Case:
    return make_case(geometry, lengths, seed=3, m_padding=1, **options)


def empty_qkv(case: Case) -> Tensor:
    return torch.zeros(case["mixed_qkv"].shape, dtype=torch.bfloat16)


def pick(case: Case, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: case.tensors[name] for name in names}


def layer_of(plan: Plan, case: Case, **options: Any) -> VerifyLayer:
    layer = VerifyLayer(plan, **options)
    qkv = empty_qkv(case)
    layer.conv = plan.bind_short_conv(**pick(case, CONV), qkv=qkv)
    layer.record = plan.bind_record(**pick(case, RECORD), qkv=qkv)
    return layer


def arena_bits(case: Case) -> dict[str, Tensor]:
    """A copy of every bit of a case, the padding between and around its tensors included."""
    return {name: (bits(arena) if arena.is_floating_point() else arena).clone() for name, arena in case.arenas.items()}


@dataclasses.dataclass
class Kernels:
    """In place of flashkda.kernels.specs: records what is loaded and each call's positional arguments."""

    loaded: set[str] = dataclasses.field(default_factory=set)
    loads: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    calls: list[tuple[str, tuple[Any, ...]]] = dataclasses.field(default_factory=list)

    def load(self, kind: str, geometry: Any, tile: Any, arch: str) -> Any:
        self.loads.append((kind, geometry, tile, arch))
        self.loaded.add(kind)
        return lambda *arguments: self.calls.append((kind, arguments))

    def is_loaded(self, kind: str, geometry: Any, tile: Any, arch: str) -> bool:
        return kind in self.loaded


def install_kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Stand-in kernels, on CPU tensors."""
    kernels = Kernels()
    monkeypatch.setattr(flashkda.kernels, "specs", kernels, raising=False)
    custom_ops._runner.cache_clear()
    monkeypatch.setattr(validate, "check_device", lambda plan, device: None)
    return kernels


def set_capturing(monkeypatch: pytest.MonkeyPatch, capturing: bool) -> None:
    """Pretend that a CUDA graph captures the current stream."""
    for module in (launch, binding, custom_ops):
        monkeypatch.setattr(module, "is_capturing", lambda: capturing)
