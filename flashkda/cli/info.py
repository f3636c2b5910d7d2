# SPDX-License-Identifier: Apache-2.0
"""`flashkda info`: versions, GPU, cache, packs, and what would run."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import warnings
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import flashkda
from flashkda import config
from flashkda.capability import Reason, detect_arch, unique
from flashkda.cli.text import listing, one_line, size, table
from flashkda.errors import ConfigError, KernelBuildError
from flashkda.geometry import PRESETS, VerifyGeometry, preset

if TYPE_CHECKING:
    from flashkda.jit import PackedKernel

_PACKAGES = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-python", "filelock", "platformdirs", "click")
_TP, _WINDOW, _REQUESTS = 8, 4, 8


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(as_json: bool) -> None:
    """Show what is here, and what would run.

    Versions, GPUs, variables, the cache of kernels, packs, and the path of each known model: it is what a report of a
    fault should have in it.
    """
    from flashkda.jit import search_path

    found = {
        "versions": _versions(),
        "gpus": _gpus(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("FLASHKDA_")},
        "cache": _cache(),
        "packs": [_pack(folder) for folder in search_path()],
        "runs": _runs(),
    }
    click.echo(json.dumps(found, indent=1) if as_json else _to_text(found))


def _cache() -> dict[str, Any]:
    from flashkda.jit import cache_entries

    try:
        folder, entries = str(config.cache_dir()), cache_entries()
    except ConfigError as error:  # there is no home, or it is named wrongly
        return {"folder": None, "problem": str(error)}
    states, limit = Counter(entry.state for entry in entries), config.cache_limit()
    return {"folder": folder, "limit": limit, "bytes": sum(entry.bytes for entry in entries), "kernels": dict(states)}


def _pack(folder: Path) -> dict[str, Any]:
    """How many kernels a pack has, for which architectures, and why some would not be loaded here."""
    from flashkda.jit import pack_entries

    try:
        entries = pack_entries(folder)
    except KernelBuildError as error:
        return {"folder": str(folder), "kernels": 0, "archs": [], "usable": 0, "problems": [one_line(error)]}
    return {
        "folder": str(folder),
        "kernels": len(entries),
        "archs": sorted({kernel.arch for kernel, _ in entries}),
        "usable": sum(not problem for _, problem in entries),
        "problems": list(dict.fromkeys(problem for _, problem in entries if problem)),
    }


def _ready(geometry: VerifyGeometry, arch: str) -> tuple[int, int]:
    """How many of the kernels of a geometry are built, in the cache or in a pack, and how many there are."""
    from flashkda.jit import cache_entries, pack_entries, search_path
    from flashkda.kernel_sets import kernel_set

    cached: set[str] = set()
    with contextlib.suppress(ConfigError):
        cached = {entry.digest for entry in cache_entries() if entry.state == "ok"}
    packed: list[PackedKernel] = []
    for folder in search_path():
        with contextlib.suppress(KernelBuildError):
            packed += [kernel for kernel, problem in pack_entries(folder) if not problem]
    specs = kernel_set(geometry, [arch], max_requests=_REQUESTS)
    keys = [function(*arguments)[0] for function, arguments in specs]
    found = [key.digest in cached or any(not kernel.passed_over(key) for kernel in packed) for key in keys]
    return sum(found), len(found)


def _versions() -> dict[str, str | None]:
    from flashkda.planner import kernels_version

    versions: dict[str, str | None] = {
        "flashkda": flashkda.__version__,
        "kernels": kernels_version()[:16],
        "python": platform.python_version(),
    }
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _gpus() -> list[dict[str, str]]:
    import torch

    if not torch.cuda.is_available():
        return []
    devices = range(torch.cuda.device_count())
    return [{"name": torch.cuda.get_device_name(i), "arch": detect_arch(i)} for i in devices]


def _runs() -> list[dict[str, Any]]:
    """For each preset the path that a plan would take, and why it is not a faster one."""
    runs = []
    for name in PRESETS:
        with warnings.catch_warnings():  # that the reasons are shown is the point of it
            warnings.simplefilter("ignore")
            plan = flashkda.plan_verify(preset(name, tp=_TP, window=_WINDOW), max_requests=_REQUESTS)
        ready = None if plan.path == "reference" else _ready(plan.geometry, plan.arch)
        runs.append(
            {
                "model": name,
                "heads": plan.geometry.heads,
                "arch": plan.arch,
                "path": plan.path,
                "ready": ready,
                "reasons": [reason.to_dict() for reason in plan.reasons],
            }
        )
    return runs


def _to_text(found: dict[str, Any]) -> str:
    parts = [table(("package", "version"), [(name, version or "-") for name, version in found["versions"].items()])]
    gpus = [(i, gpu["name"], gpu["arch"]) for i, gpu in enumerate(found["gpus"])]
    parts.append(table(("GPU", "name", "arch"), gpus) if gpus else "no GPU that torch can use")
    if found["environment"]:
        parts.append(table(("variable", "value"), found["environment"].items()))
    parts.append(_cache_text(found["cache"]))
    for pack in found["packs"]:
        counts = f"{pack['usable']} of {pack['kernels']} kernels can be loaded here"
        archs = f", for {', '.join(pack['archs'])}" if pack["archs"] else ""
        parts.append("\n".join([f"pack {pack['folder']}{archs}: {counts}", *filter(None, [listing(pack["problems"])])]))
    if not found["packs"]:
        parts.append("no packs: FLASHKDA_KERNEL_PATH names none")
    runs = [
        (run["model"], _TP, run["heads"], _WINDOW, run["arch"], run["path"], _of(run["ready"])) for run in found["runs"]
    ]
    parts.append(table(("model", "TP", "heads", "window", "arch", "would run", "kernels built"), runs))
    reasons = unique(Reason(**reason) for run in found["runs"] for reason in run["reasons"])
    if reasons:
        parts.append(f"why nothing faster runs:\n{listing(reasons)}")
    return "\n\n".join(parts)


def _of(ready: tuple[int, int] | None) -> str:
    return "none needed" if ready is None else f"{ready[0]} of {ready[1]}"


def _cache_text(cache: dict[str, Any]) -> str:
    if cache["folder"] is None:
        return f"no cache: {cache['problem']}"
    states = ", ".join(f"{count} {state}" for state, count in sorted(cache["kernels"].items())) or "no kernels"
    limit = "" if cache["limit"] is None else f" of at most {size(cache['limit'])}"
    return f"cache {cache['folder']}: {states}, {size(cache['bytes'])}{limit}"
