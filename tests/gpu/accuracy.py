# SPDX-License-Identifier: Apache-2.0
"""Both paths against the float64 oracle of tests.oracle: K3's options and every row of the pairwise table."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from flashkda.geometry import VerifyGeometry
from flashkda.planner import Tile
from tests.gpu import pairwise
from tests.gpu.setup import Check, Detail, Setup, describe, kimi_k3
from tests.inputs import KINDS, Case, assert_same_bits, clone, make_case, written
from tests.oracle import CORRECTION_TOLERANCE, OUT_TOLERANCE, check

K3 = ((1, 12), (8, 12), (16, 6))  # windows and heads


def checks(setup: Setup) -> list[Check]:
    """One check a geometry, at all kinds of inputs."""
    geometries: list[tuple[str, VerifyGeometry, Tile | None]] = [
        (f"K3 T={window}", kimi_k3(window, heads), None) for window, heads in (K3 if not setup.small else ((4, 1),))
    ]
    for row in pairwise.table() if not setup.small else pairwise.table()[1:3]:
        geometries.append((row.name, row.geometry.replace(heads=2), row.tile))
    return [Check("accuracy", name, partial(_check, setup, g, t), setup.both(g, 4, t)) for name, g, t in geometries]


def _check(setup: Setup, geometry: VerifyGeometry, tile: Tile | None) -> Detail:
    worst = {"out": 0.0, "corrections": 0.0}
    window = geometry.window
    for kind in KINDS if not setup.small else KINDS[:2]:
        lengths = (window, 1, 0, max(window - 1, 1))
        case = make_case(geometry, lengths, seed=7, device=setup.device, kind=kind, m_padding=2)
        before, whole = clone(case), clone(case)
        qkv, o = setup.run_parts(case, tile)
        setup.run_whole(whole, tile)
        try:
            assert_same_bits(written(whole), written(case))
            errors = measure(before, case, qkv, o)
        except AssertionError as error:
            raise AssertionError(f"{kind}: {error}") from error
        worst = {name: max(value, errors[name]) for name, value in worst.items()}
    return {
        "worst": worst,
        "tolerances": {"out": OUT_TOLERANCE, "corrections": CORRECTION_TOLERANCE},
        "kinds": list(KINDS),
        **describe(geometry),
    }


def measure(before: Case, after: Case, qkv: Tensor, o: Tensor) -> dict[str, float]:
    """Check a result against the oracle; the largest errors, relative to each row's largest magnitude."""
    expected = check(before, after, qkv=qkv, o=o)
    recorded = ~expected.corrections.isnan().any(-1)
    return {
        "out": _relative(after["out"], expected.out),
        "corrections": _relative(after["corrections"].cpu()[recorded], expected.corrections[recorded]),
    }


def _relative(found: Tensor, want: Tensor) -> float:
    largest = want.abs().amax(-1, keepdim=True)
    error = (found.double().cpu() - want).abs() / largest.clamp(min=torch.finfo(torch.float32).tiny)
    return error.max().item() if error.numel() else 0.0
