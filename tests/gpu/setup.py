# SPDX-License-Identifier: Apache-2.0
"""What the checks share: where they run, the two ways to run a verification, and what a check is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashkda.geometry import VerifyGeometry, preset
from flashkda.ops.binding import VerifyBinding
from flashkda.planner import Plan, Tile, plan_verify
from tests.inputs import Case

Detail = dict[str, Any]


class Failure(AssertionError):
    """A failed check, with the detail that it has all the same."""

    def __init__(self, text: str, detail: Detail | None = None) -> None:
        super().__init__(text)
        self.detail = detail or {}


def require(condition: object, text: str) -> None:
    """An assertion that python -O keeps."""
    if not condition:
        raise Failure(text)


@dataclass(frozen=True)
class Check:
    """One promise in one place. run raises where it is broken, and returns what it saw (JSON values).

    plans: those it needs kernels for, so that all can be built before the first check runs.
    """

    group: str
    name: str
    run: Callable[[], Detail]
    plans: tuple[Plan, ...] = field(default=(), repr=False)
    # Others than the plans': recipes and their arguments, as `jit.cache.prebuild` takes them.
    kernels: tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Setup:
    """Where the checks run. "whole" is the fused path and "parts" the three launches.

    reference: the torch reference stands in for the kernels: its `verify` as the whole, its bindings of the parts as
    the parts. On a CPU device without it the kernels run on the simulator (tests.simulator). small: few and small
    cases, to try the checks themselves. numerics: of every plan.
    """

    device: str = "cuda"
    reference: bool = False
    small: bool = False
    numerics: str = "exact"

    @property
    def current(self) -> torch.device:
        """The device, with its number where it has one."""
        return torch.device(self.device, torch.cuda.current_device()) if self.cuda else torch.device(self.device)

    @property
    def cuda(self) -> bool:
        return torch.device(self.device).type == "cuda"

    def whole(self, geometry: VerifyGeometry, requests: int, tile: Tile | None = None) -> Plan:
        """The plan of one launch."""
        return self._plan("fused", geometry, requests, tile)

    def parts(self, geometry: VerifyGeometry, requests: int, tile: Tile | None = None) -> Plan:
        """The plan of three launches."""
        return self._plan("decomposed", geometry, requests, tile)

    def both(self, geometry: VerifyGeometry, requests: int, tile: Tile | None = None) -> tuple[Plan, Plan]:
        """The plans of both."""
        return self.whole(geometry, requests, tile), self.parts(geometry, requests, tile)

    def _plan(self, path: str, geometry: VerifyGeometry, requests: int, tile: Tile | None) -> Plan:
        path = "reference" if self.reference else path
        tile = None if self.reference else tile
        return plan_verify(
            geometry, max(requests, 1), path=path, device=self.device, tile=tile, strict=True, numerics=self.numerics
        )

    def run_whole(self, case: Case, tile: Tile | None = None, **options: Any) -> None:
        """Verify the case in place, in one launch."""
        self.bind_whole(case, tile, **options)()

    def bind_whole(self, case: Case, tile: Tile | None = None, **options: Any) -> Callable[[], None]:
        """The one launch over a case, ready to be called again and again."""
        return self.whole(case.geometry, len(case.lengths), tile).bind(**case.tensors, **options).run

    def run_parts(self, case: Case, tile: Tile | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        """Verify the case in place, in three launches. Returns what was between them: qkv and o."""
        qkv, o = scratch(case)
        self.bind_parts(case, qkv, o, tile, **options)()
        return qkv, o if case.geometry.norm else case["out"]

    def bind_parts(
        self, case: Case, qkv: Tensor, o: Tensor, tile: Tile | None = None, **options: Any
    ) -> Callable[[], None]:
        """The three launches over a case, ready to be called again and again."""
        plan = self.parts(case.geometry, len(case.lengths), tile)
        between: dict[str, Any] = {"qkv": qkv, "o": o} if case.geometry.norm else {"qkv": qkv}
        if not self.reference:
            return plan.bind(**case.tensors, **between, **options).run
        conv_names = ("mixed_qkv", "conv_weight", "conv_state", "query_start_loc", "state_indices", "num_accepted")
        conv = plan.bind_short_conv(**{name: case.tensors[name] for name in conv_names}, qkv=qkv, **options)
        rest = {name: t for name, t in case.tensors.items() if name not in (*conv_names[:3], "num_accepted")}
        record = plan.bind_record(**rest, **between, **options)

        def run() -> None:
            conv.run()
            record.run()

        return run

    def share(self, tensors: dict[str, Tensor]) -> None:
        """Tensors that kernels find by their addresses: the simulator has to be told of them."""
        if not self.cuda and not self.reference:
            from tests.simulator import device

            device.share(tensors)

    def capture(self, run: Callable[[], Any]) -> Callable[[], None]:
        """`run` as a CUDA graph's replay (it has run once by then). A CPU has no graph: `run` itself."""
        if not self.cuda:
            return run
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay


def scratch(case: Case) -> tuple[Tensor, Tensor]:
    """Poisoned qkv and o of a case."""
    device = case["out"].device
    qkv = torch.full(case["mixed_qkv"].shape, torch.nan, dtype=torch.bfloat16, device=device)
    return qkv, torch.full(case["out"].shape, torch.nan, dtype=torch.bfloat16, device=device)


def kimi_k3(window: int, heads: int = 12, **changes: Any) -> VerifyGeometry:
    """Kimi K3's options; 12 heads are a rank's at TP8."""
    return preset("kimi-k3", window=window, **changes).replace(heads=heads)


def kernel_specs(
    plans: Iterable[Plan], more: Iterable[tuple[Callable[..., Any], tuple[Any, ...]]] = ()
) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """What `jit.cache.prebuild` has to build for these plans, and ``more`` recipes: each kernel once."""
    from flashkda.kernels import specs

    found: dict[Any, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
    for recipe, arguments in more:
        found.setdefault(recipe(*arguments)[0], (recipe, arguments))
    for plan in plans:
        if plan.path == "reference":
            continue
        assert plan.tile is not None
        for kind in VerifyBinding.kinds(plan):
            wanted = (kind, plan.geometry, plan.tile, plan.arch)
            found.setdefault(specs.make_spec(*wanted)[0], (specs.make_spec, wanted))
    return list(found.values())


def describe(geometry: VerifyGeometry) -> Detail:
    """The fields of a geometry that differ from the defaults."""
    defaults = {f.name: f.default for f in dataclasses.fields(geometry)}
    return {name: value for name, value in geometry.to_dict().items() if value != defaults[name]}
