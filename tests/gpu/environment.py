# SPDX-License-Identifier: Apache-2.0
"""What a result was obtained with: GPU, driver, versions, clocks, and digests of the sources that ran."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from flashkda.jit.digest import digest_files, source_digest, toolchain_versions

ROOT = Path(__file__).resolve().parents[2]


def sources_digest(*names: str) -> str:
    """SHA-256 over files of the repository and the Python sources of folders; it needs no version control."""
    digest = sha256()
    for name in names:
        path = ROOT / name
        found = digest_files(path) if path.is_dir() else sha256(path.read_bytes()).hexdigest()
        digest.update(f"{name} {found}\n".encode())
    return digest.hexdigest()


def environment(*sources: str) -> dict[str, Any]:
    """JSON values that say what ran, and on what. sources: the files and folders that are digested."""
    cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if cuda else "none",
        "sms": torch.cuda.get_device_properties(0).multi_processor_count if cuda else 0,
        "driver": _smi("driver_version") if cuda else None,
        "cuda": torch.version.cuda,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        **toolchain_versions(),
        "kernels_sources": source_digest(),
        "sources": {"of": list(sources), "sha256": sources_digest(*sources)},
    }


def gpu_slug() -> str:
    """The GPU's name for a file name: "nvidia-h200"; "cpu" without one."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def clocks() -> dict[str, str]:
    """Clocks, power and temperature now, as nvidia-smi says them."""
    names = ("clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "temperature.gpu")
    found = _smi(",".join(names))
    return dict(zip(names, (part.strip() for part in found.split(",")), strict=False)) if found else {}


def _smi(query: str) -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, f"--query-gpu={query}", "--format=csv,noheader", f"--id={torch.cuda.current_device()}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def use_local_kernel_cache() -> Path:
    """Kernels of these programs go below build/, unless FLASHKDA_CACHE_DIR says otherwise."""
    return Path(os.environ.setdefault("FLASHKDA_CACHE_DIR", str(ROOT / "build" / "kernels")))


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write the file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    with os.fdopen(handle, "w") as file:
        json.dump(values, file, indent=1)
        file.write("\n")
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)
