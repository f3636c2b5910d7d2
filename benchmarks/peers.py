# SPDX-License-Identifier: Apache-2.0
"""Other projects' kernels, measured in the same run where they are installed. Each row says what it covers.

An adapter stands here only for an interface that could be read in a released package; the release is named. The others
are skipped, with the reason printed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.points import Point, Unavailable
from tests.inputs import Case

Calls = list[Callable[[], object]]


@dataclass(frozen=True)
class Peer:
    """package: its distribution; module: what is imported; covers: the stages that its row measures.

    adapter makes the calls, one a layer; without one, ``reason`` says why there is none.
    """

    package: str
    module: str
    covers: str
    adapter: Callable[[Point, Sequence[Case]], Calls] | None = None
    reason: str = ""

    @property
    def impl(self) -> str:
        """The name of its rows."""
        return f"peer-{self.package}"

    @property
    def version(self) -> str:
        """That is installed."""
        return importlib.metadata.version(self.package)

    def calls(self, point: Point, cases: Sequence[Case]) -> Calls:
        """One call a layer; each has run once. Raises Unavailable, with the reason."""
        if importlib.util.find_spec(self.module) is None:
            raise Unavailable(f"{self.package} is not installed")
        if self.adapter is None:
            raise Unavailable(self.reason)
        try:
            made = self.adapter(point, cases)
            for call in made:
                call()
            torch.cuda.synchronize()  # a fault of its kernels is to be found here
        except Exception as error:  # whatever it raises, other rows are to be had without it
            first = str(error).strip().splitlines()[:1]
            raise Unavailable(f"{self.package} {self.version}: {type(error).__name__}: {' '.join(first)}") from error
        return made


def _heads(case: Case, requests: int) -> list[torch.Tensor]:
    """q, k and v [requests, tokens, H, 128], contiguous, as a convolution leaves them."""
    heads = case.geometry.heads
    return [part.reshape(requests, -1, heads, 128).contiguous() for part in case["mixed_qkv"].chunk(3, dim=1)]


def _fla(point: Point, cases: Sequence[Case]) -> Calls:
    """fla.ops.kda.fused_recurrent_kda of fla-core 0.6.0, which keeps the state as it was without output_final_state."""
    from fla.ops.kda import fused_recurrent_kda

    made: Calls = []
    for case in cases:
        q, k, v = _heads(case, point.requests)
        gate, beta = (case[name].reshape(point.requests, point.window, *case[name].shape[1:]) for name in _GATES)
        options: dict[str, Any] = {
            "A_log": case["A_log"],
            "dt_bias": case["dt_bias"].reshape(-1),
            "initial_state": case["state"][case["state_indices"].long()],
            "lower_bound": case.geometry.lower_bound,
            **dict.fromkeys(("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"), True),
            "state_v_first": True,
        }
        made.append(functools.partial(fused_recurrent_kda, q, k, v, gate.contiguous(), beta.contiguous(), **options))
    return made


def _flashinfer(point: Point, cases: Sequence[Case]) -> Calls:
    """flashinfer.kda_decode.recurrent_kda of flashinfer-python 0.7.2.post1: the verify that records, of bf16 states."""
    from flashinfer.kda_decode import recurrent_kda

    made: Calls = []
    for case in cases:
        q, k, v = _heads(case, 1)
        options: dict[str, Any] = {
            "A_log": case["A_log"],
            "dt_bias": case["dt_bias"].reshape(-1),
            "initial_state_source": case["state"].bfloat16(),
            "initial_state_indices": case["state_indices"],
            "cu_seqlens": case["query_start_loc"],
            "lower_bound": case.geometry.lower_bound,
            **dict.fromkeys(("use_gate_in_kernel", "beta_is_logit", "disable_state_update"), True),
            "correction_cache": case["corrections"],
            "kg_cache": case["key_gate"],
            "output": torch.empty_like(v),
        }
        gate, beta = (case[name][None] for name in _GATES)
        made.append(functools.partial(recurrent_kda, q, k, v, gate, beta, **options))
    return made


_GATES = ("raw_gate", "raw_beta")

PEERS = (
    Peer("fla-core", "fla", "the rule; no conv, norm or records", _fla),
    Peer("flashinfer-python", "flashinfer", "the rule and records, bf16 state; no conv or norm", _flashinfer),
    Peer(
        "b12x",
        "b12x",
        "the rule and records",
        reason="b12x 1.5.1 runs prepared plans and pins another version of the DSL than FlashKDA needs: no adapter",
    ),
    Peer(
        "sglang",
        "sglang",
        "conv, the rule and records",
        reason="the kernel for Kimi K3 is internal to SGLang; its interface could not be read in a release: no adapter",
    ),
)
