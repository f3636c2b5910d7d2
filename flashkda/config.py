# SPDX-License-Identifier: Apache-2.0
"""The environment variables of FlashKDA. No other module of the package reads the environment.

FLASHKDA_VERIFY_PATH   fused | decomposed | reference | auto: the path that `plan_verify(path="auto")` and
                       plan_decode take; plan_commit follows to the reference
FLASHKDA_CACHE_DIR     folder of the built kernels, in place of the user's cache folder
FLASHKDA_DEBUG_CHECKS  1: check device metadata at every run (synchronizes)
"""

from __future__ import annotations

import os
from pathlib import Path

from flashkda.errors import ConfigError

# Fastest first. A path that is refused falls back to the next one.
PATHS = ("fused", "decomposed", "reference")

_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def verify_path() -> str | None:
    """The path named by FLASHKDA_VERIFY_PATH; None where it is unset, empty or "auto". Raises ConfigError."""
    value = os.environ.get("FLASHKDA_VERIFY_PATH", "").strip().lower()
    if value in ("", "auto"):
        return None
    if value not in PATHS:
        raise ConfigError("FLASHKDA_VERIFY_PATH", f"auto or one of {', '.join(PATHS)}", repr(value))
    return value


def cache_dir() -> Path:
    """The folder of built kernels (not created here)."""
    value = os.environ.get("FLASHKDA_CACHE_DIR", "")
    if value:
        return Path(value).expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("flashkda")


def debug_checks() -> bool:
    """Whether FLASHKDA_DEBUG_CHECKS asks for checks of device metadata. Raises ConfigError."""
    value = os.environ.get("FLASHKDA_DEBUG_CHECKS", "").strip().lower()
    if not value:
        return False
    if value not in _SWITCH:
        raise ConfigError("FLASHKDA_DEBUG_CHECKS", f"one of {', '.join(_SWITCH)}", repr(value))
    return _SWITCH[value]
