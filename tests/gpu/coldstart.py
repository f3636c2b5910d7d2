# SPDX-License-Identifier: Apache-2.0
"""How long a rank waits for its kernels: `python -m tests.gpu.coldstart --pack DIR`.

DIR is a pack of the kernels of a Kimi K3 rank at TP8, built perhaps elsewhere and without a GPU:
`flashkda compile --preset kimi-k3 --tp 8 --arch sm_90a --out DIR` (--build builds it here). Everything is measured in
fresh processes. Writes evidence/<gpu>-coldstart.json:

warm_ms             naming and loading all kernels from the pack under FLASHKDA_NO_JIT=1, median of the processes; the
                    imports of torch, flashkda and the FFI are beside it in `warm`
warm_cache_ms       the same from the cache
cold_s_per_kernel   compiling one, mean of the set; the worst is in `cold`
cold_s_set          all of them into an empty cache, with two workers, the start of the process included
kills, failed       tests.crash: kill -9 at random moments; failed counts everything here that went wrong
bitwise             one launch against three, and rounds of verify and commit against decode, with the kernels of the
                    pack and no compiler in the process; needs a GPU, and is skipped, saying so, without one
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flashkda.geometry import preset
from flashkda.jit.compiler import find_linker
from flashkda.kernel_sets import kernel_set
from tests.gpu.environment import ROOT, environment, gpu_slug, write_json

SOURCES = ("flashkda", "tests/gpu/coldstart.py", "tests/crash.py")
PROCESSES = 11
WORKERS = 2
KILLS = 200
# Requests of the bitwise points: with 12 heads they meet every tile, on its edges too.
REQUESTS = (1, 2, 3, 8, 33)

# Prints the milliseconds of each part, and what must not have been imported.
WARM = """
import json, sys, time
now = time.perf_counter
times = [now()]
import torch
times.append(now())
import flashkda
times.append(now())
import tvm_ffi
times.append(now())
from flashkda.jit import load_kernel
from flashkda.kernel_sets import kernel_set
recipes = kernel_set(flashkda.preset("kimi-k3", tp=8), [sys.argv[1]])
times.append(now())
busy = time.process_time()
kernels = [load_kernel(*function(*arguments)) for function, arguments in recipes]
times.append(now())
names = ("import_torch", "import_flashkda", "import_tvm_ffi", "import_planner", "load")
busy = time.process_time() - busy
parts = {name: 1e3 * (end - start) for name, start, end in zip(names, times, times[1:])}
parts["load_cpu"] = 1e3 * busy
print(json.dumps({"kernels": len(kernels), "compiler": "cutlass" in sys.modules, "parts": parts}))
"""

COLD = """
import json, sys
import flashkda
from flashkda.jit import prebuild
from flashkda.kernel_sets import kernel_set
if __name__ == "__main__":
    built = prebuild(kernel_set(flashkda.preset("kimi-k3", tp=8), [sys.argv[1]]), jobs=int(sys.argv[2]))
    print(json.dumps([[one.name, one.seconds, one.compiled] for one in built]))
"""


def run(command: Sequence[str], **settings: str) -> Any:
    """What a fresh process prints as JSON. Raises RuntimeError with the end of its errors."""
    cleared = ("FLASHKDA_KERNEL_PATH", "FLASHKDA_NO_JIT", "FLASHKDA_CACHE_LIMIT", "FLASHKDA_VERIFY_PATH")
    kept = {name: value for name, value in os.environ.items() if name not in cleared}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *command], env={**kept, "PYTHONPATH": path, **settings}, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"exit status {done.returncode}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def warm(arch: str, processes: int = PROCESSES, **settings: str) -> dict[str, Any]:
    """Loading all kernels in fresh processes: milliseconds of each part, median and fastest."""
    runs = [run(["-c", WARM, arch], FLASHKDA_NO_JIT="1", **settings) for _ in range(processes)]
    if any(one["compiler"] for one in runs):
        raise RuntimeError("the DSL was imported by a process that only loads")
    parts = {name: [one["parts"][name] for one in runs] for name in runs[0]["parts"]}
    return {
        "kernels": runs[0]["kernels"],
        "processes": processes,
        "median_ms": {name: round(statistics.median(times), 2) for name, times in parts.items()},
        "fastest_ms": {name: round(min(times), 2) for name, times in parts.items()},
    }


def cold(arch: str, cache: Path, workers: int) -> dict[str, Any]:
    """Compiling all kernels into an empty cache, in seconds."""
    script = cache.parent / "cold.py"  # a file, since its workers are spawned
    script.write_text(COLD)
    start = time.perf_counter()
    built = run([str(script), arch, str(workers)], FLASHKDA_CACHE_DIR=str(cache))
    seconds = time.perf_counter() - start
    if not all(compiled for _, _, compiled in built):
        raise RuntimeError("the cache was not empty")
    worst = max(built, key=lambda one: one[1])
    return {
        "set_s": round(seconds, 2),
        "workers": workers,
        "cores": len(os.sched_getaffinity(0)),
        "mean_s": round(statistics.mean(one[1] for one in built), 2),
        "worst_s": [worst[0], round(worst[1], 2)],
        "kernels": [[name, round(spent, 2)] for name, spent, _ in built],
    }


def bitwise() -> dict[str, Any]:
    """In the process that is checked: points of the verify's matrix, decode, and rounds; on kernels of the pack."""
    from tests.gpu import rounds
    from tests.gpu.matrix import check_equal
    from tests.gpu.setup import Setup, kimi_k3

    setup, geometry = Setup(), kimi_k3(8)
    for requests in REQUESTS:
        check_equal(setup, geometry, requests, seed=requests)
    decoded = rounds._decode_parts(setup, geometry)
    lossless = rounds._lossless(setup, geometry, True)
    torch.cuda.synchronize()
    if "cutlass" in sys.modules:
        raise RuntimeError("the DSL was imported by a process that only loads")
    return {"window": 8, "heads": geometry.heads, "requests": list(REQUESTS), "decode": decoded, "lossless": lossless}


class Report:
    """The results so far, and the file that they go to after each step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, Any] = {**environment(*SOURCES), "failed": 0, "failures": [], "skipped": {}}

    def step(self, name: str, work: Callable[[], dict[str, Any]], summary: Callable[[Any], Mapping[str, Any]]) -> None:
        """Do one step and keep what it found, and what of it is a result of its own."""
        start = time.perf_counter()
        try:
            found = work()
            self.values |= {name: found, **summary(found)}
        except Exception as error:  # whatever it is, it is this step's result
            self.values["failed"] += 1
            self.values["failures"].append(f"{name}: {type(error).__name__}: {error}")
        write_json(self.path, self.values)
        failed = self.values["failures"][-1:] if name not in self.values else []
        seconds = time.perf_counter() - start
        print(f"{name}: {failed[0] if failed else self.values[name]} ({seconds:.1f} s)", flush=True)

    def skip(self, name: str, why: str) -> None:
        """Say that a step was not done."""
        self.values["skipped"][name] = why
        write_json(self.path, self.values)
        print(f"{name}: skipped, {why}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.coldstart", description=__doc__)
    parser.add_argument("--pack", type=Path, required=True, metavar="DIR", help="the pack of the kernels")
    parser.add_argument("--build", action="store_true", help="build what the pack lacks first")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: evidence/<gpu>-coldstart.json")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="fresh processes of a warm start")
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--without-cold", action="store_true", help="compile nothing, where there is no DSL")
    parser.add_argument("--bitwise", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.bitwise:
        print(json.dumps(bitwise()))
        return 0
    pack = options.pack.absolute()
    if options.build:
        from flashkda.jit import build_pack

        build_pack(kernel_set(preset("kimi-k3", tp=8), [options.arch]), pack)
    report = Report(options.output or ROOT / "evidence" / f"{gpu_slug()}-coldstart.json")
    with tempfile.TemporaryDirectory(prefix="flashkda-coldstart-") as name:
        folder = Path(name)
        cache, none = folder / "cache", str(folder / "none")
        from_pack = {"FLASHKDA_KERNEL_PATH": str(pack), "FLASHKDA_CACHE_DIR": none}
        report.step(
            "warm",
            lambda: warm(options.arch, options.processes, **from_pack),
            lambda found: {"warm_ms": found["median_ms"]["load"]},
        )
        if options.without_cold:
            report.skip("cold", "as asked for")
        else:
            report.step(
                "cold",
                lambda: cold(options.arch, cache, WORKERS),
                lambda found: {"cold_s_per_kernel": found["mean_s"], "cold_s_set": found["set_s"]},
            )
            if find_linker() is None:
                report.skip("warm_cache", "there is no linker, so the DSL has to load what was compiled here")
            else:
                report.step(
                    "warm_cache",
                    lambda: warm(options.arch, options.processes, FLASHKDA_CACHE_DIR=str(cache)),
                    lambda found: {"warm_cache_ms": found["median_ms"]["load"]},
                )
        report.step("crash", lambda: _crash(options.kills), lambda found: {"kills": found["kills"]})
        if torch.cuda.is_available():
            command = ["-m", "tests.gpu.coldstart", "--pack", str(pack), "--bitwise"]
            report.step("bitwise", lambda: run(command, FLASHKDA_NO_JIT="1", **from_pack), lambda found: {})
        else:
            report.skip("bitwise", "torch finds no CUDA device")
    print(f"failed: {report.values['failed']}; written to {report.path}")
    return 1 if report.values["failed"] else 0


def _crash(kills: int) -> dict[str, Any]:
    found = run(["-m", "tests.crash", "--kills", str(kills)])
    if found["failed"] or found["damaged"] or found["temporary"]:
        raise RuntimeError(f"the cache did not survive: {found}")
    return {name: found[name] for name in ("kills", "failed", "phases", "checked")}


if __name__ == "__main__":
    sys.exit(main())
