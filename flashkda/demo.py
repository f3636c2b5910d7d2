# SPDX-License-Identifier: Apache-2.0
"""A language model that speculates, then one verify of a Kimi K3 layer as a rank at TP8 has it: `make demo`.

`python -m flashkda.demo` is the same. The language model is one of the examples (`python -m examples.lm.generate`): the
same bytes with and without speculation. Then, on a GPU that takes the fused path: fused against the three launches,
compared to the bit and timed in a CUDA graph. Elsewhere: the reference path on the CPU and some of the promises checked
on it, then the fused kernel cross-compiled for sm_90a. Exits with 1 where bytes or bits differ or a kernel cannot be
built.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

import flashkda
from flashkda.errors import KernelBuildError
from flashkda.geometry import PRESETS, VerifyGeometry
from flashkda.planner import Plan, plan_verify

MODEL, TP = "kimi-k3", 8
CROSS_ARCH = "sm_90a"
ROOT = Path(__file__).parent.parent  # of a checkout, which has the examples
WRITTEN = ("out", "conv_state", "corrections", "key_gate")
COMPARED = (*WRITTEN, "state")
_ROWS = ("mixed_qkv", "raw_gate", "raw_beta", "output_gate", "out")
_BITS = {2: torch.int16, 4: torch.int32}


def example_tensors(
    geometry: VerifyGeometry, lengths: Sequence[int], *, device: str | torch.device = "cpu", seed: int = 0
) -> dict[str, Tensor]:
    """Random tensors for a verify of ``lengths`` tokens a request, by their names in docs/tensors.md.

    Those that the geometry does not have are left out. Request n has slot null_slot+1+n. out, corrections and key_gate
    hold NaN, so that what is not written shows.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 1.0, dtype: str = "bfloat16") -> Tensor:
        values = torch.randn(shape, generator=generator) * scale
        return values.to(device=device, dtype=getattr(torch, dtype))

    def nan(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.full(shape, torch.nan, device=device, dtype=dtype)

    def index(values: Sequence[int], dtype: str = "int32") -> Tensor:
        return torch.tensor(values, device=device, dtype=getattr(torch, dtype))

    heads, dim, channels, columns = geometry.heads, geometry.head_dim, geometry.channels, geometry.conv_columns
    requests, rows = len(lengths), sum(lengths)
    slots = geometry.null_slot + 1 + requests
    records = slots if geometry.records == "slot" else requests
    if geometry.conv_layout == "DS":
        conv_state = random(slots, channels, columns)
    else:
        conv_state = random(slots, columns, channels).transpose(1, 2)
    tensors = {
        "mixed_qkv": random(rows, channels),
        "conv_weight": random(channels, geometry.conv_width, scale=0.5, dtype=geometry.conv_weight_dtype),
        "conv_state": conv_state,
        "raw_gate": random(rows, heads, dim),
        "raw_beta": random(rows, heads),
        "A_log": random(heads, scale=0.5, dtype="float32"),
        "dt_bias": random(heads, dim, scale=0.5, dtype="float32"),
        "state": random(slots, heads, dim, dim, scale=0.3, dtype=geometry.state_dtype),
        "query_start_loc": index([sum(lengths[:n]) for n in range(requests + 1)]),
        "state_indices": index(range(geometry.null_slot + 1, slots), geometry.index_dtype),
        "out": nan(rows, heads, dim),
        "corrections": nan(records, heads, geometry.window, dim, dtype=torch.float32),
        "key_gate": nan(records, heads, geometry.window, 2 * dim),
    }
    if geometry.norm:
        tensors["output_gate"] = random(rows, heads, dim)
        tensors["norm_weight"] = random(dim, dtype=geometry.norm_weight_dtype)
    if geometry.has_num_accepted:
        tensors["num_accepted"] = index([1] * requests)
    if geometry.records == "indices":
        tensors["record_indices"] = index(range(requests), geometry.index_dtype)
    return tensors


def run_copy(plan: Plan, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Verify a deep copy of the tensors under ``plan`` and return the copy. Raises as ``plan.bind`` does."""
    copy = {name: tensor.clone() for name, tensor in tensors.items()}
    plan.bind(check_metadata=None, **copy).run()
    return copy


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two floating-point tensors agree in every bit (equal NaNs are equal, zeros differ by their sign)."""
    bits = _BITS[a.element_size()]
    return torch.equal(a.view(bits), b.view(bits))


# --- the language model ---------------------------------------------------------------------------------------------


def language_model() -> bool:
    """Run the example in a process of its own. Returns whether it gave the same bytes twice; prints why it cannot."""
    script = ROOT / "examples" / "lm" / "generate.py"
    missing = [name for name in ("safetensors", "rich") if importlib.util.find_spec(name) is None]
    if not script.is_file():
        print("No language model: the package is installed without the examples, which a checkout has.", flush=True)
        return True
    if missing:
        print(f"No language model: it needs {' and '.join(missing)}; pip install -e '.[dev]'", flush=True)
        return True
    command = [sys.executable, "-m", "examples.lm.generate", "--bytes", "160"]
    return subprocess.run(command, cwd=ROOT).returncode == 0


# --- without a GPU --------------------------------------------------------------------------------------------------


def prefix_law(plan: Plan, before: Mapping[str, Tensor], after: Mapping[str, Tensor], n: int, count: int) -> bool:
    """Whether request ``n``, alone in a batch and with its first ``count`` tokens only, gets the bits it got in
    ``after``: the run of ``plan`` on ``before``, with all of its tokens and all requests. Records go by the slot."""
    start, slot = int(before["query_start_loc"][n]), int(before["state_indices"][n])
    rows = slice(start, start + count)
    part = {name: tensor[rows] if name in _ROWS else tensor for name, tensor in before.items()}
    part["query_start_loc"] = before["query_start_loc"].new_tensor([0, count])
    part["state_indices"] = before["state_indices"][n : n + 1]
    alone = run_copy(plan, part)
    history = plan.geometry.conv_width - 2
    return (
        same_bits(alone["out"], after["out"][rows])
        and same_bits(alone["conv_state"][slot, :, : count + history], after["conv_state"][slot, :, : count + history])
        and all(same_bits(alone[name][slot, :, :count], after[name][slot, :, :count]) for name in WRITTEN[2:])
    )


def accepted_law(geometry: VerifyGeometry, tensors: Mapping[str, Tensor], accepted: int) -> bool:
    """Whether a window that follows ``accepted`` tokens of a full one (request 0's) sees these tokens as its history
    and not the drafts behind them: its conv gives the bits of accepted and new tokens in one window."""
    plan = plan_verify(geometry.replace(has_num_accepted=True), 1, path="reference", device=tensors["state"].device)
    window = geometry.window
    old = tensors["mixed_qkv"][:window]
    new = old.flip(0).contiguous()

    def conv(mixed_qkv: Tensor, conv_state: Tensor, num_accepted: int) -> Tensor:
        qkv = torch.empty_like(mixed_qkv)
        plan.bind_short_conv(
            mixed_qkv=mixed_qkv,
            conv_weight=tensors["conv_weight"],
            conv_state=conv_state,
            query_start_loc=tensors["query_start_loc"].new_tensor([0, window]),
            state_indices=tensors["state_indices"][:1],
            num_accepted=tensors["query_start_loc"].new_tensor([num_accepted]),
            qkv=qkv,
        ).run()
        return qkv

    rolled = tensors["conv_state"].clone()
    conv(old, rolled, 1)
    follows = conv(new, rolled, accepted)
    at_once = conv(torch.cat([old[:accepted], new])[:window], tensors["conv_state"].clone(), 1)
    return same_bits(follows[: window - accepted], at_once[accepted:])


def on_cpu(geometry: VerifyGeometry, lengths: Sequence[int]) -> bool:
    """The reference path: prints shapes and what holds. Returns whether all of it held."""
    plan = plan_verify(geometry, len(lengths), path="reference", device="cpu")
    before = example_tensors(geometry, lengths)
    after = run_copy(plan, before)
    print("The reference path (torch, on the CPU) read")
    _show(before, [name for name in before if name not in WRITTEN])
    print("and wrote (conv_state it also read)")
    _show(after, WRITTEN)
    count = max(1, lengths[0] // 2)
    checks = {
        "the state kept every bit, and every row of out was written": same_bits(before["state"], after["state"])
        and bool(after["out"].isfinite().all()),
        f"the first {_tokens(count)} of request 0, alone in a batch: the same bits": prefix_law(
            plan, before, after, 0, count
        ),
        f"after {_tokens(count)} accepted, the conv window goes on behind them, not behind the drafts": accepted_law(
            geometry, before, count
        ),
    }
    for text, held in checks.items():
        print(f"  {'ok    ' if held else 'BROKEN'} {text}")
    return all(checks.values())


def cross_compile(geometry: VerifyGeometry, requests: int) -> None:
    """Compile the fused kernel for ``CROSS_ARCH`` and print what it uses. Raises KernelBuildError."""
    from flashkda.jit.compiler import inspect_kernel
    from flashkda.kernels.specs import make_spec, traits_of

    plan = plan_verify(geometry, requests, path="fused", arch=CROSS_ARCH)
    assert plan.tile is not None
    traits = traits_of("fused_verify", geometry, plan.tile, CROSS_ARCH)
    split = f"{traits.cluster} CTAs a head, {traits.threads} threads a CTA"
    print(f"The fused kernel, cross-compiled for {CROSS_ARCH} ({split}):")
    start = time.perf_counter()
    uses = inspect_kernel(*make_spec("fused_verify", geometry, plan.tile, CROSS_ARCH))
    seconds = time.perf_counter() - start
    print(f"  {uses.registers} registers a thread, {uses.shared_bytes} bytes of shared memory a CTA")
    print(f"  {uses.spill_bytes} bytes spilled, {uses.local_bytes} bytes of local memory a thread")
    print(f"  {seconds:.1f} s, the import of the DSL included")


# --- with a GPU -----------------------------------------------------------------------------------------------------


def compare(plans: Sequence[Plan], tensors: Mapping[str, Tensor]) -> list[str]:
    """Run two plans on copies of the tensors. Returns the names of ``COMPARED`` whose bits differ."""
    one, other = (run_copy(plan, tensors) for plan in plans)
    return [name for name in COMPARED if not same_bits(one[name], other[name])]


def on_gpu(geometry: VerifyGeometry, lengths: Sequence[int]) -> bool:
    """Fused against the three launches on the current GPU. Returns whether their bits agree."""
    plans = [plan_verify(geometry, len(lengths), path=path) for path in ("fused", "decomposed")]
    print(f"On {torch.cuda.get_device_name()}, one launch against three:")
    tensors = example_tensors(geometry, lengths, device="cuda")
    differ = compare(plans, tensors)
    for name in COMPARED:
        print(f"  {name:<12} {list(tensors[name].shape)!s:<22} {'DIFFERS' if name in differ else 'the same bits'}")
    layers = PRESETS[MODEL].kda_layers
    for plan, times in zip(plans, time_layers(plans, geometry, lengths, layers), strict=True):
        spread = max(times) - min(times)
        print(f"  {plan.path:<12} {statistics.median(times):.2f} us a layer (spread {spread:.2f})")
    print(f"  (median of a CUDA graph of {layers} layers with states of their own, the two in turn)")
    return not differ


def time_layers(
    plans: Sequence[Plan], geometry: VerifyGeometry, lengths: Sequence[int], layers: int, rounds: int = 20
) -> list[list[float]]:
    """For each plan its microseconds a layer, one number a round: a CUDA graph of ``layers`` verifies on tensors of
    their own, so that no state is still in a cache when its layer comes; the plans take turns in alternating order."""
    replays = 10
    tensors = [example_tensors(geometry, lengths, device="cuda", seed=layer) for layer in range(layers)]
    graphs = []
    for plan in plans:
        bindings = [plan.bind(check_metadata=None, **layer) for layer in tensors]
        for binding in bindings:
            binding.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for binding in bindings:
                binding.run()
        graphs.append(graph)
    times: list[list[float]] = [[] for _ in plans]
    for round_ in range(rounds):
        for i in range(len(plans)) if round_ % 2 == 0 else reversed(range(len(plans))):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graphs[i].replay()
            start.record()
            for _ in range(replays):
                graphs[i].replay()
            end.record()
            end.synchronize()
            times[i].append(start.elapsed_time(end) * 1e3 / (replays * layers))
    return times


# --- the command ----------------------------------------------------------------------------------------------------


def _tokens(count: int) -> str:
    return f"{count} token{'s' if count > 1 else ''}"


def _show(tensors: Mapping[str, Tensor], names: Sequence[str]) -> None:
    for name in names:
        tensor = tensors[name]
        print(f"  {name:<16} {list(tensor.shape)!s:<22} {str(tensor.dtype).removeprefix('torch.')}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m flashkda.demo", description=__doc__.split("\n\n")[0])
    parser.add_argument("--window", type=int, choices=range(2, 17), default=4, metavar="2..16", help="T (default 4)")
    window = parser.parse_args(arguments).window
    same = language_model()
    geometry = flashkda.preset(MODEL, tp=TP, window=window)
    lengths = (window, max(1, window - 1), 1)
    drafts = ", ".join(map(str, lengths))
    print(f"{MODEL} at TP{TP}: {geometry.heads} heads, windows of up to {_tokens(window)}; requests of {drafts}.")
    try:
        if torch.cuda.is_available():
            fused = flashkda.query(geometry).fused
            if fused.supported:
                return 0 if on_gpu(geometry, lengths) and same else 1
            print("This GPU does not take the fused path:", *fused.reasons, sep="\n  - ")
        held = on_cpu(geometry, lengths)
        cross_compile(geometry, len(lengths))
    except KernelBuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if held and same else 1


if __name__ == "__main__":
    sys.exit(main())
