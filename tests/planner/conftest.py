"""Models large enough for FP8, on the meta device: they cost no memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn


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
