# SPDX-License-Identifier: Apache-2.0
"""`flashkda info`: versions, GPU, cache, packs, and what would run."""

from __future__ import annotations

import json
import os
import platform
import warnings
from importlib import metadata
from typing import Any

import click

import flashkda
from flashkda import config
from flashkda.capability import Reason, detect_arch, unique
from flashkda.cli.text import listing, table
from flashkda.geometry import PRESETS, preset
from flashkda.planner import kernels_version

_PACKAGES = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-python", "filelock", "platformdirs", "click")
_TP, _WINDOW = 8, 4


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(as_json: bool) -> None:
    """Show what is here, and what would run.

    Versions, GPUs, variables, the cache of kernels, packs, and the path of each known model: it is what a report of a
    fault should have in it.
    """
    found = {
        "versions": _versions(),
        "gpus": _gpus(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("FLASHKDA_")},
        "cache": {"folder": str(config.cache_dir())},
        "runs": _runs(),
    }
    click.echo(json.dumps(found, indent=1) if as_json else _to_text(found))


def _versions() -> dict[str, str | None]:
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
            plan = flashkda.plan_verify(preset(name, tp=_TP, window=_WINDOW), max_requests=8)
        runs.append(
            {
                "model": name,
                "heads": plan.geometry.heads,
                "arch": plan.arch,
                "path": plan.path,
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
    runs = [(run["model"], _TP, run["heads"], _WINDOW, run["arch"], run["path"]) for run in found["runs"]]
    parts.append(table(("model", "TP", "heads", "window", "arch", "would run"), runs))
    reasons = unique(Reason(**reason) for run in found["runs"] for reason in run["reasons"])
    if reasons:
        parts.append(f"why nothing faster runs:\n{listing(reasons)}")
    return "\n\n".join(parts)
