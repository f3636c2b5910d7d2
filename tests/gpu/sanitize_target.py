# SPDX-License-Identifier: Apache-2.0
"""Runs the fused kernel, for compute-sanitizer to watch: `python -m tests.gpu.sanitize_target N T [T ...]`.

Tensors are made on the CPU and copied, each into an allocation of its own, so that next to nothing but the kernel runs
on the GPU and an access past the end of a tensor is one past the end of an allocation.
"""

from __future__ import annotations

import os
import sys

RAN = "sanitize_target: ran"


def main(requests: int, windows: list[int]) -> int:
    """Run once a window; 1 where a result is not what must be written."""
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    import torch

    from tests.gpu.setup import Setup, kimi_k3
    from tests.inputs import make_case

    setup = Setup()
    for window in windows:
        geometry = kimi_k3(window)
        lengths = [max(window - n % 3, 1) for n in range(requests)]
        case = make_case(geometry, lengths, seed=window)
        for name, tensor in case.tensors.items():
            if tensor is not None:
                # Exactly the view's own elements, in its layout.
                size = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
                flat = torch.as_strided(tensor, (size,), (1,)).to(setup.device)
                case.tensors[name] = torch.as_strided(flat, tensor.shape, tensor.stride())
        setup.run_whole(case)
        torch.cuda.synchronize()
        if not case["out"].cpu().isfinite().all():
            print(f"N={requests} T={window}: out is not finite")
            return 1
        print(f"{RAN} N={requests} T={window}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), [int(text) for text in sys.argv[2:]]))
