# SPDX-License-Identifier: Apache-2.0
"""The lanes of a launch: who runs next, who waits for whom, and what is on its way."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.simulator.control import build_control
from tests.simulator.instructions import Builder, Run
from tests.simulator.memory import GlobalMemory, SharedMemory
from tests.simulator.ptx import Kernel, UnknownPtx

Array = Any
Index = Any

WARP = 32
_BANKS = 32


class SimulationError(Exception):
    """What CUDA leaves undefined or what would hang, with the lines of PTX where it happened."""


@dataclass(frozen=True)
class Schedule:
    """What a GPU decides by chance.

    seed: None has all lanes go on together, and copies arrive at once. A number draws, from that seed, the order of the
    warps, and for each asynchronous copy whether it arrives at once, at some time, or not before all wait for it.
    """

    seed: int | None = None


@dataclass(frozen=True)
class Step:
    """One instruction, ready to run. control: takes the lanes and the program counter, returns the lanes that go on.
    together: only whole warps may run it."""

    run: Run | None
    control: Callable[[Machine, Array, int], Array] | None
    guard: tuple[int, bool] | None
    target: int
    together: bool
    line: int


class Program:
    """A kernel whose instructions have become functions. Made once, run often."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        builder = Builder(kernel)
        self.steps: list[Step] = []
        for i in kernel.instructions:
            guard = (builder.number(i.guard[0]), i.guard[1]) if i.guard else None
            target = kernel.labels[i.operands[0].name] if i.parts[0] == "bra" else -1  # type: ignore[union-attr]
            control = build_control(builder, i)
            run = None if control or target >= 0 else builder.build(i)
            together = i.parts[0] in ("shfl", "mma") or i.opcode == "bar.warp.sync"
            if together and guard:
                raise UnknownPtx(f"a guarded {i.opcode}")
            self.steps.append(Step(run, control, guard, target, together, i.line))
        self.registers = builder.registers


@dataclass
class Report:
    """What a launch did. issued: warp instructions by line of PTX. wavefronts: of shared memory, 128 bytes each at
    best; ideal: as few as the accesses could take. loaded, stored: bytes of global memory by tensor."""

    warps: int = 0
    issued: Counter[int] = field(default_factory=Counter)
    wavefronts: int = 0
    ideal: int = 0
    loaded: Counter[str] = field(default_factory=Counter)
    stored: Counter[str] = field(default_factory=Counter)


class Machine:
    """One launch. grid: CTAs in x, y, z. cluster: CTAs in x of a cluster. dependent: the grid ahead may still run when
    this one starts (programmatic dependent launch). Raises SimulationError, MemoryFault."""

    def __init__(
        self,
        program: Program,
        grid: tuple[int, int, int],
        cluster: int,
        parameters: bytes,
        shared_bytes: int,
        memory: GlobalMemory,
        schedule: Schedule,
        dependent: bool = False,
    ) -> None:
        self.program, self.parameters, self.memory = program, parameters, memory
        threads, count = program.kernel.threads, grid[0] * grid[1] * grid[2]
        if threads % WARP or grid[0] % cluster:
            raise SimulationError(f"{threads} threads a CTA, clusters of {cluster} in a grid {grid}: not known here")
        self.lanes, self.threads, self.cluster, self.grid_blocks = threads * count, threads, cluster, count
        lane = np.arange(self.lanes)
        self.blocks = lane // threads
        self.ranks = self.blocks % cluster
        x, rest = self.blocks % grid[0], self.blocks // grid[0]
        self.special = {
            "%tid.x": lane % threads, "%laneid": lane % WARP,
            "%ctaid.x": x, "%ctaid.y": rest % grid[1], "%ctaid.z": rest // grid[1],
            "%nctaid.x": np.full(self.lanes, grid[0]), "%nctaid.y": np.full(self.lanes, grid[1]),
            "%nctaid.z": np.full(self.lanes, grid[2]),
        }  # fmt: skip
        self.shared = SharedMemory(count, shared_bytes, cluster)
        sizes: dict[int, Any] = {0: np.bool_, 2: np.uint16, 4: np.uint32, 8: np.uint64}
        self.registers: list[Array] = [np.zeros(self.lanes, sizes[bytes_]) for bytes_ in program.registers]
        self.waited = np.full(self.lanes, not dependent)
        self.alive = np.ones(self.lanes, np.bool_)
        self.report = Report(warps=self.lanes // WARP)
        self.random = random.Random(schedule.seed) if schedule.seed is not None else None
        # How likely it is that something arrives at once; 0: nothing before all wait for it.
        self._haste = self.random.choice((0.0, 0.3, 0.8)) if self.random else 1.0
        self._everyone = lane
        self._cohort = self._draw_cohorts(threads // WARP)
        self._order = list(range(int(self._cohort.max()) + 1))
        if self.random is not None:
            self.random.shuffle(self._order)
        # For each cohort, the lanes that can go on, by program counter.
        self.ready: list[dict[int, Array]] = [{} for _ in range(int(self._cohort.max()) + 1)]
        self._gathering: dict[int, Array] = {}
        self.sleeping: Counter[int] = Counter()
        self.on_the_way: list[Callable[[], None]] = []
        # State of the synchronizing instructions, kept by control.
        self.barriers: dict[Any, Any] = {}
        self.copies: dict[int, list[Callable[[], None]]] = {}

    def _draw_cohorts(self, warps: int) -> Array:
        """Which lanes go on together: all, or what is drawn by lot, the same in every cluster: CTAs, warps of any CTA,
        any warps, or parts of warps."""
        zero = np.zeros(self.lanes, np.int64)
        if self.random is None:
            return zero
        warp, lane = self.special["%tid.x"] // WARP, self.special["%laneid"]
        kinds = [warp, self.ranks * warps + warp, warp * WARP + lane] + [self.ranks] * (self.cluster > 1)
        unit = self.random.choice(kinds)
        drawn = np.array([self.random.randrange(4) for _ in range(int(unit.max()) + 1)])
        return np.unique(drawn[unit], return_inverse=True)[1].astype(np.int64)

    # ---- for the instructions

    def count(self, index: Index) -> int:
        """How many lanes an index means."""
        return self.lanes if isinstance(index, slice) else len(index)

    def require_waited(self, index: Index) -> None:
        """Global memory is not touched before the grid ahead has finished."""
        if not self.waited[index].all():
            raise SimulationError("global memory is accessed before griddepcontrol.wait")

    def count_shared(self, index: Index, addresses: Array, size: int) -> None:
        """Count the wavefronts of an access: 32 banks of 4 bytes, where lanes that read one word share it."""
        lanes = self._everyone[index]
        warps = lanes // WARP
        together = WARP if size <= 4 else WARP * 4 // size  # lanes whose accesses fit 128 bytes go together
        parts = warps * (WARP // together) + lanes % WARP // together
        first = np.broadcast_to(np.asarray(addresses, np.int64), len(lanes)) // 4
        words = np.concatenate([first + i for i in range(max(1, size // 4))])
        keys = np.unique(np.tile(parts, max(1, size // 4)) << 32 | words)
        _, load = np.unique(keys >> 32 << 5 | keys % _BANKS, return_counts=True)
        owners = np.unique(keys >> 32 << 5 | keys % _BANKS) >> 5
        starts = np.flatnonzero(np.r_[True, np.diff(owners) > 0])
        self.report.wavefronts += int(np.maximum.reduceat(load, starts).sum())
        self.report.ideal += len(starts)

    def wake(self, lanes: Array, counter: int) -> None:
        """Lanes go on at this program counter."""
        for cohort in np.unique(self._cohort[lanes]):
            chosen = lanes[self._cohort[lanes] == cohort]
            there = self.ready[cohort].get(counter)
            self.ready[cohort][counter] = chosen if there is None else np.sort(np.concatenate((there, chosen)))

    def send(self, deliver: Callable[[], None]) -> None:
        """Something that arrives at a time of its own."""
        if self.random is None or self.random.random() < self._haste:
            deliver()
        else:
            self.on_the_way.append(deliver)

    # ---- the run

    def run(self) -> Report:
        """Until every lane has ended."""
        self.wake(self._everyone, 0)
        with np.errstate(all="ignore"):
            while True:
                able = [cohort for cohort, groups in enumerate(self.ready) if groups]
                if not able and self.on_the_way:
                    self._deliver()
                elif not able:
                    break
                else:
                    if self.random and self.on_the_way and self.random.random() < self._haste / 4:
                        self._deliver()
                    self._advance(self._choose(able))
        if self.alive.any():
            raise SimulationError(f"{int(self.alive.sum())} lanes wait for ever; {self._who_waits()}")
        if any(self.copies.values()):
            raise SimulationError("a CTA has ended with asynchronous copies on their way")
        self.report.loaded, self.report.stored = self.memory.loaded, self.memory.stored
        return self.report

    def _choose(self, able: list[int]) -> int:
        """The cohort that comes first in an order which changes now and then (Burckhardt et al., "A Randomized
        Scheduler with Probabilistic Guarantees of Finding Bugs", 2010): some are left behind for long."""
        chosen = min(able, key=self._order.index)
        if self.random is not None and self.random.random() < 0.1:
            self._order.remove(chosen)
            self._order.append(chosen)
        return chosen

    def _deliver(self) -> None:
        """Whatever is on its way has an order of its own."""
        which = self.random.randrange(len(self.on_the_way)) if self.random else 0
        self.on_the_way.pop(which)()

    def _advance(self, cohort: int) -> None:
        """Run the cohort's lanes that are furthest behind, up to the next ones, a wait, or their turn's end."""
        groups = self.ready[cohort]
        counter = min(groups)
        lanes = groups.pop(counter)
        turn = self.random.randrange(1, 200) if self.random else -1
        steps, issued = self.program.steps, self.report.issued
        index, warps = self._index(lanes)
        ahead = min(groups, default=-1)
        while True:
            if counter == ahead or turn == 0:
                self.wake(lanes, counter)
                return
            turn -= 1
            step = steps[counter]
            if step.together:
                lanes = self._gather(lanes, counter)
                if not len(lanes):
                    return
                index, warps = self._index(lanes)
            issued[step.line] += warps
            try:
                if step.target >= 0:
                    taken = self._taken(step, lanes)
                    if len(taken) == len(lanes):
                        counter = step.target
                    elif not len(taken):
                        counter += 1
                    else:
                        self.wake(np.setdiff1d(lanes, taken, assume_unique=True), counter + 1)
                        self.wake(taken, step.target)
                        return
                    ahead = min(groups, default=-1)
                    if ahead >= 0 and counter > ahead:
                        self.wake(lanes, counter)
                        return
                    continue
                if step.control is not None:
                    chosen = self._taken(step, lanes)
                    skipped = np.setdiff1d(lanes, chosen, assume_unique=True)
                    lanes = np.sort(np.concatenate((skipped, step.control(self, chosen, counter))))
                    if not len(lanes):
                        return
                    index, warps = self._index(lanes)
                    # Others may have been woken, perhaps between here and what was ahead.
                    ahead = min(groups, default=-1)
                    if ahead >= 0 and counter + 1 > ahead:
                        self.wake(lanes, counter + 1)
                        return
                elif step.guard is not None:
                    chosen = self._taken(step, lanes)
                    if len(chosen) and step.run is not None:
                        step.run(self, chosen)
                elif step.run is not None:
                    step.run(self, index)
            except Exception as error:
                error.args = (f"{error}; in line {step.line} of the PTX of {self.program.kernel.name[:60]}",)
                raise
            counter += 1

    def _index(self, lanes: Array) -> tuple[Index, int]:
        """A cheap index of these lanes, and how many warps have some."""
        index = slice(None) if len(lanes) == self.lanes else lanes
        return index, int(np.count_nonzero(np.diff(lanes // WARP)) + 1)

    def _taken(self, step: Step, lanes: Array) -> Array:
        """The lanes whose guard holds."""
        if step.guard is None:
            return lanes
        number, negated = step.guard
        return lanes[self.registers[number][lanes] != negated]

    def _gather(self, lanes: Array, counter: int) -> Array:
        """Lanes wait here for the rest of their warps; those of whole warps go on."""
        waiting = self._gathering.pop(counter, None)
        if waiting is not None:
            lanes = np.sort(np.concatenate((waiting, lanes)))
        complete = np.bincount(lanes // WARP, minlength=self.lanes // WARP)[lanes // WARP] == WARP
        if not complete.all():
            self._gathering[counter] = lanes[~complete]
        return lanes[complete]

    def _who_waits(self) -> str:
        lines = {steps.line: len(lanes) for c, lanes in self._gathering.items() for steps in [self.program.steps[c]]}
        lines |= {self.program.steps[c].line: n for c, n in self.sleeping.items() if n}
        return ", ".join(f"{n} in line {line}" for line, n in sorted(lines.items())) or "nobody is known to wait"
