# SPDX-License-Identifier: Apache-2.0
"""compute-sanitizer over the fused kernel: memcheck, racecheck, synccheck.

It slows a program down a hundredfold, so its processes start with the first check of the evidence and are asked for
their result at the end.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.gpu.environment import ROOT, use_local_kernel_cache
from tests.gpu.sanitize_target import RAN
from tests.gpu.setup import Check, Detail, Failure, Setup, kimi_k3

TOOLS = ("memcheck", "racecheck", "synccheck")
REQUESTS = (1, 8)
WINDOWS = (1, 4, 16)
SECONDS = 240.0


def summary(report: str) -> tuple[str, int] | None:
    """The last summary line of a report and the errors or hazards in it; None where there is none."""
    lines = re.findall(r"((?:ERROR|RACECHECK) SUMMARY: .*)", report)
    if not lines:
        return None
    return lines[-1].strip(), int(re.search(r"\d+", lines[-1]).group())  # type: ignore[union-attr]


class Run:
    """One tool over the target, in a process of its own."""

    def __init__(self, tool: str, requests: int) -> None:
        self.tool, self.requests = tool, requests
        self._process: subprocess.Popen[bytes] | None = None
        self._report = Path(tempfile.gettempdir())
        self._started = 0.0

    def start(self) -> None:
        """Start it, if the sanitizer is here; once."""
        program = shutil.which("compute-sanitizer")
        if self._process is not None or program is None:
            return
        use_local_kernel_cache()
        target = ("-m", "tests.gpu.sanitize_target", str(self.requests), *map(str, WINDOWS))
        command = [program, "--tool", self.tool, "--error-exitcode", "3", sys.executable, *target]
        with tempfile.NamedTemporaryFile(prefix=f"flashkda-{self.tool}-", suffix=".log", delete=False) as log:
            self._report = Path(log.name)
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        self._started = time.monotonic()

    def result(self) -> Detail:
        """Wait for the end; raises Failure unless every shape ran and the report is clean."""
        self.start()
        if self._process is None:
            raise Failure("not run: compute-sanitizer is not on the PATH")
        try:
            code = self._process.wait(max(self._started + SECONDS - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        report = self._report.read_text(errors="replace")
        self.stop()
        shapes = [f"N={self.requests} T={window}" for window in WINDOWS]
        missing = [shape for shape in shapes if f"{RAN} {shape}" not in report]
        found = summary(report)
        detail = {"shapes": shapes, "summary": found[0] if found else None, "exit": code}
        if missing or found is None or found[1] or code:
            lines = "\n".join(report.splitlines()[-30:])
            raise Failure(f"exit {code}, {found}, did not run: {missing or 'none'}\n{lines}", detail)
        return detail

    def stop(self) -> None:
        """End it if it still runs, and remove its report."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            self._report.unlink(missing_ok=True)
            self._process = None


def checks(setup: Setup) -> list[Check]:
    """One check a tool and batch. None without a GPU."""
    return [check for check, _ in started_later(setup)]


def started_later(setup: Setup) -> list[tuple[Check, Run]]:
    """The checks, and what to start beforehand."""
    if not setup.cuda:
        return []
    found = []
    for tool in TOOLS:
        for requests in REQUESTS:
            run = Run(tool, requests)
            plans = tuple(setup.whole(kimi_k3(window), requests) for window in WINDOWS)
            found.append((Check("sanitizer", f"{tool}, N={requests}", run.result, plans), run))
    return found
