# SPDX-License-Identifier: Apache-2.0
"""A request's bits depend neither on the other requests, nor its slot, nor later drafts, nor how heads are ranked."""

from __future__ import annotations

from functools import partial

import torch

from flashkda.geometry import VerifyGeometry
from flashkda.planner import Tile
from tests.gpu import pairwise
from tests.gpu.setup import Check, Detail, Setup, kimi_k3
from tests.inputs import Case, assert_same_bits, clone, make_case
from tests.regroup import outcome, regroup, take_heads


def checks(setup: Setup) -> list[Check]:
    """Batch, slot and prefix at K3's options and at one other geometry; ranks at K3's."""
    window, heads = (8, 12) if not setup.small else (3, 1)
    row = pairwise.table()[1]
    other = row.geometry.replace(heads=min(heads, 6))
    found = []
    for name, geometry, tile in (("K3", kimi_k3(window, heads), None), (row.name, other, row.tile)):
        plans = [plan for n in (1, 2, 3, 5) for plan in setup.both(geometry, n, tile)]
        run = partial(_batches, setup, geometry, tile)
        found.append(Check("invariance", f"batch, slot and drafts, {name}", run, tuple(plans)))
    all_heads, splits = (96, (12, 6)) if not setup.small else (4, (2, 1))
    plans = [plan for h in (all_heads, *splits) for plan in setup.both(kimi_k3(4, h), 2)]
    found.append(Check("invariance", "heads of a rank", partial(_ranks, setup, all_heads, splits), tuple(plans)))
    return found


def _run(setup: Setup, case: Case, tile: Tile | None) -> Case:
    """One launch; the three launches give the same."""
    parts = clone(case)
    setup.run_whole(case, tile)
    setup.run_parts(parts, tile)
    for n in range(len(case.lengths)):
        assert_same_bits(outcome(parts, n), outcome(case, n))
    return case


def _batches(setup: Setup, geometry: VerifyGeometry, tile: Tile | None) -> Detail:
    window = geometry.window
    lengths = (window, 3, 1, window, min(5, window))
    case = make_case(geometry, lengths, seed=11, device=setup.device)
    base = _run(setup, clone(case), tile)
    compared = 0

    def same(requests: tuple[int, ...], changed: Case, tokens: list[int]) -> None:
        nonlocal compared
        _run(setup, changed, tile)
        for i, (n, length) in enumerate(zip(requests, tokens, strict=True)):
            found, wanted = outcome(changed, i, tokens=length), outcome(base, n, tokens=length)
            try:
                assert_same_bits(found, wanted)
            except AssertionError as error:
                raise AssertionError(f"request {n} as {i} of {requests}, {length} tokens: {error}") from error
            compared += 1

    batches = ((4, 3, 2, 1, 0), (1, 4), (2, 0, 3), *((n,) for n in range(5)))
    for seed, requests in enumerate(batches):  # alone, in other positions, in other slots
        kept = [lengths[n] for n in requests]
        same(requests, regroup(case, requests, seed=seed + 1), kept)
    for last in (1, 22):  # the same request in the first and in a far slot
        same((0,), regroup(case, (0,), slots=(last,), seed=30), [lengths[0]])
    for tokens in range(1, window):
        same((0,), regroup(case, (0,), lengths=(tokens,), seed=40), [tokens])  # without its later drafts
        others = regroup(case, (3, 0), seed=50 + tokens)
        start = others.starts[1] + tokens
        generator = torch.Generator().manual_seed(tokens)
        for name in ("mixed_qkv", "raw_gate", "raw_beta", "output_gate"):  # with others in their place
            if others.tensors[name] is not None:
                rows = others[name][start:]
                rows.copy_(torch.randn(rows.shape, generator=generator))
        same((3, 0), others, [lengths[3], tokens])
    return {"lengths": list(lengths), "compared": compared, "heads": geometry.heads}


def _ranks(setup: Setup, all_heads: int, splits: tuple[int, ...]) -> Detail:
    case = make_case(kimi_k3(4, all_heads), (4, 2), seed=13, device=setup.device)
    base = _run(setup, clone(case), None)
    compared = 0
    for count in splits:
        for first in range(0, all_heads, count):
            rank = _run(setup, take_heads(case, first, count), None)
            for n in range(2):
                wanted = outcome(base, n, heads=slice(first, first + count))
                try:
                    assert_same_bits(outcome(rank, n), wanted)
                except AssertionError as error:
                    raise AssertionError(f"heads {first}..{first + count - 1}, request {n}: {error}") from error
                compared += 1
    return {"heads": all_heads, "a_rank": list(splits), "compared": compared}
