# SPDX-License-Identifier: Apache-2.0
"""A byte-level language model of KDA layers, small enough to be trained on a CPU in minutes.

A layer, with pre-norms and residuals::

    x = x + out(kda(norm(x)))        kda: q|k|v through the short conv, gate, beta, delta rule, gated RMSNorm a head
    x = x + down(silu(up(norm(x))))

and logits = embedding(norm(x)), the head tied to the embedding of bytes. ``LM`` is the model as it is trained: plain
differentiable torch on whole sequences, the delta rule in chunks. ``examples/lm/decoder.py`` runs the same weights
through FlashKDA, window after window.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from flashkda import VerifyGeometry
from flashkda.ops.reference import QK_NORM_EPS

WEIGHTS = Path(__file__).parent / "weights.safetensors"
NORM_EPS = 1e-5
# exp(-g) summed over a chunk has to stay within fp32: 16 tokens of a gate bounded by -5 make exp(80).
CHUNK, LOWER_BOUND = 16, -5.0


@dataclass(frozen=True)
class Config:
    """The sizes. ``hidden`` and ``mlp`` are powers of two, which the decoder's sums need."""

    layers: int = 3
    heads: int = 2
    hidden: int = 128
    mlp: int = 256
    head_dim: int = 128
    vocabulary: int = 256

    def geometry(self, window: int, *, ranks: int = 1) -> VerifyGeometry:
        """The verify of one layer, on one of ``ranks`` tensor-parallel ranks."""
        return VerifyGeometry(
            self.heads // ranks, window, has_num_accepted=True, lower_bound=LOWER_BOUND, norm_eps=NORM_EPS
        )


class Layer(nn.Module):
    """The weights of one layer, and what they do to whole sequences. Per-head weights have the heads in front."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        heads, dim, hidden = config.heads, config.head_dim, config.hidden
        residual = (2 * config.layers) ** -0.5

        def weight(*shape: int, fan_in: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape) * scale * fan_in**-0.5)

        self.norm, self.mlp_norm = nn.Parameter(torch.ones(hidden)), nn.Parameter(torch.ones(hidden))
        self.qkv = weight(3, heads, dim, hidden, fan_in=hidden)
        self.conv = weight(3, heads, dim, 4, fan_in=4)
        self.gate = weight(heads, dim, hidden, fan_in=hidden, scale=0.1)
        self.A_log = nn.Parameter(torch.zeros(heads))
        # Keys that forget within a few bytes, and keys that remember hundreds.
        self.dt_bias = nn.Parameter(torch.linspace(-7, -1.5, dim).repeat(heads, 1))
        self.beta = weight(heads, hidden, fan_in=hidden)
        self.output_gate = weight(heads, dim, hidden, fan_in=hidden)
        self.head_norm = nn.Parameter(torch.ones(dim))
        self.out = weight(hidden, heads * dim, fan_in=heads * dim, scale=residual)
        self.up = weight(config.mlp, hidden, fan_in=hidden)
        self.down = weight(hidden, config.mlp, fan_in=config.mlp, scale=residual)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [B, L, hidden] to the same shape, from an empty state; L is a multiple of CHUNK."""
        h = rms_norm(x, self.norm)
        qkv = functional.linear(h, self.qkv.flatten(0, 2)).transpose(1, 2)
        qkv = functional.conv1d(functional.pad(qkv, (3, 0)), self.conv.flatten(0, 2)[:, None], groups=qkv.shape[1])
        q, k, v = functional.silu(qkv).unflatten(1, self.conv.shape[:3]).permute(1, 0, 2, 4, 3)  # [B, H, L, D] each
        heads, dim = self.dt_bias.shape
        raw_gate = functional.linear(h, self.gate.flatten(0, 1)).unflatten(-1, (heads, dim)) + self.dt_bias
        log_decay = LOWER_BOUND * torch.sigmoid(self.A_log.exp()[:, None] * raw_gate).transpose(1, 2)
        beta = torch.sigmoid(functional.linear(h, self.beta)).transpose(1, 2)
        o = delta_rule(unit(q) * dim**-0.5, unit(k), v, log_decay, beta).transpose(1, 2)
        z = functional.linear(h, self.output_gate.flatten(0, 1)).unflatten(-1, (heads, dim))
        x = x + functional.linear((rms_norm(o, self.head_norm) * torch.sigmoid(z)).flatten(2), self.out)
        h = functional.silu(functional.linear(rms_norm(x, self.mlp_norm), self.up))
        return x + functional.linear(h, self.down)


class LM(nn.Module):
    """Embedding, layers, tied head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.randn(config.vocabulary, config.hidden) * 0.05)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.Parameter(torch.ones(config.hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits [B, L, 256] that follow each byte of ``tokens`` [B, L] int64."""
        length = tokens.shape[1]
        x = functional.embedding(functional.pad(tokens, (0, -length % CHUNK)), self.embedding)
        for layer in self.layers:
            x = layer(x)
        return functional.linear(rms_norm(x[:, :length], self.norm), self.embedding)

    def blocks(self) -> list[Layer]:
        """The layers, first to last."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def save(self, path: Path, about: dict[str, str]) -> None:
        """Write matrices as bf16 and vectors as fp32, with the sizes and ``about`` as metadata."""
        tensors = {
            name: parameter.detach().to(torch.bfloat16 if parameter.numel() >= 4096 else torch.float32).contiguous()
            for name, parameter in self.named_parameters()
        }
        save_file(tensors, path, {**about, **{name: str(value) for name, value in asdict(self.config).items()}})

    @classmethod
    def load(cls, path: Path = WEIGHTS) -> LM:
        """The model of a file that ``save`` wrote, its weights as fp32."""
        with safe_open(path, framework="pt") as file:
            about = file.metadata()
            model = cls(Config(**{name: int(about[name]) for name in asdict(Config())}))
            model.load_state_dict({name: file.get_tensor(name).float() for name in file.keys()})  # noqa: SIM118
        return model.eval().requires_grad_(False)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """``x`` over the root of its mean square, times ``weight``, over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPS) * weight


def unit(x: Tensor) -> Tensor:
    """``x`` over its L2 norm."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + QK_NORM_EPS)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """The outputs of the gated delta rule from an empty state, a chunk at a time.

    ``q``, ``k``, ``v``, ``log_decay`` [B, H, L, D], ``beta`` [B, H, L]. Within a chunk the corrections u solve a
    triangular system: u_i + beta_i sum_{j<i} (k_i exp(G_i - G_j) . k_j) u_j = beta_i (v_i - S exp(G_i) k_i), with G the
    sums of log_decay since the chunk's start and S the state there. Only S goes from chunk to chunk in order.
    """
    q, k, v, g, beta = (x.unflatten(2, (-1, CHUNK)) for x in (q, k, v, log_decay, beta[..., None]))
    g = g.cumsum(-2)
    q_in, k_in, k_out = q * g.exp(), k * g.exp(), k * (-g).exp()
    mixed = torch.tril(q_in @ k_out.mT)
    system = torch.tril(beta * (k_in @ k_out.mT), -1)  # its diagonal of ones is implied: unitriangular
    solved = torch.linalg.solve_triangular(system, beta * torch.cat([v, k_in], -1), upper=False, unitriangular=True)
    u_alone, u_state = solved.chunk(2, -1)
    k_end, end = k * (g[..., -1:, :] - g).exp(), g[..., -1:, :].exp()
    state = q.new_zeros(*q.shape[:2], q.shape[-1], q.shape[-1])  # [V, K]
    outputs = []
    for c in range(q.shape[2]):
        u = u_alone[:, :, c] - u_state[:, :, c] @ state.mT
        outputs.append(q_in[:, :, c] @ state.mT + mixed[:, :, c] @ u)
        state = state * end[:, :, c] + u.mT @ k_end[:, :, c]
    return torch.stack(outputs, 2).flatten(2, 3)


def parameters(config: Config) -> int:
    """How many weights a model of ``config`` has."""
    with torch.device("meta"):
        return sum(math.prod(p.shape) for p in LM(config).parameters())
