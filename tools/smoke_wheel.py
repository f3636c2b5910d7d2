# SPDX-License-Identifier: Apache-2.0
"""Try a wheel in a fresh environment: `python tools/smoke_wheel.py dist/*.whl`, the end of `make dist`.

The wheel is installed into a virtual environment of its own, without its dependencies: those are taken from the
environment that runs this, behind what is installed, so that nothing is downloaded. Commands run outside the checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

_IMPORT = "import flashkda; print(flashkda.__version__, flashkda.__file__)"
_VERIFY = """
import warnings
warnings.simplefilter("error")
import flashkda
from flashkda.demo import example_tensors
geometry = flashkda.preset("kimi-k3", tp=48, window=4)
tensors = example_tensors(geometry, [4, 1])
flashkda.plan_verify(geometry, 2, path="reference", device="cpu").bind(**tensors).run()
print(bool(tensors["out"].isfinite().all()))
"""
_QUERY = ("query", "--preset", "kimi-k3", "--tp", "8", "--window", "4", "--arch", "sm_90a", "--no-toolchain", "--json")


class Broken(Exception):
    """The wheel does not do what it should."""


class Environment:
    """A virtual environment in ``folder`` that has the wheel, and behind it the packages of this one."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        venv.create(folder / "venv", with_pip=False, symlinks=True)
        self.scripts = folder / "venv" / "bin"
        site = Path(self._python("-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
        # Only paths: an editable install of the checkout is a .pth file itself, and those are not followed.
        paths = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
        (site / "behind.pth").write_text("\n".join(paths) + "\n")
        target = str(self.scripts / "python")
        command = [sys.executable, "-m", "pip", "--python", target, "install", "--no-deps", "--no-index", "-q"]
        self._run([*command, "--force-reinstall", str(wheel.resolve())])

    def _run(self, command: Sequence[str], status: int = 0) -> str:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("FLASHKDA_", "PYTHON", "PIP_"))}
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        if done.returncode != status:
            raise Broken(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}")
        return (done.stdout if status == 0 else done.stderr).strip()

    def _python(self, *arguments: str) -> str:
        return self._run([str(self.scripts / "python"), *arguments])

    def check(self, version: str) -> list[str]:
        """What was tried, as lines. Raises Broken at the first that does not hold."""
        found, file = self._python("-c", _IMPORT).split(" ", 1)
        if found != version or not Path(file).is_relative_to(self.folder.resolve()):
            raise Broken(f"expected version {version} of {self.folder}, found {found} of {file}")
        if not (Path(file).parent / "py.typed").is_file():
            raise Broken("the wheel has no py.typed")
        printed = self._run([str(self.scripts / "flashkda"), "--version"])
        if printed != f"flashkda {version}":
            raise Broken(f"flashkda --version: {printed}")
        (architecture,) = json.loads(self._python("-m", "flashkda", *_QUERY))["architectures"]
        if not architecture["paths"]["fused"]["supported"]:
            raise Broken(f"flashkda query: {architecture}")
        if self._python("-c", _VERIFY) != "True":
            raise Broken("a verify by the reference left rows of out unwritten")
        hint = self._run([str(self.scripts / "flashkda"), "bench"], status=4)
        return [f"import flashkda {version}", printed, "flashkda query", "a verify by the reference", hint]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was tried; 1 where something is broken."""
    parser = argparse.ArgumentParser(description="Try a wheel in a fresh environment")
    parser.add_argument("wheel", type=Path)
    wheel: Path = parser.parse_args(arguments).wheel
    version = wheel.name.split("-")[1]
    with tempfile.TemporaryDirectory(prefix="flashkda-wheel-") as folder:
        try:
            for line in Environment(Path(folder).resolve(), wheel).check(version):
                print(f"ok  {line}")
        except Broken as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
