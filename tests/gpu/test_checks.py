# SPDX-License-Identifier: Apache-2.0
"""The checks of `python -m tests.gpu.evidence`, one pytest test each."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.environment import use_local_kernel_cache
from tests.gpu.evidence import all_checks
from tests.gpu.setup import Check, Setup

# Without a GPU the kernels cannot be planned for: the names then come from the small run on the reference.
_SETUP = Setup() if torch.cuda.is_available() else Setup("cpu", reference=True, small=True)


@pytest.mark.gpu
@pytest.mark.parametrize("check", [pytest.param(c, id=f"{c.group}-{c.name}") for c in all_checks(_SETUP)])
def test_check(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHKDA_VERIFY_PATH", raising=False)
    monkeypatch.delenv("FLASHKDA_DEBUG_CHECKS", raising=False)
    use_local_kernel_cache()
    check.run()
