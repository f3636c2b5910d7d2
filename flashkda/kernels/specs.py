# SPDX-License-Identifier: Apache-2.0
"""From a geometry and a tile to a compiled kernel: its cache key, its compile recipe, and the loaded callable.

``KINDS`` names the kernels; ``*_chunked`` are those of that numerics mode, and with a persistent tile ``fused_*``
becomes ``persistent_*``. The DSL is imported only when one is compiled. A key carries what changes the code and no
more: neither heads nor strides nor pool sizes, and the window rounded up to a power of two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..jit.cache import is_loaded as _is_loaded
from ..jit.cache import load_kernel
from ..jit.key import KernelKey
from .traits import HEAD_DIM, WARP, ChunkedTraits, CommitTraits, Traits, chunked_warp_roles, warp_roles, window_capacity

if TYPE_CHECKING:
    from ..commit import CommitGeometry
    from ..geometry import VerifyGeometry
    from ..planner import Tile

# The driver takes 1 KiB of shared memory a CTA; alignment and some words of the kernel's own stay below another.
_RESERVED = 1024

KINDS = (
    "short_conv", "record", "gated_rms_norm", "fused_verify", "fused_decode", "decode_rule", "record_chunked",
    "fused_verify_chunked", "fused_round",
)  # fmt: skip
_FUSED = ("fused_verify", "fused_decode", "fused_verify_chunked", "fused_round")
_CHUNKED = ("record_chunked", "fused_verify_chunked")
_DECODE = ("fused_decode", "decode_rule")

#: Traits that each kernel's code does not depend on are left at their defaults, so that geometries share kernels.
_IGNORED = {
    "fused_verify": (),
    "fused_round": (),
    "record": ("conv_layout", "conv_weight_dtype", "norm_weight_dtype", "norm", "has_num_accepted", "norm_eps"),
    "fused_verify_chunked": ("rows_per_thread", "key_lanes"),
    "record_chunked": (
        "conv_layout", "conv_weight_dtype", "norm_weight_dtype", "norm", "has_num_accepted", "norm_eps",
        "rows_per_thread", "key_lanes",
    ),
    "fused_decode": ("records",),
    "decode_rule": (
        "conv_layout", "conv_weight_dtype", "norm_weight_dtype", "norm", "has_num_accepted", "norm_eps", "records",
    ),
    "short_conv": (
        "state_dtype", "norm_weight_dtype", "gate", "lower_bound", "norm", "records", "norm_eps", "persistent", "rows",
        "rows_per_thread", "key_lanes", "token_warps", "value_warps", "min_blocks", "padding",
        "bulk_state",
    ),
    "gated_rms_norm": (
        "capacity", "state_dtype", "conv_layout", "conv_weight_dtype", "gate", "lower_bound", "norm",
        "has_num_accepted", "records", "rows", "rows_per_thread", "key_lanes", "token_warps", "value_warps",
        "min_blocks", "padding", "bulk_state",
    ),
}  # fmt: skip


def traits_of(kind: str, geometry: VerifyGeometry, tile: Tile, arch: str) -> Traits:
    """The compile-time constants of kernel ``kind`` for this geometry, tile and architecture."""
    if tile.persistent and kind not in _FUSED:
        # Only the fused kernels have a persistent form; the rule alone takes the other tile for whole heads.
        tile = replace(tile, rows_per_thread=4, persistent=False)
    hopper_or_newer = arch not in ("sm_80", "sm_86", "sm_89")
    capacity = 1 if kind in _DECODE else window_capacity(geometry.window)
    chunked = kind in _CHUNKED
    rule_warps = tile.rows // tile.rows_per_thread * tile.key_lanes // WARP
    token_warps, value_warps = warp_roles(capacity, tile.rows, rule_warps)
    if tile.persistent:
        token_warps, value_warps = tile.threads // WARP, 0
    if chunked:
        token_warps, value_warps = chunked_warp_roles(capacity, tile.rows)
    everything: dict[str, Any] = {
        "capacity": capacity,
        "state_dtype": geometry.state_dtype,
        "conv_layout": geometry.conv_layout,
        "conv_weight_dtype": geometry.conv_weight_dtype,
        "norm_weight_dtype": geometry.norm_weight_dtype,
        "gate": geometry.gate,
        "lower_bound": geometry.lower_bound,
        "norm": geometry.norm,
        "vector": 4 if geometry.alignment == 16 else 1,
        "null_slot": geometry.null_slot,
        "index_dtype": geometry.index_dtype,
        "has_num_accepted": geometry.has_num_accepted,
        "records": geometry.records,
        "norm_eps": geometry.norm_eps,
        "rows": tile.rows,
        "rows_per_thread": tile.rows_per_thread,
        "key_lanes": tile.key_lanes,
        "token_warps": token_warps,
        "value_warps": value_warps,
        "padding": _padding(tile.rows, arch),
        "bulk_state": geometry.alignment == 16 and hopper_or_newer,
        "pdl": hopper_or_newer,
        "decode": kind in _DECODE,
        "persistent": tile.persistent,
        "fold": kind == "fused_round",
    }
    ignored = {name: Traits.__dataclass_fields__[name].default for name in _IGNORED[kind] if name != "capacity"}
    if "capacity" in _IGNORED[kind]:
        ignored["capacity"] = 1
    traits = (ChunkedTraits if chunked else Traits)(**(everything | ignored))
    return traits if kind in ("short_conv", "gated_rms_norm") else _occupancy(traits, kind in _FUSED, arch)


def _shared_memory(arch: str) -> int:
    """Bytes of shared memory of an SM."""
    return (100 if arch in ("sm_86", "sm_89", "sm_120a") else 164 if arch == "sm_80" else 228) * 1024


def _padding(rows: int, arch: str) -> int:
    """Tiles for few heads are to be alone on their SM while others are idle: half of its shared memory."""
    return _shared_memory(arch) // 2 if rows <= 32 else 0


def _occupancy(traits: Traits, fuse: bool, arch: str) -> Traits:
    """Drops the padding of a chunked or folding kernel and the staging of the state where they do not fit, and says how
    many CTAs share an SM (up to two of 256 threads, three where none holds the state in registers, two of a persistent
    kernel): the compiler then keeps to the registers that this leaves."""
    available, chunked = _shared_memory(arch), isinstance(traits, ChunkedTraits)
    if (chunked or traits.fold) and traits.shared_bytes(fuse) + 2 * _RESERVED > available:
        traits = replace(traits, padding=0)
    wanted = 2 if traits.persistent else 1
    if wanted * (traits.shared_bytes(fuse) + 2 * _RESERVED) > available:
        traits = replace(traits, bulk_state=False)
    fit = available // (traits.shared_bytes(fuse) + (_RESERVED + 512 if chunked else 2 * _RESERVED))
    if fuse and traits.conv_layout == "DS" and traits.capacity > 8:
        fit = 1  # a long window's taps, channel by channel, take more registers than two CTAs would leave
    # Loads of single elements, from the state or a channel-major window, take the registers of a third CTA.
    vectors = traits.bulk_state and traits.conv_layout == "SD"
    threads = 768 if chunked and fuse and traits.rows == HEAD_DIM and vectors else 512
    most = threads // traits.threads
    if traits.fold:
        most = 1  # what is folded takes the registers of a second CTA
    if traits.persistent:
        most = 2
    return replace(traits, min_blocks=max(1, min(fit, most)))


def make_spec(kind: str, geometry: VerifyGeometry, tile: Tile, arch: str) -> tuple[KernelKey, Callable[[], Any]]:
    """Cache key and recipe; the recipe returns (jit callable, fake arguments) and imports the DSL."""
    traits = traits_of(kind, geometry, tile, arch)
    name = kind.replace("fused", "persistent") if traits.persistent else kind
    key = KernelKey(name=name, params=tuple(sorted(traits.to_params().items())), arch=arch)
    return key, lambda: _recipe(name, traits)


def load(kind: str, geometry: VerifyGeometry, tile: Tile, arch: str) -> Callable[..., None]:
    """The compiled kernel, from memory, disk or the compiler. Launches on torch's current stream.

    That of a persistent tile wants the device's number of SMs before the tensors.
    """
    key, make = make_spec(kind, geometry, tile, arch)
    return load_kernel(key, make)


def is_loaded(kind: str, geometry: VerifyGeometry, tile: Tile, arch: str) -> bool:
    """Whether ``load`` would return from memory."""
    return _is_loaded(make_spec(kind, geometry, tile, arch)[0])


def make_commit_spec(geometry: CommitGeometry, arch: str) -> tuple[KernelKey, Callable[[], Any]]:
    """Cache key and recipe of the commit kernel."""
    verify = geometry.verify
    traits = CommitTraits(
        capacity=window_capacity(verify.window),
        state_dtype=verify.state_dtype,
        conv_layout=verify.conv_layout if geometry.compact else "SD",
        gate=verify.gate,
        lower_bound=verify.lower_bound,
        vector=4 if verify.alignment == 16 else 1,
        null_slot=verify.null_slot,
        index_dtype=verify.index_dtype,
        records=verify.records,
        compact=geometry.compact,
        has_dst=geometry.has_dst,
        has_boundary=geometry.has_boundary,
        has_accepted_indices=geometry.has_accepted_indices,
        pdl=arch not in ("sm_80", "sm_86", "sm_89"),
    )
    key = KernelKey(name="commit", params=tuple(sorted(traits.to_params().items())), arch=arch)
    return key, lambda: _recipe("commit", traits)


def load_commit(geometry: CommitGeometry, arch: str) -> Callable[..., None]:
    """The compiled commit kernel. Launches on torch's current stream."""
    return load_kernel(*make_commit_spec(geometry, arch))


def is_commit_loaded(geometry: CommitGeometry, arch: str) -> bool:
    """Whether ``load_commit`` would return from memory."""
    return _is_loaded(make_commit_spec(geometry, arch)[0])


def _recipe(kind: str, traits: Traits | CommitTraits) -> tuple[Any, tuple[Any, ...]]:
    from cutlass.cute.runtime import make_fake_stream

    from .chunked import FusedVerifyChunked, RecordChunked
    from .commit import Commit
    from .fakes import fake_tensors
    from .gated_rms_norm import GatedRmsNorm
    from .persistent import PersistentDecode, PersistentVerify
    from .short_conv import ShortConv
    from .verify import DecodeRule, FusedDecode, FusedVerify, Record

    kernels: dict[str, Any] = {
        "short_conv": ShortConv,
        "record": Record,
        "gated_rms_norm": GatedRmsNorm,
        "fused_verify": FusedVerify,
        "fused_round": FusedVerify,
        "record_chunked": RecordChunked,
        "fused_verify_chunked": FusedVerifyChunked,
        "fused_decode": FusedDecode,
        "decode_rule": DecodeRule,
        "persistent_verify": PersistentVerify,
        "persistent_round": PersistentVerify,
        "persistent_decode": PersistentDecode,
        "commit": Commit,
    }
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return kernels[kind](traits), (*fake_tensors(kind, traits), stream)
