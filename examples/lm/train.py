# SPDX-License-Identifier: Apache-2.0
"""Train the example's weights: `python -m examples.lm.train`, some minutes on two CPU cores.

The text is ``pydoc_data/topics.py`` of the Python in use: the topics of Python's ``help()``, extracts of the language
reference, which every CPython ships in its standard library. Copyright Python Software Foundation, under the PSF
License Agreement Version 2 (https://docs.python.org/3/license.html). Nothing else is read, and nothing is downloaded.
The weights file names the text, its licence and the Python version in its metadata.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from rich.progress import Progress
from torch import Tensor
from torch.nn import functional

from examples.lm.model import LM, WEIGHTS, Config

SOURCE = "pydoc_data/topics.py of the Python standard library"
LICENCE = "PSF License Agreement Version 2"


def text() -> Tensor:
    """The training text as int64 bytes, topics in the order of their names."""
    joined = "\n\n".join(topics[name].strip() for name in sorted(topics))
    return torch.frombuffer(bytearray(joined.encode()), dtype=torch.uint8).long()


def batch(data: Tensor, sequences: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random pieces of ``data`` and the bytes that follow, [sequences, length] each."""
    starts = torch.randint(len(data) - length, (sequences, 1), generator=generator)
    pieces = data[starts + torch.arange(length + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def main() -> None:
    """Train until the minutes are over, then write the weights."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=192)
    parser.add_argument("--rate", type=float, default=4e-3, help="the highest learning rate")
    parser.add_argument("--output", type=Path, default=WEIGHTS)
    options = parser.parse_args()

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    data = text()
    held_out, data = data[: len(data) // 50], data[len(data) // 50 :]
    model = LM(Config())
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    start, done, steps, mean = time.monotonic(), 0.0, 0, math.nan
    with Progress() as progress:
        task = progress.add_task("training", total=1.0)
        while done < 1:
            done = min(1.0, (time.monotonic() - start) / (60 * options.minutes))
            rate = options.rate * min(1.0, (steps + 1) / 40) * (0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * done)))
            for group in optimizer.param_groups:
                group["lr"] = rate
            inputs, targets = batch(data, options.sequences, options.length, generator)
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            steps += 1
            mean = loss.item() if math.isnan(mean) else 0.98 * mean + 0.02 * loss.item()
            progress.update(task, completed=done, description=f"step {steps}, loss {mean:.3f}")
            if steps % 50 == 0:
                progress.print(f"step {steps}: loss {mean:.3f} nats a byte")
    with torch.no_grad():
        inputs, targets = batch(held_out, 16, 512, generator)
        held = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()
    about = {
        "text": SOURCE,
        "licence": LICENCE,
        "python": platform.python_version(),
        "steps": str(steps),
        "loss": f"{mean:.3f}",
        "held_out_loss": f"{held:.3f}",
    }
    model.save(options.output, about)
    print(f"{steps} steps, loss {mean:.3f}, on text held out {held:.3f} nats a byte: {options.output}")


if __name__ == "__main__":
    main()
