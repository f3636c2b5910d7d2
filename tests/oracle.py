# SPDX-License-Identifier: Apache-2.0
"""A float64 oracle of the verification, written from the equations: one request, one head, one token at a time.

It shares no code with the package. Two values are rounded to bf16 by contract: the conv's output and o. A correct fp32
computation may fall on the other side of a rounding tie there, which then moves all that follows by far more than fp32
itself does. So the oracle can be shown the values that were found (``qkv``, ``o``): where a found value is as good a
rounding of the exact one, it goes on from that one, and elsewhere from its own. ``out`` is left unrounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flashkda.geometry import VerifyGeometry
from tests.inputs import Case, assert_same_bits, bits, clone, written

OUT_TOLERANCE = 4e-3  # of the row's largest magnitude; half a bf16 ulp is 3.90625e-3
CORRECTION_TOLERANCE = 2e-5  # of the row's largest magnitude


@dataclass(frozen=True)
class Expected:
    """What a verification must give, on the CPU."""

    qkv: Tensor  # [M, C] float64, rounded to bf16; NaN where no request takes part
    o: Tensor  # [M, H, V] float64, rounded to bf16; zero where no request takes part
    out: Tensor  # [M, H, V] float64, not rounded; zero where no request takes part
    corrections: Tensor  # [R, H, T, V] float64; NaN where nothing is recorded
    key_gate: Tensor  # [R, H, T, 2K] bf16, whole
    conv_state: Tensor  # [slots, C, T+2] bf16, whole


def verify(
    geometry: VerifyGeometry,
    tensors: Mapping[str, Tensor | None],
    *,
    qkv: Tensor | None = None,
    o: Tensor | None = None,
) -> Expected:
    """The expected result for tensors (by the contract's names, any device) that no run has touched yet.

    ``qkv`` [M, C] and ``o`` [M, H, V]: what was found at the two rounding points.
    """
    given = {name: t if name == "state" else t.cpu() for name, t in tensors.items() if t is not None}
    found_qkv, found_o = (None if found is None else found.double().cpu() for found in (qkv, o))
    rows = given["mixed_qkv"].shape[0]
    result = Expected(
        qkv=torch.full(given["mixed_qkv"].shape, torch.nan, dtype=torch.float64),
        o=torch.zeros(rows, geometry.heads, geometry.head_dim, dtype=torch.float64),
        out=torch.zeros(rows, geometry.heads, geometry.head_dim, dtype=torch.float64),
        corrections=torch.full(given["corrections"].shape, torch.nan, dtype=torch.float64),
        key_gate=given["key_gate"].clone(),
        conv_state=given["conv_state"].clone(),
    )
    pool = min(given["state"].shape[0], given["conv_state"].shape[0])
    for n, slot in enumerate(given["state_indices"].tolist()):
        start, end = given["query_start_loc"][n : n + 2].tolist()
        end = min(end, start + geometry.window)
        if slot <= geometry.null_slot or not 0 <= slot < pool or end <= start:
            continue
        column = min(max(int(given["num_accepted"][n]), 1), geometry.window) - 1 if "num_accepted" in given else 0
        _conv(given, result, slot, range(start, end), column, found_qkv)
        record = slot if geometry.records == "slot" else n
        if geometry.records == "indices":
            record = int(given["record_indices"][n])
        for head in range(geometry.heads):
            _head(geometry, given, result, head, slot, range(start, end), record, found_o)
    return result


def _conv(
    given: dict[str, Tensor], result: Expected, slot: int, tokens: range, column: int, found: Tensor | None
) -> None:
    weight = given["conv_weight"].double()
    width = weight.shape[1]
    inputs = [given["conv_state"][slot, :, column + i] for i in range(width - 1)]  # oldest first
    for m in tokens:
        inputs.append(given["mixed_qkv"][m])
        terms = torch.stack([weight[:, i] * inputs[i - width].double() for i in range(width)])
        x = terms.sum(0)
        slack = 2.0**-20 * terms.abs().sum(0)
        result.qkv[m] = _round(x / (1 + torch.exp(-x)), None if found is None else found[m], slack)
    for i, raw in enumerate(inputs[1:]):
        result.conv_state[slot, :, i] = raw


def _head(
    geometry: VerifyGeometry,
    given: dict[str, Tensor],
    result: Expected,
    h: int,
    slot: int,
    tokens: range,
    record: int,
    found: Tensor | None,
) -> None:
    dim = geometry.head_dim
    state = given["state"][slot, h].cpu().double()
    rate = given["A_log"][h].double().exp()
    for t, m in enumerate(tokens):
        q, k, v = result.qkv[m].view(3, geometry.heads, dim)[:, h]
        unit_k = k / torch.sqrt(k.dot(k) + 1e-6)
        unit_q = q / torch.sqrt(q.dot(q) + 1e-6) / dim**0.5
        z = given["raw_gate"][m, h].double() + given["dt_bias"][h].double()
        if geometry.gate == "bounded":
            assert geometry.lower_bound is not None
            g = geometry.lower_bound / (1 + torch.exp(-rate * z))
        else:
            g = -rate * torch.where(z > 20, z, torch.log1p(torch.exp(z.clamp(max=20))))
        state *= torch.exp(g)  # column by column: one factor a key
        u = (v - state @ unit_k) / (1 + torch.exp(-given["raw_beta"][m, h].double()))
        state += torch.outer(u, unit_k)
        o = state @ unit_q
        o = _round(o, None if found is None else found[m, h], CORRECTION_TOLERANCE * o.abs().max())
        result.o[m, h] = o
        result.out[m, h] = o
        if geometry.norm:
            scale = 1 / torch.sqrt(o.dot(o) / dim + geometry.norm_eps)
            z = given["output_gate"][m, h].double()
            result.out[m, h] *= scale * given["norm_weight"].double() / (1 + torch.exp(-z))
        if 0 <= record < result.corrections.shape[0]:
            result.corrections[record, h, t] = u
            result.key_gate[record, h, t, :dim] = k
            result.key_gate[record, h, t, dim:] = given["raw_gate"][m, h]


def _round(exact: Tensor, found: Tensor | None, slack: Tensor) -> Tensor:
    """To bf16, kept as float64; ``found`` where it is the rounding of a value within ``slack`` of the exact one."""
    own = exact.to(torch.bfloat16).double()
    if found is None:
        return own
    exponent = torch.frexp(exact).exponent.clamp(min=-125).masked_fill(exact == 0, -125)
    half_ulp = torch.ldexp(torch.ones_like(exact), exponent - 9)
    return torch.where((found - exact).abs() <= half_ulp + slack, found, own)


def check(before: Case, after: Case, *, qkv: Tensor | None = None, o: Tensor | None = None) -> Expected:
    """Assert that ``after`` is the result of a verification of ``before`` (a clone made earlier).

    out and corrections within their tolerances of each row's largest magnitude; conv_state, key_gate and everything
    untouched, arenas and inputs included, to the bit. Show ``qkv`` and ``o`` of the run where it has them: they are
    checked to be roundings of the exact values. Without them a rounding tie may fail the check of a right result.
    """
    expected = verify(before.geometry, before.tensors, qkv=qkv, o=o)
    for name, found, want in (("qkv", qkv, expected.qkv), ("o", o, expected.o)):
        if found is not None:
            defined = ~want.isnan()
            _assert_close(name, found.double().cpu()[defined], want[defined], 0.0)
    _assert_close("out", after["out"].double().cpu(), expected.out, OUT_TOLERANCE)
    recorded = ~expected.corrections.isnan()
    corrections = after["corrections"].double().cpu()
    dim = before.geometry.head_dim
    _assert_close(
        "corrections",
        corrections[recorded].view(-1, dim),
        expected.corrections[recorded].view(-1, dim),
        CORRECTION_TOLERANCE,
    )

    wanted = clone(before)
    wanted["out"].copy_(after["out"])
    wanted["conv_state"].copy_(expected.conv_state)
    wanted["key_gate"].copy_(expected.key_gate)
    recorded = recorded.to(after["corrections"].device)
    wanted["corrections"][recorded] = after["corrections"][recorded]
    assert_same_bits(written(after), written(wanted))
    for name, arena in before.arenas.items():
        if name not in written(before):
            same = bits(arena) if arena.is_floating_point() else arena
            found = bits(after.arenas[name]) if arena.is_floating_point() else after.arenas[name]
            assert torch.equal(found, same), f"{name}, an input, has changed"
    return expected


def _assert_close(name: str, found: Tensor, want: Tensor, tolerance: float) -> None:
    """Each row (the last dimension) within ``tolerance`` of its largest magnitude; NaN is never close."""
    if want.numel() == 0:
        return
    limit = tolerance * want.abs().amax(-1, keepdim=True)
    error = (found - want).abs()
    wrong = ~(error <= limit)
    if wrong.any():
        worst = (error / limit.clamp(min=1e-300)).nan_to_num(torch.inf).max().item() * tolerance
        first = wrong.nonzero()[0].tolist()
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {want.numel()} beyond {tolerance:g} (worst {worst:.3g}), first at {first}:"
            f" {found[tuple(first)].item():.7g} for {want[tuple(first)].item():.7g}"
        )
