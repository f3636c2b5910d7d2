# SPDX-License-Identifier: Apache-2.0
"""From PTX text to a list of instructions. Reads what the DSL writes, and refuses the rest by name."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

#: Bytes of a register, by the letters of its name; those of inline assembly are declared with their type.
_BANKS = {"p": 0, "rs": 2, "r": 4, "rd": 8, "f": 4, "fd": 8}
_TYPE_BYTES = {"pred": 0, "16": 2, "32": 4, "64": 8}


class UnknownPtx(Exception):
    """PTX that this simulator has no meaning for."""


@dataclass(frozen=True)
class Register:
    """bytes: 2, 4 or 8; 0 for a predicate."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Immediate:
    """bits: the value as an unsigned integer of 64 bits; a float's own bits."""

    bits: int


@dataclass(frozen=True)
class Symbol:
    """A special register (with its %), a parameter, a shared array or a label."""

    name: str


@dataclass(frozen=True)
class Address:
    """[base + offset]"""

    base: Register | Symbol
    offset: int


@dataclass(frozen=True)
class Vector:
    """{a, b, ...}"""

    items: tuple[Register | Immediate, ...]


Operand = Register | Immediate | Symbol | Address | Vector


@dataclass(frozen=True)
class Instruction:
    """opcode: with its suffixes. guard: the predicate it runs under, and whether that is negated."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: tuple[Register, bool] | None
    line: int

    @property
    def parts(self) -> tuple[str, ...]:
        """The opcode and its suffixes; ``shared::cluster`` is one."""
        return tuple(self.opcode.split("."))


@dataclass
class Kernel:
    """One entry. parameters: name and bytes, in order. threads: of a CTA."""

    name: str
    parameters: dict[str, int] = field(default_factory=dict)
    threads: int = 0
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    dynamic_shared: str = ""


def parse(text: str) -> Kernel:
    """The one kernel of a module. Raises UnknownPtx."""
    names = re.findall(r"\.entry (\S+)\(", text)
    if len(names) != 1:
        raise UnknownPtx(f"one entry expected, found {names}")
    kernel = Kernel(names[0])
    shared = re.findall(r"\.shared \.align \d+ \.b8 (\w+)\[(\d*)\]", text)
    if any(size for _, size in shared) or len(shared) > 1:
        raise UnknownPtx(f"only one dynamic array in shared memory is known, found {shared}")
    kernel.dynamic_shared = shared[0][0] if shared else ""
    for bytes_, name, size in re.findall(r"\.param (?:\.align \d+ )?\.(\w+) (\w+)(?:\[(\d+)\])?[,\n]", text):
        kernel.parameters[name] = int(size) if size else int(re.sub(r"\D", "", bytes_)) // 8
    sizes = re.search(r"^\.reqntid (\d+)(?:, (\d+))?(?:, (\d+))?", text, re.MULTILINE)
    if sizes is None:
        raise UnknownPtx("no .reqntid")
    for size in sizes.groups(default="1"):
        kernel.threads = (kernel.threads or 1) * int(size)
    _Body(kernel).read(text)
    return kernel


class _Body:
    """Reads statements; keeps track of the scopes that inline assembly opens."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._scopes: list[tuple[int, dict[str, Register]]] = []
        self._opened = 0

    def read(self, text: str) -> None:
        begin = text.index("\n{", text.index(".entry"))
        first = text[:begin].count("\n") + 1
        for line, statement in _statements(text[begin:], first):
            self._statement(statement, line)

    def _statement(self, text: str, line: int) -> None:
        if text == "{":
            self._opened += 1
            self._scopes.append((self._opened, {}))
        elif text == "}":
            self._scopes.pop()
        elif text.endswith(":"):
            self.kernel.labels[self._label(text[:-1])] = len(self.kernel.instructions)
        elif text.startswith(".reg"):
            self._declare(text)
        elif not text.startswith(".pragma"):
            self.kernel.instructions.append(self._instruction(text, line))

    def _declare(self, text: str) -> None:
        type_, names = re.fullmatch(r"\.reg \.(\w+)\s+(.+)", text).groups()  # type: ignore[union-attr]
        for name in re.split(r"\s*,\s*", names):
            if not name.startswith("%"):  # a bank of the compiler's: its name says what it holds
                scope, known = self._scopes[-1]
                known[name] = Register(f"{name}#{scope}", _TYPE_BYTES[re.sub(r"[bfsu](?=\d)", "", type_)])

    def _label(self, name: str) -> str:
        return name if name.startswith("$") else f"{name}#{self._scopes[-1][0]}"

    def _instruction(self, text: str, line: int) -> Instruction:
        guard = None
        if text.startswith("@"):
            name, text = re.fullmatch(r"@(!?\S+)\s+(.+)", text).groups()  # type: ignore[union-attr]
            register = self._operand(name.lstrip("!"))
            assert isinstance(register, Register)
            guard = (register, name.startswith("!"))
        opcode, _, rest = text.partition(" ")
        operands = [self._operand(part) for part in _split(rest)]
        if opcode.startswith("bra"):
            (target,) = operands
            assert isinstance(target, Symbol)
            operands = [Symbol(self._label(target.name))]
        return Instruction(opcode, tuple(operands), guard, line)

    def _operand(self, text: str) -> Operand:
        if text.startswith("{"):
            return Vector(tuple(self._operand(part) for part in _split(text[1:-1])))  # type: ignore[misc]
        if text.startswith("["):
            base, offset = re.fullmatch(r"\[\s*([^+\]]+?)\s*(?:\+\s*(-?\d+))?\s*\]", text).groups()  # type: ignore[union-attr]
            return Address(self._operand(base), int(offset or 0))  # type: ignore[arg-type]
        for _, known in reversed(self._scopes):
            if text in known:
                return known[text]
        bank = re.fullmatch(r"%([a-z]+)\d+", text)
        if bank and bank[1] in _BANKS:
            return Register(text, _BANKS[bank[1]])
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
            return Immediate(int(text.rstrip("U"), 0) & (1 << 64) - 1)
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            return Immediate(int(text[2:], 16))
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
            return Immediate(int(text[2:], 16))
        if re.fullmatch(r"-?\d+\.\d*", text):
            return Immediate(struct.unpack("<I", struct.pack("<f", float(text)))[0])
        return Symbol(text)


def _statements(text: str, line: int) -> Iterator[tuple[int, str]]:
    """Each statement with its line: an instruction, a declaration, a label with its colon, or a brace alone."""
    for number, whole in enumerate(text.split("\n"), line):
        rest = whole.split("//")[0].strip()
        while rest:
            label = re.match(r"[$\w]+:(?!:)", rest)
            if rest[0] in "{}":
                end = 1
            elif label:
                end = label.end()
            else:
                end = rest.index(";") + 1 if ";" in rest else len(rest)
            yield number, " ".join(rest[:end].rstrip(";").split())
            rest = rest[end:].strip()


def _split(text: str) -> list[str]:
    """The operands of a list, at commas outside of braces."""
    parts = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", text)
    return [part.strip() for part in parts]
