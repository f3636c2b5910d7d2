# SPDX-License-Identifier: Apache-2.0
"""The language model with its heads split over ranks: `torchrun --nproc-per-node 2 -m examples.lm.tensor_parallel`.

gloo on CPUs, NCCL on GPUs; any number of ranks that divides the heads. Each rank speculates with its share of the
heads, then alone with all of them, and compares: the bytes have to be the same, and so has every bit of the recurrent
states of its heads. Exits with 1 where they differ.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import distributed

from examples.lm.decoder import SLOT, Decoder
from examples.lm.generate import PROMPT, generate, sampled
from examples.lm.model import LM

WINDOW, BYTES = 4, 48


def main() -> int:
    """Compare on every rank; the exit status, 1 on all ranks where one differs."""
    gpu = torch.cuda.is_available()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if gpu else "cpu"
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    distributed.init_process_group("nccl" if gpu else "gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    try:
        model = LM.load()
        split = Decoder(model, WINDOW, device=device, rank=rank, ranks=ranks)
        whole = Decoder(model, WINDOW, device=device)
        texts = [generate(decoder, PROMPT.encode(), BYTES, sampled(0)).text for decoder in (split, whole)]
        heads = slice(rank * split.plan.geometry.heads, (rank + 1) * split.plan.geometry.heads)
        differ = int(texts[0] != texts[1]) + sum(
            not torch.equal(mine.state[SLOT].view(torch.int32), all_heads.state[SLOT, heads].view(torch.int32))
            for mine, all_heads in zip(split.layers, whole.layers, strict=True)
        )
        found = torch.tensor([differ], device=device)
        distributed.all_reduce(found)
        if rank == 0:
            verdict = "the same bytes and states as" if not found else "DIFFERENT from"
            print(f"{ranks} ranks of {split.plan.geometry.heads} heads: {verdict} one rank's, {BYTES} bytes sampled")
        return int(found.item() > 0)
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
