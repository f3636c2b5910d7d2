# SPDX-License-Identifier: Apache-2.0
"""Bindings and the op of a commit: what they refuse before anything is written, and what the kernel is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import flashkda.kernels
from flashkda.commit import CommitGeometry, CommitPlan, plan_commit
from flashkda.errors import MetadataError, NotPreparedError, TensorError
from flashkda.ops import commit_binding, commit_op, custom_ops
from flashkda.ops.commit_reference import commit
from tests.commits import SMALL, CommitCase, make_commit
from tests.inputs import assert_same_bits

EVERYTHING = CommitGeometry(
    SMALL.replace(records="indices"), 2, compact=True, has_dst=True, has_boundary=True, has_accepted_indices=True
)
IN_PLACE = CommitGeometry(SMALL, 2)


def plan_of(geometry: CommitGeometry, max_requests: int = 8) -> CommitPlan:
    return plan_commit(geometry, max_requests, path="reference", device="cpu")


def kernel_plan(geometry: CommitGeometry) -> CommitPlan:
    return replace(plan_of(geometry), path="kernel", arch="sm_90a")


def full(**changes: Any) -> CommitCase:
    options: dict[str, Any] = {
        "slots": [4, 1, 3],
        "record_indices": [2, 0, 1],
        "accepted_indices": [1, 0, 3],
        "dst": [7, 8, 9],
        "boundary": [(1, 5), (0, 6), (2, 10)],
        **changes,
    }
    return make_commit(EVERYTHING, [2, 3, 7, 1], **options)


class Kernel:
    """In place of the compiled kernel and flashkda.kernels.specs."""

    def __init__(self) -> None:
        self.loaded = False
        self.calls: list[tuple[Any, ...]] = []

    def load_commit(self, geometry: CommitGeometry, arch: str) -> Any:
        self.loaded = True
        return lambda *arguments: self.calls.append(arguments)

    def is_commit_loaded(self, geometry: CommitGeometry, arch: str) -> bool:
        return self.loaded


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr(flashkda.kernels, "specs", kernel, raising=False)
    monkeypatch.setattr("flashkda.ops.commit_validate.check_device", lambda plan, device: None)
    commit_op._runner.cache_clear()
    return kernel


def capture(monkeypatch: pytest.MonkeyPatch, capturing: bool) -> None:
    for module in (commit_binding, commit_op):
        monkeypatch.setattr(module, "is_capturing", lambda: capturing)


# --- what runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stacked", [False, True])
def test_a_run_is_the_reference(stacked: bool) -> None:
    case, wanted = full(), full()
    commit(EVERYTHING, **wanted.tensors)
    tensors = dict(case.tensors)
    if stacked:
        tensors = {n: torch.stack(v) if isinstance(v, list) else v for n, v in tensors.items()}
        tensors["conv_state"] = tensors["conv_state"].mT.contiguous().mT
    plan_of(EVERYTHING).bind(**tensors, check_metadata=True).run()
    if stacked:
        for name in ("state", "conv_state"):
            for found, want in zip(tensors[name], wanted.tensors[name], strict=True):
                assert torch.equal(found[1:], want[1:])
    else:
        assert_same_bits(case.bits(), wanted.bits())


def test_overrides() -> None:
    case, wanted = make_commit(IN_PLACE, [3, 1]), make_commit(IN_PLACE, [3, 1])
    binding = plan_of(IN_PLACE).bind(**case.tensors)
    fewer = {"accepted": torch.tensor([2], dtype=torch.int32), "state_indices": torch.tensor([1], dtype=torch.int32)}
    binding.run(**fewer)
    commit(IN_PLACE, **{**wanted.tensors, **fewer})
    assert_same_bits(case.bits(), wanted.bits())
    before = case.bits()
    for bad, match in (
        ({"state": case.tensors["state"][0]}, "state: expected one of accepted, state_indices at run"),
        ({"dst_indices": fewer["state_indices"]}, "dst_indices: expected one of"),
        ({"state_indices": fewer["state_indices"].long()}, "state_indices: expected dtype int32"),
        ({"state_indices": torch.ones(9, dtype=torch.int32), "accepted": torch.ones(9, dtype=torch.int32)}, "at most"),
        ({"accepted": fewer["accepted"]}, "accepted: expected at least 2 counts"),
        ({"accepted": None}, "accepted: expected a torch.Tensor"),
    ):
        with pytest.raises(TensorError, match=match):
            binding.run(**bad)
    assert_same_bits(case.bits(), before)
    none = torch.zeros(0, dtype=torch.int32)
    binding.run(state_indices=none, accepted=none)
    assert_same_bits(case.bits(), before)


def test_more_requests_than_bound_need_records() -> None:
    geometry = CommitGeometry(SMALL.replace(records="request"), 1, has_accepted_indices=True)
    case = make_commit(geometry, [2], accepted_indices=[0])
    binding = plan_of(geometry, 20).bind(**case.tensors)
    before = case.bits()

    def of(size: int) -> dict[str, torch.Tensor]:
        zeros = torch.zeros(size, dtype=torch.int32)
        return {"accepted_indices": zeros, "state_indices": zeros}

    binding.run(**of(12))
    with pytest.raises(TensorError, match="corrections: expected at least 13 rows, one for each request"):
        binding.run(**of(13))
    assert_same_bits(case.bits(), before)


def test_the_kernel_gets_a_table_of_addresses(kernel: Kernel) -> None:
    case = full()
    binding = kernel_plan(EVERYTHING).bind(**case.tensors)
    assert not kernel.calls  # no launch on a CPU
    binding.run()
    ((table, *rest),) = kernel.calls
    names = ("state", "corrections", "key_gate", "conv_state", "A_log", "dt_bias")
    assert table.dtype == torch.int64 and table.is_contiguous()
    assert table.tolist() == [[t.data_ptr() for t in case.tensors[name]] for name in names]
    for tensor, name in zip(rest[:4], names, strict=False):
        assert tensor is case.tensors[name][0]
    order = ("accepted", "accepted_indices", "state_indices", "dst_indices", "record_indices", "boundary_length")
    for tensor, name in zip(rest[4:], (*order, "boundary_indices"), strict=True):
        assert tensor is case.tensors[name]


def test_the_kernel_gets_none_for_what_is_absent(kernel: Kernel) -> None:
    case = make_commit(IN_PLACE, [1])
    kernel_plan(IN_PLACE).bind(**case.tensors).run()
    ((table, *rest),) = kernel.calls
    assert table[3].tolist() == [0, 0]
    assert [i for i, argument in enumerate(rest) if argument is None] == [3, 5, 7, 8, 9, 10]


def test_nothing_is_launched_without_requests(kernel: Kernel) -> None:
    binding = kernel_plan(IN_PLACE).bind(**make_commit(IN_PLACE, [1]).tensors)
    none = torch.zeros(0, dtype=torch.int32)
    binding.run(accepted=none, state_indices=none)
    assert not kernel.calls
    binding.run()
    assert len(kernel.calls) == 1


def test_under_capture(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    case = full()
    capture(monkeypatch, True)
    with pytest.raises(NotPreparedError, match="not loaded"):
        kernel_plan(EVERYTHING).bind(**case.tensors)
    capture(monkeypatch, False)
    binding = kernel_plan(EVERYTHING).bind(**case.tensors)
    capture(monkeypatch, True)
    binding.run()  # right after bind
    assert len(kernel.calls) == 1
    with pytest.raises(NotPreparedError, match="table"):
        kernel_plan(EVERYTHING).bind(**case.tensors)
    with pytest.raises(NotPreparedError, match="reference"):
        plan_of(EVERYTHING).bind(**case.tensors).run()


# --- what is refused at bind ----------------------------------------------------------------------------------------


def _shrunk(case: CommitCase, name: str, view: Any) -> dict[str, Any]:
    return {**case.tensors, name: [view(tensor) for tensor in case.tensors[name]]}


REFUSED = {
    "state: expected 2 tensors": lambda c: {**c.tensors, "state": c.tensors["state"][:1]},
    "A_log: expected 2 tensors, or one with": lambda c: {**c.tensors, "A_log": torch.zeros(3, 2)},
    r"state\[1\]: expected a torch.Tensor": lambda c: {**c.tensors, "state": [c.tensors["state"][0], None]},
    "corrections: expected 2 tensors.*found nothing": lambda c: {**c.tensors, "corrections": None},
    "conv_state: expected .*compact=False": lambda c: {**c.tensors, "conv_state": None},
    "query: expected one of": lambda c: {**c.tensors, "query": None},
    r"corrections\[0\]: expected shape": lambda c: _shrunk(c, "corrections", lambda t: t[:, :, :2]),
    r"key_gate\[0\]: expected shape": lambda c: _shrunk(c, "key_gate", lambda t: t[:, :1]),
    r"key_gate\[1\]: expected shape .*R=12": lambda c: {
        **c.tensors,
        "key_gate": [c.tensors["key_gate"][0], c.tensors["key_gate"][1][:7]],
    },
    r"state\[0\]: expected dtype float32": lambda c: _shrunk(c, "state", lambda t: t.bfloat16()),
    r"state\[1\]: expected strides": lambda c: {
        **c.tensors,
        "state": [c.tensors["state"][0], torch.zeros(24, 2, 8, 8)[::2]],
    },
    r"state\[[01]\]: expected no memory in common with state": lambda c: {
        **c.tensors,
        "state": [c.tensors["state"][0]] * 2,
    },
    "accepted: expected dtype int32": lambda c: {**c.tensors, "accepted": c.tensors["accepted"].long()},
    "dst_indices: expected shape": lambda c: {**c.tensors, "dst_indices": c.tensors["dst_indices"][:2]},
    "boundary_length: expected a torch.Tensor.*has_boundary=False": lambda c: {**c.tensors, "boundary_length": None},
}


@pytest.mark.parametrize("match", REFUSED)
def test_bind_refuses(match: str) -> None:
    case = full()
    before = case.bits()
    with pytest.raises(TensorError, match=match):
        plan_of(EVERYTHING).bind(**REFUSED[match](case))
    assert_same_bits(case.bits(), before)


def test_bind_refuses_what_the_geometry_has_not() -> None:
    case = make_commit(IN_PLACE, [1, 2])
    for name in ("dst_indices", "record_indices", "accepted_indices", "boundary_indices"):
        with pytest.raises(TensorError, match=f"{name}: expected None by this geometry"):
            plan_of(IN_PLACE).bind(**case.tensors, **{name: case.tensors["state_indices"]})
    with pytest.raises(TensorError, match="conv_state: expected None"):
        plan_of(IN_PLACE).bind(**case.tensors, conv_state=[layer["conv_state"] for layer in case.layers])
    with pytest.raises(TensorError, match="at most 1 requests"):
        plan_of(IN_PLACE, 1).bind(**case.tensors)
    with pytest.raises(TensorError, match="corrections: expected at least 12 rows"):
        short = {name: [t[:5] for t in case.tensors[name]] for name in ("corrections", "key_gate")}
        plan_of(IN_PLACE).bind(**{**case.tensors, **short})


def test_pools_may_interleave() -> None:
    """The layers' states take turns in the pages of one pool."""
    geometry = CommitGeometry(SMALL, 2)
    case, wanted = make_commit(geometry, [3, 2]), make_commit(geometry, [3, 2])
    pool = torch.stack(case.tensors["state"], dim=1)
    plan_of(geometry).bind(**{**case.tensors, "state": [pool[:, 0], pool[:, 1]]}).run()
    commit(geometry, **wanted.tensors)
    for layer in range(2):
        assert torch.equal(pool[1:, layer], wanted.tensors["state"][layer][1:])


# --- debug checks ---------------------------------------------------------------------------------------------------

BAD = {
    r"accepted\[1\]: expected a count of the window, 0..3, found 4": {"accepted": [2, 4, 7, 1]},
    r"accepted\[0\]: .* found -1": {"accepted": [-1, 3, 7, 1]},
    r"accepted_indices\[2\]: expected an entry of accepted, 0..3": {"accepted_indices": [1, 0, 4]},
    r"state_indices\[1\]: expected a slot of the pools, 0..11": {"state_indices": [4, 12, 3]},
    r"record_indices\[0\]: expected a row of the records": {"record_indices": [12, 0, 1]},
    r"dst_indices\[2\]: expected a slot of the pools": {"dst_indices": [7, 8, 12]},
    r"boundary_indices\[0\]: expected a slot of the pools": {"boundary_indices": [99, 6, 10]},
    r"boundary_indices\[0\]: expected another slot than the new state's, 7": {"boundary_indices": [7, 6, 10]},
    r"dst_indices\[2\]: expected a slot of its own, found 8, which request 1 writes": {"dst_indices": [7, 8, 8]},
    r"boundary_indices\[1\]: expected a slot of its own, found 5, which request 0": {"boundary_indices": [5, 5, 10]},
    r"state_indices\[2\]: expected a slot that no other request writes, found 3": {"dst_indices": [3, 8, 9]},
}


@pytest.mark.parametrize("match", BAD)
@pytest.mark.parametrize("through", ["binding", "op"])
def test_debug_checks(match: str, through: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = full()
    for name, values in BAD[match].items():
        case.tensors[name].copy_(torch.tensor(values))
    before = case.bits()
    with pytest.raises(MetadataError, match=match):
        if through == "binding":
            plan_of(EVERYTHING).bind(**case.tensors, check_metadata=True).run()
        else:
            monkeypatch.setenv("FLASHKDA_DEBUG_CHECKS", "1")
            call(case)
    assert_same_bits(case.bits(), before)


def test_checks_know_the_lengths_of_the_windows() -> None:
    case = make_commit(IN_PLACE, [2, 0, 3])
    plan = plan_of(IN_PLACE)
    starts = torch.tensor([0, 2, 2, 4], dtype=torch.int32)
    plan.bind(**case.tensors, check_metadata=True).run()
    before = case.bits()
    with pytest.raises(MetadataError, match=r"accepted\[2\]: expected a count of the tokens of request 2, 0..2, found"):
        plan.bind(**case.tensors, query_start_loc=starts, check_metadata=True).run()
    assert_same_bits(case.bits(), before)


def test_two_requests_writing_one_slot_in_place() -> None:
    case = make_commit(IN_PLACE, [2, 3], slots=[4, 4])
    with pytest.raises(MetadataError, match=r"state_indices\[1\]: expected a slot of its own"):
        plan_of(IN_PLACE).bind(**case.tensors, check_metadata=True).run()


def test_what_the_checks_let_pass() -> None:
    """Null requests, a checkpoint that is not due, destinations that are dropped, and one source for two."""
    for changes in (
        {"state_indices": [4, 0, 3], "dst_indices": [7, 99, 9]},
        {"boundary_length": [4, -1, 2], "boundary_indices": [7, 99, 10]},
        {"dst_indices": [7, 0, -1]},
        {"state_indices": [4, 4, 3]},
        {"accepted": [0, 0, 0, 0], "dst_indices": [4, 4, 4]},
    ):
        case = full()
        for name, values in changes.items():
            case.tensors[name].copy_(torch.tensor(values))
        plan_of(EVERYTHING).bind(**case.tensors, check_metadata=True).run()


# --- the op ---------------------------------------------------------------------------------------------------------

ORDER = (
    *("state", "corrections", "key_gate", "conv_state", "A_log", "dt_bias", "accepted", "accepted_indices"),
    *("state_indices", "dst_indices", "record_indices", "boundary_length", "boundary_indices"),
)


def arguments(case: CommitCase, plan: CommitPlan | None = None) -> tuple[Any, ...]:
    absent: dict[str, Any] = {"conv_state": []}
    tensors = [case.tensors.get(name, absent.get(name)) for name in ORDER]
    return (*tensors, (plan or plan_of(case.geometry)).to_json())


def call(case: CommitCase, plan: CommitPlan | None = None) -> None:
    custom_ops.register().kda_commit(*arguments(case, plan))


def finite(case: CommitCase) -> CommitCase:
    for layer in case.layers:
        for arena in layer.arenas.values():
            arena.nan_to_num_(1.0) if arena.is_floating_point() else None
    return case


def test_the_op_is_the_reference_and_names_what_it_mutates() -> None:
    schema = custom_ops.register().kda_commit.default._schema
    assert tuple(a.name for a in schema.arguments) == (*ORDER, "plan")
    mutable = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert mutable == {"state", "conv_state"} and not schema.returns
    case, wanted = full(), full()
    call(case)
    commit(EVERYTHING, **wanted.tensors)
    assert_same_bits(case.bits(), wanted.bits())


@pytest.mark.parametrize("geometry", [EVERYTHING, IN_PLACE], ids=["everything", "in place"])
def test_opcheck(geometry: CommitGeometry) -> None:
    case = finite(full() if geometry is EVERYTHING else make_commit(IN_PLACE, [2, 1]))
    torch.library.opcheck(custom_ops.register().kda_commit.default, arguments(case))


def test_the_op_in_a_compiled_graph() -> None:
    case, wanted = full(), full()
    commit(EVERYTHING, **wanted.tensors)
    custom_ops.register()
    *tensors, text = arguments(case)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(tensors: list[Any]) -> None:
        torch.ops.flashkda.kda_commit(*tensors, text)

    run(tensors)
    assert_same_bits(case.bits(), wanted.bits())


def test_the_op_remembers_its_table(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    case = full()
    plan = kernel_plan(EVERYTHING)
    capture(monkeypatch, True)
    with pytest.raises(NotPreparedError):
        call(case, plan)
    capture(monkeypatch, False)
    call(case, plan)
    capture(monkeypatch, True)
    call(case, plan)
    tables = [arguments[0] for arguments in kernel.calls]
    assert len(tables) == 2 and tables[0] is tables[1]
    other = full()
    with pytest.raises(NotPreparedError, match="table"):
        call(other, plan)


def test_a_kernel_plan_needs_a_gpu() -> None:
    with pytest.raises(TensorError, match="device: expected cuda, for the kernel kernels of sm_90a"):
        kernel_plan(IN_PLACE).bind(**make_commit(IN_PLACE, [1]).tensors)
