# SPDX-License-Identifier: Apache-2.0
"""The custom ops: what they mutate, opcheck, torch.compile, torch.export, and the plan that a graph carries."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashkda.errors import MetadataError, NotPreparedError, PlanMismatchError, TensorError
from flashkda.geometry import VerifyGeometry
from flashkda.ops import custom_ops
from flashkda.ops.validate import validate
from tests.bound import BARE, FULL, arena_bits, install_kernels, kernel_plan, reference_plan, set_capturing
from tests.inputs import Case, assert_same_bits, clone, make_case, written

# Each op's tensors in order, and what it mutates, as the documentation has them.
OPS = {
    "short_conv": (
        ("mixed_qkv", "conv_weight", "conv_state", "query_start_loc", "state_indices", "num_accepted", "qkv"),
        {"conv_state", "qkv"},
    ),
    "kda_record": (
        (
            *("qkv", "raw_gate", "raw_beta", "A_log", "dt_bias", "state", "query_start_loc", "state_indices"),
            *("record_indices", "o", "corrections", "key_gate"),
        ),
        {"o", "corrections", "key_gate"},
    ),
    "gated_rms_norm": (
        ("o", "output_gate", "norm_weight", "query_start_loc", "state_indices", "out"),
        {"out"},
    ),
    "kda_record_fused": (
        (
            *("mixed_qkv", "conv_weight", "conv_state", "raw_gate", "raw_beta", "A_log", "dt_bias", "state"),
            *("output_gate", "norm_weight", "query_start_loc", "state_indices", "num_accepted", "record_indices"),
            *("out", "corrections", "key_gate"),
        ),
        {"out", "corrections", "key_gate", "conv_state"},
    ),
}


def op(name: str) -> Any:
    return getattr(custom_ops.register(), name)


def case_of(geometry: VerifyGeometry = FULL) -> Case:
    """A case with qkv and o in it, and without a NaN: the outputs hold ones where nothing has been written."""
    case = make_case(geometry, [3, 1, 2], seed=5, m_padding=1)
    case.arenas["qkv"] = case.tensors["qkv"] = torch.randn(case["mixed_qkv"].shape).bfloat16()
    case.arenas["o"] = case.tensors["o"] = torch.randn(case["out"].shape).bfloat16()
    for arena in case.arenas.values():
        arena.nan_to_num_(1.0) if arena.is_floating_point() else None
    return case


def arguments(name: str, case: Case) -> tuple[Any, ...]:
    return (*(case.tensors[tensor] for tensor in OPS[name][0]), reference_plan(case.geometry).to_json())


@pytest.mark.parametrize("name", OPS)
def test_the_schema_is_the_documented_one_and_true(name: str) -> None:
    schema = op(name).default._schema
    assert tuple(a.name for a in schema.arguments) == (*OPS[name][0], "plan")
    mutable = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert mutable == OPS[name][1] and not schema.returns
    case = case_of()
    before = arena_bits(case)
    assert op(name)(*arguments(name, case)) is None
    after = arena_bits(case)
    assert {arena for arena in before if not torch.equal(before[arena], after[arena])} == mutable


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(op(name).default, arguments(name, case_of()))


def test_opcheck_without_the_optional_tensors() -> None:
    torch.library.opcheck(op("kda_record_fused").default, arguments("kda_record_fused", case_of(BARE)))


def verify(plan: str) -> Callable[..., Tensor]:
    """A piece of a model around the op: projections before it, an output after it."""

    def run(scale: Tensor, **tensors: Tensor) -> Tensor:
        tensors["mixed_qkv"] = tensors["mixed_qkv"] * scale
        torch.ops.flashkda.kda_record_fused(**tensors, plan=plan)
        return tensors["out"].float() * 2

    return run


def fused_tensors(case: Case) -> dict[str, Any]:
    return {name: case.tensors[name] for name in OPS["kda_record_fused"][0]}


def test_in_a_compiled_graph() -> None:
    custom_ops.register()
    case = case_of()
    eager = clone(case)
    plan, scale = reference_plan(FULL).to_json(), torch.tensor(0.5, dtype=torch.bfloat16)
    wanted = verify(plan)(scale, **fused_tensors(eager))
    compiled = torch.compile(verify(plan), fullgraph=True, backend="aot_eager")
    found = compiled(scale, **fused_tensors(case))
    assert torch.equal(found, wanted)
    assert_same_bits(written(case), written(eager))


def test_the_three_ops_in_a_compiled_graph_give_the_fused_ones_bits() -> None:
    custom_ops.register()
    case = case_of()
    fused = clone(case)
    plan = reference_plan(FULL).to_json()
    op("kda_record_fused")(**fused_tensors(fused), plan=plan)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def three(tensors: dict[str, Tensor]) -> None:
        for name in ("short_conv", "kda_record", "gated_rms_norm"):
            getattr(torch.ops.flashkda, name)(*[tensors[tensor] for tensor in OPS[name][0]], plan)

    three(case.tensors)
    assert_same_bits(written(case), written(fused))


class Layer(torch.nn.Module):
    def __init__(self, plan: str) -> None:
        super().__init__()
        self.run = verify(plan)

    def forward(self, scale: Tensor, tensors: dict[str, Any]) -> Tensor:
        return self.run(scale, **tensors)


@pytest.mark.parametrize("strict", [False, True])
def test_in_an_exported_program(strict: bool) -> None:
    custom_ops.register()
    case = case_of()
    eager = clone(case)
    layer, scale = Layer(reference_plan(FULL).to_json()), torch.tensor(0.5, dtype=torch.bfloat16)
    wanted = layer(scale, fused_tensors(eager))
    program = torch.export.export(layer, (scale, fused_tensors(clone(case))), strict=strict)
    assert "flashkda.kda_record_fused" in str(program.graph)
    assert torch.equal(program.module()(scale, fused_tensors(case)), wanted)
    assert_same_bits(written(case), written(eager))


def test_a_plan_for_other_kernels_or_another_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of()
    *tensors, text = arguments("kda_record_fused", case)
    before = arena_bits(case)
    other = json.dumps({**json.loads(text), "kernels_version": "0" * 16})
    for broken in (other, "{}", "not a plan"):
        with pytest.raises(PlanMismatchError):
            op("kda_record_fused")(*tensors, broken)
    assert_same_bits(arena_bits(case), before)
    op("kda_record_fused")(*tensors, text)
    fused_text = kernel_plan(FULL.replace(head_dim=128), "fused").to_json()
    with pytest.raises(TensorError, match="device"):
        op("kda_record_fused")(*tensors, fused_text)
    monkeypatch.setenv("FLASHKDA_VERIFY_PATH", "decomposed")  # seen by the next call, though the plan was parsed before
    with pytest.raises(PlanMismatchError, match="FLASHKDA_VERIFY_PATH"):
        op("kda_record_fused")(*tensors, fused_text)


def test_an_op_validates_before_it_writes() -> None:
    case = case_of()
    before = arena_bits(case)
    *tensors, text = arguments("kda_record_fused", case)
    tensors[-1] = tensors[-1][:, :, :2]
    with pytest.raises(TensorError, match="key_gate: expected shape"):
        op("kda_record_fused")(*tensors, text)
    assert_same_bits(arena_bits(case), before)


def test_a_verdict_holds_for_the_same_tensors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    custom_ops._runner.cache_clear()
    case = case_of()
    tensors = fused_tensors(case)
    plan = reference_plan(FULL).to_json()
    verdicts: list[Any] = []

    def counting(*given: Any) -> Any:
        verdicts.append(validate(*given))
        return verdicts[-1]

    monkeypatch.setattr(custom_ops, "validate", counting)
    for _ in range(3):
        op("kda_record_fused")(**tensors, plan=plan)
    assert len(verdicts) == 1
    shifted = torch.zeros(tensors["raw_gate"].numel() + 1, dtype=torch.bfloat16)[1:].view(tensors["raw_gate"].shape)
    for _ in range(2):  # the same signature at another address; a refusal is not remembered
        with pytest.raises(TensorError, match="raw_gate: expected data aligned"):
            op("kda_record_fused")(**{**tensors, "raw_gate": shifted}, plan=plan)


def test_an_op_checks_metadata_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of()
    case["query_start_loc"][0] = 1
    before = arena_bits(case)
    monkeypatch.setenv("FLASHKDA_DEBUG_CHECKS", "1")
    with pytest.raises(MetadataError, match="query_start_loc"):
        op("kda_record_fused")(*arguments("kda_record_fused", case))
    assert_same_bits(arena_bits(case), before)


@pytest.mark.parametrize("name", OPS)
def test_an_op_without_requests_zeroes_its_output(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kernels, case = install_kernels(monkeypatch), case_of()
    none = {"query_start_loc": torch.zeros(1, dtype=torch.int32)}
    for tensor in ("state_indices", "num_accepted", "record_indices"):
        none[tensor] = case[tensor][:0]
    case.tensors.update(none)
    before = arena_bits(case)
    op(name)(*arguments(name, case)[:-1], kernel_plan(FULL, "fused").to_json())
    assert not kernels.calls
    output = {"kda_record": "o", "short_conv": None}.get(name, "out")
    if output is not None:
        assert not case[output].any()
        before[output] = arena_bits(case)[output]
    assert_same_bits(arena_bits(case), before)


@pytest.mark.parametrize(
    ("path", "kinds"), [("fused", ["fused_verify"]), ("decomposed", ["short_conv", "record", "gated_rms_norm"])]
)
def test_an_op_launches_the_plans_path(monkeypatch: pytest.MonkeyPatch, path: str, kinds: list[str]) -> None:
    kernels, case = install_kernels(monkeypatch), case_of()
    *tensors, _ = arguments("kda_record_fused", case)
    text = kernel_plan(FULL, path).to_json()
    set_capturing(monkeypatch, True)
    with pytest.raises(NotPreparedError, match="not loaded"):
        op("kda_record_fused")(*tensors, text)
    set_capturing(monkeypatch, False)
    op("kda_record_fused")(*tensors, text)
    set_capturing(monkeypatch, True)
    op("kda_record_fused")(*tensors, text)
    assert [kind for kind, _ in kernels.calls] == kinds * 2
