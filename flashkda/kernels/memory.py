# SPDX-License-Identifier: Apache-2.0
"""Pointers, vector access of a promised alignment, bulk copies and cluster messages.

Offsets that a slot or a row stride scales are Int64 throughout: pools pass 2^31 elements.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from .numerics import select


def at(tensor, offset):
    """Pointer to the element ``offset`` elements behind the tensor's first."""
    return tensor.iterator + offset


def _aligned(pointer, bytes_):
    return cute.make_ptr(pointer.dtype, pointer.toint(), pointer.memspace, assumed_align=bytes_)


def load(pointer, count, vector):
    """``count`` adjacent elements as a list of scalars, in accesses of ``vector`` elements (<= 16 bytes each).

    The caller promises that the pointer is aligned to ``vector`` elements.
    """
    width = pointer.dtype.width // 8
    vector = min(vector, count, 16 // width)
    if vector == 1:
        return [(pointer + i).load() for i in range(count)]
    values = []
    for i in range(0, count, vector):
        chunk = cute.make_tensor(_aligned(pointer + i, vector * width), cute.make_layout(vector)).load()
        values += [chunk[j] for j in range(vector)]
    return values


def store(pointer, values, vector):
    """The counterpart of ``load``: writes the scalars of a list to adjacent elements."""
    width = pointer.dtype.width // 8
    vector = min(vector, len(values), 16 // width)
    if vector == 1:
        for i, value in enumerate(values):
            (pointer + i).store(value)
        return
    for i in range(0, len(values), vector):
        chunk = cute.make_rmem_tensor(vector, pointer.dtype)
        for j in range(vector):
            chunk[j] = values[i + j]
        cute.make_tensor(_aligned(pointer + i, vector * width), cute.make_layout(vector)).store(chunk.load())


def prefetch(pointer):
    """Brings the pointer's line to the L2 cache; unlike a load it holds no register and nobody waits for it."""
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[pointer.toint()])


def minimum(x, y):
    """The smaller of two integers, without a branch."""
    return select(x < y, x, y)


def to_float(values):
    """A list of scalars widened to fp32 (exact for bf16)."""
    return [value.to(Float32) for value in values]


def store_shared(pointer, values):
    """Up to four fp32 values to 16-byte aligned shared memory."""
    store(pointer, values, len(values))


def bulk_copy_to_shared(shared, source, bytes_, barrier):
    """One ``cp.async.bulk`` of ``bytes_`` (a multiple of 16), both ends 16-byte aligned; completes on ``barrier``."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[shared.toint(), source.toint(), Int32(bytes_), barrier.toint()],
    )


def copy_async(shared, source, bytes_=16):
    """``cp.async`` of 16, 8 or 4 bytes, both ends aligned to them; holds no register. Wait with ``wait_for_copies``."""
    kind = "cg" if bytes_ == 16 else "ca"
    cute.arch.inline_ptx(
        f"cp.async.{kind}.shared.global [{{$r0}}], [{{$r1}}], {bytes_};",
        read_only_args=[shared.toint(), source.toint()],
    )


def round_down(pointer, bytes_):
    """The pointer at or before this one that is aligned to ``bytes_``."""
    return cute.make_ptr(pointer.dtype, pointer.toint() & -bytes_, pointer.memspace, assumed_align=bytes_)


def halves(pointer):
    """The two bf16 of a 32-bit word in shared memory."""
    pair = cute.make_ptr(BFloat16, pointer.toint(), pointer.memspace, assumed_align=4)
    return [pair.load(), (pair + 1).load()]


def wait_for_copies():
    """Blocks until all ``copy_async`` of this thread have arrived."""
    cute.arch.inline_ptx("cp.async.wait_all;")


def send(shared, value, barrier, rank):
    """``st.async`` of one fp32 to the same place in CTA ``rank`` of the cluster; counts 4 bytes on its barrier."""
    bits = cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])
    cute.arch.store_async_dsmem(shared, bits, barrier, rank)


def shared_array(allocator, dtype, count, align=16):
    """Pointer to ``count`` elements of shared memory."""
    return allocator.allocate_array(dtype, count, byte_alignment=align)


def copy_in(fragment, pointer, count, vector):
    """``load`` into a fragment that can cross a branch."""
    for i, value in enumerate(load(pointer, count, vector)):
        fragment[i] = value


def launch_dependents():
    """Lets a programmatically launched successor start; it still waits for this grid before it reads its results."""
    cute.arch.griddepcontrol_launch_dependents()


def wait_for_predecessor():
    """Blocks until the grids before this one have finished and their writes are visible. No global memory is read or
    written before it, so a programmatic launch is safe after any kernel."""
    cute.arch.griddepcontrol_wait()
