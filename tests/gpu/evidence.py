# SPDX-License-Identifier: Apache-2.0
"""All that must be shown on a GPU, in one command: `python -m tests.gpu.evidence`.

Builds every kernel first, in all cores, then runs the checks and writes evidence/<gpu>-verify.json, after each check
anew, so that an interrupted run leaves what it had. Exits with 1 where anything failed or did not run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from flashkda.errors import KernelBuildError
from tests.gpu import (
    accuracy,
    chunked,
    folded,
    invariance,
    layer,
    matrix,
    pairwise,
    replays,
    reported,
    rounds,
    sanitizer,
)
from tests.gpu.environment import ROOT, clocks, environment, gpu_slug, use_local_kernel_cache, write_json
from tests.gpu.setup import Check, Setup, kernel_specs
from tests.oracle import CORRECTION_TOLERANCE, OUT_TOLERANCE

BUDGET = 525.0
SOURCES = ("flashkda", "tests/gpu", "tests/inputs.py", "tests/oracle.py", "tests/regroup.py")
GROUPS = (reported, accuracy, invariance, matrix, pairwise, replays, rounds, layer, sanitizer, chunked, folded)


def all_checks(setup: Setup) -> list[Check]:
    """Every check, in the order of the run."""
    return [check for group in GROUPS for check in group.checks(setup)]


class Evidence:
    """The results so far, and the file that they go to."""

    def __init__(self, path: Path, setup: Setup) -> None:
        self.path, self.start = path, time.monotonic()
        self.values: dict[str, Any] = {
            **environment(*SOURCES),
            "path": "reference" if setup.reference else "fused against decomposed",
            "clocks": {"before": clocks()},
            "complete": False,
            "failed": 0,
            "tolerances": {"out": OUT_TOLERANCE, "corrections": CORRECTION_TOLERANCE},
            "worst": {"out": 0.0, "corrections": 0.0},
            "replays": [],
            "tests": [],
        }

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.start

    def add(self, check: Check, result: str, detail: dict[str, Any], seconds: float, error: str = "") -> None:
        """One more result; on disk when this returns."""
        values = self.values
        test = {"name": f"{check.group}: {check.name}", "result": result, "seconds": round(seconds, 2)}
        values["tests"].append({**test, "detail": detail, **({"error": error} if error else {})})
        values["failed"] += result != "passed"
        if check.group == "replays" and "mismatches" in detail:
            values["replays"].append({key: detail[key] for key in ("rows", "replays", "mismatches")})
        for name, worst in detail.get("worst", {}).items():
            values["worst"][name] = max(values["worst"][name], worst)
        self.write()

    def write(self) -> None:
        """Bring the file up to date."""
        self.values["seconds"] = round(self.seconds, 1)
        write_json(self.path, self.values)

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"[{self.seconds:6.1f} s] {text}", flush=True)


def build(evidence: Evidence, checks: Iterable[Check], jobs: int | None) -> None:
    """Build all kernels of the checks, in parallel. A kernel that fails is its checks' failure, later."""
    from flashkda.jit.cache import prebuild

    specs = kernel_specs((plan for check in checks for plan in check.plans), (k for c in checks for k in c.kernels))
    start = time.monotonic()
    evidence.say(f"building {len(specs)} kernels")
    check = Check("build", f"{len(specs)} kernels", dict)
    try:
        built = prebuild(specs, jobs=jobs)
    except KernelBuildError as error:
        evidence.say(f"FAILED build: {error}")
        evidence.add(check, "failed", {}, time.monotonic() - start, str(error))
        return
    detail = {"compiled": sum(one.compiled for one in built), "core_seconds": round(sum(one.seconds for one in built))}
    evidence.add(check, "passed", detail, time.monotonic() - start)
    evidence.say(f"built: {detail}")


def run_checks(evidence: Evidence, checks: Sequence[Check], budget: float) -> None:
    """Run the checks in order while the budget lasts; after a CUDA fault the rest cannot run."""
    fault = ""
    group, passed, began = "", 0, evidence.seconds
    for i, check in enumerate(checks):
        if check.group != group:
            group, passed, began = check.group, 0, evidence.seconds
        why = f"the budget of {budget:.0f} s was spent" if evidence.seconds > budget else fault
        if why and not (why is fault and check.group == "sanitizer"):  # its processes have a context of their own
            evidence.add(check, "not run", {}, 0.0, why)
        else:
            passed += run_check(evidence, check)
            fault = fault or _clean_up()
        if i + 1 == len(checks) or checks[i + 1].group != group:
            count = sum(other.group == group for other in checks)
            evidence.say(f"{group}: {passed} of {count} passed in {evidence.seconds - began:.1f} s {why}".rstrip())


def run_check(evidence: Evidence, check: Check) -> bool:
    """Run one check and keep its result."""
    start = time.monotonic()
    try:
        detail = check.run()
        if torch.cuda.is_initialized() and check.group != "sanitizer":
            torch.cuda.synchronize()
    except Exception as error:  # whatever it is, it is this check's result
        text = str(error) if isinstance(error, AssertionError) else traceback.format_exc(limit=-6)
        evidence.add(check, "failed", getattr(error, "detail", {}), time.monotonic() - start, text)
        evidence.say(f"FAILED {check.group}: {check.name}: {text[:1500]}")
        return False
    evidence.add(check, "passed", detail, time.monotonic() - start)
    return True


def _clean_up() -> str:
    """Give the memory of a check back; what is wrong where the device cannot go on."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except Exception as error:  # torch raises types of its own here
        return f"not run after a CUDA fault: {str(error).splitlines()[0]}"
    return ""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.evidence", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="groups or parts of check names")
    parser.add_argument(
        "--budget", type=float, default=BUDGET, metavar="SECONDS", help="start no check after this time"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: evidence/<gpu>-verify.json")
    parser.add_argument("--without-sanitizer", action="store_true", help="leave compute-sanitizer out")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes that compile (default: one a core)")
    parser.add_argument("--device", default="cuda", help="cpu: a smoke run of the checks, with --path reference")
    parser.add_argument("--path", default="kernels", choices=("kernels", "reference"), help="what is checked")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    options = arguments(argv)
    setup = Setup(options.device, reference=options.path == "reference", small=options.path == "reference")
    if setup.cuda and not torch.cuda.is_available():
        print("evidence needs a CUDA device, and torch finds none.", file=sys.stderr)
        print("To try the checks without one: --device cpu --path reference", file=sys.stderr)
        return 2
    if not setup.cuda and not setup.reference:
        print("the kernels need a CUDA device; with --device cpu, give --path reference", file=sys.stderr)
        return 2
    for name in ("FLASHKDA_VERIFY_PATH", "FLASHKDA_DEBUG_CHECKS"):
        os.environ.pop(name, None)  # the checks choose for themselves
    use_local_kernel_cache()
    suffix = "verify" if not setup.reference else "reference"
    evidence = Evidence(options.output or ROOT / "evidence" / f"{gpu_slug()}-{suffix}.json", setup)
    evidence.say(f"{evidence.values['gpu']}, driver {evidence.values['driver']}, torch {evidence.values['torch']}")

    watched = [] if options.without_sanitizer else sanitizer.started_later(setup)
    checks = [check for group in GROUPS if group is not sanitizer for check in group.checks(setup)]
    checks += [check for check, _ in watched]
    if options.only:
        checks = [check for check in checks if any(part in f"{check.group}: {check.name}" for part in options.only)]
    evidence.values["partial"] = bool(options.only) or options.without_sanitizer
    build(evidence, checks, options.jobs)
    try:
        for check, process in watched:
            if check in checks:
                process.start()
        run_checks(evidence, checks, options.budget)
    finally:
        for _, process in watched:
            process.stop()
    evidence.values["complete"] = True
    evidence.values["clocks"]["after"] = clocks()
    evidence.write()
    failed = evidence.values["failed"]
    evidence.say(f"{len(checks)} checks, failed: {failed}; written to {evidence.path}")
    return 1 if failed or not checks else 0


if __name__ == "__main__":
    sys.exit(main())
