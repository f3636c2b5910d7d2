# SPDX-License-Identifier: Apache-2.0
"""The benchmarks as far as they go without a GPU: what is measured, what is skipped, tables and plots."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as suite
from benchmarks import peers, plots, points, progress, rounds, sweep, timing, verify
from benchmarks.points import POINTS, Point, Result, Unavailable, chosen
from benchmarks.timing import Timing
from flashkda.planner import plan_verify

RESULTS = Path(suite.RESULTS)
PNG = b"\x89PNG\r\n\x1a\n"
everything = chosen(None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert suite.main([]) == 2
    assert "CUDA device" in capsys.readouterr().err


class TestPoints:
    def test_large_batches_have_fewer_layers(self) -> None:
        assert [Point(n, t).layers for n, t in POINTS] == [69, 69, 69, 69, 69, 69, 24, 24]
        assert Point(512, 16, 96).layers == 7
        assert Point(512, 16, 96).layers * Point(512, 16, 96).state_bytes < 24e9

    def test_bytes_and_geometry(self) -> None:
        point = Point(8, 4, 24, "bfloat16")
        assert point.state_bytes == 8 * 24 * 128 * 128 * 2
        assert (point.geometry.heads, point.geometry.window, point.geometry.state_dtype) == (24, 4, "bfloat16")
        assert point.label == "N8 T4 H24 bfloat16" and Point(1, 1).label == "N1 T1 float32"

    def test_patterns(self) -> None:
        wanted = chosen(("flashkda-fused", "floor-*"))
        names = ("flashkda-fused", "flashkda-fused-chunked", "floor-empty")
        assert [wanted(name) for name in names] == [True, False, True]
        assert everything("peer-fla-core")


class TestRows:
    def test_times_are_by_layer(self) -> None:
        result = Result()
        result.add(Point(8, 4), {"a": Timing(690.0, 69.0)}, {"a": 69}, {"a": {"covers": "all"}})
        assert result.rows == [
            {"impl": "a", "N": 8, "T": 4, "H": 12, "state_dtype": "float32", "us_per_layer": 10.0, "spread_us": 1.0,
             "layers": 69, "covers": "all"}
        ]  # fmt: skip

    def test_the_best_shape_of_a_floor(self) -> None:
        times = {"floor/1": Timing(3.0, 0.1), "other": Timing(1.0, 0.0), "floor/2": Timing(2.0, 0.2)}
        assert timing.best_of(times) == {"floor": Timing(2.0, 0.2), "other": Timing(1.0, 0.0)}


class TestSkipping:
    def test_a_refused_plan_is_skipped_with_its_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(impl: str, point: Point) -> Any:
            raise Unavailable("no clusters")

        monkeypatch.setattr(verify, "plan_of", refuse)
        result = Result()
        assert verify.plans(Point(1, 4), chosen(("flashkda-fused",)), result) == {}
        assert result.skipped == [{"impl": "flashkda-fused", **Point(1, 4).row, "reason": "no clusters"}]

    def test_what_the_planner_refuses(self) -> None:
        with pytest.raises(Unavailable, match="heads"):
            verify.plan_of("flashkda-fused", Point(1, 4, heads=97))

    def test_a_peer_that_is_not_installed(self) -> None:
        peer = peers.Peer("no-such-package", "no_such_module", "nothing", lambda point, cases: [])
        with pytest.raises(Unavailable, match="no-such-package is not installed"):
            peer.calls(Point(1, 4), [])

    def test_a_peer_without_an_adapter(self) -> None:
        peer = peers.Peer("pytest", "pytest", "nothing", reason="no interface")
        with pytest.raises(Unavailable, match="no interface"):
            peer.calls(Point(1, 4), [])

    def test_a_peer_that_fails(self) -> None:
        def adapter(point: Point, cases: object) -> peers.Calls:
            raise TypeError("another signature\nand more")

        peer = peers.Peer("pytest", "pytest", "nothing", adapter)
        with pytest.raises(Unavailable, match=rf"pytest {peer.version}: TypeError: another signature$"):
            peer.calls(Point(1, 4), [])

    def test_every_peer_has_an_adapter_or_a_reason(self) -> None:
        assert {peer.package for peer in peers.PEERS} == {"fla-core", "b12x", "flashinfer-python", "sglang"}
        assert all((peer.adapter is None) == bool(peer.reason) for peer in peers.PEERS)


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The measuring code on the CPU: the reference in place of the kernels, small models, nothing captured or timed.
    Returns the names of the floors that were launched, once they were."""
    launched: list[str] = []

    def run_all(calls: Any) -> int:
        for call in calls:
            call()
        return len(calls)

    def times(graphs: Any, **_: Any) -> dict[str, Timing]:
        return {name: Timing(10.0 * calls, 1.0) for name, calls in graphs.items()}

    def load(kind: str, arch: str, dtype: str = "float32", loads: int = 1) -> Any:
        return lambda *tensors: launched.append(f"{kind}/{loads}: {len(tensors)}")

    floors = types.SimpleNamespace(LOADS=(1, 2), copy_loads=lambda dtype: (4, 8), load=load, specs=lambda *_: [])
    monkeypatch.setitem(sys.modules, "benchmarks.floors", floors)
    monkeypatch.setattr("benchmarks.floors", floors, raising=False)
    monkeypatch.setattr(points, "DEVICE", "cpu")
    monkeypatch.setattr(points, "KDA_LAYERS", 2)
    monkeypatch.setattr(rounds, "KDA_LAYERS", 2)
    monkeypatch.setattr(verify, "IMPLS", {"flashkda-fused": ("reference", "exact"), "other": ("fused", "unheard-of")})
    monkeypatch.setattr(rounds, "DECODES", {"flashkda-decode-fused": "reference"})
    for module in (verify, rounds):
        monkeypatch.setattr(module, "capture", run_all)
        monkeypatch.setattr(module, "time_graphs", times)
    return launched


class TestMeasuring:
    def test_verify(self, on_the_cpu: list[str]) -> None:
        point = Point(3, 2, heads=1)
        result = verify.measure(point, 1, everything)
        times = {row["impl"]: row["us_per_layer"] for row in result.rows}
        assert times == {"flashkda-fused": 10.0, "floor-empty": 10.0, "floor-state-read": 10.0}
        assert all(row["layers"] == 2 and row["N"] == 3 for row in result.rows)
        reasons = {skip["impl"]: skip["reason"] for skip in result.skipped}
        assert "unheard-of" in reasons.pop("other")
        assert reasons.keys() == {peer.impl for peer in peers.PEERS}
        assert sorted(set(on_the_cpu)) == ["floor_empty/1: 1", "floor_state_read/1: 3", "floor_state_read/2: 3"]
        assert result.host == []

    def test_only_what_is_wanted(self, on_the_cpu: list[str]) -> None:
        result = verify.measure(Point(1, 1, heads=1), 1, chosen(("flashkda-fused",)))
        assert [row["impl"] for row in result.rows] == ["flashkda-fused"]
        assert result.skipped == [] and on_the_cpu == []

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_commit_and_round(self, dtype: str, on_the_cpu: list[str]) -> None:
        result = rounds.measure(Point(2, 4, heads=1, state_dtype=dtype), 1, everything)
        # A round of two layers is two verifies and one commit; four small models take turns.
        assert {row["impl"]: row["us_per_layer"] for row in result.rows} == {
            "flashkda-commit": 5.0, "flashkda-round": 15.0, "floor-state-copy": 5.0
        }  # fmt: skip
        assert sorted(set(on_the_cpu)) == ["floor_state_copy/4: 3", "floor_state_copy/8: 3"]

    def test_a_round_without_its_verify(self, on_the_cpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rounds, "VERIFY", "other")
        result = rounds.measure(Point(1, 2, heads=1), 1, chosen(("flashkda-*",)))
        assert [row["impl"] for row in result.rows] == ["flashkda-commit"]
        assert [skip["impl"] for skip in result.skipped] == ["flashkda-round", "flashkda-round-folded"]

    def test_decode(self, on_the_cpu: list[str]) -> None:
        result = rounds.decode(Point(2, 1, heads=1), 1, everything)
        assert [(row["impl"], row["us_per_layer"]) for row in result.rows] == [("flashkda-decode-fused", 10.0)]


def fake(us: float, impls: tuple[str, ...]) -> Any:
    """In place of a module's measure."""

    def measure(point: Point, turns: int, wanted: Any) -> Result:
        result = Result()
        times = {impl: Timing(us * point.requests * point.layers, 0.0) for impl in impls if wanted(impl)}
        result.add(point, times, dict.fromkeys(times, point.layers))
        if wanted("peer-b12x"):
            result.skip("peer-b12x", point, "not installed")
        return result

    return measure


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "measure", fake(2.0, ("flashkda-fused", "flashkda-decomposed", "floor-state-read")))
    monkeypatch.setattr(rounds, "measure", fake(1.0, ("flashkda-commit", "flashkda-round", "floor-state-copy")))
    monkeypatch.setattr(rounds, "decode", fake(3.0, tuple(rounds.DECODES)))


class TestRun:
    def test_all_points_and_files(self, faked: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        grid = [Point(n, t, state_dtype=d) for d in ("float32", "bfloat16") for n, t in POINTS]
        steps = suite.jobs(grid, everything, 3)
        # Decode has one point for each number of requests and each type.
        assert len(steps) == 2 * (8 + 8 + 5)
        path, values = tmp_path / "gpu.json", {"gpu": "NVIDIA H200"}
        suite.run(steps, values, path, progress.Lines())
        suite.finish(values, path, sweeping=False, plot=True)
        kept = json.loads(path.read_text())
        assert {(row["N"], row["T"]) for row in kept["rows"]} >= set(POINTS)
        assert len(kept["skipped"]) == len(steps) and len(kept["clocks"]["after_each"]) == len(steps)
        printed = capsys.readouterr().out
        assert printed.count("peer-b12x skipped: not installed") == 1, "a reason is said once"
        assert "| one launch |" in printed and path.with_suffix(".md").read_text() in printed
        names = {f.name for f in tmp_path.glob("*.png")}
        assert names >= {"gpu-requests.png", "gpu-window.png", "gpu-bandwidth.png", "gpu-requests-bfloat16.png"}

    def test_a_part_measures_a_part(self, faked: None) -> None:
        names = [step.name for step in suite.jobs([Point(1, 4)], chosen(("floor-state-read",)), 3)]
        assert names == ["verify, N1 T4 float32"]

    def test_a_part_does_not_overwrite_the_whole(self) -> None:
        def folder(*argv: str) -> Path:
            return suite.destination(suite.arguments(argv)).parent

        assert folder() == RESULTS
        assert folder("--sweep") == RESULTS / "sweep"
        for part in (("--points", "1,4"), ("--heads", "6"), ("--impl", "floor-*"), ("--state-dtype", "float32")):
            assert folder(*part) == RESULTS.parent.parent / "build" / "bench"
        assert suite.destination(suite.arguments(["--points", "1,4", "--output", "x/y.json"])) == Path("x/y.json")


class TestSweep:
    def test_the_grid(self) -> None:
        grid = sweep.points(("float32", "bfloat16"))
        assert len(set(grid)) == len(grid) == 4 * 4 * 2 * 2
        assert Point(512, 16, 96, "bfloat16") in grid

    def test_ratios_are_to_the_best_large_point_of_their_kind(self) -> None:
        def row(n: int, t: int, h: int, us: float) -> dict[str, Any]:
            return {"impl": sweep.IMPL, "N": n, "T": t, "H": h, "state_dtype": "float32", "us_per_layer": us}

        # Twice the bytes in 1.6 times the time is better; a small batch may be worse, and is not the measure.
        rows = [row(128, 4, 12, 40.0), row(128, 4, 24, 64.0), row(8, 4, 6, 0.1), row(128, 16, 12, 99.0)]
        found = [round(ratio, 3) for _, _, ratio in sweep.ratios(rows)]
        assert found == [1.25, 1.0, pytest.approx(0.1 / 48 / (64 / 3072), abs=1e-3), 1.0]
        assert "**over**" not in sweep.table(rows)
        assert sweep.table([*rows, row(512, 4, 6, 200.0)]).count("**over**") == 1


class TestPlots:
    @pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
    def test_of_the_results_kept_here(self, path: Path, tmp_path: Path) -> None:
        values = json.loads(path.read_text())
        written = plots.write(values, tmp_path / path.stem)
        names = {file.name for file in written}
        suffixes = {"" if row["state_dtype"] == "float32" else f"-{row['state_dtype']}" for row in values["rows"]}
        wanted = {f"{kind}{suffix}" for kind in ("requests", "window", "bandwidth") for suffix in suffixes}
        assert names >= {f"{path.stem}-{name}.png" for name in wanted}
        assert all(file.read_bytes().startswith(PNG) for file in written)
        assert {file.name for file in RESULTS.glob(f"{path.stem}-*.png")} == names, "run python -m benchmarks.plots"

    def test_shares_count_what_has_to_be_moved(self, monkeypatch: pytest.MonkeyPatch) -> None:
        drawn = {}
        monkeypatch.setattr(plots, "_shares", lambda axes, lines, peak: drawn.update(lines))
        rows = [
            {"impl": impl, "N": n, "T": 4, "H": 12, "state_dtype": "float32", "us_per_layer": 1.0 * n}
            for impl in ("flashkda-fused", "flashkda-commit", "floor-empty")
            for n in (1, 8)
        ]
        for name, draw in plots._drawings(rows, "NVIDIA H200"):
            if name == "bandwidth":
                draw(None)
        read = 100 * 12 * 65536 / (1e-6 * 4.8e12)
        assert drawn == {
            "flashkda-fused": [(1, pytest.approx(read)), (8, pytest.approx(read))],
            "flashkda-commit": [(1, pytest.approx(2 * read)), (8, pytest.approx(2 * read))],
        }

    def test_no_share_of_an_unknown_memory(self) -> None:
        rows = [{"impl": "a", "N": n, "T": 4, "H": 12, "state_dtype": "float32", "us_per_layer": 1.0} for n in (1, 8)]
        assert [name for name, _ in plots._drawings(rows, "a GPU")] == ["requests"]


class TestProgress:
    def test_lines_where_there_is_no_terminal(self, capsys: pytest.CaptureFixture[str]) -> None:
        with progress.progress(1) as report:
            report.begin("step")
            report.say("[done] 1.0")
            report.end()
        assert capsys.readouterr().out.endswith(" s] [done] 1.0\n")

    def test_a_bar_at_a_terminal(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        with progress.progress(2) as report:
            report.begin("the step")
            report.say("[done] 1.0")
            report.end()
        printed = capsys.readouterr().out
        assert "[done] 1.0" in printed and "the step" in printed and "1/2" in printed


def test_tiles_are_compared_where_they_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import tiles

    def planned(*arguments: Any, device: str, **options: Any) -> Any:
        return plan_verify(*arguments, arch="sm_90a", **options)

    monkeypatch.setattr(tiles, "plan_verify", planned)
    few, many = tiles.plans(Point(1, 4)), tiles.plans(Point(32, 4))
    assert few.keys() == {str(tile) for tile in tiles.CANDIDATES}
    assert {str(plan.tile) for plan in many.values()} == many.keys() < few.keys()
    assert all(plan.tile.cluster <= 2 for plan in many.values() if plan.tile is not None)
