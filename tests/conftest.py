# SPDX-License-Identifier: Apache-2.0
"""Skips, with the reason, what this machine cannot run. pytest prints the reasons (-rs in pyproject.toml)."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-rounds", action="store_true", help="200 rounds of verify and commit for any number of heads"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if "gpu" in item.keywords]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is False")
        for item in on_gpu:
            item.add_marker(skip)
