# SPDX-License-Identifier: Apache-2.0
"""What each instruction does to the lanes that run it. Those that wait or branch are in ``control``.

An instruction becomes a function of the machine and an index (the lanes, or a slice that means all of them). Registers
are unsigned integers of their size; an instruction's type says how it reads them (PTX ISA, "Instruction Operands").
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.simulator import arithmetic
from tests.simulator.ptx import Address, Immediate, Instruction, Kernel, Operand, Register, Symbol, UnknownPtx, Vector

if TYPE_CHECKING:
    from tests.simulator.machine import Machine

Array = Any
Index = Any
Read = Callable[["Machine", Index], Array]
Write = Callable[["Machine", Index, Array], None]
Run = Callable[["Machine", Index], None]

_TYPES: dict[str, Any] = {
    "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16, "s16": np.int16,
    "bf16": np.uint16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32, "b64": np.uint64,
    "u64": np.uint64, "s64": np.int64, "pred": np.bool_, "tf32": np.uint32,
}  # fmt: skip
_UNSIGNED: dict[int, Any] = {2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED: dict[int, Any] = {2: np.int16, 4: np.int32, 8: np.int64}
_WIDER: dict[Any, Any] = {
    np.int16: np.int32, np.uint16: np.uint32, np.int32: np.int64, np.uint32: np.uint64,
}  # fmt: skip
_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": operator.add, "sub": operator.sub, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "min": np.minimum, "max": np.maximum,
}  # fmt: skip
_SPECIAL = {"%tid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z", "%laneid"}


class Builder:
    """Makes the functions of one kernel; numbers its registers. registers: their sizes in bytes, by number."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.registers: list[int] = []
        self._numbers: dict[str, int] = {}
        self._offsets: dict[str, int] = {}
        offset = 0
        for name, size in kernel.parameters.items():
            self._offsets[name] = offset
            offset += size

    def number(self, register: Register) -> int:
        """Which of the machine's arrays a register is."""
        if register.name not in self._numbers:
            self._numbers[register.name] = len(self.registers)
            self.registers.append(register.bytes)
        return self._numbers[register.name]

    def read(self, operand: Operand, type_: Any) -> Read:
        """The operand's value as this type."""
        if isinstance(operand, Immediate):
            size = np.dtype(type_).itemsize
            value = np.array(operand.bits & (1 << 8 * size) - 1, dtype=f"u{size}").view(type_)[()]
            return lambda machine, index: value
        if isinstance(operand, Symbol):
            return self._symbol(operand.name, type_)
        if not isinstance(operand, Register):
            raise UnknownPtx(f"an operand {operand}")
        number = self.number(operand)
        size = np.dtype(type_).itemsize
        if operand.bytes in (0, size):
            return lambda machine, index: machine.registers[number][index].view(type_)
        narrow = np.dtype(f"u{size}")
        return lambda machine, index: machine.registers[number][index].astype(narrow).view(type_)

    def write(self, operand: Operand) -> Write:
        """Puts a value, widened by its own type's sign, into a register; ``_`` takes it and keeps nothing."""
        if operand == Symbol("_"):
            return lambda machine, index, value: None
        if not isinstance(operand, Register):
            raise UnknownPtx(f"a destination {operand}")
        number, size = self.number(operand), operand.bytes

        def put(machine: Machine, index: Index, value: Array) -> None:
            type_ = value.dtype
            if type_.itemsize < size and type_.kind in "iu":
                value = value.astype(_SIGNED[size] if type_.kind == "i" else _UNSIGNED[size])
            machine.registers[number][index] = value.view(_UNSIGNED[size]) if size else value

        return put

    def _symbol(self, name: str, type_: Any) -> Read:
        if name == self.kernel.dynamic_shared and name:
            from tests.simulator.memory import SHARED_BASE

            base = type_(SHARED_BASE)
            return lambda machine, index: base
        if name not in _SPECIAL:
            raise UnknownPtx(f"a symbol {name}")
        return lambda machine, index: machine.special[name][index].astype(type_)

    def address(self, operand: Operand) -> Read:
        """The value of [base + offset]."""
        if not isinstance(operand, Address) or not isinstance(operand.base, Register | Symbol):
            raise UnknownPtx(f"an address {operand}")
        wide = isinstance(operand.base, Register) and operand.base.bytes == 8
        base, offset = self.read(operand.base, np.int64 if wide else np.int32), operand.offset
        return lambda machine, index: base(machine, index) + offset

    def build(self, instruction: Instruction) -> Run:
        """The instruction's function, without its guard. Raises UnknownPtx."""
        parts = instruction.parts
        name = {"ld": f"ld_{parts[1]}", "st": f"st_{parts[1]}"}.get(parts[0], parts[0]) if len(parts) > 1 else parts[0]
        if name in _BINARY:
            return self._binary(_BINARY[name], instruction)
        make = getattr(self, f"_{name}", None)
        if make is None:
            raise UnknownPtx(instruction.opcode)
        run: Run = make(parts, *instruction.operands)
        return run

    # ---- arithmetic

    def _apply(self, function: Callable[..., Array], to: Operand, *operands: tuple[Operand, Any]) -> Run:
        write = self.write(to)
        reads = [self.read(operand, type_) for operand, type_ in operands]
        if len(reads) == 1:
            (one,) = reads
            return lambda machine, index: write(machine, index, function(one(machine, index)))
        if len(reads) == 2:
            one, two = reads
            return lambda machine, index: write(machine, index, function(one(machine, index), two(machine, index)))
        return lambda machine, index: write(machine, index, function(*[read(machine, index) for read in reads]))

    def _same(self, function: Callable[..., Array], parts: tuple[str, ...], to: Operand, *operands: Operand) -> Run:
        """An operation all of whose operands have the type that the opcode ends with."""
        type_ = _TYPES[parts[-1]]
        return self._apply(function, to, *((operand, type_) for operand in operands))

    def _binary(self, function: Callable[..., Array], instruction: Instruction) -> Run:
        parts = instruction.parts
        if parts[-1] == "f32" and parts[1:-1] not in (("rn",), ()):
            raise UnknownPtx(instruction.opcode)
        if parts[-1] == "f32" and parts[0] in ("min", "max"):
            function = {"min": np.fmin, "max": np.fmax}[parts[0]]
        return self._same(function, parts, *instruction.operands)

    def _mul(self, parts: tuple[str, ...], to: Operand, x: Operand, y: Operand) -> Run:
        type_ = _TYPES[parts[-1]]
        if parts[1] == "wide":
            wide = _WIDER[type_]
            return self._apply(lambda a, b: np.multiply(a.astype(wide), b.astype(wide)), to, (x, type_), (y, type_))
        if parts[1] == "hi" and parts[-1] in ("s32", "u32"):
            wide = _WIDER[type_]
            return self._apply(
                lambda a, b: (a.astype(wide) * b.astype(wide) >> wide(32)).astype(type_), to, (x, type_), (y, type_)
            )
        if parts[1:] not in (("rn", "f32"), ("lo", parts[-1])):
            raise UnknownPtx(".".join(parts))
        return self._same(operator.mul, parts, to, x, y)

    def _mad(self, parts: tuple[str, ...], to: Operand, *operands: Operand) -> Run:
        if parts[1] != "lo":
            raise UnknownPtx(".".join(parts))
        return self._same(lambda x, y, z: x * y + z, parts, to, *operands)

    def _fma(self, parts: tuple[str, ...], to: Operand, *operands: Operand) -> Run:
        if parts != ("fma", "rn", "f32"):
            raise UnknownPtx(".".join(parts))
        return self._same(arithmetic.fma, parts, to, *operands)

    def _ex2(self, parts: tuple[str, ...], to: Operand, x: Operand) -> Run:
        functions = {"ex2": arithmetic.exp2, "rcp": arithmetic.reciprocal, "rsqrt": arithmetic.reciprocal_root}
        if parts[1:] != ("approx", "ftz", "f32"):
            raise UnknownPtx(".".join(parts))
        return self._same(functions[parts[0]], parts, to, x)

    _rcp = _rsqrt = _ex2

    def _neg(self, parts: tuple[str, ...], to: Operand, x: Operand) -> Run:
        return self._same(operator.neg, parts, to, x)

    def _abs(self, parts: tuple[str, ...], to: Operand, x: Operand) -> Run:
        return self._same(np.abs, parts, to, x)

    def _not(self, parts: tuple[str, ...], to: Operand, x: Operand) -> Run:
        return self._same(operator.invert, parts, to, x)

    def _div(self, parts: tuple[str, ...], to: Operand, x: Operand, y: Operand) -> Run:
        if parts[1] not in ("s32", "u32", "s64", "u64"):
            raise UnknownPtx(".".join(parts))
        return self._same(_quotient, parts, to, x, y)

    def _rem(self, parts: tuple[str, ...], to: Operand, x: Operand, y: Operand) -> Run:
        return self._same(lambda a, b: a - _quotient(a, b) * b, parts, to, x, y)

    def _shl(self, parts: tuple[str, ...], to: Operand, x: Operand, y: Operand) -> Run:
        return self._shift(operator.lshift, parts, to, x, y)

    def _shr(self, parts: tuple[str, ...], to: Operand, x: Operand, y: Operand) -> Run:
        return self._shift(operator.rshift, parts, to, x, y)

    def _shift(
        self, function: Callable[..., Array], parts: tuple[str, ...], to: Operand, x: Operand, y: Operand
    ) -> Run:
        type_ = _TYPES[parts[-1]]
        size = 8 * np.dtype(type_).itemsize

        def shift(value: Array, count: Array) -> Array:
            kept = function(value, np.minimum(count, size - 1).astype(type_))
            if np.dtype(type_).kind == "i":
                return kept  # what a signed number is shifted by beyond its size leaves its sign
            return np.where(count < size, kept, type_(0))

        return self._apply(shift, to, (x, type_), (y, np.uint32))

    def _setp(self, parts: tuple[str, ...], to: Operand, x: Operand, y: Operand) -> Run:
        return self._same(_COMPARE[parts[1]], parts, to, x, y)

    def _selp(self, parts: tuple[str, ...], to: Operand, x: Operand, y: Operand, chosen: Operand) -> Run:
        type_ = _TYPES[parts[-1]]
        return self._apply(lambda a, b, c: np.where(c, a, b), to, (x, type_), (y, type_), (chosen, np.bool_))

    # ---- moves and conversions

    def _mov(self, parts: tuple[str, ...], to: Operand, source: Operand) -> Run:
        type_ = _TYPES[parts[-1]]
        if isinstance(to, Vector):
            part = _UNSIGNED[np.dtype(type_).itemsize // len(to.items)]
            writes, read = [self.write(item) for item in to.items], self.read(source, type_)

            def unpack(machine: Machine, index: Index) -> None:
                pieces = np.atleast_1d(np.ascontiguousarray(read(machine, index))).view(part).reshape(-1, len(writes))
                for i, write in enumerate(writes):
                    write(machine, index, pieces[:, i].copy())

            return unpack
        if isinstance(source, Vector):
            half = _UNSIGNED[np.dtype(type_).itemsize // len(source.items)]
            shift = type_(8 * np.dtype(half).itemsize)
            if len(source.items) != 2:
                raise UnknownPtx("mov of a vector that is not a pair")
            low, high = source.items
            return self._apply(lambda a, b: a.astype(type_) | b.astype(type_) << shift, to, (low, half), (high, half))
        return self._apply(lambda x: x, to, (source, type_))

    def _cvt(self, parts: tuple[str, ...], to: Operand, *operands: Operand) -> Run:
        match parts[1:]:
            case ("rn", "bf16", "f32"):
                return self._apply(arithmetic.to_bf16, to, (operands[0], np.float32))
            case ("rn", "bf16x2", "f32"):
                high, low = operands

                def pack(x: Array, y: Array) -> Array:
                    return arithmetic.to_bf16(x).astype(np.uint32) << np.uint32(16) | arithmetic.to_bf16(y)

                return self._apply(pack, to, (high, np.float32), (low, np.float32))
            case ("f32", "bf16"):
                return self._apply(arithmetic.from_bf16, to, (operands[0], np.uint16))
            case ("rna", "tf32", "f32"):
                return self._apply(arithmetic.to_tf32, to, (operands[0], np.float32))
            case ("rn", "f32", "s32" | "u32"):
                return self._apply(lambda x: x.astype(np.float32), to, (operands[0], _TYPES[parts[-1]]))
            case (into, source) if into[0] in "us" and source[0] in "us":
                type_ = _TYPES[into]
                return self._apply(lambda x: x.astype(type_), to, (operands[0], _TYPES[source]))
        raise UnknownPtx(".".join(parts))

    # ---- memory

    def _ld_param(self, parts: tuple[str, ...], to: Operand, source: Operand) -> Run:
        assert isinstance(source, Address) and isinstance(source.base, Symbol)
        type_ = np.dtype(_TYPES[parts[-1]])
        begin = self._offsets[source.base.name] + source.offset
        items = to.items if isinstance(to, Vector) else (to,)
        writes = [self.write(item) for item in items]

        def load(machine: Machine, index: Index) -> None:
            values = np.frombuffer(machine.parameters, type_, len(writes), begin)
            for write, value in zip(writes, values, strict=True):
                write(machine, index, value)

        return load

    def _ld_global(self, parts: tuple[str, ...], to: Operand, source: Operand) -> Run:
        items = to.items if isinstance(to, Vector) else (to,)
        address, writes, width = self.address(source), [self.write(item) for item in items], _width(parts)

        def load(machine: Machine, index: Index) -> None:
            machine.require_waited(index)
            values = machine.memory.load(address(machine, index), width, len(writes))
            for write, value in zip(writes, values, strict=True):
                write(machine, index, value)

        return load

    def _st_global(self, parts: tuple[str, ...], target: Operand, source: Operand) -> Run:
        address, reads, width = self.address(target), self._stored(source, parts), _width(parts)

        def store(machine: Machine, index: Index) -> None:
            machine.require_waited(index)
            machine.memory.store(address(machine, index), width, [read(machine, index) for read in reads])

        return store

    def _ld_shared(self, parts: tuple[str, ...], to: Operand, source: Operand) -> Run:
        items = to.items if isinstance(to, Vector) else (to,)
        address, writes, width = self.address(source), [self.write(item) for item in items], _width(parts)

        def load(machine: Machine, index: Index) -> None:
            at = address(machine, index)
            values = machine.shared.load(machine.blocks[index], at, width, len(writes))
            machine.count_shared(index, at, width * len(writes))
            for write, value in zip(writes, values, strict=True):
                write(machine, index, value)

        return load

    def _st_shared(self, parts: tuple[str, ...], target: Operand, source: Operand) -> Run:
        address, reads, width = self.address(target), self._stored(source, parts), _width(parts)

        def store(machine: Machine, index: Index) -> None:
            at = address(machine, index)
            machine.shared.store(machine.blocks[index], at, width, [read(machine, index) for read in reads])
            machine.count_shared(index, at, width * len(reads))

        return store

    def _stored(self, source: Operand, parts: tuple[str, ...]) -> list[Read]:
        items = source.items if isinstance(source, Vector) else (source,)
        return [self.read(item, _UNSIGNED[_width(parts)]) for item in items]

    def _mapa(self, parts: tuple[str, ...], to: Operand, address: Operand, rank: Operand) -> Run:
        from tests.simulator.memory import WINDOW

        if parts != ("mapa", "shared::cluster", "u32"):
            raise UnknownPtx(".".join(parts))
        window = np.uint32(WINDOW)
        return self._apply(lambda a, r: a + (r + np.uint32(1)) * window, to, (address, np.uint32), (rank, np.uint32))

    def _prefetch(self, parts: tuple[str, ...], address: Operand) -> Run:
        return lambda machine, index: None

    def _fence(self, parts: tuple[str, ...]) -> Run:
        return lambda machine, index: None

    # ---- whole warps

    def _shfl(self, parts: tuple[str, ...], to: Operand, source: Operand, lane: Operand, *rest: Operand) -> Run:
        clamp, mask = rest
        if mask != Immediate((1 << 64) - 1) or not isinstance(clamp, Immediate) or parts[2] not in ("bfly", "idx"):
            raise UnknownPtx(f"{'.'.join(parts)} of a part of a warp")
        write, read, by = self.write(to), self.read(source, np.uint32), self.read(lane, np.uint32)
        # The clamp's upper bits cut the warp into segments, the lower ones end them (PTX ISA, "shfl.sync").
        lanes, segment, exchange = np.arange(32), clamp.bits >> 8 & 31, parts[2] == "bfly"
        last = lanes & segment | clamp.bits & 31 & ~segment

        def shuffle(machine: Machine, index: Index) -> None:
            count = machine.count(index)
            values = np.broadcast_to(read(machine, index), count).reshape(-1, 32)
            places = np.broadcast_to(by(machine, index), count).reshape(-1, 32).astype(np.int64) & 31
            places = lanes ^ places if exchange else lanes & segment | places & ~segment
            places = np.where(places <= last, places, lanes)
            write(machine, index, np.take_along_axis(values, places, axis=1).reshape(-1))

        return shuffle

    def _mma(self, parts: tuple[str, ...], to: Operand, *operands: Operand) -> Run:
        if ".".join(parts[1:]) != "sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32":
            raise UnknownPtx(".".join(parts))
        assert isinstance(to, Vector)
        writes = [self.write(item) for item in to.items]
        a, b, c = ([self.read(item, np.float32) for item in vector.items] for vector in operands)  # type: ignore[union-attr]
        # Where each lane's elements lie (PTX ISA, "Matrix Fragments for mma.m16n8k8", tf32).
        group, place = np.arange(32) // 4, np.arange(32) % 4
        a_at = [(group + 8 * (i % 2), place + 4 * (i // 2)) for i in range(4)]
        b_at = [(place + 4 * i, group) for i in range(2)]
        c_at = [(group + 8 * (i // 2), 2 * place + i % 2) for i in range(4)]

        def multiply(machine: Machine, index: Index) -> None:
            warps = machine.count(index) // 32

            def gather(reads: list[Read], places: list[tuple[Array, Array]], shape: tuple[int, int]) -> Array:
                tile = np.empty((warps, *shape), np.float32)
                for read, (row, column) in zip(reads, places, strict=True):
                    tile[:, row, column] = np.broadcast_to(read(machine, index), warps * 32).reshape(warps, 32)
                return tile

            tiles = (gather(a, a_at, (16, 8)), gather(b, b_at, (8, 8)), gather(c, c_at, (16, 8)))
            result = arithmetic.multiply_tiles(*tiles)
            for write, (row, column) in zip(writes, c_at, strict=True):
                write(machine, index, np.ascontiguousarray(result[:, row, column]).reshape(-1))

        return multiply


def _width(parts: tuple[str, ...]) -> int:
    return int(np.dtype(_TYPES[parts[-1]]).itemsize)


def _quotient(x: Array, y: Array) -> Array:
    """Rounded towards zero."""
    floor = x // y
    return np.where((floor * y != x) & ((x < 0) != (y < 0)), floor + 1, floor).astype(x.dtype)
