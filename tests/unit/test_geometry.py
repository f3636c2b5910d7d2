# SPDX-License-Identifier: Apache-2.0
"""VerifyGeometry: what it accepts, what it refuses and how it says so; presets; JSON."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashkda import PRESETS, VerifyGeometry, preset
from flashkda.errors import GeometryError

FLOATS = st.sampled_from(["float32", "bfloat16"])


@st.composite
def geometries(draw):
    bounded = draw(st.booleans())
    return VerifyGeometry(
        heads=draw(st.integers(1, 96)),
        window=draw(st.integers(1, 16)),
        state_dtype=draw(FLOATS),
        conv_layout=draw(st.sampled_from(["SD", "DS"])),
        conv_weight_dtype=draw(FLOATS),
        norm_weight_dtype=draw(FLOATS),
        gate="bounded" if bounded else "softplus",
        lower_bound=draw(st.floats(max_value=0, exclude_max=True, allow_infinity=False)) if bounded else None,
        norm=draw(st.booleans()),
        alignment=draw(st.sampled_from([2, 16])),
        null_slot=draw(st.integers(-1, 2**31 - 1)),
        index_dtype=draw(st.sampled_from(["int32", "int64"])),
        has_num_accepted=draw(st.booleans()),
        records=draw(st.sampled_from(["slot", "request", "indices"])),
        norm_eps=draw(st.floats(min_value=0, exclude_min=True, allow_infinity=False)),
        head_dim=draw(st.integers(1, 1024)),
        conv_width=draw(st.integers(2, 8)),
    )


@given(geometries())
def test_json_round_trip(geometry):
    copy = VerifyGeometry.from_dict(json.loads(json.dumps(geometry.to_dict())))
    assert copy == geometry
    assert hash(copy) == hash(geometry)
    assert set(geometry.to_dict()) == {field.name for field in dataclasses.fields(geometry)}


@pytest.mark.parametrize(("heads", "window"), [(1, 1), (96, 16), (12, 4), (6, 7)])
def test_limits_are_inclusive(heads, window):
    geometry = VerifyGeometry(heads, window)
    assert (geometry.heads, geometry.window) == (heads, window)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("heads", 0),
        ("heads", 97),
        ("heads", 1.0),
        ("heads", True),
        ("heads", None),
        ("window", 0),
        ("window", 17),
        ("window", "4"),
        ("state_dtype", "float16"),
        ("state_dtype", torch.float16),
        ("state_dtype", None),
        ("conv_layout", "sd"),
        ("conv_weight_dtype", torch.float64),
        ("norm_weight_dtype", "half"),
        ("gate", "sigmoid"),
        ("gate", ["bounded"]),
        ("lower_bound", None),
        ("lower_bound", 0.0),
        ("lower_bound", 5.0),
        ("lower_bound", float("nan")),
        ("lower_bound", float("-inf")),
        ("lower_bound", "-5"),
        ("norm", 1),
        ("alignment", 4),
        ("alignment", 16.0),
        ("null_slot", -2),
        ("null_slot", 2**31),
        ("index_dtype", "float32"),
        ("index_dtype", torch.int16),
        ("has_num_accepted", None),
        ("records", "row"),
        ("norm_eps", 0.0),
        ("norm_eps", float("inf")),
        ("norm_eps", "1e-5"),
        ("head_dim", 0),
        ("conv_width", 1),
    ],
)
def test_refuses_by_name(argument, value):
    with pytest.raises(GeometryError) as caught:
        VerifyGeometry(**{"heads": 12, "window": 4, argument: value})
    assert caught.value.argument == argument
    assert caught.value.found == repr(value)
    assert len(caught.value.problems) == 1


def test_refuses_everything_at_once():
    with pytest.raises(GeometryError) as caught:
        VerifyGeometry(0, 99, state_dtype="half", lower_bound=3, norm_eps=-1)
    assert [p.argument for p in caught.value.problems] == ["heads", "window", "state_dtype", "norm_eps", "lower_bound"]
    for name in ("heads", "window", "state_dtype", "norm_eps", "lower_bound"):
        assert f"{name}: expected" in str(caught.value)


def test_softplus_takes_no_lower_bound():
    with pytest.raises(GeometryError) as caught:
        VerifyGeometry(12, 4, gate="softplus")
    assert caught.value.argument == "lower_bound"
    assert VerifyGeometry(12, 4, gate="softplus", lower_bound=None).lower_bound is None


@pytest.mark.parametrize("field", ["state_dtype", "conv_weight_dtype", "norm_weight_dtype"])
def test_torch_dtypes_are_kept_as_names(field):
    given_torch = VerifyGeometry(12, 4, **{field: torch.bfloat16})
    assert getattr(given_torch, field) == "bfloat16"
    assert given_torch == VerifyGeometry(12, 4, **{field: "bfloat16"})
    assert VerifyGeometry(12, 4, index_dtype=torch.int64).index_dtype == "int64"


def test_numbers_are_normalized():
    geometry = VerifyGeometry(torch.tensor(12), 4, lower_bound=-5, norm_eps=1)
    assert type(geometry.heads) is int
    assert type(geometry.lower_bound) is float
    assert type(geometry.norm_eps) is float
    assert geometry == VerifyGeometry(12, 4, norm_eps=1.0)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        VerifyGeometry(12, 4).heads = 6


@pytest.mark.parametrize(
    ("fields", "channels", "columns"),
    [
        ({"heads": 12, "window": 4}, 4608, 6),
        ({"heads": 1, "window": 1}, 384, 3),
        ({"heads": 96, "window": 16}, 36864, 18),
        ({"heads": 2, "window": 3, "head_dim": 64, "conv_width": 2}, 384, 3),
    ],
)
def test_derived_sizes(fields, channels, columns):
    geometry = VerifyGeometry(**fields)
    assert geometry.channels == channels
    assert geometry.conv_columns == columns


def test_replace():
    geometry = VerifyGeometry(12, 4)
    assert geometry.replace(window=8, norm=False) == VerifyGeometry(12, 8, norm=False)
    assert geometry.window == 4
    with pytest.raises(GeometryError, match="windows"):
        geometry.replace(windows=8)
    with pytest.raises(GeometryError, match="window: expected"):
        geometry.replace(window=0)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"heads": 12, "window": 4, "tp": 8, "rank": 0}, ["'tp'", "'rank'"]),
        ({"norm": True}, ["heads", "window"]),
        ([12, 4], ["geometry"]),
    ],
)
def test_from_dict_refuses(values, named):
    with pytest.raises(GeometryError) as caught:
        VerifyGeometry.from_dict(values)
    assert all(name in str(caught.value) for name in named)


def test_str_shows_what_differs_from_the_defaults():
    assert str(VerifyGeometry(12, 4)) == "VerifyGeometry(heads=12, window=4)"
    assert str(VerifyGeometry(12, 4, norm=False)) == "VerifyGeometry(heads=12, window=4, norm=False)"


@pytest.mark.parametrize(
    ("name", "tp", "heads", "gate", "lower_bound"),
    [
        ("kimi-k3", 1, 96, "bounded", -5.0),
        ("kimi-k3", 8, 12, "bounded", -5.0),
        ("kimi-k3", 16, 6, "bounded", -5.0),
        ("glm-5.3-flash", 8, 8, "bounded", -5.0),
        ("kimi-linear", 4, 8, "softplus", None),
    ],
)
def test_preset(name, tp, heads, gate, lower_bound):
    geometry = preset(name, tp, window=4, state_dtype="bfloat16")
    expected = VerifyGeometry(heads, 4, gate=gate, lower_bound=lower_bound, state_dtype="bfloat16", norm_eps=1e-5)
    assert geometry == expected


def test_preset_table():
    sizes = {name: (model.hidden, model.layers, model.kda_layers, model.heads) for name, model in PRESETS.items()}
    assert sizes == {
        "kimi-k3": (7168, 93, 69, 96),
        "glm-5.3-flash": (4096, 45, 34, 64),
        "kimi-linear": (2304, 27, 20, 32),
    }


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("kimi-k4",), "kimi-k3"),
        (("kimi-k3", 7), "tp"),
        (("kimi-k3", 0), "tp"),
        (("kimi-k3", 192), "tp"),
        (("kimi-k3", 8, 17), "window"),
    ],
)
def test_preset_refuses(arguments, named):
    with pytest.raises(GeometryError, match=named):
        preset(*arguments)


def test_preset_refuses_unknown_overrides():
    with pytest.raises(GeometryError, match="'dtype'"):
        preset("kimi-k3", dtype="bfloat16")
