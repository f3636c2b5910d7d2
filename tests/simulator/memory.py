# SPDX-License-Identifier: Apache-2.0
"""Global and shared memory of a launch. Addresses of global memory are those of the process."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any

#: Where shared memory begins in a CTA's window of it: an address of zero is a mistake.
SHARED_BASE = 1024
#: Bytes of the window of each CTA of a cluster; a CTA's own is number 0, that of rank r is number r + 1.
WINDOW = 1 << 24

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class MemoryFault(Exception):
    """An access that a GPU would fault on, or that CUDA leaves undefined."""


@dataclass(frozen=True)
class Extent:
    """Memory that a launch may use."""

    name: str
    address: int
    bytes: int


class GlobalMemory:
    """The tensors of a launch. loaded, stored: bytes by the tensor's name, each access counted."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        self._extents = sorted((e for e in extents if e.bytes), key=lambda extent: extent.address)
        self.loaded: Counter[str] = Counter()
        self.stored: Counter[str] = Counter()
        self._low = min((e.address for e in self._extents), default=0) & -16
        high = max((e.address + e.bytes for e in self._extents), default=16) + 15 & -16
        self._views = {}
        if self._extents:
            whole = np.ctypeslib.as_array((ctypes.c_uint8 * (high - self._low)).from_address(self._low))
            self._views = {width: whole.view(type_) for width, type_ in _UNSIGNED.items()}
        self._starts = np.array([e.address for e in self._extents], dtype=np.int64)
        self._ends = np.array([e.address + e.bytes for e in self._extents], dtype=np.int64)

    def load(self, addresses: Array, width: int, count: int) -> list[Array]:
        """`count` adjacent elements of `width` bytes at each address."""
        index = self._index(addresses, width, count, self.loaded)
        view = self._views[width]
        return [view[index + i] for i in range(count)]

    def store(self, addresses: Array, width: int, values: list[Array]) -> None:
        """The counterpart of `load`."""
        index = self._index(addresses, width, len(values), self.stored)
        for i, value in enumerate(values):
            self._views[width][index + i] = value

    def read(self, address: int, bytes_: int) -> Array:
        """The bytes of one block."""
        index = self._index(np.array([address], dtype=np.int64), 1, bytes_, self.loaded)
        return self._views[1][index[0] : index[0] + bytes_].copy()

    def _index(self, addresses: Array, width: int, count: int, counter: Counter[str]) -> Array:
        addresses = addresses.astype(np.int64)
        size = width * count
        which = np.searchsorted(self._starts, addresses, side="right") - 1
        bad = (which < 0) | (addresses + size > self._ends[which])
        if bad.any():
            address = int(addresses[bad][0])
            near = ", ".join(f"{e.name} [{e.address:#x}, +{e.bytes})" for e in self._near(address))
            raise MemoryFault(f"{size} bytes at {address:#x} are in no tensor; near: {near}")
        if (addresses % (size if size in (2, 4, 8, 16) else width)).any():
            raise MemoryFault(f"an access of {size} bytes is misaligned")
        for extent, times in enumerate(np.bincount(which)):
            if times:
                counter[self._extents[extent].name] += int(times) * size
        return (addresses - self._low) // width

    def _near(self, address: int) -> list[Extent]:
        return sorted(self._extents, key=lambda e: min(abs(address - e.address), abs(address - e.address - e.bytes)))[
            :2
        ]


class SharedMemory:
    """Shared memory of all CTAs of a launch; NaN until it is written. cluster: CTAs of one."""

    def __init__(self, blocks: int, bytes_: int, cluster: int) -> None:
        self.bytes, self._cluster = bytes_ + 127 & -128, cluster
        whole = np.full(blocks * self.bytes, 0xFF, dtype=np.uint8)
        self._views = {width: whole.view(type_) for width, type_ in _UNSIGNED.items()}

    def locate(self, block: int, address: int) -> tuple[int, int]:
        """The CTA and the offset that an address of a CTA's means."""
        window, offset = divmod(address, WINDOW)
        return (block - block % self._cluster + window - 1 if window else block), offset - SHARED_BASE

    def load(self, blocks: Array, addresses: Array, width: int, count: int) -> list[Array]:
        """`count` adjacent elements of `width` bytes at each address of each CTA."""
        index = self._index(blocks, addresses, width, count)
        return [self._views[width][index + i] for i in range(count)]

    def store(self, blocks: Array, addresses: Array, width: int, values: list[Array]) -> None:
        """The counterpart of `load`."""
        index = self._index(blocks, addresses, width, len(values))
        for i, value in enumerate(values):
            self._views[width][index + i] = value

    def write(self, block: int, offset: int, data: Array) -> None:
        """The bytes of one block at an offset that `locate` gave."""
        if not 0 <= offset <= self.bytes - len(data):
            raise MemoryFault(f"{len(data)} bytes at {offset} of shared memory of {self.bytes} bytes")
        self._views[1][block * self.bytes + offset :][: len(data)] = data

    def _index(self, blocks: Array, addresses: Array, width: int, count: int) -> Array:
        addresses, size = addresses.astype(np.int64), width * count
        window, offset = addresses // WINDOW, addresses % WINDOW - SHARED_BASE
        if window.any():
            blocks = np.where(window > 0, blocks - blocks % self._cluster + window - 1, blocks)
        if (offset < 0).any() or (offset + size > self.bytes).any():
            raise MemoryFault(f"{size} bytes at {int(offset.min())}..{int(offset.max())} of shared {self.bytes} bytes")
        if (offset % size).any():
            raise MemoryFault(f"an access of {size} bytes of shared memory is misaligned")
        return (blocks * self.bytes + offset) // width
