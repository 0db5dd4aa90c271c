"""A grammar of small models: each is a chain of steps on a stream of shape (batch, time, width)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

BATCH, TIME, WIDTH = 2, 6, 8


class Step(nn.Module):
    """One step with all that any of them needs; it runs ``STEPS[name]``."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.linear, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.LayerNorm(WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / math.sqrt(WIDTH))
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / math.sqrt(WIDTH))
        self.vector = nn.Parameter(1 + torch.randn(WIDTH) / 10)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("order", torch.randperm(TIME))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return STEPS[self.name](self, x)


def conv(s: Step, x: torch.Tensor) -> torch.Tensor:
    return s.conv(x.transpose(1, 2)).transpose(1, 2)


def matmul(s: Step, x: torch.Tensor) -> torch.Tensor:
    return x @ s.matrix


def einsum(s: Step, x: torch.Tensor) -> torch.Tensor:
    return torch.einsum("btd,de->bte", x, s.matrix) * s.scale


def addmm(s: Step, x: torch.Tensor) -> torch.Tensor:
    return torch.addmm(s.vector, x.flatten(0, 1), s.matrix).view_as(x)


def recurrent(s: Step, x: torch.Tensor) -> torch.Tensor:
    return s.gru(x)[0]


def layer_norm(s: Step, x: torch.Tensor) -> torch.Tensor:
    return s.norm(x)


def rms_norm(s: Step, x: torch.Tensor) -> torch.Tensor:
    before = x.dtype
    h = x.float()
    return s.vector * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(before)


def norm_by_moments(s: Step, x: torch.Tensor) -> torch.Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / ((x * x).mean(-1, keepdim=True) - mean**2 + 1e-5).sqrt() * s.vector


def unit_length(s: Step, x: torch.Tensor) -> torch.Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-6) * s.vector


def attention(s: Step, x: torch.Tensor) -> torch.Tensor:
    """Softmax by hand, masked by the end of the dtype's range."""
    scores = s.linear(x) @ x.transpose(-1, -2) / math.sqrt(WIDTH)
    scores = scores + torch.full((TIME, TIME), torch.finfo(scores.dtype).min, dtype=scores.dtype).triu(1)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ x


def masked_attention(s: Step, x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(TIME, TIME, dtype=torch.bool).triu(1)
    return (s.linear(x) @ x.mT / math.sqrt(WIDTH)).masked_fill(mask, -1e9).softmax(-1) @ x


def fused_attention(s: Step, x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(s.linear(x)[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]


def pool_by_logarithms(s: Step, x: torch.Tensor) -> torch.Tensor:
    return x - torch.logsumexp(s.linear(x), 1, keepdim=True)


def running_mean(s: Step, x: torch.Tensor) -> torch.Tensor:
    counts = torch.arange(1, TIME + 1, dtype=x.dtype)
    return x.cumsum(1) / counts[:, None] * s.vector


def window_by_difference(s: Step, x: torch.Tensor) -> torch.Tensor:
    total = F.pad(x.cumsum(1), (0, 0, 2, 0))
    return total[:, 2:] - total[:, :-2]


def shuffle(s: Step, x: torch.Tensor) -> torch.Tensor:
    return x[:, s.order].flip(-1) + x.roll(1, 1) * s.vector


def gathered(s: Step, x: torch.Tensor) -> torch.Tensor:
    index = (torch.arange(WIDTH) + torch.arange(TIME)[:, None]) % WIDTH
    return x.gather(-1, index.expand(x.shape[0], -1, -1))


def route(s: Step, x: torch.Tensor) -> torch.Tensor:
    """The two best of four experts for each sequence."""
    weights, chosen = s.gate(x.mean(1)).softmax(-1).topk(2)
    outputs = torch.einsum("btd,bkde->bkte", x, s.experts[chosen])
    return (outputs * (weights / weights.sum(-1, keepdim=True))[..., None, None]).sum(1)


def in_place(s: Step, x: torch.Tensor) -> torch.Tensor:
    y = s.linear(x)
    y += 0.5
    y.mul_(s.scale)
    y[:, 0] = 0.25
    return F.relu_(y) + x


def filled_in_place(s: Step, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    out[:, ::2] = s.linear(x[:, ::2])
    out.index_add_(1, torch.tensor([1, 3]), x[:, :2] @ s.matrix)
    return out


def views(s: Step, x: torch.Tensor) -> torch.Tensor:
    a, b = x.view(x.shape[0], TIME, 2, -1).permute(2, 0, 1, 3)
    return torch.cat((a * b, a - b), -1) + torch.stack((a, b), -1).flatten(-2)


def author_upcast(s: Step, x: torch.Tensor) -> torch.Tensor:
    return (x.float() @ s.matrix.float()).to(x.dtype)


def like_the_weight(s: Step, x: torch.Tensor) -> torch.Tensor:
    return s.linear(x.to(s.linear.weight.dtype)).type_as(x) + x.new_full((1,), 0.5) * s.vector.to(x.dtype)


def guarded(s: Step, x: torch.Tensor) -> torch.Tensor:
    # detached, as scales are: the gradient of a maximum goes to whichever of two near values is rounded up
    largest = x.detach().abs().amax(-1, keepdim=True)
    noise = torch.linspace(-1, 1, WIDTH, dtype=x.dtype)
    return x / (largest + torch.finfo(x.dtype).tiny) + 0.1 * noise


def shifted(s: Step, x: torch.Tensor) -> torch.Tensor:
    """Cancels: what is left of 300 in 16 bit is not what it was."""
    return ((x + 300.0) - 300.0) @ s.matrix


def beyond_half(s: Step, x: torch.Tensor) -> torch.Tensor:
    return (x * 1e5) @ s.matrix / 1e5


def gated(s: Step, x: torch.Tensor) -> torch.Tensor:
    return F.silu(s.linear(x)) * torch.sigmoid(x @ s.matrix)


def positions(s: Step, x: torch.Tensor) -> torch.Tensor:
    angles = torch.outer(torch.arange(500, 500 + TIME).to(x.dtype), 100.0 ** -(s.order[:4].sort()[0] / TIME))
    return x + torch.cat((angles.sin(), angles.cos()), -1).to(x.dtype)


def chosen_by_comparison(s: Step, x: torch.Tensor) -> torch.Tensor:
    y = s.linear(x)
    return torch.where(y > 0, y, 0.1 * y).clamp(max=50.0)


STEPS: dict[str, Callable[[Step, torch.Tensor], torch.Tensor]] = {
    f.__name__: f
    for f in (
        conv, matmul, einsum, addmm, recurrent, layer_norm, rms_norm, norm_by_moments, unit_length, attention,
        masked_attention, fused_attention, pool_by_logarithms, running_mean, window_by_difference, shuffle, gathered,
        route, in_place, filled_in_place, views, author_upcast, like_the_weight, guarded, shifted, beyond_half, gated,
        positions, chosen_by_comparison,
    )
}  # fmt: skip


@dataclass(frozen=True)
class Sentence:
    """One model of the grammar: steps, and for each whether it is a module of its own and has a residual around it."""

    steps: tuple[tuple[str, bool, bool], ...]
    seed: int = 0


class Chain(nn.Module):
    """A sentence as a model; it ends in a linear layer, so that something can run low."""

    def __init__(self, sentence: Sentence) -> None:
        super().__init__()
        self.sentence = sentence
        self.steps = nn.ModuleList(Step(name) for name, _, _ in sentence.steps)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for step, (name, is_module, is_residual) in zip(self.steps, self.sentence.steps, strict=True):
            y = step(x) if is_module else STEPS[name](step, x)
            x = x + y if is_residual else y
        return {"out": self.head(x), "hidden": x}


def build(sentence: Sentence) -> tuple[nn.Module, tuple[torch.Tensor], dict[str, torch.Tensor]]:
    """The model in eval mode with its input, the same each time."""
    torch.manual_seed(sentence.seed)
    return Chain(sentence).eval(), (torch.randn(BATCH, TIME, WIDTH),), {}
