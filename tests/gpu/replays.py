# SPDX-License-Identifier: Apache-2.0
"""Thousands of CUDA graph replays over poisoned memory, one launch against three, at each row count 1..16.

One graph holds it all, so that the host neither waits nor copies: pick the replay's inputs, slots, lengths and accepted
counts from pools by a counter on the device, poison what is written and what must not be read, run both, compare to the
bit, and count. The conv windows go on from replay to replay.
"""

from __future__ import annotations

import random
from functools import partial

import torch
from torch import Tensor

from flashkda.geometry import VerifyGeometry
from tests.gpu.cases import WRITTEN, device_case, fork, poison
from tests.gpu.setup import Check, Detail, Failure, Setup, kimi_k3, scratch
from tests.inputs import bits

ROWS = tuple(range(1, 17))
REPLAYS = 2000
WINDOW = 8
SLOTS = 24
# Primes: the combinations come back after 61 * 67 replays only.
_INPUTS, _BATCHES = 61, 67
_ROW_TENSORS = {"mixed_qkv": 1.0, "raw_gate": 1.5, "raw_beta": 1.5, "output_gate": 2.0}
_BATCH_TENSORS = ("query_start_loc", "state_indices", "num_accepted")


def checks(setup: Setup) -> list[Check]:
    """One check a row count."""
    rows, replays = (ROWS, REPLAYS) if not setup.small else ((1, 5), 24)
    geometry = kimi_k3(WINDOW, 1 if setup.small else 12, has_num_accepted=True)
    return [
        Check(
            "replays",
            f"{r} rows",
            partial(_check, setup, geometry, r, replays),
            setup.both(geometry, requests_of(r)),
        )
        for r in rows
    ]


def _check(setup: Setup, geometry: VerifyGeometry, rows: int, replays: int) -> Detail:
    return _Replays(setup, geometry, rows).check(replays)


def requests_of(rows: int) -> int:
    """Requests of a graph of ``rows`` rows: 1 to 9, which takes the planner through all its tiles at 12 heads."""
    return rows // 2 + 1


def _batch(draw: random.Random, rows: int, requests: int) -> tuple[list[int], list[int], list[int], list[bool]]:
    """query_start_loc, slots, accepted counts, and which rows must not be read."""
    lengths, left = [], rows if draw.random() < 0.7 else draw.randint(0, rows)
    for _ in range(requests):
        lengths.append(draw.randint(0, min(WINDOW, left)))
        left -= lengths[-1]
    lengths[-1] = min(WINDOW, lengths[-1] + left)
    draw.shuffle(lengths)
    slots = [0 if draw.random() < 0.1 else slot for slot in draw.sample(range(1, SLOTS), requests)]
    starts, unread = [0], [True] * rows
    for length, slot in zip(lengths, slots, strict=True):
        starts.append(starts[-1] + length)
        unread[starts[-2] : starts[-1]] = [slot == 0] * length
    return starts, slots, [draw.randint(0, WINDOW) for _ in range(requests)], unread


class _Replays:
    def __init__(self, setup: Setup, geometry: VerifyGeometry, rows: int) -> None:
        self.setup, self.rows, requests = setup, rows, requests_of(rows)
        draw = random.Random(rows)
        lengths, left = [], rows
        for _ in range(requests):
            lengths.append(min(WINDOW, left))
            left -= lengths[-1]
        case = device_case(geometry, lengths, seed=rows, device=setup.device, pool_slots=SLOTS)
        self.case = case
        self.whole, self.parts = fork(case), fork(case)
        self.scratch = scratch(case)
        self.state = case.arenas["state"].clone()

        device, generator = torch.device(setup.device), torch.Generator(setup.device).manual_seed(rows)
        self.pools: dict[str, Tensor] = {
            name: torch.empty(_INPUTS, *case[name].shape, dtype=torch.bfloat16, device=device).normal_(
                0, scale, generator=generator
            )
            for name, scale in _ROW_TENSORS.items()
        }
        batches = [_batch(draw, rows, requests) for _ in range(_BATCHES)]
        for i, name in enumerate(_BATCH_TENSORS):
            self.pools[name] = torch.tensor([batch[i] for batch in batches], dtype=torch.int32, device=device)
        self.unread = torch.tensor([batch[3] for batch in batches], device=device)
        self.step, self.mismatches, self.changes = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(3))
        self.previous = case["out"].clone()

        self.run_whole = setup.bind_whole(self.whole)
        self.run_parts = setup.bind_parts(self.parts, *self.scratch)

    def replay(self) -> None:
        """All of one replay; everything in it is on the device."""
        self.refill()
        for written in (self.whole, self.parts):
            for name in WRITTEN:
                if name != "conv_state":
                    poison(written.arenas[name])
        for tensor in self.scratch:
            poison(tensor)
        self.state.copy_(self.case.arenas["state"])
        self.parts.arenas["conv_state"].copy_(self.whole.arenas["conv_state"])
        self.run_whole()
        self.run_parts()
        self.compare()

    def refill(self) -> None:
        self.step.add_(1)
        inputs, batch = self.step.remainder(_INPUTS), self.step.remainder(_BATCHES)
        for name in _BATCH_TENSORS:
            self.case[name].copy_(self.pools[name].index_select(0, batch)[0])
        unread = self.unread.index_select(0, batch)[0]
        for name in _ROW_TENSORS:
            view = self.case[name]
            mask = unread.view(-1, *[1] * (view.ndim - 1))
            view.copy_(self.pools[name].index_select(0, inputs)[0].masked_fill(mask, torch.nan))
        self.case["state"].neg_()

    def compare(self) -> None:
        arenas = [(self.whole.arenas[name], self.parts.arenas[name]) for name in WRITTEN]
        differ = [(bits(a) != bits(b)).any() for a, b in [*arenas, (self.case.arenas["state"], self.state)]]
        # Equal poison would be equal bits.
        wrong = torch.stack([*differ, ~self.whole["out"].isfinite().all()])
        self.mismatches.add_(wrong.any())
        self.changes.add_((bits(self.whole["out"]) != bits(self.previous)).any())
        self.previous.copy_(self.whole["out"])

    def check(self, replays: int) -> Detail:
        run = self.setup.capture(self.replay)
        for counter in (self.step, self.mismatches, self.changes):
            counter.zero_()
        for _ in range(replays):
            run()
        detail = {
            "rows": self.rows,
            "replays": int(self.step),
            "mismatches": int(self.mismatches),
            "changes": int(self.changes),
            "requests": requests_of(self.rows),
            "window": WINDOW,
            "heads": self.case.geometry.heads,
        }
        if detail["replays"] != replays or detail["mismatches"]:
            raise Failure(f"{detail['mismatches']} of {detail['replays']} replays differ ({replays} wanted)", detail)
        # A batch of null requests alone gives zeros, as the one before may have.
        if detail["changes"] < replays * 0.8:
            raise Failure("the output hardly changes from replay to replay: the graph does not see new inputs", detail)
        return detail
