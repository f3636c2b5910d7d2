# SPDX-License-Identifier: Apache-2.0
"""The package's own plans and bindings on the simulator: kernels of sm_90a run on CPU tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from flashkda.kernels import fakes, specs
from flashkda.ops.commit_binding import CommitProgram
from tests.simulator.runtime import Simulator

ARCH = "sm_90a"
#: SMs of the device: a persistent grid is two CTAs for each, so that both have several heads in a small test.
MULTIPROCESSORS = 1


_running: list[Simulator] = []


def share(tensors: Mapping[str, torch.Tensor]) -> None:
    """Tensors that kernels of the running simulator may use besides their arguments, by names of the caller's."""
    _running[-1].memory.update(tensors)


@contextmanager
def simulated(simulator: Simulator | None = None) -> Iterator[Simulator]:
    """While it lasts, plans of the kernels are made for ARCH whatever the device, bind CPU tensors, and run here."""
    simulator = simulator or Simulator()

    def load(kind: str, *arguments: Any) -> Callable[..., None]:
        key, make = specs.make_spec(kind, *arguments)
        return simulator.kernel(key, make, fakes._ARGUMENTS[kind])

    def load_commit(*arguments: Any) -> Callable[..., None]:
        key, make = specs.make_commit_spec(*arguments)
        return simulator.kernel(key, make, fakes._ARGUMENTS["commit"])

    def on_device(kernel: Callable[..., None], device: object) -> Callable[..., None]:
        return functools.partial(kernel, MULTIPROCESSORS)

    make_table = CommitProgram.table

    def table(program: CommitProgram, layers: Any) -> torch.Tensor | None:
        share({f"{name}[{i}]": tensor for name in layers for i, tensor in enumerate(layers[name])})
        return make_table(program, layers)

    def plans_for(device: object = None) -> str:
        return ARCH

    with ExitStack() as stack:
        for name, value in (
            ("flashkda.kernels.specs.load", load),
            ("flashkda.kernels.specs.load_commit", load_commit),
            ("flashkda.ops.launch._on_device", on_device),
            ("flashkda.ops.commit_binding.CommitProgram.table", table),
            ("flashkda.planner.detect_arch", plans_for),
            ("flashkda.ops.validate.check_device", lambda plan, device: None),
            ("flashkda.ops.commit_validate.check_device", lambda plan, device: None),
        ):
            stack.enter_context(mock.patch(name, value))
        _running.append(simulator)
        stack.callback(_running.pop)
        yield simulator
