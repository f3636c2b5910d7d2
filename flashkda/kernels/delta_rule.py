# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule of one token, for the value rows of one thread:

S <- S * decay;  u = beta * (v - S k^);  S <- S + u k^T;  o = S_decayed q^ + u (k^.q^)

A row's 128 keys lie on ``key_lanes`` neighbouring lanes. Whatever that number is, the dot products have one order:
sixteen chains of eight fma, key 4l + 32j + c of chain (l, j // 2) at place (j % 2, c); the two chains of an l are added
first, then the l's by a butterfly over 4, 2, 1. With 8 lanes a thread holds both chains, with 16 it holds one.

A thread with R rows has 2R sums (S k^ and S q^ of each). They are reduced by halving: at each step a lane keeps one
half and gets its partner's part of it, so that one lane ends with one sum, or, with as many rows as lanes, with both
sums of one row (``paired``). Addition commutes, so the bits are those of the full butterfly.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32

from .memory import load, store, to_float
from .numerics import add, fma, mul, select, sub
from .traits import HEAD_DIM, Traits

_CHAIN = 8


class DeltaRule:
    """The rule for one tile. ``state`` fragments are fp32 [rows_per_thread * keys_per_thread], row-major."""

    def __init__(self, traits: Traits):
        self.rows = traits.rows_per_thread
        self.lanes = traits.key_lanes
        self.keys = traits.keys_per_thread
        self.chunks = self.keys // 4
        self.lean = traits.lean
        self.row_shift = self.lanes.bit_length() - self.rows.bit_length()
        self.paired = self.rows == self.lanes

    def key_offset(self, key_lane, chunk):
        """First of the four adjacent keys of this lane's ``chunk``."""
        if self.lanes == 8:
            return key_lane * 4 + 32 * chunk
        return (key_lane & 7) * 4 + (key_lane >> 3) * 64 + 32 * chunk

    def own_row(self, key_lane):
        """Which of the thread's rows this lane finishes."""
        return key_lane >> self.row_shift

    def finishes_output(self, key_lane):
        """True on the lanes that end with S q^ of their row, and so with o; the others end with S k^, and so with u."""
        return (key_lane & (1 << (self.row_shift - 1))) != 0

    def operands(self):
        """Fragment of one token's key, query and decay of this lane."""
        return cute.make_rmem_tensor((3, self.keys), Float32)

    def load_keys(self, array, token, key_lane):
        """This lane's keys of a [capacity, 128] array in shared memory."""
        values = []
        for chunk in range(self.chunks):
            values += load(array + (token * HEAD_DIM + self.key_offset(key_lane, chunk)), 4, 4)
        return values

    def load_operands(self, operands, shared, token, key_lane, chunks=None):
        """Fills ``operands`` from the arrays of ``shared`` (a TokenStore)."""
        for chunk in chunks or range(self.chunks):
            for which, array in enumerate((shared.key, shared.query, shared.decay)):
                values = load(array + (token * HEAD_DIM + self.key_offset(key_lane, chunk)), 4, 4)
                for i, value in enumerate(values):
                    operands[which, chunk * 4 + i] = value

    def load_state(self, state, source, key_lane, vector):
        """Fills the fragment from ``source``: pointer to the thread's first row, rows 128 elements apart."""
        for row in range(self.rows):
            for chunk in range(self.chunks):
                values = load(source + (row * HEAD_DIM + self.key_offset(key_lane, chunk)), 4, vector)
                for i, value in enumerate(to_float(values)):
                    state[row * self.keys + chunk * 4 + i] = value

    def store_state(self, state, target, key_lane, vector):
        """The counterpart of ``load_state``: the fragment, rounded to the pool's type."""
        for row in range(self.rows):
            for chunk in range(self.chunks):
                first = row * self.keys + chunk * 4
                values = [state[first + i].to(target.dtype) for i in range(4)]
                store(target + (row * HEAD_DIM + self.key_offset(key_lane, chunk)), values, vector)

    def decay_and_project(self, state, operands, before_chunk):
        """Decays the state in place; returns the thread's 2R partial sums [S k^, S q^] row by row.

        ``before_chunk(chunk)`` is called ahead of each four keys, for tiles that load operands as they go.
        """
        chains = []
        for first in range(0, self.keys, _CHAIN):
            sums = [None] * (2 * self.rows)
            for i in range(first, first + _CHAIN):
                if i % 4 == 0:
                    before_chunk(i // 4)
                key, query, decay = operands[0, i], operands[1, i], operands[2, i]
                for row in range(self.rows):
                    at = row * self.keys + i
                    s = mul(state[at], decay)
                    state[at] = s
                    for j, operand in ((2 * row, key), (2 * row + 1, query)):
                        sums[j] = mul(s, operand) if i == first else fma(s, operand, sums[j])
            chains.append(sums)
        if len(chains) == 1:
            return chains[0]
        return [add(x, y) for x, y in zip(*chains, strict=True)]

    def reduce(self, sums, key_lane):
        """A lane's finished sums, of row ``own_row``: [S k^, S q^] if paired, else one, by the next lower bit."""
        offset = self.lanes // 2
        while len(sums) > 1 and offset:
            half = len(sums) // 2
            upper = (key_lane & offset) != 0
            kept = [select(upper, sums[half + i], sums[i]) for i in range(half)]
            sent = [select(upper, sums[i], sums[half + i]) for i in range(half)]
            sums = [
                add(mine, cute.arch.shuffle_sync_bfly(other, offset)) for mine, other in zip(kept, sent, strict=True)
            ]
            offset //= 2
        while offset:
            sums = [add(total, cute.arch.shuffle_sync_bfly(total, offset)) for total in sums]
            offset //= 2
        return sums

    def update(self, state, key, corrections):
        """S <- S + u k^T on the decayed state; ``corrections`` one u a row."""
        for row in range(self.rows):
            for i in range(self.keys):
                at = row * self.keys + i
                state[at] = fma(corrections[row], key[i], state[at])

    def _of_all_rows(self, u):
        """Every row's u, from the lanes that finished them."""
        # Lane numbers within the segment of a row's lanes are constants, and cost no registers.
        segment = (32 - self.lanes) << 8 | 0x1F
        return [cute.arch.shuffle_sync(u, row << self.row_shift, mask_and_clamp=segment) for row in range(self.rows)]

    def step_paired(self, state, operands, shared, token, value, key_lane):
        """One token, for a tile whose lanes finish both sums of a row; ``value`` is v of ``own_row``. Returns its u and
        o."""
        beta, key_dot_query = (shared.beta + token).load(), (shared.key_dot_query + token).load()
        sums = self.decay_and_project(
            state, operands, lambda chunk: self.load_operands(operands, shared, token, key_lane, [chunk])
        )
        # Read k again rather than keep it: the barrier is what stops the compiler from keeping it all the same.
        cute.arch.sync_warp()
        key = self.load_keys(shared.key, token, key_lane)
        projected, output = self.reduce(sums, key_lane)
        u = mul(beta, sub(value, projected))
        self.update(state, key, self._of_all_rows(u))
        return u, fma(u, key_dot_query, output)

    def fold(self, state, key, decay, token, key_lane, corrections):
        """S <- S * decay + u k^T: one recorded token, with the roundings of ``step``. ``key`` and ``decay`` are
        [capacity, 128] in shared memory, ``corrections`` one u a row."""
        for chunk in range(self.chunks):
            place = token * HEAD_DIM + self.key_offset(key_lane, chunk)
            keys, decays = load(key + place, 4, 4), load(decay + place, 4, 4)
            for row in range(self.rows):
                for i in range(4):
                    at = row * self.keys + chunk * 4 + i
                    state[at] = fma(corrections[row], keys[i], mul(state[at], decays[i]))

    def step(self, state, operands, shared, token, following, value, key_lane):
        """One token; a tile that reads ahead has its operands at hand and loads those of token ``following``.

        ``value`` is v of the lane's ``own_row``. Returns that row's o where ``finishes_output`` and its u on the row's
        other lanes.
        """
        # Where the state fills the registers there are none for the next token's operands; other warps hide the wait.
        ahead = not self.lean

        def before_chunk(chunk):
            if not ahead:
                self.load_operands(operands, shared, token, key_lane, [chunk])

        beta, key_dot_query = (shared.beta + token).load(), (shared.key_dot_query + token).load()
        sums = self.decay_and_project(state, operands, before_chunk)
        key = [operands[0, i] for i in range(self.keys)]
        if ahead:
            self.load_operands(operands, shared, following, key_lane)
        (total,) = self.reduce(sums, key_lane)
        u = mul(beta, sub(value, total))
        corrections = self._of_all_rows(u)
        own = corrections[0]
        row = self.own_row(key_lane)
        for i in range(1, self.rows):
            own = select(row == i, corrections[i], own)
        if not ahead:
            # Read k again rather than keep it: the barrier is what stops the compiler from keeping it all the same.
            cute.arch.sync_warp()
            key = self.load_keys(shared.key, token, key_lane)
        self.update(state, key, corrections)
        return select(self.finishes_output(key_lane), fma(own, key_dot_query, total), own)
