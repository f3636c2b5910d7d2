# SPDX-License-Identifier: Apache-2.0
"""The benchmark as far as it goes without a GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks import verify


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main([]) == 2
    assert "CUDA device" in capsys.readouterr().err


def test_the_table_has_a_column_a_point_and_the_ratio() -> None:
    times = {"flashkda-fused": 2.0, "flashkda-decomposed": 7.0, "floor-empty": 1.0, "floor-state-read": 1.5}
    rows = [
        {"impl": impl, "N": n, "T": t, "us_per_layer": us * n}
        for n, t in ((1, 4), (8, 4))
        for impl, us in times.items()
    ]
    assert verify.table(rows).splitlines() == [
        "| us per layer | N1 T4 | N8 T4 |",
        "|---|---|---|",
        "| flashkda-fused | 2.00 | 16.00 |",
        "| flashkda-decomposed | 7.00 | 56.00 |",
        "| floor-empty | 1.00 | 8.00 |",
        "| floor-state-read | 1.50 | 12.00 |",
        "| fused is faster by | 3.50x | 3.50x |",
    ]


def test_large_batches_have_fewer_layers() -> None:
    assert [verify.layers(n) for n, _ in verify.POINTS] == [69, 69, 69, 69, 69, 69, 24, 24]
