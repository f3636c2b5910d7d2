# SPDX-License-Identifier: Apache-2.0
"""Kernels share code where they should and keys where the code is the same: equal keys mean equal PTX, and other
options mean other keys and other PTX. Also that the table of kernels to compile (cases.py) covers what it claims.
"""

from __future__ import annotations

import itertools

import pytest

from flashkda.capability import ARCHITECTURES
from flashkda.commit import CommitGeometry
from flashkda.geometry import VerifyGeometry
from flashkda.kernels.specs import KINDS, make_commit_spec, make_spec
from flashkda.planner import TILES
from tests.compile.cases import (
    CLUSTER_ARCHS,
    COMMITS,
    DECOMPOSED_ARCHS,
    FACTORS,
    FUSED_KINDS,
    ROWS,
    SIBLING_ARCH,
    TILED_KINDS,
    quick_cases,
    row_geometry,
)
from tests.compile.rounding import IR_APPROXIMATE, IR_ARITHMETIC

pytestmark = pytest.mark.compile
pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

ARCH = "sm_90a"
BASE = VerifyGeometry(heads=12, window=4)

# All at once, what a kernel's code does not depend on.
IRRELEVANT = {
    "fused_verify": {},
    "fused_verify_chunked": {},
    "fused_round": {},
    "fused_decode": {"records": "indices"},
    "decode_rule": {
        "conv_layout": "DS", "conv_weight_dtype": "bfloat16", "norm_weight_dtype": "bfloat16", "norm": False,
        "has_num_accepted": True, "norm_eps": 1e-6, "records": "indices",
    },
    "record": {
        "conv_layout": "DS", "conv_weight_dtype": "bfloat16", "norm_weight_dtype": "bfloat16", "norm": False,
        "has_num_accepted": True, "norm_eps": 1e-6,
    },
    "short_conv": {
        "state_dtype": "bfloat16", "gate": "softplus", "lower_bound": None, "norm_weight_dtype": "bfloat16",
        "norm": False, "records": "request", "norm_eps": 1e-6,
    },
    "gated_rms_norm": {
        "window": 16, "state_dtype": "bfloat16", "gate": "softplus", "lower_bound": None, "conv_layout": "DS",
        "conv_weight_dtype": "bfloat16", "has_num_accepted": True, "records": "request",
    },
}  # fmt: skip
IRRELEVANT["record_chunked"] = IRRELEVANT["record"]

# One at a time, some of what it does depend on (all of it: tests/unit/test_kernel_specs.py).
RELEVANT = {
    "fused_verify": ({"norm": False},),
    "fused_round": ({"has_num_accepted": True},),
    "fused_verify_chunked": ({"norm": False}, {"state_dtype": "bfloat16"}),
    "record_chunked": ({"window": 8}, {"state_dtype": "bfloat16"}, {"records": "request"}),
    "fused_decode": ({"norm": False}, {"has_num_accepted": True}),
    "decode_rule": ({"state_dtype": "bfloat16"},),
    "record": (
        {"window": 8}, {"state_dtype": "bfloat16"}, {"gate": "softplus", "lower_bound": None}, {"records": "request"},
    ),
    "short_conv": ({"window": 2}, {"conv_layout": "DS"}, {"has_num_accepted": True}),
    "gated_rms_norm": ({"norm_weight_dtype": "bfloat16"}, {"norm_eps": 1e-6}, {"alignment": 2}, {"null_slot": -1}),
}  # fmt: skip


PERSISTENT = next(tile for tile in TILES if tile.persistent)


def spec(kind, geometry=BASE, tile=TILES[0], arch=ARCH):
    return make_spec, (kind, geometry, tile, arch)


def key(given):
    function, arguments = given
    return function(*arguments)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_geometries_that_share_a_key_share_the_code(kind, examiner):
    other = BASE.replace(**{"heads": 96, "window": 3, **IRRELEVANT[kind]})
    # Short conv and norm are not tiled.
    tile = TILES[0] if kind in TILED_KINDS else TILES[-1]
    one, two = spec(kind), spec(kind, other, tile)
    assert key(one) == key(two)
    assert examiner.facts(one).ptx_digest == examiner.compile_again(two).ptx_digest


@pytest.mark.parametrize("kind", KINDS)
def test_options_that_change_the_code_change_the_key(kind, examiner):
    specs = [spec(kind), *(spec(kind, BASE.replace(**change)) for change in RELEVANT[kind])]
    if kind in ("record", "record_chunked"):
        specs.append(spec(kind, tile=TILES[-1]))
    for one in specs:
        examiner.submit(one)
    assert len({key(one) for one in specs}) == len(specs)
    assert len({examiner.facts(one).ptx_digest for one in specs}) == len(specs)


def test_one_launch_computes_with_what_the_three_compute_with(examiner):
    """The same operations, none besides: an exp of another kind in one of them would be another formula."""
    used = {kind: examiner.facts(spec(kind)).ir_operations.keys() & (IR_ARITHMETIC | IR_APPROXIMATE) for kind in KINDS}
    assert used["fused_verify"] == used["short_conv"] | used["record"] | used["gated_rms_norm"]
    assert used["fused_verify_chunked"] == used["short_conv"] | used["record_chunked"] | used["gated_rms_norm"]
    assert used["fused_decode"] == used["fused_verify"] and used["decode_rule"] == used["record"]
    assert used["fused_round"] == used["fused_verify"]
    assert examiner.facts(spec("fused_round")).ptx_digest != examiner.facts(spec("fused_verify")).ptx_digest
    for kind in ("fused_verify", "fused_decode", "fused_round"):
        persistent = examiner.facts(spec(kind, tile=PERSISTENT)).ir_operations.keys()
        assert persistent & (IR_ARITHMETIC | IR_APPROXIMATE) == used[kind]


def test_the_commit_computes_with_what_the_verify_computes_with(examiner):
    recipe = (make_commit_spec, (CommitGeometry(BASE, 2), ARCH))
    commit = examiner.facts(recipe).ir_operations.keys() & (IR_ARITHMETIC | IR_APPROXIMATE)
    record = examiner.facts(spec("record")).ir_operations.keys() & (IR_ARITHMETIC | IR_APPROXIMATE)
    assert commit and commit <= record


class TestTable:
    def test_every_two_options_meet_in_a_row(self):
        levels = [sorted({row[i] for row in ROWS}, key=str) for i in range(len(FACTORS))]
        for i, j in itertools.combinations(range(len(FACTORS)), 2):
            assert {(row[i], row[j]) for row in ROWS} == set(itertools.product(levels[i], levels[j]))

    def test_the_rows_have_every_choice(self):
        geometries = [row_geometry(row) for row in ROWS]
        assert {geometry.window for geometry in geometries} == {1, 4, 8, 16}
        choices = {"state_dtype": 2, "alignment": 2, "gate": 2, "conv_layout": 2, "records": 3, "index_dtype": 2}
        assert {name: len({getattr(geometry, name) for geometry in geometries}) for name in choices} == choices

    def test_the_quick_set_has_every_tile_window_row_and_architecture(self):
        fused = [case for case in quick_cases() if case.kind == "fused_verify"]
        rows = {row_geometry(row) for row in ROWS}
        met = []
        for tile in TILES:
            mine = [case for case in fused if case.tile == tile]
            archs = {arch for arch in CLUSTER_ARCHS if not tile.persistent or ARCHITECTURES[arch].large_shared_memory}
            assert {case.arch for case in mine if case.geometry.window == 16} >= archs
            if tile.persistent:
                plain = {row.replace(alignment=16, conv_layout="SD") for row in rows}
                assert {case.geometry for case in mine} >= plain
                continue
            met.append({case.geometry for case in mine} & rows)
            assert {geometry.window for geometry in met[-1]} == {1, 4, 8, 16}
        assert all(one | two == rows for one, two in itertools.pairwise(met))
        kinds = {arch: {case.kind for case in quick_cases() if case.arch == arch} for arch in ARCHITECTURES}
        assert all(kinds[arch] == {*KINDS, *COMMITS} for arch in CLUSTER_ARCHS)
        assert kinds[SIBLING_ARCH] == set(KINDS)
        assert all(kinds[arch] - set(COMMITS) == set(KINDS) - set(FUSED_KINDS) for arch in DECOMPOSED_ARCHS)
