# SPDX-License-Identifier: Apache-2.0
"""What the kernels of an engine take of an SM, written down: `python -m tests.compile.record`.

Registers a thread, shared memory and CTAs an SM of every kernel of a Kimi K3 rank with every tile, on sm_90a, go to
resources.json. A test compares what is compiled with it, so that a change which costs occupancy is seen without a GPU;
who means it records anew, and the difference is part of the change. The numbers are those of the pinned DSL.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.compile.cases import Case, quick_cases
from tests.compile.examine import Examiner, Facts

PATH = Path(__file__).with_name("resources.json")
ARCH = "sm_90a"
_SM_REGISTERS, _SM_SHARED, _SM_THREADS = 64 * 1024, 228 * 1024, 2048
_PORTION, _WARP = 256, 32


def recorded_cases() -> tuple[Case, ...]:
    """The cases that are written down."""
    return tuple(case for case in quick_cases() if case.arch == ARCH and case.label.startswith("k3_"))


def occupancy(facts: Facts) -> int:
    """CTAs that fit an SM, by registers, shared memory (what the system reserves is in it) and threads."""
    warps = -(-facts.threads // _WARP)
    registers = warps * -(-facts.registers * _WARP // _PORTION) * _PORTION
    return min(_SM_REGISTERS // registers, _SM_SHARED // max(facts.shared_bytes, 1), _SM_THREADS // facts.threads)


def resources(facts: Facts) -> dict[str, int]:
    """What is written down of a kernel."""
    return {
        "registers": facts.registers,
        "spill_bytes": facts.spill_bytes,
        "shared_bytes": facts.shared_bytes,
        "ctas_per_sm": occupancy(facts),
    }


def main() -> int:
    """Compile and write."""
    with tempfile.TemporaryDirectory() as folder:
        examiner = Examiner(Path(folder), workers=2)
        try:
            cases = recorded_cases()
            for case in cases:
                examiner.submit(case.spec)
            found = {case.id: resources(examiner.facts(case.spec)) for case in cases}
        finally:
            examiner.close()
    PATH.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(f"{len(found)} kernels: {PATH}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
