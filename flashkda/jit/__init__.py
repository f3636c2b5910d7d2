# SPDX-License-Identifier: Apache-2.0
"""Compile kernels, keep them in memory and on disk, build them ahead of time. Knows no KDA.

digest    what the sources and the toolchain are
key       the name of a compiled kernel
compiler  recipe to library; resources: what it uses of a multiprocessor
runtime   library to callable, without the compiler
trust     which files may become code; files: how they are written
store     one kernel's place in the cache; cleaning: the cache as a whole
manifest  what is in a pack; packs: reading one; packing: building one; pool: compiling in processes
cache     load_kernel, prebuild
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashkda.jit.cache import Built, Spec, build_kernel, is_loaded, load_kernel, prebuild
    from flashkda.jit.cleaning import Entry, cache_entries, clear_cache, verify_cache
    from flashkda.jit.key import KernelKey
    from flashkda.jit.manifest import Manifest, PackedKernel
    from flashkda.jit.packing import build_pack
    from flashkda.jit.packs import pack_entries, search_path

# Loaded on first use: a plan needs the digest alone.
_LAZY = {
    "Built": "cache",
    "Entry": "cleaning",
    "KernelKey": "key",
    "Manifest": "manifest",
    "PackedKernel": "manifest",
    "Spec": "cache",
    "build_kernel": "cache",
    "build_pack": "packing",
    "cache_entries": "cleaning",
    "clear_cache": "cleaning",
    "is_loaded": "cache",
    "load_kernel": "cache",
    "pack_entries": "packs",
    "prebuild": "cache",
    "search_path": "packs",
    "verify_cache": "cleaning",
}

__all__ = [
    "Built",
    "Entry",
    "KernelKey",
    "Manifest",
    "PackedKernel",
    "Spec",
    "build_kernel",
    "build_pack",
    "cache_entries",
    "clear_cache",
    "is_loaded",
    "load_kernel",
    "pack_entries",
    "prebuild",
    "search_path",
    "verify_cache",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
