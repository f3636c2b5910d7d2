# SPDX-License-Identifier: Apache-2.0
"""Keys and compile-time constants of the kernels, without the DSL."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest

from flashkda.capability import ARCHITECTURES
from flashkda.geometry import PRESETS, VerifyGeometry, preset
from flashkda.kernels.specs import KINDS, is_loaded, make_spec, traits_of
from flashkda.kernels.traits import window_capacity
from flashkda.planner import TILES

BASE = VerifyGeometry(heads=12, window=4)
ARCH = "sm_90a"
CHUNKED = ("record_chunked", "fused_verify_chunked")
TILED = ("record", "fused_verify", "fused_decode", "fused_round", "decode_rule", *CHUNKED)
FUSED = ("fused_verify", "fused_decode", "fused_round", "fused_verify_chunked")
WITHOUT_CLUSTERS = [arch for arch, info in ARCHITECTURES.items() if not info.cluster]

# Another value of each field, and the kernels whose code it changes.
CHANGES = [
    ({"heads": 96}, ()),
    ({"window": 3}, ()),
    ({"window": 5}, ("short_conv", "record", "fused_verify", "fused_round", *CHUNKED)),
    ({"state_dtype": "bfloat16"}, TILED),
    ({"conv_layout": "DS"}, ("short_conv", *FUSED)),
    ({"conv_weight_dtype": "bfloat16"}, ("short_conv", *FUSED)),
    ({"norm_weight_dtype": "bfloat16"}, ("gated_rms_norm", *FUSED)),
    ({"gate": "softplus", "lower_bound": None}, TILED),
    ({"lower_bound": -4.0}, TILED),
    ({"norm": False}, FUSED),
    ({"alignment": 2}, KINDS),
    ({"null_slot": -1}, KINDS),
    ({"index_dtype": "int64"}, KINDS),
    ({"has_num_accepted": True}, ("short_conv", *FUSED)),
    ({"records": "request"}, ("record", "fused_verify", "fused_round", *CHUNKED)),
    ({"records": "indices"}, ("record", "fused_verify", "fused_round", *CHUNKED)),
    ({"norm_eps": 1e-6}, ("gated_rms_norm", *FUSED)),
]


def key(kind, geometry=BASE, tile=TILES[0], arch=ARCH):
    return make_spec(kind, geometry, tile, arch)[0]


@pytest.mark.parametrize(("change", "kinds"), CHANGES, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_a_key_changes_with_what_changes_the_code(change, kinds):
    changed = {kind for kind in KINDS if key(kind, BASE.replace(**change)) != key(kind)}
    assert changed == set(kinds)
    assert changed == {kind for kind in KINDS if key(kind, BASE.replace(**change)).digest != key(kind).digest}


def test_the_changes_cover_the_geometry():
    named = {name for change, _ in CHANGES for name in change}
    # The kernels have one head dimension and one conv width; the planner refuses others.
    assert named == set(BASE.to_dict()) - {"head_dim", "conv_width"}


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_change_the_keys_of_tiled_kernels_only(kind):
    found = {key(kind, tile=tile) for tile in TILES}
    # Only the fused kernels have a persistent form; the rule alone has the tile of the same rows.
    tiles = [tile for tile in TILES if kind in FUSED or not tile.persistent]
    assert len(found) == (len(tiles) if kind in TILED else 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_holds_all_the_traits(kind):
    """What the recipe is given is what the key names, so that kernels of one key are one kernel."""
    traits = traits_of(kind, BASE, TILES[-1], ARCH)
    found = key(kind, tile=TILES[-1])
    assert found.name == kind and found.arch == ARCH
    assert dict(found.params) == {name: getattr(traits, name) for name in traits.__dataclass_fields__}


def test_only_a_round_folds_and_only_a_persistent_tile_persists():
    for kind, tile in itertools.product(KINDS, TILES):
        traits = traits_of(kind, BASE, tile, ARCH)
        assert traits.fold == (kind == "fused_round")
        assert traits.persistent == (tile.persistent and kind in FUSED)


def test_windows_are_rounded_up_to_a_power_of_two():
    capacities = [window_capacity(window) for window in range(1, 17)]
    assert capacities == [1, 2, 4, 4, *[8] * 4, *[16] * 8]
    assert [traits_of("record", BASE.replace(window=t), TILES[0], ARCH).capacity for t in range(1, 17)] == capacities


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("window", [1, 4, 8, 16])
def test_a_preset_keeps_its_options(name, tp, window):
    geometry = preset(name, tp=tp, window=window)
    for kind, tile, arch in itertools.product(KINDS, TILES, ARCHITECTURES):
        traits = traits_of(kind, geometry, tile, arch)
        assert traits.vector == 4 and traits.null_slot == 0
        if kind in TILED:
            assert (traits.gate, traits.lower_bound) == (PRESETS[name].gate, PRESETS[name].lower_bound)
            assert traits.capacity == (1 if traits.decode else window) and traits.decode == ("decode" in kind)
            assert traits.rows == tile.rows and traits.rows * traits.cluster == 128 and traits.cluster == tile.cluster
            assert traits.threads % 32 == 0 and tile.threads <= traits.threads <= 1024
        if kind in ("gated_rms_norm", *FUSED):
            assert traits.norm_eps == PRESETS[name].norm_eps
        # Tensor-parallel ranks share their kernels.
        assert key(kind, geometry, tile, arch) == key(kind, preset(name, window=window), tile, arch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_only_aligned_state_on_newer_architectures_is_copied_in_bulk(kind, arch):
    for tile, alignment in itertools.product(TILES, (16, 2)):
        traits = traits_of(kind, BASE.replace(alignment=alignment), tile, arch)
        assert traits.vector == (4 if alignment == 16 else 1)
        if alignment == 2 or arch in WITHOUT_CLUSTERS:
            assert not traits.bulk_state
        if arch in WITHOUT_CLUSTERS:
            assert not traits.pdl  # programmatic launches came with clusters


def test_architectures_share_no_key():
    for kind in KINDS:
        digests = {key(kind, arch=arch).digest for arch in ARCHITECTURES}
        assert len(digests) == len(ARCHITECTURES)


def test_a_kernel_that_was_not_loaded_is_not_loaded():
    assert not is_loaded("record", BASE.replace(null_slot=12345), TILES[0], ARCH)


def test_naming_a_kernel_imports_no_compiler():
    script = (
        "import sys; from flashkda.geometry import VerifyGeometry; from flashkda.kernels import specs\n"
        "from flashkda.planner import TILES\n"
        "print([specs.make_spec(kind, VerifyGeometry(12, 4), TILES[0], 'sm_90a')[0].digest for kind in specs.KINDS])\n"
        "print(sorted({'cutlass', 'tvm_ffi', 'torch', 'triton'} & sys.modules.keys()))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    digests, imported = done.stdout.splitlines()
    assert digests == str([key(kind).digest for kind in KINDS]) and imported == "[]"
