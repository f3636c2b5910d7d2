# SPDX-License-Identifier: Apache-2.0
"""Instructions after which some lanes do not go on: exits, barriers, and waits for what is on its way.

Each becomes a function of the machine, the lanes and the program counter, which returns the lanes that go on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.simulator.instructions import Builder
from tests.simulator.ptx import Immediate, Instruction, UnknownPtx

if TYPE_CHECKING:
    from tests.simulator.machine import Machine

Array = Any
Control = Callable[["Machine", Array, int], Array]

_NOBODY = np.zeros(0, np.int64)


def build_control(builder: Builder, instruction: Instruction) -> Control | None:
    """The instruction's function, or None where every lane goes on after it."""
    match instruction.parts:
        case ("ret",) | ("exit",):
            return _leave
        case ("bar", "sync"):
            which, count = (builder.read(o, np.uint32) for o in (*instruction.operands, Immediate(0))[:2])
            return _sync_block(which, count)
        case ("bar", "warp", "sync"):
            return lambda machine, lanes, counter: lanes
        case ("barrier", "cluster", "arrive", *_):
            return _arrive_cluster
        case ("barrier", "cluster", "wait", *_):
            return _wait_cluster
        case ("griddepcontrol", "wait"):
            return _wait_for_grid
        case ("griddepcontrol", "launch_dependents"):
            return lambda machine, lanes, counter: lanes
        case ("mbarrier", *_):
            return _build_mbarrier(builder, instruction)
        case ("cp", "async", *_):
            return _build_copy(builder, instruction)
        case ("st", "async", *rest):
            if ".".join(rest) != "shared::cluster.mbarrier::complete_tx::bytes.b32":
                raise UnknownPtx(instruction.opcode)
            return _build_send(builder, instruction)
    return None


# ---- ends and barriers of threads


def _leave(machine: Machine, lanes: Array, counter: int) -> Array:
    machine.alive[lanes] = False
    for key, barrier in list(machine.barriers.items()):
        if isinstance(barrier, _Threads) and barrier.touches(lanes):
            barrier.release(machine, key)
    return _NOBODY


@dataclass
class _Threads:
    """A barrier of the threads of a CTA or a cluster. members: its lanes. arrived: those that have come; waiting: of
    those, the ones that sleep, by where they go on. expected: how many come, 0 for all that are alive."""

    members: Array
    arrived: Array
    waiting: list[tuple[int, Array]] = field(default_factory=list)
    phase: int = 0
    expected: int = 0

    def touches(self, lanes: Array) -> bool:
        return bool(np.isin(lanes, self.members).any())

    def release(self, machine: Machine, key: Any) -> None:
        """Wake all, if those that are expected have come."""
        arrived = int(self.arrived[self.members].sum())
        alive = int((self.arrived | machine.alive)[self.members].sum())
        if arrived and arrived == (self.expected or alive):
            self.arrived[self.members] = False
            self.phase += 1
            for counter, lanes in self.waiting:
                machine.sleeping[counter] -= len(lanes)
                machine.wake(lanes, counter + 1)
            self.waiting = []


def _threads_of(machine: Machine, key: Any, members: Array) -> _Threads:
    if key not in machine.barriers:
        machine.barriers[key] = _Threads(members, np.zeros(machine.lanes, np.bool_))
    barrier: _Threads = machine.barriers[key]
    return barrier


def _sleep(machine: Machine, barrier: Any, counter: int, lanes: Array) -> None:
    machine.sleeping[counter] += len(lanes)
    barrier.waiting.append((counter, lanes))


def _sync_block(which: Callable[..., Array], count: Callable[..., Array]) -> Control:
    def control(machine: Machine, lanes: Array, counter: int) -> Array:
        names = np.broadcast_to(which(machine, lanes), len(lanes))
        for name in np.unique(names):
            chosen = lanes[names == name]
            for block in np.unique(machine.blocks[chosen]):
                members = np.arange(block * machine.threads, (block + 1) * machine.threads)
                key = ("bar", int(block), int(name))
                barrier = _threads_of(machine, key, members)
                barrier.expected = int(count(machine, lanes[:1]).max())
                mine = chosen[machine.blocks[chosen] == block]
                barrier.arrived[mine] = True
                _sleep(machine, barrier, counter, mine)
                barrier.release(machine, key)
        return _NOBODY

    return control


def _cluster_barriers(machine: Machine, lanes: Array) -> list[tuple[Any, _Threads, Array]]:
    size = machine.threads * machine.cluster
    found = []
    for cluster in np.unique(lanes // size):
        key = ("cluster", int(cluster))
        barrier = _threads_of(machine, key, np.arange(cluster * size, (cluster + 1) * size))
        found.append((key, barrier, lanes[lanes // size == cluster]))
    return found


def _arrive_cluster(machine: Machine, lanes: Array, counter: int) -> Array:
    phases = machine.barriers.setdefault("cluster phases", np.full(machine.lanes, -1))
    for key, barrier, mine in _cluster_barriers(machine, lanes):
        phases[mine] = barrier.phase
        barrier.arrived[mine] = True
        barrier.release(machine, key)
    return lanes


def _wait_cluster(machine: Machine, lanes: Array, counter: int) -> Array:
    phases = machine.barriers["cluster phases"]
    going = []
    for _, barrier, mine in _cluster_barriers(machine, lanes):
        done = phases[mine] < barrier.phase
        going.append(mine[done])
        if not done.all():
            _sleep(machine, barrier, counter, mine[~done])
    return np.sort(np.concatenate(going)) if going else lanes


def _wait_for_grid(machine: Machine, lanes: Array, counter: int) -> Array:
    machine.waited[lanes] = True
    return lanes


# ---- mbarriers


@dataclass
class _Mbarrier:
    """expected arrivals a phase, those still pending in this one, and bytes that are still to come."""

    expected: int
    pending: int
    bytes: int = 0
    phase: int = 0
    waiting: list[tuple[int, Array]] = field(default_factory=list)

    def settle(self, machine: Machine) -> None:
        if self.pending < 0:
            raise ValueError("more arrivals at an mbarrier than it expects")
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.expected
            for counter, lanes in self.waiting:
                machine.sleeping[counter] -= len(lanes)
                machine.wake(lanes, counter)  # to ask again
            self.waiting = []


def _mbarrier(machine: Machine, place: tuple[int, int]) -> _Mbarrier:
    found: _Mbarrier | None = machine.barriers.get(place)
    if found is None:
        raise ValueError(f"no mbarrier was initialized at {place[1]} of CTA {place[0]}")
    return found


def _each(values: Array, lanes: Array) -> list[int]:
    return [int(value) for value in np.broadcast_to(values, len(lanes))]


def _build_mbarrier(builder: Builder, instruction: Instruction) -> Control:
    match instruction.parts[1:]:
        case ("init", "shared", "b64"):
            address, count = builder.address(instruction.operands[0]), builder.read(instruction.operands[1], np.uint32)

            def init(machine: Machine, lanes: Array, counter: int) -> Array:
                counts = _each(count(machine, lanes), lanes)
                for lane, at, expected in zip(lanes, _each(address(machine, lanes), lanes), counts, strict=True):
                    machine.barriers[machine.shared.locate(machine.blocks[lane], at)] = _Mbarrier(expected, expected)
                return lanes

            return init
        case ("arrive", "shared", "b64") | ("arrive", "expect_tx", "shared", "b64"):
            expect = "expect_tx" in instruction.parts
            address, number = builder.address(instruction.operands[1]), builder.read(instruction.operands[2], np.uint32)

            def arrive(machine: Machine, lanes: Array, counter: int) -> Array:
                numbers = _each(number(machine, lanes), lanes)
                for lane, at, n in zip(lanes, _each(address(machine, lanes), lanes), numbers, strict=True):
                    barrier = _mbarrier(machine, machine.shared.locate(machine.blocks[lane], at))
                    barrier.bytes += n if expect else 0
                    barrier.pending -= 1 if expect else n
                    barrier.settle(machine)
                return lanes

            return arrive
        case ("try_wait", "parity", "shared", "b64"):
            return _build_try_wait(builder, instruction)
    raise UnknownPtx(instruction.opcode)


def _build_try_wait(builder: Builder, instruction: Instruction) -> Control:
    """Always succeeds in the end: lanes whose phase has not completed sleep until it has, and then ask again."""
    write = builder.write(instruction.operands[0])
    address, parity = builder.address(instruction.operands[1]), builder.read(instruction.operands[2], np.uint32)

    def control(machine: Machine, lanes: Array, counter: int) -> Array:
        at = np.broadcast_to(address(machine, lanes), len(lanes)).astype(np.int64)
        wanted = np.broadcast_to(parity(machine, lanes), len(lanes))
        keys = np.stack((machine.blocks[lanes], at, wanted))
        done = np.zeros(len(lanes), np.bool_)
        for block, place, bit in np.unique(keys, axis=1).T:
            mine = (keys[0] == block) & (keys[1] == place) & (keys[2] == bit)
            barrier = _mbarrier(machine, machine.shared.locate(int(block), int(place)))
            done[mine] = barrier.phase & 1 != bit
            if not done[mine].all():
                _sleep(machine, barrier, counter, lanes[mine])
        write(machine, lanes[done], np.bool_(True))
        return lanes[done]

    return control


def _complete(machine: Machine, place: tuple[int, int], bytes_: int) -> None:
    barrier = _mbarrier(machine, place)
    barrier.bytes -= bytes_
    barrier.settle(machine)


# ---- asynchronous copies


def _build_copy(builder: Builder, instruction: Instruction) -> Control:
    match instruction.parts[2:]:
        case ("cg" | "ca", "shared", "global"):
            return _build_small_copy(builder, instruction)
        case ("wait_all",):
            return _wait_for_copies
        case ("bulk", "shared::cluster", "global", "mbarrier::complete_tx::bytes"):
            return _build_bulk_copy(builder, instruction)
    raise UnknownPtx(instruction.opcode)


def _require_alive(machine: Machine, block: int) -> None:
    if not machine.alive[block * machine.threads : (block + 1) * machine.threads].any():
        raise ValueError(f"what was sent to CTA {block} finds it ended")


def _build_small_copy(builder: Builder, instruction: Instruction) -> Control:
    to, source, size = instruction.operands
    target, origin = builder.address(to), builder.address(source)
    bytes_ = int(builder.read(size, np.uint32)(None, None))  # type: ignore[arg-type]

    def control(machine: Machine, lanes: Array, counter: int) -> Array:
        machine.require_waited(lanes)
        starts = origin(machine, lanes)
        data = machine.memory.load(starts, 4, bytes_ // 4)  # checks the addresses, whenever the data comes
        at = np.broadcast_to(target(machine, lanes), len(lanes)).copy()
        if (starts % bytes_).any() or (at % bytes_).any():
            raise ValueError(f"a copy of {bytes_} bytes is misaligned")

        def arrive(chosen: Array) -> None:
            values = [item[chosen] for item in data]
            machine.shared.store(machine.blocks[lanes[chosen]], at[chosen], 4, values)

        if machine.random is None or machine.random.random() < 0.5:
            arrive(np.arange(len(lanes)))
            return lanes
        for i, lane in enumerate(lanes):
            machine.copies.setdefault(int(lane), []).append(functools.partial(arrive, np.array([i])))
        return lanes

    return control


def _wait_for_copies(machine: Machine, lanes: Array, counter: int) -> Array:
    for lane in lanes:
        for copy in machine.copies.pop(int(lane), ()):
            copy()
    return lanes


def _build_bulk_copy(builder: Builder, instruction: Instruction) -> Control:
    to, source, size, barrier = instruction.operands
    target, origin, signal = (builder.address(operand) for operand in (to, source, barrier))
    count = builder.read(size, np.uint32)

    def control(machine: Machine, lanes: Array, counter: int) -> Array:
        machine.require_waited(lanes)
        columns = (target(machine, lanes), origin(machine, lanes), count(machine, lanes), signal(machine, lanes))
        for lane, at, start, bytes_, flag in zip(lanes, *(_each(c, lanes) for c in columns), strict=True):
            block, offset = machine.shared.locate(machine.blocks[lane], at)
            place = machine.shared.locate(machine.blocks[lane], flag)
            if (offset | start | bytes_) % 16:
                raise ValueError(f"a bulk copy of {bytes_} bytes from {start:#x} to {offset} is misaligned")

            def deliver(block=block, offset=offset, start=start, bytes_=bytes_, place=place) -> None:
                _require_alive(machine, block)
                machine.shared.write(block, offset, machine.memory.read(start, bytes_))
                _complete(machine, place, bytes_)

            machine.send(deliver)
        return lanes

    return control


def _build_send(builder: Builder, instruction: Instruction) -> Control:
    to, value, barrier = instruction.operands
    target, read, signal = builder.address(to), builder.read(value, np.uint32), builder.address(barrier)

    def control(machine: Machine, lanes: Array, counter: int) -> Array:
        columns = (target(machine, lanes), read(machine, lanes), signal(machine, lanes))
        for lane, at, bits, flag in zip(lanes, *(_each(c, lanes) for c in columns), strict=True):
            block, offset = machine.shared.locate(machine.blocks[lane], at)
            place = machine.shared.locate(machine.blocks[lane], flag)

            def deliver(block=block, offset=offset, bits=bits, place=place) -> None:
                _require_alive(machine, block)
                machine.shared.write(block, offset, np.array([bits], np.uint32).view(np.uint8))
                _complete(machine, place, 4)

            machine.send(deliver)
        return lanes

    return control
