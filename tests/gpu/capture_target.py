# SPDX-License-Identifier: Apache-2.0
"""Captures a binding that has never run, in a process in which nothing has: `python -m tests.gpu.capture_target`.

A kernel's first launch hands its code to the driver, which a capture may not see; `bind` has to have done it.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Bind, capture, replay, compare with the three launches; 1 where they differ."""
    import torch

    from flashkda.planner import plan_verify
    from tests.gpu.cases import device_case, fork
    from tests.gpu.setup import Setup, kimi_k3
    from tests.inputs import assert_same_bits, written

    setup, geometry = Setup(), kimi_k3(4)
    case = device_case(geometry, [4, 1, 3], seed=1, device=setup.device)
    wanted = fork(case)
    verify = plan_verify(geometry, 3, path="fused", device=setup.device, strict=True).bind(**case.tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verify.run()
    graph.replay()
    setup.run_parts(wanted)
    assert_same_bits(written(case), written(wanted))
    print("captured at once")
    return 0


if __name__ == "__main__":
    sys.exit(main())
