# SPDX-License-Identifier: Apache-2.0
"""A Kimi K3 rank's layer as an engine has it: projections, verify, output projection; the switch off against on.

bf16 projections of hidden states with synthetic weights; mixed_qkv, output gate, beta and the low-rank gate are views
of one wide projection. Off: three custom ops. On: one. Both under torch.compile and in a CUDA graph, over poisoned
memory. Then with bindings and a VerifyLayer, of which a part is replaced between two captures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashkda
from flashkda.errors import StaleBindingError
from flashkda.geometry import PRESETS, VerifyGeometry
from flashkda.planner import Plan, plan_verify
from tests.gpu.cases import assert_inputs_kept, device_case, fork, inputs_of, poison
from tests.gpu.setup import Check, Detail, Setup, kimi_k3, require, scratch
from tests.inputs import Case, assert_same_bits, bits, clone, written

WINDOW = 8
LENGTHS = {1: (1,), 4: (3, 1), 8: (5, 2, 1)}  # requests of each row count
_LOW_RANK = 128


def checks(setup: Setup) -> list[Check]:
    """One check a row count, and the replaced binding."""
    geometry = kimi_k3(WINDOW, 1 if setup.small else 12, has_num_accepted=True)
    hidden = 256 if setup.small else PRESETS["kimi-k3"].hidden
    found = []
    for rows, lengths in LENGTHS.items():
        plans = setup.both(geometry, len(lengths))
        run = partial(_switch, setup, geometry, hidden, lengths)
        found.append(Check("layer", f"off against on, {rows} rows", run, plans))
    plans = setup.both(geometry, len(LENGTHS[8]))
    found.append(Check("layer", "a binding replaced", partial(_replaced, setup, geometry, hidden), plans))
    return found


class _Weights:
    """Of the projections; those of the verify are the case's."""

    def __init__(self, geometry: VerifyGeometry, hidden: int, device: str) -> None:
        heads, dim = geometry.heads, geometry.head_dim
        self.geometry = geometry
        # Widths of the parts of the wide projection. raw_beta is last: its rows have no alignment to keep.
        self.widths = (geometry.channels, heads * dim, _LOW_RANK, heads)
        total = -(-sum(self.widths) // 8) * 8
        generator = torch.Generator(device).manual_seed(5)

        def normal(*shape: int) -> Tensor:
            tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
            return tensor.normal_(0, shape[0] ** -0.5, generator=generator)

        self.wide = normal(hidden, total)
        self.gate = normal(_LOW_RANK, heads * dim)
        self.output = normal(heads * dim, hidden)

    def project(self, hidden: Tensor) -> dict[str, Tensor]:
        """The row tensors of the verify, by name."""
        wide = hidden @ self.wide
        heads, dim = self.geometry.heads, self.geometry.head_dim
        mixed, gate, low, beta = wide[:, : sum(self.widths)].split(self.widths, dim=1)
        return {
            "mixed_qkv": mixed,
            "raw_gate": (low @ self.gate).view(-1, heads, dim),
            "raw_beta": beta,
            "output_gate": gate.unflatten(1, (heads, dim)),
        }


@contextmanager
def _switched(path: str) -> Iterator[None]:
    """FLASHKDA_VERIFY_PATH, for the length of a block."""
    before = os.environ.get("FLASHKDA_VERIFY_PATH")
    os.environ["FLASHKDA_VERIFY_PATH"] = path
    try:
        yield
    finally:
        os.environ.pop("FLASHKDA_VERIFY_PATH")
        if before is not None:
            os.environ["FLASHKDA_VERIFY_PATH"] = before


def _switch(setup: Setup, geometry: VerifyGeometry, hidden: int, lengths: tuple[int, ...]) -> Detail:
    ops = flashkda.register_ops()
    weights, before = _Weights(geometry, hidden, setup.device), _case(setup, geometry, lengths)
    kept, x = inputs_of(before), _hidden(setup, hidden, sum(lengths))

    def finish(out: Tensor) -> Tensor:
        return out.flatten(1) @ weights.output

    def on(case: Case, qkv: Tensor, o: Tensor, plan: str) -> Callable[[Tensor], Tensor]:
        tensors = _without_rows(case)

        def forward(x: Tensor) -> Tensor:
            ops.kda_record_fused(**tensors, **weights.project(x), plan=plan)
            return finish(tensors["out"])

        return forward

    def off(case: Case, qkv: Tensor, o: Tensor, plan: str) -> Callable[[Tensor], Tensor]:
        t = _without_rows(case)
        batch = {name: t[name] for name in ("query_start_loc", "state_indices")}
        conv = {name: t[name] for name in ("conv_weight", "conv_state", "num_accepted")}
        rule = {name: t[name] for name in ("A_log", "dt_bias", "state", "record_indices", "corrections", "key_gate")}

        def forward(x: Tensor) -> Tensor:
            row = weights.project(x)
            ops.short_conv(mixed_qkv=row["mixed_qkv"], **conv, **batch, qkv=qkv, plan=plan)
            gates = {"raw_gate": row["raw_gate"], "raw_beta": row["raw_beta"]}
            ops.kda_record(qkv=qkv, **gates, **rule, **batch, o=o, plan=plan)
            ops.gated_rms_norm(
                o=o, output_gate=row["output_gate"], norm_weight=t["norm_weight"], **batch, out=t["out"], plan=plan
            )
            return finish(t["out"])

        return forward

    results = {}
    for make, path in ((off, "decomposed"), (on, "fused")):
        with _switched("reference" if setup.reference else path):
            plan = plan_verify(geometry, len(lengths), device=setup.device, strict=True)
            case, between = fork(before), scratch(before)
            torch._dynamo.reset()
            forward = make(case, *between, plan.to_json())
            compiled = torch.compile(
                forward, fullgraph=True, dynamic=False, backend="inductor" if setup.cuda else "aot_eager"
            )
            results[make.__name__] = (case, _run_twice(setup, compiled, x, case, between, before))
    (off_case, off_y), (on_case, on_y) = results["off"], results["on"]
    assert_same_bits({"projection": bits(on_y), **written(on_case)}, {"projection": bits(off_y), **written(off_case)})
    require(on_y.isfinite().all(), "the output projection is not finite")
    assert_inputs_kept(before, kept)
    return {"rows": sum(lengths), "lengths": list(lengths), "hidden": hidden, "heads": geometry.heads}


def _run_twice(
    setup: Setup,
    forward: Callable[[Tensor], Tensor],
    x: Tensor,
    case: Case,
    between: tuple[Tensor, Tensor],
    before: Case,
) -> Tensor:
    """Run once to compile, then as a graph, on freshly poisoned memory; the output projection of the second run."""
    y = torch.full_like(x, torch.nan)
    replay = setup.capture(lambda: y.copy_(forward(x)))
    for name, arena in case.arenas.items():
        if arena is not before.arenas[name]:
            arena.copy_(before.arenas[name])
    for tensor in (y, *between):
        poison(tensor)
    replay()
    return y


def _replaced(setup: Setup, geometry: VerifyGeometry, hidden: int) -> Detail:
    lengths = LENGTHS[8]
    weights = _Weights(geometry, hidden, setup.device)
    plan = setup.whole(geometry, len(lengths))
    layer = flashkda.VerifyLayer(plan)
    x, y = _hidden(setup, hidden, sum(lengths)), _hidden(setup, hidden, sum(lengths))
    first, second = _case(setup, geometry, lengths, seed=1), _case(setup, geometry, lengths, seed=2)
    qkv, _ = scratch(first)

    def forward(verify: Any, case: Case) -> None:
        verify.run(**weights.project(x))
        y.copy_(case["out"].flatten(1) @ weights.output)

    def wanted(before: Case) -> dict[str, Tensor]:
        case = fork(before)
        case.tensors.update(weights.project(x))
        setup.run_parts(case)
        return {"projection": bits(case["out"].flatten(1) @ weights.output), **written(case)}

    def capture_and_check(verify: Any, case: Case, before: Case) -> None:
        replay = setup.capture(lambda: forward(verify, case))
        for name, arena in before.arenas.items():
            case.arenas[name].copy_(arena)
        poison(y)
        replay()
        assert_same_bits({"projection": bits(y), **written(case)}, wanted(before))

    _bind(layer, plan, first, qkv)
    old = layer.finalize()
    capture_and_check(old, first, clone(first))

    # The pools are allocated anew and the weights swapped: first the conv's binding is replaced, then the record's.
    old_bits = {name: bits(arena).clone() for name, arena in first.arenas.items() if arena.is_floating_point()}
    layer.conv = plan.bind_short_conv(**_pick(second, _CONV), qkv=qkv)
    _refused(lambda: old.run())
    layer.record = plan.bind_record(**_pick(second, _RECORD), qkv=qkv)
    new = layer.finalize()
    require(new is not old, "finalize gave the old verify")
    capture_and_check(new, second, clone(second))
    now = {name: bits(first.arenas[name]) for name in old_bits}
    assert_same_bits(now, old_bits)  # the new graph has not gone near the old pools
    return {"rows": sum(lengths), "hidden": hidden, "captures": 2 if setup.cuda else 0}


_CONV = ("mixed_qkv", "conv_weight", "conv_state", "query_start_loc", "state_indices", "num_accepted")
_RECORD = (
    *("raw_gate", "raw_beta", "A_log", "dt_bias", "state", "query_start_loc", "state_indices", "record_indices"),
    *("output_gate", "norm_weight", "out", "corrections", "key_gate"),
)


def _pick(case: Case, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: case.tensors[name] for name in names}


def _bind(layer: flashkda.VerifyLayer, plan: Plan, case: Case, qkv: Tensor) -> None:
    layer.conv = plan.bind_short_conv(**_pick(case, _CONV), qkv=qkv)
    layer.record = plan.bind_record(**_pick(case, _RECORD), qkv=qkv)


def _refused(run: Callable[[], Any]) -> None:
    try:
        run()
    except StaleBindingError:
        return
    raise AssertionError("a verify of a replaced binding ran")


def _case(setup: Setup, geometry: VerifyGeometry, lengths: tuple[int, ...], seed: int = 3) -> Case:
    return device_case(geometry, lengths, seed=seed, device=setup.device)


def _without_rows(case: Case) -> dict[str, Any]:
    return {k: v for k, v in case.tensors.items() if k not in ("mixed_qkv", "raw_gate", "raw_beta", "output_gate")}


def _hidden(setup: Setup, hidden: int, rows: int) -> Tensor:
    generator = torch.Generator(setup.device).manual_seed(rows)
    tensor = torch.empty(rows, hidden, dtype=torch.bfloat16, device=setup.device)
    return tensor.normal_(generator=generator)
