# SPDX-License-Identifier: Apache-2.0
"""The delta rule of a whole window at once: nothing is serial in the tokens but a triangular solve.

With P(t, i) the product of the decays of tokens i+1 .. t (key by key), and P(t) that of tokens 0 .. t:

    p_t = P(t) k^_t                    r_t = P(t) q^_t
    c_ti = sum k^_t P(t, i) k^_i       d_ti = sum q^_t P(t, i) k^_i
    u_t = beta_t (v_t - S p_t - sum_{i<t} c_ti u_i)
    o_t = S r_t + sum_{i<=t} d_ti u_i

Decays are factors in [0, 1] and are only ever multiplied: nothing overflows, and what has decayed to 0 is 0, as it is
in the rule itself. (Quotients of cumulative decays would be 0/0 there.)

S [p|r] runs on the tensor cores in tf32 with compensation: an fp32 number is the sum of two tf32 ones to 2^-23, and of
the four products only the one of the two small parts is left out. The tensor cores cut off where they accumulate, so
they only sum the eight keys of a step, from zero; steps are added outside, rounded to nearest. A bf16 state is a tf32
number as it is.

Orders of summation, whatever the tile and the window's capacity: c and d are chains of a lane's four keys, then a
butterfly over 16, 8, 4, 2, 1; S p and S r are four sums of four steps each, added in order; u and o take the earlier
tokens in order.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from . import memory
from .memory import load, store_shared, to_float
from .numerics import add, fma, mul, select, sub
from .place import Place
from .tf32 import bits, mma, number, split, split_state
from .token import TokenStore
from .traits import HEAD_DIM, QUAD, WARP, ChunkedTraits

# A tile of the tensor cores: 16 value rows, 8 columns (p and r of four tokens); a step has 8 keys.
_ROWS, _COLUMNS = 16, 8
_TOKENS = _COLUMNS // 2
# Four lanes share a row; of each 32 keys a lane has eight adjacent ones, two for each of four steps.
_SPAN = 32
_SPANS = HEAD_DIM // _SPAN
_PIECE = _SPAN // 4
_WORDS = _COLUMNS * HEAD_DIM


class ChunkStore(NamedTuple):
    """Shared memory of the chunk, all fp32. [p|r] as two tf32 parts, ``high`` and ``low`` [tiles, 4, 2, 32 lanes, 4] in
    the order in which lanes read them; ``coefficients`` [c and d, capacity, capacity]; ``partials`` [4, S p and S r,
    capacity, rows] where warps share the keys, or None; ``outputs`` o and, behind it, ``values`` v, then u, [capacity,
    rows]; ``factors`` of the norm as ``values``, or None."""

    high: object
    low: object
    coefficients: object
    partials: object
    outputs: object
    values: object
    factors: object


def chunk_store(allocator, traits: ChunkedTraits, norm: bool) -> tuple[TokenStore, ChunkStore]:
    """Shared memory of a window: of its tokens and of the chunk.

    Folded, [p|r] takes the place of the tokens it was made from and of o, and the norm's factors the place of [p|r]:
    each has been read by all, and a barrier has passed, before the next is written.
    """
    capacity = traits.capacity
    words, block, operands = traits.column_tiles * _WORDS, capacity * traits.rows, 3 * capacity * HEAD_DIM
    coefficients = memory.shared_array(allocator, Float32, 2 * capacity**2)
    scalars = memory.shared_array(allocator, Float32, 2 * capacity)
    high = memory.shared_array(allocator, Float32, 2 * words + block if traits.folded else 2 * words)
    partials = None
    if traits.folded:
        keys, outputs, factors = high, high + (2 * words - block), high
    else:
        keys = memory.shared_array(allocator, Float32, operands)
        outputs = memory.shared_array(allocator, Float32, 2 * block)
        factors = memory.shared_array(allocator, Float32, block) if norm else None
        if traits.key_warps > 1:
            partials = memory.shared_array(allocator, Float32, _SPANS * 2 * block)
    # Queries lie right behind the keys: k and q of a token differ by a constant.
    arrays = (keys + i * capacity * HEAD_DIM for i in range(3))
    tokens = TokenStore(*arrays, scalars, scalars + capacity)
    return tokens, ChunkStore(high, high + words, coefficients, partials, outputs, outputs + block, factors)


def _dot(x, y):
    total = mul(x[0], y[0])
    for i in range(1, QUAD):
        total = fma(x[i], y[i], total)
    return total


def _reduce(sums, lane):
    """Sums over the warp's lanes, a power of two of them: lane l ends with number l * len(sums) // 32.

    While there are several, a lane keeps one half of them and gets its partner's part of it; the pairs that are added
    are those of a butterfly over 16, 8, 4, 2, 1, so the bits do not depend on how many there are.
    """
    offset = WARP // 2
    while len(sums) > 1:
        half = len(sums) // 2
        upper = (lane & offset) != 0
        kept = [select(upper, sums[half + i], sums[i]) for i in range(half)]
        sent = [select(upper, sums[i], sums[half + i]) for i in range(half)]
        sums = [add(mine, cute.arch.shuffle_sync_bfly(other, offset)) for mine, other in zip(kept, sent, strict=True)]
        offset //= 2
    total = sums[0]
    while offset:
        total = add(total, cute.arch.shuffle_sync_bfly(total, offset))
        offset //= 2
    return total


class ChunkedRule:
    """The three phases of one tile, with a barrier between each two."""

    def __init__(self, traits: ChunkedTraits):
        self.traits = traits
        self.state_is_tf32 = traits.state_dtype == "bfloat16"
        self.kinds = 1 if traits.splits_tokens else 2
        self.passes = -(-2 * traits.capacity // (self.kinds * traits.couple_warps))
        self.row_tiles, self.column_warps = traits.row_tiles, traits.column_warps
        self.tiles = -(-traits.column_tiles // self.column_warps)
        self.spans, self.shared_keys = _SPANS // traits.key_warps, traits.key_warps > 1
        self.joins = self.shared_keys and traits.capacity > 4
        # Warps that have a row tile: all find all of its u, and share the outputs.
        self.solve_warps = min(max(1, traits.threads // WARP // self.row_tiles), -(-traits.capacity // 2))

    # ---- 1. what the tokens are to each other

    def _couple_token(self, place: Place, i):
        """Token of a warp's pass ``i``. Later tokens have more before them: a warp takes an early and a late one."""
        if self.traits.splits_tokens:
            return place.warp % self.traits.capacity
        within = self.traits.couple_warps - 1 - place.warp if i % 2 else place.warp
        return i * self.traits.couple_warps + within

    @cute.jit
    def couple(self, place: cutlass.Constexpr, shared: cutlass.Constexpr, chunk: cutlass.Constexpr):
        """A warp a token, or a half: c and p, d and r, of all tokens up to it, by running products of the decays."""
        columns = cute.make_rmem_tensor((self.passes, self.kinds, QUAD), Float32)
        first = place.warp // self.traits.capacity if self.traits.splits_tokens else Int32(0)
        for i in cutlass.range_constexpr(self.passes):
            token = self._couple_token(place, i)
            if place.warp < self.traits.couple_warps:
                self._couple(token, first, i, columns, place, shared, chunk)
        if cutlass.const_expr(self.traits.folded):
            cute.arch.sync_threads()
        for i in cutlass.range_constexpr(self.passes):
            token = self._couple_token(place, i)
            if place.warp < self.traits.couple_warps:
                for which in cutlass.range_constexpr(self.kinds):
                    values = [columns[i, which, j] for j in range(QUAD)]
                    self._store_column(2 * token + first + which, values, place, chunk)

    @cute.jit
    def _couple(
        self, token: Int32, first: Int32, number: cutlass.Constexpr, columns: cute.Tensor, place: cutlass.Constexpr,
        shared: cutlass.Constexpr, chunk: cutlass.Constexpr,
    ):  # fmt: skip
        """``first`` of the kinds: 0 for k (c and p), 1 for q (d and r)."""
        capacity, kinds = self.traits.capacity, self.kinds
        sums = cute.make_rmem_tensor((kinds, capacity), Float32)
        at = place.lane * QUAD
        for which in cutlass.range_constexpr(kinds):
            source = shared.key + ((first + which) * (capacity * HEAD_DIM) + token * HEAD_DIM + at)
            values = load(source, QUAD, QUAD)
            for j in cutlass.range_constexpr(QUAD):
                columns[number, which, j] = values[j]
        for step in cutlass.range_constexpr(capacity):
            i = capacity - 1 - step
            for which in cutlass.range_constexpr(kinds):
                sums[which, i] = Float32(0.0)
            if i <= token:
                key = load(shared.key + (i * HEAD_DIM + at), QUAD, QUAD)
                decay = load(shared.decay + (i * HEAD_DIM + at), QUAD, QUAD)
                for which in cutlass.range_constexpr(kinds):
                    sums[which, i] = _dot([columns[number, which, j] for j in range(QUAD)], key)
                    for j in cutlass.range_constexpr(QUAD):
                        columns[number, which, j] = mul(columns[number, which, j], decay[j])
        total = _reduce([sums[which, i] for which in range(kinds) for i in range(capacity)], place.lane)
        index = place.lane * (kinds * capacity) // WARP
        which, i = first + index // capacity, index % capacity
        # Lanes that hold the same number store equal words to one place.
        (chunk.coefficients + ((which * capacity + token) * capacity + i)).store(total)

    def _store_column(self, column, values, place: Place, chunk: ChunkStore):
        """Both parts of a column's keys of this lane, where the lanes that read them will look."""
        span, lane = place.lane // (_SPAN // QUAD), place.lane % (_SPAN // QUAD)
        block = (column // _COLUMNS * _SPANS + span) * 2 + lane % 2
        at = block * (WARP * QUAD) + (column % _COLUMNS * 4 + lane // 2) * QUAD
        parts = [split(value) for value in values]
        store_shared(chunk.high + at, [number(high) for high, _ in parts])
        store_shared(chunk.low + at, [number(low) for _, low in parts])

    # ---- 2. the state

    @cute.jit
    def project(self, place: cutlass.Constexpr, source, vector: cutlass.Constexpr, chunk: cutlass.Constexpr):
        """S p is taken from v, and S r is o so far; or, where warps share the keys, each one's part of both goes to
        ``partials``. ``source``: pointer to the CTA's first row of the state. All threads call this."""
        totals = cute.make_rmem_tensor((self.tiles, 4), Float32)
        works = place.warp < self.traits.project_warps
        if works:
            self._project_tile(totals, place, source, vector, chunk)
        if cutlass.const_expr(self.traits.folded):
            cute.arch.sync_threads()
        if cutlass.const_expr(not self.shared_keys):
            if works:
                self._store_totals(totals, place, chunk)
        if cutlass.const_expr(self.traits.project_warps == self.row_tiles and self.solve_warps == 1):
            cute.arch.sync_warp()  # a warp's own rows
        else:
            cute.arch.sync_threads()
        if cutlass.const_expr(self.joins):
            self._join_parts(place, chunk)
            cute.arch.sync_threads()

    @cute.jit
    def _join_parts(self, place: cutlass.Constexpr, chunk: cutlass.Constexpr):
        """Adds up the parts of the spans, once for all who will read the sums."""
        block = self.traits.capacity * self.traits.rows
        for i in cutlass.range_constexpr(-(-block // self.traits.threads)):
            at = place.tid + i * self.traits.threads
            if at < block:
                value, output = (self._projected(which, chunk, at) for which in range(2))
                (chunk.values + at).store(value)
                (chunk.outputs + at).store(output)

    def _row(self, place: Place):
        return place.warp % self.row_tiles * _ROWS + place.lane // 4

    def _tile(self, place: Place, n):
        return place.warp // self.row_tiles % self.column_warps + n * self.column_warps

    @cute.jit
    def _project_tile(
        self, totals: cute.Tensor, place: cutlass.Constexpr, source, vector: cutlass.Constexpr,
        chunk: cutlass.Constexpr,
    ):  # fmt: skip
        row = self._row(place)
        first_span = place.warp // (self.row_tiles * self.column_warps) * self.spans
        for n in cutlass.range_constexpr(self.tiles):
            for j in cutlass.range_constexpr(4):
                totals[n, j] = Float32(0.0)
        zero = [Float32(0.0)] * 4
        # Unrolled, all loads are moved to the front: good for a warp alone, but many warps have no registers for it.
        for i in cutlass.range(self.spans, unroll=self.spans if self.shared_keys else 1):
            span = first_span + i
            keys = source + (row * HEAD_DIM + span * _SPAN + place.lane % 4 * _PIECE)
            upper = self._parts(self._load_piece(keys, place, vector))
            lower = self._parts(self._load_piece(keys + 8 * HEAD_DIM, place, vector))
            for n in cutlass.range_constexpr(self.tiles):
                tile = self._tile(place, n)
                at = (tile * _SPANS + span) * (2 * WARP * QUAD) + place.lane * QUAD
                columns = [
                    [bits(x) for half in range(2) for x in load(part + (at + half * (WARP * QUAD)), QUAD, QUAD)]
                    for part in (chunk.high, chunk.low)
                ]
                steps = []
                for step in cutlass.range_constexpr(_PIECE // 2):
                    one, two = 2 * step, 2 * step + 1
                    high = [upper[one][0], lower[one][0], upper[two][0], lower[two][0]]
                    low = [upper[one][1], lower[one][1], upper[two][1], lower[two][1]]
                    b_high, b_low = ([part[one], part[two]] for part in columns)
                    product = mma(high, b_low, zero)
                    if cutlass.const_expr(not self.state_is_tf32):
                        product = mma(low, b_high, product)
                    steps.append(mma(high, b_high, product))
                sums = [add(add(add(*x[:2]), x[2]), x[3]) for x in zip(*steps, strict=True)]
                if cutlass.const_expr(self.shared_keys):
                    self._store_part(span, tile, row, sums, place, chunk)
                else:
                    for j in cutlass.range_constexpr(4):
                        totals[n, j] = add(totals[n, j], sums[j])

    @cute.jit
    def _store_totals(self, totals: cute.Tensor, place: cutlass.Constexpr, chunk: cutlass.Constexpr):
        traits = self.traits
        for n in cutlass.range_constexpr(self.tiles):
            token = self._tile(place, n) * _TOKENS + place.lane % 4
            if token < traits.capacity:
                for half in cutlass.range_constexpr(2):
                    at = token * traits.rows + self._row(place) + 8 * half
                    value = chunk.values + at
                    value.store(sub(value.load(), totals[n, 2 * half]))
                    (chunk.outputs + at).store(totals[n, 2 * half + 1])

    @cute.jit
    def _store_part(
        self, span: Int32, tile: Int32, row: Int32, sums: cutlass.Constexpr, place: cutlass.Constexpr,
        chunk: cutlass.Constexpr,
    ):  # fmt: skip
        """A span's part of S p and S r, where other warps have the other spans."""
        traits = self.traits
        token = tile * _TOKENS + place.lane % 4
        if token < traits.capacity:
            part = chunk.partials + ((2 * span * traits.capacity + token) * traits.rows + row)
            for which in cutlass.range_constexpr(2):
                behind = part + which * (traits.capacity * traits.rows)
                behind.store(sums[which])
                (behind + 8).store(sums[2 + which])

    def _load_piece(self, keys, place: Place, vector):
        """Eight adjacent elements of the state."""
        if self.state_is_tf32 or not self.traits.bulk_state:
            return load(keys, _PIECE, vector)
        # Rows lie whole lines apart: neighbours take the halves in another order, so that they share no banks.
        odd = (place.lane // 4 & 1) != 0
        ahead = select(odd, Int32(QUAD), Int32(0))
        one, two = load(keys + ahead, QUAD, QUAD), load(keys + (QUAD - ahead), QUAD, QUAD)
        return [select(odd, *pair) for pair in (*zip(two, one, strict=True), *zip(one, two, strict=True))]

    def _parts(self, state):
        """(high, low) of each element of the state."""
        if self.state_is_tf32:
            return [(bits(x), None) for x in to_float(state)]
        return [split_state(x) for x in state]

    # ---- 3. the solve

    @cute.jit
    def solve(self, place: cutlass.Constexpr, shared: cutlass.Constexpr, chunk: cutlass.Constexpr):
        """A lane finds all u of its row and finishes every so many o: lanes and warps share a row's."""
        if place.warp < self.row_tiles * self.solve_warps:
            self._solve_rows(place, shared, chunk)

    def _projected(self, which, chunk: ChunkStore, at):
        """v - S p (``which`` 0) or S r (1) of the row and token ``at``, from the parts of the spans."""
        stored = (chunk.outputs if which else chunk.values) + at
        # Added as by a warp that has all spans.
        total, behind = Float32(0.0), self.traits.capacity * self.traits.rows
        for span in range(_SPANS):
            total = add(total, (chunk.partials + ((2 * span + which) * behind + at)).load())
        return total if which else sub(stored.load(), total)

    def _joined(self, which, chunk: ChunkStore, at):
        """The same, from wherever it is: with few tokens the solve itself adds up the parts."""
        if self.shared_keys and not self.joins:
            return self._projected(which, chunk, at)
        return ((chunk.outputs if which else chunk.values) + at).load()

    @cute.jit
    def _solve_rows(self, place: cutlass.Constexpr, shared: cutlass.Constexpr, chunk: cutlass.Constexpr):
        traits = self.traits
        capacity, rows = traits.capacity, traits.rows
        row = place.warp % self.row_tiles * _ROWS + place.lane % _ROWS
        sharers = 2 * self.solve_warps
        own = place.warp // self.row_tiles * 2 + place.lane // _ROWS
        rest = [self._joined(0, chunk, token * rows + row) for token in range(capacity)]
        beta = load(shared.beta, capacity, QUAD)
        corrections = []
        for token in cutlass.range_constexpr(capacity):
            total = rest[token]
            c = self._row_of(chunk.coefficients, token, token) if token else []
            for i in cutlass.range_constexpr(token):
                total = fma(-c[i], corrections[i], total)
            corrections.append(mul(beta[token], total))
        outputs = []
        for first in cutlass.range_constexpr(0, capacity, sharers):
            token = memory.minimum(first + own, Int32(capacity - 1))
            last = min(first + sharers, capacity)
            d = self._row_of(chunk.coefficients + capacity**2, token, last)
            total = self._joined(1, chunk, token * rows + row)
            for i in cutlass.range_constexpr(last):
                following = fma(d[i], corrections[i], total)
                # Later tokens are not looked at, not even times zero.
                total = following if i <= first else select(token >= i, following, total)
            outputs.append(total)
        if cutlass.const_expr(self.solve_warps == 1):
            cute.arch.sync_warp()
        else:
            # All warps of the row have read what is overwritten now.
            cute.arch.barrier(barrier_id=1, number_of_threads=WARP * self.row_tiles * self.solve_warps)
        for k in cutlass.range_constexpr(len(outputs)):
            token = memory.minimum(k * sharers + own, Int32(capacity - 1))
            (chunk.outputs + (token * rows + row)).store(outputs[k])
        # Equal words from all who have the row.
        for token in cutlass.range_constexpr(capacity):
            (chunk.values + (token * rows + row)).store(corrections[token])

    def _row_of(self, matrix, token, count):
        """The first ``count`` coefficients of a token, a few more where that makes whole vectors."""
        vector = min(QUAD, self.traits.capacity)
        return load(matrix + token * self.traits.capacity, -(-count // vector) * vector, vector)
