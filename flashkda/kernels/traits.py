# SPDX-License-Identifier: Apache-2.0
"""What a kernel is compiled for: the part of a geometry and a tile that changes the code."""

from __future__ import annotations

from dataclasses import asdict, dataclass

HEAD_DIM = 128
TAPS = 4
WARP = 32
#: Channels that one lane holds in the stages that give a whole head to one warp.
QUAD = 4


def window_capacity(window: int) -> int:
    """Windows share kernels: code is compiled for the next power of two, lengths are read at run time."""
    return 1 << (window - 1).bit_length()


@dataclass(frozen=True)
class Traits:
    """Compile-time constants of one kernel.

    ``rows`` value rows a CTA, ``rows_per_thread`` and ``key_lanes`` of the delta rule; a head is split over
    ``cluster`` CTAs. ``min_blocks`` CTAs must fit an SM (it caps the
    registers). ``vector`` is the number of bf16 or fp32 elements of one access (4, or 1 where nothing is promised).
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
    bulk_state: bool = False
    min_blocks: int = 1
    pdl: bool = False

    @property
    def cluster(self) -> int:
        return HEAD_DIM // self.rows

    @property
    def threads(self) -> int:
        return self.rows // self.rows_per_thread * self.key_lanes

    @property
    def warps(self) -> int:
        return self.threads // WARP

    @property
    def keys_per_thread(self) -> int:
        return HEAD_DIM // self.key_lanes

    @property
    def quads(self) -> int:
        """Quads of value rows that a CTA owns."""
        return self.rows // QUAD

    def to_params(self) -> dict[str, object]:
        return asdict(self)
