"""Models large enough for FP8, on the meta device: they cost no memory; and planning problems of random numbers."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoprec.planner.problem import Edge, Option, Problem, ProblemGroup


class Attention(nn.Module):
    def __init__(self, width: int, narrow: int) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(width, width, bias=False), nn.Linear(width, narrow, bias=False)
        self.v, self.o = nn.Linear(width, narrow, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x):
        repeat = self.q.out_features // self.k.out_features
        q, k, v = (t[:, None] for t in (self.q(x), self.k(x).repeat(1, 1, repeat), self.v(x).repeat(1, 1, repeat)))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn = Attention(width, width // 4)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.down(F.silu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self, width: int = 4096, layers: int = 12, vocabulary: int = 32000, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


@pytest.fixture
def decoder():
    """``decoder(width=…, layers=…)`` on the meta device."""

    def make(**sizes) -> nn.Module:
        with torch.device("meta"):
            return Decoder(**sizes)

    return make


STORAGES = ("", "fp32", "bf16", "fp16")


def _random_problem(
    seed: int, groups: int, options: int, *, storages: Sequence[str] = STORAGES, skip: int = 1, cast_s: float = 0.2
) -> Problem:
    """A chain of groups, with an edge over two of them at every ``skip``-th; harms over six decades."""
    draw = random.Random(seed)
    found = []

    def stored() -> dict[str, str]:
        firm = draw.choice(storages) if draw.random() < 0.3 else None
        return {"storage": draw.choice(storages), "firm_storage": firm}

    for g in range(groups):
        base = draw.uniform(0.5, 1.5)
        reference = Option(format="f0", harm=0.0, cost_s=base, **stored())
        low = [
            Option(
                format=f"f{k}",
                harm=10 ** draw.uniform(-6, 0),
                cost_s=base * draw.uniform(0.3, 1.08),
                **stored(),
            )
            for k in range(1, options)
        ]
        found.append(ProblemGroup(name=f"g{g}", options=(reference, *low)))
    pairs = [(g, g + 1) for g in range(groups - 1)]
    pairs += [(g, g + 3) for g in range(0, groups - 3, skip)] if skip else []
    edges = tuple(
        Edge(a=f"g{a}", b=f"g{b}", cast_s=draw.uniform(0, cast_s), firm=draw.random() < 0.3)
        for a, b in [*pairs, *pairs[::3]]
    )
    return Problem(groups=tuple(found), edges=edges, fixed_s=draw.uniform(0, groups / 3), device="made up")


def _all_mixes(problem: Problem, pins: Mapping[str, str] | None = None) -> list[dict[str, str]]:
    """Every mix of a small problem."""
    pins = pins or {}
    names = [
        [option.format for option in group.options if pins.get(group.name, option.format) == option.format]
        for group in problem.groups
    ]
    return [
        {group.name: name for group, name in zip(problem.groups, mix, strict=True)} for mix in itertools.product(*names)
    ]


def _best_cost(problem: Problem, budget: float, pins: Mapping[str, str] | None = None) -> float:
    """Of the cheapest mix within a budget."""
    return min(problem.cost_s(mix) for mix in _all_mixes(problem, pins) if problem.harm(mix) <= budget * (1 + 1e-6))


@pytest.fixture
def random_problem() -> Callable[..., Problem]:
    """``random_problem(seed, groups, options)``."""
    return _random_problem


@pytest.fixture
def best_cost() -> Callable[..., float]:
    """``best_cost(problem, budget, pins)``: of the cheapest mix, by trying all."""
    return _best_cost
