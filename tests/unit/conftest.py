# SPDX-License-Identifier: Apache-2.0
"""hypothesis without a deadline: a busy machine is no fault of the code."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("flashkda", deadline=None)
settings.load_profile("flashkda")
