# SPDX-License-Identifier: Apache-2.0
"""The environment variables of FlashKDA. No other module of the package reads the environment.

FLASHKDA_VERIFY_PATH   fused | decomposed | reference | auto: the path that `plan_verify(path="auto")` and
                       plan_decode take; plan_commit follows to the reference
FLASHKDA_CACHE_DIR     folder of the built kernels, in place of the user's cache folder
FLASHKDA_CACHE_LIMIT   most bytes in that folder: a number, with K, M, G or T behind it, or "unlimited" (default 1G)
FLASHKDA_KERNEL_PATH   folders of prebuilt kernels, separated by ":", that are looked through before the cache
FLASHKDA_NO_JIT        1: a kernel that is in neither raises KernelNotFoundError; nothing is compiled
FLASHKDA_DEBUG_CHECKS  1: check device metadata at every run (synchronizes)
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from flashkda.errors import ConfigError

# Fastest first. A path that is refused falls back to the next one.
PATHS = ("fused", "decomposed", "reference")

_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_CACHE_LIMIT = "1G"


def verify_path() -> str | None:
    """The path named by FLASHKDA_VERIFY_PATH; None where it is unset, empty or "auto". Raises ConfigError."""
    value = os.environ.get("FLASHKDA_VERIFY_PATH", "").strip().lower()
    if value in ("", "auto"):
        return None
    if value not in PATHS:
        raise ConfigError("FLASHKDA_VERIFY_PATH", f"auto or one of {', '.join(PATHS)}", repr(value))
    return value


def cache_dir() -> Path:
    """The folder of built kernels (not created here). Raises ConfigError where there is no home for one."""
    value = os.environ.get("FLASHKDA_CACHE_DIR", "")
    try:
        if value:
            return Path(value).expanduser().absolute()
        from platformdirs import user_cache_path

        path = user_cache_path("flashkda")
    except RuntimeError as error:  # no home folder is known for a ~
        raise ConfigError("FLASHKDA_CACHE_DIR", "a folder, or a home folder for it", error) from error
    if not path.is_absolute():
        raise ConfigError("FLASHKDA_CACHE_DIR", "a folder, or a home folder for it", f"no home for {path}")
    return path


def cache_limit() -> int | None:
    """Most bytes of the folder of built kernels; None for "unlimited". Raises ConfigError."""
    value = os.environ.get("FLASHKDA_CACHE_LIMIT", "").strip() or _CACHE_LIMIT
    if value.lower() in ("unlimited", "none"):
        return None
    found = re.fullmatch(r"(\d+)\s*([KMGT]?)(?:i?B)?", value, re.IGNORECASE)
    if found is None:
        raise ConfigError("FLASHKDA_CACHE_LIMIT", 'bytes, such as 500M or 2G, or "unlimited"', repr(value))
    return int(found[1]) << 10 * (" KMGT".index(found[2].upper() or " "))


def kernel_path() -> tuple[Path, ...]:
    """The folders of prebuilt kernels that FLASHKDA_KERNEL_PATH names, in order. They need not exist."""
    names = os.environ.get("FLASHKDA_KERNEL_PATH", "").split(os.pathsep)
    return tuple(Path(name).expanduser().absolute() for name in names if name)


def no_jit() -> bool:
    """Whether FLASHKDA_NO_JIT forbids to compile. Raises ConfigError."""
    return _switch("FLASHKDA_NO_JIT")


def debug_checks() -> bool:
    """Whether FLASHKDA_DEBUG_CHECKS asks for checks of device metadata. Raises ConfigError."""
    return _switch("FLASHKDA_DEBUG_CHECKS")


def _switch(name: str) -> bool:
    value = os.environ.get(name, "").strip().lower()
    if not value:
        return False
    if value not in _SWITCH:
        raise ConfigError(name, f"one of {', '.join(_SWITCH)}", repr(value))
    return _SWITCH[value]
