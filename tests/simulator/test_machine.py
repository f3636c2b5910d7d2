# SPDX-License-Identifier: Apache-2.0
"""The simulator itself, on small kernels written by hand: its arithmetic, its schedule, and what it refuses."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.simulator import arithmetic
from tests.simulator.machine import Machine, Program, Schedule, SimulationError
from tests.simulator.memory import Extent, GlobalMemory, MemoryFault
from tests.simulator.ptx import UnknownPtx, parse

SEEDS = range(8)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)

_HEAD = """
.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 shmem[];
.visible .entry toy(
 .param .u64 toy_param_0,
 .param .u64 toy_param_1
)
.reqntid {threads}, 1, 1
{{
 .reg .pred %p<9>;
 .reg .b32 %r<99>;
 .reg .b64 %rd<99>;
 ld.param.b64 %rd1, [toy_param_0];
 ld.param.b64 %rd2, [toy_param_1];
 mov.u32 %r1, %tid.x;
 mov.u32 %r2, %ctaid.x;
 mul.wide.u32 %rd3, %r1, 4;
 add.s64 %rd4, %rd1, %rd3;
 add.s64 %rd5, %rd2, %rd3;
 mov.b32 %r9, shmem;
 shl.b32 %r3, %r1, 2;
 add.s32 %r4, %r9, %r3;
{body}
 ret;
}}
"""


def play(body, source=None, *, threads=64, out=None, seed=None, blocks=1, cluster=1, dependent=False):
    """Run a body: %rd4 and %rd5 are the addresses of this thread's word of `source` and of the result, %r4 that of its
    word in shared memory. Returns the result, a word a thread, and the report."""
    source = torch.arange(threads, dtype=torch.int32) if source is None else source
    out = torch.full((threads,), -1, dtype=torch.int32) if out is None else out
    program = Program(parse(_HEAD.format(threads=threads, body=body)))
    parameters = np.array([source.data_ptr(), out.data_ptr()], np.uint64).tobytes()
    extents = [Extent(name, t.data_ptr(), t.nbytes) for name, t in (("source", source), ("out", out))]
    schedule = Schedule(seed)
    memory = GlobalMemory(extents)
    launch = (program, (blocks, 1, 1), cluster, parameters, 4 * threads + 64, memory, schedule, dependent)
    return out, Machine(*launch).run()


# ---- arithmetic


@given(FLOATS, FLOATS, FLOATS)
def test_fma_rounds_once(x, y, z):
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    found = arithmetic.fma(*(np.array([value], np.float32) for value in (x, y, z)))[0]
    if not np.isfinite(found):
        assert abs(exact) >= Fraction(2) ** 128 - Fraction(2) ** 103
        return
    below, above = (np.nextafter(found, np.float32(side * np.inf)) for side in (-1, 1))
    error = abs(exact - Fraction(float(found)))
    for other in (below, above):
        if np.isfinite(other):
            far = abs(exact - Fraction(float(other)))
            # Half way between two: the even one.
            assert error < far or (error == far and not found.view(np.int32) & 1)


def test_fma_is_not_a_product_and_a_sum():
    x = np.array([1 + 2.0**-12], np.float32)
    assert arithmetic.fma(x, x, -np.array([1 + 2.0**-11], np.float32))[0] == 2.0**-24
    # A tie of float64's sum that float32 must not see as one.
    x, y, z = (np.array([value], np.float32) for value in (1 + 2.0**-23, 1 + 2.0**-23, 2.0**-60))
    assert arithmetic.fma(x, y, z)[0] == np.float32(1 + 2.0**-22)


@given(st.floats(width=32))
def test_bf16_is_torch_s(x):
    tensor = torch.tensor([x], dtype=torch.float32)
    found = arithmetic.to_bf16(tensor.numpy())
    if not np.isnan(x):
        assert found[0] == tensor.bfloat16().view(torch.int16).numpy().view(np.uint16)[0]
    assert arithmetic.from_bf16(found)[0] == pytest.approx(float(tensor.bfloat16()), nan_ok=True)


def test_tf32_rounds_ties_away():
    values = np.array([1 + 2.0**-11, -(1 + 2.0**-11), 1 + 2.0**-12, 3.0], np.float32)
    assert arithmetic.to_tf32(values).tolist() == [1 + 2.0**-10, -(1 + 2.0**-10), 1.0, 3.0]


def test_approximations_flush_subnormals():
    tiny = np.array([2.0**-130, -(2.0**-130)], np.float32)
    assert arithmetic.exp2(np.array([-130.0, -126.0], np.float32)).tolist() == [0.0, 2.0**-126]
    assert np.isinf(arithmetic.reciprocal(tiny)).all()
    assert np.isinf(arithmetic.reciprocal_root(tiny[:1])).all()


def test_matrix_fragments():
    generator = np.random.default_rng(0)
    a, b, c = (generator.integers(-8, 8, shape).astype(np.float32) for shape in ((16, 8), (8, 8), (16, 8)))
    flat = torch.from_numpy(np.concatenate([part.reshape(-1) for part in (a, b, c)])).view(torch.int32)
    out = torch.zeros(128, dtype=torch.int32)
    lanes = "and.b32 %r10, %r1, 3; shr.u32 %r11, %r1, 2;"  # place in the group, group
    loads, stores = [], []

    def word(register, row, column, width, offset):
        loads.append(
            f"mad.lo.s32 %r80, {row}, {width}, {column}; add.s32 %r80, %r80, {offset}; mul.wide.u32 %rd80, %r80, 4;"
            f"add.s64 %rd80, %rd80, %rd1; ld.global.b32 {register}, [%rd80];"
        )

    for i in range(4):
        loads.append(f"add.s32 %r70, %r11, {8 * (i % 2)}; add.s32 %r71, %r10, {4 * (i // 2)};")
        word(f"%r{20 + i}", "%r70", "%r71", 8, 0)
    for i in range(2):
        loads.append(f"add.s32 %r70, %r10, {4 * i};")
        word(f"%r{30 + i}", "%r70", "%r11", 8, 128)
    for i in range(4):
        loads.append(f"add.s32 %r70, %r11, {8 * (i // 2)}; shl.b32 %r71, %r10, 1; add.s32 %r71, %r71, {i % 2};")
        word(f"%r{40 + i}", "%r70", "%r71", 8, 192)
        stores.append(
            f"add.s32 %r70, %r11, {8 * (i // 2)}; mad.lo.s32 %r80, %r70, 8, %r10; add.s32 %r80, %r80, %r10;"
            f"add.s32 %r80, %r80, {i % 2}; mul.wide.u32 %rd80, %r80, 4; add.s64 %rd80, %rd80, %rd2;"
            f"st.global.b32 [%rd80], %r{50 + i};"
        )
    multiply = (
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r50, %r51, %r52, %r53}, {%r20, %r21, %r22, %r23}, "
        "{%r30, %r31}, {%r40, %r41, %r42, %r43};"
    )
    play("\n".join([lanes, *loads, multiply, *stores]), flat, threads=32, out=out)
    assert np.array_equal(out.view(torch.float32).numpy().reshape(16, 8), a @ b + c)


def test_integers_wrap_and_keep_their_sign():
    body = """
 ld.global.b32 %r10, [%rd4];
 shr.s32 %r11, %r10, 1;
 div.s32 %r12, %r10, -3;
 mul.lo.s32 %r13, %r10, 1000003;
 mul.hi.s32 %r14, %r10, %r13;
 cvt.s64.s32 %rd10, %r10;
 shl.b64 %rd11, %rd10, 33;
 shr.u64 %rd12, %rd11, 40;
 cvt.u32.u64 %r15, %rd12;
 add.s32 %r16, %r11, %r12;
 add.s32 %r16, %r16, %r13;
 xor.b32 %r16, %r16, %r14;
 xor.b32 %r16, %r16, %r15;
 st.global.b32 [%rd5], %r16;
"""
    values = [0, 1, -1, 7, -8, 2**31 - 1, -(2**31), 123456789] * 8

    def expected(x):
        low = (x * 1000003 + 2**31) % 2**32 - 2**31
        quotient = -(abs(x) // 3) if x > 0 else abs(x) // 3
        wide = (x << 33) % 2**64 >> 40
        total = (x >> 1) + quotient + low
        return (total ^ (x * low >> 32) ^ wide) % 2**32

    out, _ = play(body, torch.tensor(values, dtype=torch.int32))
    assert [int(word) % 2**32 for word in out] == [expected(x) for x in values]


# ---- who runs when


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_lanes_part_and_meet(seed):
    body = """
 mov.b32 %r10, 0;
 mov.b32 %r11, %r1;
$loop:
 setp.eq.s32 %p1, %r11, 0;
 @%p1 bra $done;
 add.s32 %r10, %r10, %r11;
 add.s32 %r11, %r11, -1;
 bra.uni $loop;
$done:
 shfl.sync.bfly.b32 %r12, %r10, 1, 31, -1;
 @!%p1 add.s32 %r12, %r12, 1000;
 st.global.b32 [%rd5], %r12;
"""
    out, _ = play(body, seed=seed)
    assert out.tolist() == [(n ^ 1) * ((n ^ 1) + 1) // 2 for n in range(64)]


def test_shuffles_of_segments():
    body = "shfl.sync.idx.b32 %r10, %r1, 3, 4127, -1;\nst.global.b32 [%rd5], %r10;"  # 4127: segments of 16 lanes
    assert play(body)[0].tolist() == [n & ~15 | 3 for n in range(64)]


EXCHANGE = """
 ld.global.b32 %r10, [%rd4];
 st.shared.b32 [%r4], %r10;
{wait}
 sub.s32 %r11, 63, %r1;
 shl.b32 %r11, %r11, 2;
 add.s32 %r11, %r11, %r9;
 ld.shared.b32 %r12, [%r11];
 st.global.b32 [%rd5], %r12;
"""


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_a_barrier_orders_warps(seed):
    assert play(EXCHANGE.format(wait="bar.sync 0;"), seed=seed)[0].tolist() == list(range(63, -1, -1))


def test_a_barrier_of_some_warps():
    body = "setp.ge.u32 %p1, %r1, 64;\n@%p1 bra $on;\n" + EXCHANGE.format(wait="bar.sync 1, 64;") + "$on:"
    for seed in SEEDS:
        assert play(body, threads=96, seed=seed)[0].tolist() == [*range(63, -1, -1), *[-1] * 32]


def test_a_missing_barrier_shows():
    """Some schedule reads what has not been written, which is the poison of shared memory."""
    found = [play(EXCHANGE.format(wait=""), seed=seed)[0].tolist() for seed in SEEDS]
    assert any(words != list(range(63, -1, -1)) for words in found)
    assert any(-1 in words for words in found)


BULK = """
 setp.ne.s32 %p1, %r1, 0;
 @%p1 bra $rest;
 mov.b32 %r10, 1;
 mbarrier.init.shared.b64 [%r9+256], %r10;
 mov.b32 %r11, 256;
 mbarrier.arrive.expect_tx.shared.b64 %rd10, [%r9+256], %r11;
 add.s32 %r12, %r9, 256;
 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r9], [%rd1], %r11, [%r12];
$rest:
 bar.sync 0;
{wait}
 ld.shared.b32 %r12, [%r4];
 st.global.b32 [%rd5], %r12;
 bar.sync 0;
{late}
"""
WAIT = """
$again{n}:
 mbarrier.try_wait.parity.shared.b64 %p2, [%r9+256], 0;
 @!%p2 bra $again{n};
"""


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_a_bulk_copy_is_waited_for(seed):
    assert play(BULK.format(wait=WAIT.format(n=1), late=""), seed=seed)[0].tolist() == list(range(64))


def test_a_bulk_copy_that_is_not_waited_for_shows():
    found = [play(BULK.format(wait="", late=WAIT.format(n=1)), seed=seed)[0].tolist() for seed in SEEDS]
    assert any(-1 in words for words in found)


def test_a_copy_that_nobody_waited_for_meets_a_cta_that_has_ended():
    with pytest.raises(ValueError, match="finds it ended"):
        for seed in SEEDS:
            play(BULK.format(wait="", late=""), seed=seed)


SMALL_COPY = """
 cp.async.ca.shared.global [%r4], [%rd4], 4;
{wait}
 ld.shared.b32 %r12, [%r4];
 st.global.b32 [%rd5], %r12;
 cp.async.wait_all;
"""


def test_a_small_copy_is_waited_for():
    for seed in SEEDS:
        assert play(SMALL_COPY.format(wait="cp.async.wait_all;"), seed=seed)[0].tolist() == list(range(64))
    found = [play(SMALL_COPY.format(wait=""), seed=seed)[0].tolist() for seed in SEEDS]
    assert any(-1 in words for words in found)


CLUSTER = """
 setp.ne.s32 %p1, %r1, 0;
 @%p1 bra $ready;
 mov.b32 %r10, 1;
 mbarrier.init.shared.b64 [%r9+256], %r10;
 mov.b32 %r11, 4;
 mbarrier.arrive.expect_tx.shared.b64 %rd10, [%r9+256], %r11;
$ready:
{arrive}
 @%p1 bra $sent;
 xor.b32 %r13, %r2, 1;
 mapa.shared::cluster.u32 %r14, %r9, %r13;
 add.s32 %r15, %r14, 256;
 add.s32 %r16, %r2, 70;
 st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r14], %r16, [%r15];
$sent:
 bar.sync 0;
$again:
 mbarrier.try_wait.parity.shared.b64 %p2, [%r9+256], 0;
 @!%p2 bra $again;
 ld.shared.b32 %r12, [%r9];
 mad.lo.s32 %r17, %r2, 64, %r1;
 mul.wide.u32 %rd20, %r17, 4;
 add.s64 %rd20, %rd20, %rd2;
 st.global.b32 [%rd20], %r12;
"""


def test_a_message_within_a_cluster():
    together = "barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;"
    for seed in (None, *SEEDS):
        out = torch.full((128,), -1, dtype=torch.int32)
        play(CLUSTER.format(arrive=together), out=out, seed=seed, blocks=2, cluster=2)
        assert out.tolist() == [71] * 64 + [70] * 64
    with pytest.raises(ValueError, match="no mbarrier was initialized"):
        for seed in SEEDS:
            play(CLUSTER.format(arrive=""), out=torch.zeros(128, dtype=torch.int32), seed=seed, blocks=2, cluster=2)


# ---- what is refused


@pytest.mark.parametrize(
    "body, error, text",
    [
        ("ld.global.b32 %r10, [%rd4+256];", MemoryFault, "4 bytes at .* are in no tensor; near: "),
        ("ld.global.b32 %r10, [%rd4+-4];", MemoryFault, "in no tensor"),
        ("ld.global.v2.b32 {%r10, %r11}, [%rd4];", MemoryFault, "misaligned|in no tensor"),
        ("ld.shared.b32 %r10, [%r4+4096];", MemoryFault, "of shared"),
        ("ld.shared.v2.b32 {%r10, %r11}, [%r4];", MemoryFault, "misaligned"),
        (
            "setp.lt.s32 %p1, %r1, 40;\n@%p1 bra $on;\nret;\n$on:\nbar.warp.sync -1;",
            SimulationError,
            "24 in line|8 in li",
        ),
        (
            "setp.lt.s32 %p1, %r1, 1;\n@%p1 mbarrier.init.shared.b64 [%r9], 2;\nbar.sync 0;\n"
            + WAIT.format(n=1).replace("256", "0"),
            SimulationError,
            "64 lanes wait for ever",
        ),
        ("lg2.approx.ftz.f32 %r10, %r1;", UnknownPtx, "lg2"),
        ("add.rz.f32 %r10, %r1, %r1;", UnknownPtx, "add.rz.f32"),
        ("bar.sync 0, 96;", SimulationError, "64 lanes wait for ever"),
    ],
)  # fmt: skip
def test_refused(body, error, text):
    with pytest.raises(error, match=text):
        play(body)


def test_global_memory_waits_for_the_grid_ahead():
    with pytest.raises(SimulationError, match=r"before griddepcontrol\.wait"):
        play("ld.global.b32 %r10, [%rd4];\ngriddepcontrol.wait;", dependent=True)
    play("griddepcontrol.wait;\nld.global.b32 %r10, [%rd4];", dependent=True)
    play("ld.global.b32 %r10, [%rd4];")


def test_a_missing_barrier_of_a_warp_shows():
    body = EXCHANGE.replace("63", "31").replace("{wait}", "{wait}") + ""
    right = [play(body.format(wait="bar.warp.sync -1;"), threads=32, seed=seed)[0].tolist() for seed in range(30)]
    assert all(words == list(range(31, -1, -1)) for words in right)
    assert any(-1 in play(body.format(wait=""), threads=32, seed=seed)[0].tolist() for seed in range(30))


# ---- what is counted


@pytest.mark.parametrize("stride, wavefronts", [(1, 2), (2, 4), (32, 64), (0, 2)])
def test_wavefronts_of_shared_memory(stride, wavefronts):
    body = f"""
 mul.lo.s32 %r10, %r1, {4 * stride};
 and.b32 %r10, %r10, 4095;
 add.s32 %r10, %r10, %r9;
 ld.shared.b32 %r11, [%r10];
"""
    program = Program(parse(_HEAD.format(threads=64, body=body)))
    report = Machine(program, (1, 1, 1), 1, bytes(16), 8192, GlobalMemory([]), Schedule()).run()
    assert (report.wavefronts, report.ideal) == (wavefronts, 2)


def test_traffic_and_instructions():
    out, report = play("ld.global.b32 %r10, [%rd4];\nst.global.b32 [%rd5], %r10;")
    assert out.tolist() == list(range(64))
    assert report.loaded == {"source": 256}
    assert report.stored == {"out": 256}
    assert sum(report.issued.values()) == 2 * (10 + 2 + 1)  # what the kernel begins with, the body, and its end
