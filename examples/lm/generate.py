# SPDX-License-Identifier: Apache-2.0
"""Generate text with and without speculation, the same bytes both times: `python -m examples.lm.generate`.

Greedy and sampled, on the kernels where there is a GPU, else on the reference backend. The drafts are guesses from the
text so far; a verify scores a window of them, the longest right prefix is committed. A sampled byte is a function of
its logits and of one random number that belongs to its position, so drafts do not change it either. Exits with 1 where
the bytes differ.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.lm.decoder import Decoder
from examples.lm.model import LM

PROMPT = "".join(f"object.__{name}__(self, other)\n" for name in ("add", "sub", "mul"))
Choice = Callable[[Tensor, int], int]


class Drafter:
    """Guesses what follows a text by what followed its last few bytes when they were there before."""

    def __init__(self, longest: int = 8, shortest: int = 2) -> None:
        self.lengths = range(longest, shortest - 1, -1)
        self.followers: dict[bytes, int] = {}

    def learn(self, text: bytearray) -> None:
        """Remember the last byte of ``text`` as what follows those before it. To be called for each byte, in order."""
        for length in self.lengths:
            if len(text) > length:
                self.followers[bytes(text[-1 - length : -1])] = text[-1]

    def draft(self, text: bytearray, most: int) -> list[int]:
        """Up to ``most`` guesses; fewer where nothing like the end of the text has been seen."""
        guessed = bytes(text[-max(self.lengths) :])
        drafts: list[int] = []
        while len(drafts) < most:
            ends = (guessed[-length:] for length in self.lengths)
            guess = next((self.followers[end] for end in ends if end in self.followers), None)
            if guess is None:
                break
            drafts.append(guess)
            guessed += bytes([guess])
        return drafts


def greedy(logits: Tensor, position: int) -> int:
    """The likeliest byte."""
    return int(logits.argmax())


def sampled(seed: int, temperature: float = 0.5, most: int = 65536) -> Choice:
    """Draws a byte with one number in [0, 1) a position."""
    numbers = torch.rand(most, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def choose(logits: Tensor, position: int) -> int:
        # One row at a time and on the CPU: a softmax over more rows may add in another order.
        sums = torch.softmax(logits.double() / temperature, dim=0).cumsum(0)
        return min(int(torch.searchsorted(sums, numbers[position] * sums[-1], right=True)), len(sums) - 1)

    return choose


@dataclass(frozen=True)
class Generated:
    """The new bytes, and what they took."""

    text: bytes
    seconds: float
    steps: int
    launches: int  # of a step

    def row(self, name: str) -> str:
        """One line of the table."""
        speed, length = len(self.text) / self.seconds, len(self.text) / self.steps
        return f"  {name:<16}{speed:>10.1f}{length:>18.2f}{self.launches:>16}{self.launches / length:>16.2f}"


HEADER = f"  {'':<16}{'bytes/s':>10}{'accepted a step':>18}{'launches/step':>16}{'launches/byte':>16}"


def generate(
    decoder: Decoder, prompt: bytes, count: int, choose: Choice, on_bytes: Callable[[int], None] = lambda count: None
) -> Generated:
    """``count`` bytes after ``prompt`` from a fresh ``decoder``; it speculates where its window is longer than 1."""
    text, drafter = bytearray(), Drafter()
    for byte in prompt:
        text.append(byte)
        drafter.learn(text)
    for start in range(0, len(prompt) - 1, decoder.window):  # all but the last byte: the first step's window has that
        piece = prompt[start : min(start + decoder.window, len(prompt) - 1)]
        decoder.verify(piece)
        decoder.commit(len(piece))
    begin, steps, end = time.perf_counter(), 0, len(prompt) + count
    accepted = decoder.window
    while len(text) < end:
        # Where drafts have just been rejected, the next window is shorter.
        longest = min(decoder.window, 2 * accepted, end - len(text))
        window = [text[-1], *drafter.draft(text, longest - 1)]
        logits = decoder.verify(window).cpu()
        accepted, before = 0, len(text)
        # Each row is right as long as the bytes before it are: window[0] is, a draft is if it is what was chosen.
        while accepted < len(window) and (accepted == 0 or window[accepted] == text[-1]):
            text.append(choose(logits[accepted], len(text)))
            drafter.learn(text)
            accepted += 1
        decoder.commit(accepted)
        steps += 1
        on_bytes(len(text) - before)
    return Generated(bytes(text[len(prompt) :]), time.perf_counter() - begin, steps, decoder.launches)


def main(arguments: list[str] | None = None) -> int:
    """Generate four times; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.lm.generate", description=__doc__.split("\n\n")[0])
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--bytes", type=int, default=256, help="to generate (default 256)")
    parser.add_argument("--window", type=int, default=4, choices=range(2, 17), metavar="2..16", help="T (default 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampled text")
    parser.add_argument("--path", default="auto", help="fused, decomposed, reference or auto")
    options = parser.parse_args(arguments)
    from rich.progress import Progress  # for who imports this module, generate() is without it

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)  # tensors this small are slower on more
    model, prompt = LM.load(), options.prompt.encode() or PROMPT.encode()
    same = True
    for name, choose in {"greedy": greedy, "sampled": sampled(options.seed)}.items():
        runs: dict[str, Generated] = {}
        with Progress(transient=True, disable=not sys.stdout.isatty()) as progress:
            for kind, window in {"plain": 1, "speculative": options.window}.items():
                decoder = Decoder(model, window, device=device, path=options.path)
                task = progress.add_task(f"{name}, {kind}", total=options.bytes)
                show = functools.partial(progress.advance, task)
                runs[kind] = generate(decoder, prompt, options.bytes, choose, show)
        where = "calls of the reference backend" if decoder.plan.path == "reference" else "kernel launches"
        print(f"{name} on the {decoder.plan.path} path ({device}; launches: {where})")
        print(HEADER)
        for kind, run in runs.items():
            print(run.row(kind))
        equal = runs["plain"].text == runs["speculative"].text
        same &= equal
        print(f"  {'the same' if equal else 'DIFFERENT'} {options.bytes} bytes:")
        shown = options.prompt + runs["plain"].text.decode(errors="replace")
        print("".join(f"    | {line}\n" for line in shown.splitlines()))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
