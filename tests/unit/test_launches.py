# SPDX-License-Identifier: Apache-2.0
"""What bindings launch on the kernels' paths, under capture, and as a layer made from parts."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashkda.errors import NotPreparedError, PlanMismatchError, StaleBindingError, TensorError
from flashkda.geometry import VerifyGeometry
from flashkda.ops import launch, reference
from flashkda.ops.binding import VerifyLayer
from flashkda.planner import plan_verify
from tests.bound import (
    BARE,
    CONV,
    FULL,
    PER_STEP,
    RECORD,
    arena_bits,
    case_of,
    empty_qkv,
    install_kernels,
    kernel_plan,
    layer_of,
    pick,
    reference_plan,
    set_capturing,
)
from tests.inputs import assert_same_bits, clone, make_case, written

# The kernels' positional arguments, as flashkda.kernels.specs documents them.
ORDER = {
    "short_conv": (*CONV, "qkv"),
    "record": ("qkv", *RECORD[:8], "o", "corrections", "key_gate"),
    "gated_rms_norm": ("o", "output_gate", "norm_weight", "query_start_loc", "state_indices", "out"),
    "fused_verify": (
        *("mixed_qkv", "conv_weight", "conv_state", "raw_gate", "raw_beta", "A_log", "dt_bias", "state"),
        *("output_gate", "norm_weight", "query_start_loc", "state_indices", "num_accepted", "record_indices"),
        *("out", "corrections", "key_gate"),
    ),
}


def named(kind: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(ORDER[kind], arguments, strict=True))


def same_view(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    return (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())


@pytest.mark.parametrize("geometry", [FULL, BARE], ids=["full", "bare"])
def test_fused_is_one_launch(monkeypatch: pytest.MonkeyPatch, geometry: VerifyGeometry) -> None:
    kernels, case, plan = install_kernels(monkeypatch), case_of(geometry), kernel_plan(geometry, "fused")
    binding = plan.bind(**case.tensors)
    assert kernels.loads == [("fused_verify", geometry, plan.tile, "sm_90a")] and not kernels.calls
    binding.run()
    ((kind, arguments),) = kernels.calls
    assert kind == "fused_verify"
    for name, argument in named(kind, arguments).items():
        assert argument is case.tensors[name]


def test_decomposed_is_three_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, case, plan = install_kernels(monkeypatch), case_of(), kernel_plan(FULL, "decomposed")
    plan.bind(**case.tensors).run()
    assert [kind for kind, _ in kernels.calls] == ["short_conv", "record", "gated_rms_norm"]
    conv, record, norm = (named(*call) for call in kernels.calls)
    for call in (conv, record, norm):
        assert all(argument is case.tensors[name] for name, argument in call.items() if name not in ("qkv", "o"))
    assert conv["qkv"] is record["qkv"] and record["o"] is norm["o"]
    assert conv["qkv"].shape == (6, 48) and record["o"].shape == (6, 2, 8)
    assert conv["qkv"].dtype == record["o"].dtype == torch.bfloat16


def test_decomposed_without_a_norm_ends_in_out(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, case = install_kernels(monkeypatch), case_of(BARE)
    kernel_plan(BARE, "decomposed").bind(**case.tensors).run()
    assert [kind for kind, _ in kernels.calls] == ["short_conv", "record"]
    assert named(*kernels.calls[1])["o"] is case["out"]


def test_scratch_may_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, case, plan = install_kernels(monkeypatch), case_of(), kernel_plan(FULL, "decomposed")
    scratch = {"qkv": empty_qkv(case), "o": torch.zeros_like(case["out"])}
    plan.bind(**{**case.tensors, **scratch}).run()
    conv, record, norm = (named(*call) for call in kernels.calls)
    assert conv["qkv"] is record["qkv"] is scratch["qkv"] and record["o"] is norm["o"] is scratch["o"]
    with pytest.raises(TensorError, match="out: expected no memory in common with o"):
        plan.bind(**case.tensors, o=case["out"])
    with pytest.raises(TensorError, match="qkv: expected shape"):
        plan.bind(**case.tensors, qkv=scratch["qkv"][:3])


@pytest.mark.parametrize("path", ["fused", "decomposed"])
def test_parts_fetch_their_kernels_when_they_are_prepared(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    kernels, case, plan = install_kernels(monkeypatch), case_of(), kernel_plan(FULL, path)
    qkv = empty_qkv(case)
    conv = plan.bind_short_conv(**pick(case, CONV), qkv=qkv)
    record = plan.bind_record(**pick(case, RECORD), qkv=qkv)
    assert not kernels.loads
    conv.prepare()
    assert [load[0] for load in kernels.loads] == ["short_conv"]
    conv.run()
    record.run()
    assert [kind for kind, _ in kernels.calls] == ["short_conv", "record", "gated_rms_norm"]
    calls = [named(*call) for call in kernels.calls]
    assert calls[0]["qkv"] is qkv and calls[1]["qkv"] is qkv and calls[1]["o"] is calls[2]["o"]


def test_scratch_follows_the_rows_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, bound, step = install_kernels(monkeypatch), case_of(), case_of(lengths=(2, 1))
    kernel_plan(FULL, "decomposed").bind(**bound.tensors).run(**pick(step, PER_STEP))
    conv, record, norm = (named(*call) for call in kernels.calls)
    assert conv["qkv"].shape[0] == record["o"].shape[0] == step["out"].shape[0] == 4
    assert conv["qkv"] is record["qkv"] and record["o"] is norm["o"]
    for call in (conv, record, norm):
        for name, argument in call.items():
            if name not in ("qkv", "o"):
                assert argument is (step if name in PER_STEP else bound).tensors[name]


@pytest.mark.parametrize("path", ["fused", "decomposed"])
def test_without_requests_nothing_is_launched(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    kernels, case = install_kernels(monkeypatch), make_case(FULL, [], seed=1, m_padding=3)
    plan, qkv, o = kernel_plan(FULL, path), empty_qkv(case), torch.ones_like(case["out"])
    plan.bind(**case.tensors).run()
    assert not case["out"].any()
    case["out"].fill_(1)
    plan.bind_record(**pick(case, RECORD), qkv=qkv).run()
    assert not case["out"].any()
    plan.bind_short_conv(**pick(case, CONV), qkv=qkv).run()
    names = ("output_gate", "norm_weight", "query_start_loc", "state_indices", "out")
    plan.bind_gated_rms_norm(**pick(case, names), o=o).run()
    assert not kernels.calls and o.all()


class Operations(TorchDispatchMode):
    """Counts the torch operations that are dispatched: allocations, copies and views among them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("path", ["fused", "decomposed"])
def test_a_run_dispatches_no_torch_operation(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    install_kernels(monkeypatch)
    binding = kernel_plan(FULL, path).bind(**case_of().tensors)
    same, fewer = pick(case_of(), PER_STEP), pick(case_of(lengths=(2, 1)), PER_STEP)
    binding.run(**fewer)  # makes the views of the scratch, once for each number of rows
    with Operations() as operations:
        binding.run()
        binding.run(**same)
        binding.run(**fewer)
    assert operations.seen == []


def test_a_first_run_under_capture_asks_to_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, case, plan = install_kernels(monkeypatch), case_of(), kernel_plan(FULL, "fused")
    conv = plan.bind_short_conv(**pick(case, CONV), qkv=empty_qkv(case))
    layer = layer_of(plan, case)
    set_capturing(monkeypatch, True)
    with pytest.raises(NotPreparedError, match="call its prepare"):
        conv.run()
    with pytest.raises(NotPreparedError, match="fused_verify kernel is not loaded"):
        plan.bind(**case.tensors)
    with pytest.raises(NotPreparedError, match=r"call finalize\(\) before the capture"):
        layer.run()
    assert not kernels.loads and not kernels.calls
    set_capturing(monkeypatch, False)
    conv.prepare()
    layer.finalize()
    set_capturing(monkeypatch, True)
    conv.run()
    layer.run()
    plan.bind(**case.tensors).run()  # loaded by now
    assert [kind for kind, _ in kernels.calls] == ["short_conv", "fused_verify", "fused_verify"]


def test_the_reference_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of()
    binding = reference_plan(FULL).bind(**case.tensors)
    before = arena_bits(case)
    set_capturing(monkeypatch, True)
    with pytest.raises(NotPreparedError, match="cannot be captured"):
        binding.run()
    assert_same_bits(arena_bits(case), before)


# --- the layer made from parts --------------------------------------------------------------------------------------


def test_a_layer_is_made_once_both_parts_exist() -> None:
    case, plan = case_of(), reference_plan(FULL)
    layer, qkv = VerifyLayer(plan), empty_qkv(case)
    with pytest.raises(NotPreparedError, match="no conv binding"):
        layer.run()
    layer.conv = plan.bind_short_conv(**pick(case, CONV), qkv=qkv)
    with pytest.raises(NotPreparedError, match="no record binding"):
        layer.finalize()
    layer.record = plan.bind_record(**pick(case, RECORD), qkv=qkv)
    assert layer.finalize() is layer.finalize()


@pytest.mark.parametrize("part", ["conv", "record"])
def test_a_replaced_part_makes_the_whole_stale(part: str) -> None:
    old, new, plan = case_of(), case_of(), reference_plan(FULL)
    wanted = clone(new)
    reference.verify(FULL, **wanted.tensors)
    layer = layer_of(plan, old)
    first = layer.finalize()
    layer.conv, layer.record = layer.conv, layer.record
    assert layer.finalize() is first, "the same parts again change nothing"

    pools = {"conv": ("conv_state",), "record": ("state", "corrections", "key_gate")}[part]
    mixed = {**old.tensors, **pick(new, pools)}
    assert layer.conv is not None
    qkv = layer.conv.tensors["qkv"]
    if part == "conv":
        layer.conv = plan.bind_short_conv(**{name: mixed[name] for name in CONV}, qkv=qkv)
    else:
        layer.record = plan.bind_record(**{name: mixed[name] for name in RECORD}, qkv=qkv)
    before = arena_bits(old)
    with pytest.raises(StaleBindingError, match=f"the {part} binding .* has been replaced"):
        first.run()
    assert_same_bits(arena_bits(old), before)
    layer.run()
    assert layer.finalize() is not first
    for name in pools:
        assert_same_bits({name: written(new)[name]}, {name: written(wanted)[name]})
    with pytest.raises(StaleBindingError):
        first.run()


@pytest.mark.parametrize("part", ["conv", "record"])
def test_a_replaced_part_under_capture_is_refused(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    kernels, case, plan = install_kernels(monkeypatch), case_of(), kernel_plan(FULL, "fused")
    layer, other = layer_of(plan, case), layer_of(plan, case)
    layer.finalize()
    setattr(layer, part, getattr(other, part))
    set_capturing(monkeypatch, True)
    with pytest.raises(NotPreparedError):
        layer.run()
    setattr(layer, part, None)
    set_capturing(monkeypatch, False)
    with pytest.raises(NotPreparedError, match=f"no {part} binding"):
        layer.run()
    assert not kernels.calls


def test_the_parts_of_a_layer_have_to_fit() -> None:
    case, plan = case_of(), reference_plan(FULL)
    layer = layer_of(plan, case)
    layer.record = plan.bind_record(**pick(case, RECORD), qkv=empty_qkv(case))
    with pytest.raises(TensorError, match="qkv: expected the same tensor in the conv and the record binding"):
        layer.finalize()
    with pytest.raises(PlanMismatchError, match=r"layer.conv"):
        layer.conv = layer_of(reference_plan(FULL, max_requests=5), case).conv
    # Each part is right by itself, and what one writes the other reads.
    assert layer.conv is not None
    tensors = {**pick(case, RECORD), "out": case["mixed_qkv"][:, :16].unflatten(1, (2, 8))}
    layer.record = plan.bind_record(**tensors, qkv=layer.conv.tensors["qkv"])
    with pytest.raises(TensorError, match="out: expected no memory in common with mixed_qkv"):
        layer.finalize()


def test_a_layer_uses_the_engines_qkv(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, case, plan = install_kernels(monkeypatch), case_of(), kernel_plan(FULL, "decomposed")
    layer = layer_of(plan, case)
    layer.run()
    assert [kind for kind, _ in kernels.calls] == ["short_conv", "record", "gated_rms_norm"]
    assert layer.conv is not None
    assert named(*kernels.calls[0])["qkv"] is named(*kernels.calls[1])["qkv"] is layer.conv.tensors["qkv"]


def test_a_kernel_is_started_once_on_each_device(monkeypatch):
    current, calls = [], []

    @contextlib.contextmanager
    def on(device):
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(launch, "_started", set())
    one, two = torch.device("cuda", 0), torch.device("cuda", 1)
    for kernel, device in (("k", one), ("k", one), ("k", two), ("other", one), ("k", two)):
        launch.start_once(kernel, device, lambda kernel=kernel: calls.append((kernel, *current)))
    assert calls == [("k", one), ("k", two), ("other", one)]


def test_a_start_that_fails_is_tried_again(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(launch, "_started", set())
    calls = []
    with pytest.raises(ZeroDivisionError):
        launch.start_once("k", torch.device("cuda", 0), lambda: 1 // 0)
    launch.start_once("k", torch.device("cuda", 0), lambda: calls.append(1))
    assert calls == [1]


def test_a_persistent_kernel_is_given_the_number_of_sms(monkeypatch):
    """Before the tensors, and only the fused kernels: the rule alone has no persistent form."""
    kernels = install_kernels(monkeypatch)
    asked = []

    def properties(device):
        asked.append(device)
        return types.SimpleNamespace(multi_processor_count=7)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    many, few = (plan_verify(VerifyGeometry(12, 4), n, path="fused", arch="sm_90a", strict=True) for n in (64, 1))
    assert many.tile.persistent and not few.tile.persistent
    device = torch.device("cuda", 3)
    launch.load(many, "fused_verify", device)("tensor")
    launch.load(many, "record", device)("tensor")
    launch.load(few, "fused_verify", device)("tensor")
    assert [arguments for _, arguments in kernels.calls] == [(7, "tensor"), ("tensor",), ("tensor",)]
    assert asked == [device]
