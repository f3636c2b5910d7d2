# SPDX-License-Identifier: Apache-2.0
"""What a kernel is compiled for: the part of a geometry and a tile that changes the code."""

from __future__ import annotations

from dataclasses import asdict, dataclass

HEAD_DIM = 128
TAPS = 4
WARP = 32
#: Channels that one lane holds in the stages that give a whole head to one warp.
QUAD = 4
#: Words in shared memory that say which window a persistent CTA works on.
WINDOW_WORDS = 8


def window_capacity(window: int) -> int:
    """Windows share kernels: code is compiled for the next power of two, lengths are read at run time."""
    return 1 << (window - 1).bit_length()


@dataclass(frozen=True)
class Traits:
    """Compile-time constants of one kernel.

    ``rows`` value rows a CTA, ``rows_per_thread`` and ``key_lanes`` of the delta rule; a head is split over
    ``cluster`` CTAs. ``token_warps`` prepare q, k and gates, a token each at a time; ``value_warps`` behind them
    prepare v, or all threads do where there are none. The rule runs on the first ``rule_threads``. ``min_blocks`` CTAs
    must fit an SM, which caps the registers. ``bulk_state``: the state comes through shared memory by one bulk copy.
    ``padding`` bytes of shared memory keep a second CTA off the SM. ``decode``: one token, the state is written, and
    nothing is recorded. ``fold``: the accepted records of the window before are folded into the state first.
    ``persistent``: CTAs stay on their SM and take one head after another.
    ``vector`` is the number of bf16 or fp32 elements of one access: 4, or 1 where no alignment is promised.
    """

    capacity: int
    state_dtype: str = "float32"
    conv_layout: str = "SD"
    conv_weight_dtype: str = "float32"
    norm_weight_dtype: str = "float32"
    gate: str = "bounded"
    lower_bound: float | None = -5.0
    norm: bool = True
    vector: int = 4
    null_slot: int = 0
    index_dtype: str = "int32"
    has_num_accepted: bool = False
    records: str = "slot"
    norm_eps: float = 1e-5
    rows: int = HEAD_DIM
    rows_per_thread: int = 4
    key_lanes: int = 8
    token_warps: int = 4
    value_warps: int = 0
    min_blocks: int = 1
    padding: int = 0
    bulk_state: bool = False
    pdl: bool = False
    decode: bool = False
    fold: bool = False
    persistent: bool = False

    @property
    def cluster(self) -> int:
        return HEAD_DIM // self.rows

    @property
    def rule_threads(self) -> int:
        return self.rows // self.rows_per_thread * self.key_lanes

    @property
    def threads(self) -> int:
        return max(self.rule_threads, (self.token_warps + self.value_warps) * WARP)

    @property
    def value_threads(self) -> int:
        """Threads that prepare v: the value warps, or all where no warps are set apart."""
        return self.value_warps * WARP or self.threads

    @property
    def keys_per_thread(self) -> int:
        return HEAD_DIM // self.key_lanes

    @property
    def lean(self) -> bool:
        """Whether the state alone takes so many registers that nothing else may be kept over the rule."""
        return self.rows_per_thread * self.keys_per_thread >= 64

    @property
    def result_blocks(self) -> tuple[int, int]:
        """Where u and o stand behind v, in arrays of [capacity, rows]. A lean tile, short of shared memory too, puts u
        in place of its v (a barrier of the warp lies between)."""
        return (0, 1) if self.lean else (1, 2)

    @property
    def quads(self) -> int:
        """Quads of value rows that a CTA owns."""
        return self.rows // QUAD

    def shared_bytes(self, fuse: bool) -> int:
        """Shared memory of a CTA of ``verify``, but for alignment and some words."""
        operands = 3 * HEAD_DIM + 2
        if self.persistent:
            # A window ready for the rule, and the inputs of the next: q|k|v behind three rows of history, gates,
            # records, weights.
            ready = 4 * (operands + (2 + 3 * self.fold) * HEAD_DIM) + 2 * self.norm * HEAD_DIM
            rows = 3 * (3 + self.capacity) + self.capacity * (1 + self.norm + 4 * self.fold)
            weights = 3 * TAPS * (4 if self.conv_weight_dtype == "float32" else 2) + 4
            inputs = HEAD_DIM * (2 * rows + weights) + 16 * WINDOW_WORDS + 4 * (self.capacity + 1) + 64
            state = self._state_bytes(HEAD_DIM) * self.bulk_state
            return self.capacity * ready + inputs + state + 4 * HEAD_DIM * self.norm
        by_row = self.result_blocks[1] + 1 + (fuse and self.norm)
        folded = (2 * HEAD_DIM + self.rows) * self.fold
        tokens = self.capacity * 4 * (operands + by_row * self.rows + self.cluster + folded)
        return self.padding + tokens + self._state_bytes(self.rows) * self.bulk_state

    def _state_bytes(self, rows: int) -> int:
        return rows * HEAD_DIM * (4 if self.state_dtype == "float32" else 2)

    def to_params(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class ChunkedTraits(Traits):
    """``Traits`` of the chunked rule, which has no use for ``rows_per_thread`` and ``key_lanes``."""

    @property
    def rule_threads(self) -> int:
        return WARP * max(self.project_warps, self.couple_warps)

    @property
    def project_warps(self) -> int:
        """Warps with a part of the tensor-core product."""
        return self.row_tiles * self.column_warps * self.key_warps

    @property
    def splits_tokens(self) -> bool:
        """Whether p and r of a token are two warps' work; with more tokens there are enough without."""
        return self.capacity <= 4

    @property
    def couple_warps(self) -> int:
        """Warps that make p and r, a token or half of one each at a time."""
        return 2 * self.capacity if self.splits_tokens else min(self.capacity, 8 if self.rows < HEAD_DIM else 16)

    @property
    def lean(self) -> bool:
        """False: the state is never held in registers."""
        return False

    @property
    def row_tiles(self) -> int:
        """Tensor-core tiles of the CTA's rows."""
        return self.rows // 16

    @property
    def column_tiles(self) -> int:
        """Tensor-core tiles of p and r, four tokens each."""
        return -(-self.capacity // 4)

    @property
    def column_warps(self) -> int:
        """Warps that share a row tile, with different columns of it."""
        return min(self.column_tiles, max(8, self.capacity) // self.row_tiles)

    @property
    def key_warps(self) -> int:
        """Warps that share a tile of rows and columns, with different keys: where a CTA has few tiles and an SM to
        itself."""
        return min(4, 8 // (self.row_tiles * self.column_warps)) if self.rows <= 32 else 1

    @property
    def folded(self) -> bool:
        """Whether [p|r] takes the place of what it is made from: for many requests, where shared memory decides how
        many CTAs share an SM; it costs two barriers."""
        return self.rows == HEAD_DIM

    @property
    def result_blocks(self) -> tuple[int, int]:
        """o, and behind it u in place of v."""
        return 1, 0

    def shared_bytes(self, fuse: bool) -> int:
        block = self.capacity * self.rows
        words = 2 * self.column_tiles * 8 * HEAD_DIM + 2 * self.capacity**2 + self.capacity * (2 + self.cluster) + block
        if not self.folded:
            words += 3 * HEAD_DIM * self.capacity + block * (1 + (fuse and self.norm))
            words += 8 * block if self.key_warps > 1 else 0
        state = self.rows * HEAD_DIM * (4 if self.state_dtype == "float32" else 2)
        return self.padding + 4 * words + state * self.bulk_state


@dataclass(frozen=True)
class CommitTraits:
    """Compile-time constants of the commit kernel; names as in ``Traits`` and ``CommitGeometry``."""

    capacity: int
    state_dtype: str = "float32"
    conv_layout: str = "SD"
    gate: str = "bounded"
    lower_bound: float | None = -5.0
    vector: int = 4
    null_slot: int = 0
    index_dtype: str = "int32"
    records: str = "slot"
    compact: bool = False
    has_dst: bool = False
    has_boundary: bool = False
    has_accepted_indices: bool = False
    pdl: bool = False

    def to_params(self) -> dict[str, object]:
        return asdict(self)


def warp_roles(capacity: int, rows: int, rule_warps: int) -> tuple[int, int]:
    """(token_warps, value_warps) of a tile.

    A head that is split over many CTAs has an SM to itself, so it gets up to eight warps for the tokens and, where that
    leaves enough registers a thread, more for v. A CTA with many rows uses what its rule leaves idle while tokens are
    prepared.
    """
    value_items = capacity * rows // QUAD
    if rows <= 32:
        return min(capacity, 8), 0 if capacity > 8 else 1 if value_items <= WARP else 2
    if rule_warps >= 2 * capacity:
        return capacity, min(rule_warps - capacity, -(-value_items // WARP))
    return min(capacity, rule_warps), 0


def chunked_warp_roles(capacity: int, rows: int) -> tuple[int, int]:
    """The same for the chunked rule: with many rows a warp a token, and behind them v, or v by all warps."""
    if rows <= 32:
        return warp_roles(capacity, rows, 0)
    return capacity, capacity if rows == HEAD_DIM and capacity <= 4 else 0
