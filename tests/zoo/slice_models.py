"""Small models, written by hand or from a small config, that break what decides precision by op name or by layer class.

Each entry makes a model in eval mode with its positional and keyword arguments, the same each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class RotaryAttention(nn.Module):
    """Rotary tables made by einsum from a buffer, softmax written by hand, a mask of ``finfo(dtype).min``."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        half = dim // heads // 2
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(half) / half), persistent=False)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = torch.einsum("t,f->tf", positions.to(x.dtype), self.inv_freq)
        cos, sin = angles.cos(), angles.sin()
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        positions = torch.arange(1000, 1000 + t)
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(d // self.heads)
        mask = torch.full((t, t), torch.finfo(scores.dtype).min, dtype=scores.dtype).triu(1)
        scores = scores + mask
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        weights = weights / weights.sum(-1, keepdim=True)
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, d))


class RotaryDecoder(nn.Module):
    """A gated decoder with tied embeddings."""

    def __init__(self, dim: int = 32, heads: int = 4, vocabulary: int = 50) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.norms = nn.ModuleList(RMSNorm(dim) for _ in range(3))
        self.attention = RotaryAttention(dim, heads)
        self.up, self.gate, self.down = nn.Linear(dim, 64), nn.Linear(dim, 64), nn.Linear(64, dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(ids)
        x = x + self.attention(self.norms[0](x))
        h = self.norms[1](x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return {"logits": self.head(self.norms[2](x)), "hidden": x}


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu_(self.convs(x) + self.skip(x))


class ResNet(nn.Module):
    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.blocks = nn.Sequential(
            ResidualBlock(width, width), nn.MaxPool2d(2), ResidualBlock(width, 2 * width), nn.MaxPool2d(2),
            ResidualBlock(2 * width, 2 * width),
        )  # fmt: skip
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class UNet(nn.Module):
    """A denoiser: sinusoidal timestep embedding, group norms, a skip connection, attention over pixels."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, 32), nn.SiLU(), nn.Linear(32, 2 * width))
        self.enter = nn.Conv2d(3, width, 3, 1, 1)
        self.down = nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.norm = nn.GroupNorm(4, 2 * width)
        self.attention = nn.MultiheadAttention(2 * width, 2, batch_first=True)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.leave = nn.Conv2d(2 * width, 3, 3, 1, 1)

    def forward(self, x: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        half = self.width // 2
        frequencies = torch.exp(-math.log(10000.0) * torch.arange(half, device=x.device) / half)
        angles = steps[:, None].float() * frequencies[None]
        time = self.time(torch.cat((angles.sin(), angles.cos()), -1).to(x.dtype))
        first = self.enter(x)
        h = self.norm(self.down(first)) + time[:, :, None, None]
        pixels = h.flatten(2).transpose(1, 2)
        h = h + self.attention(pixels, pixels, pixels, need_weights=False)[0].transpose(1, 2).view_as(h)
        return self.leave(torch.cat((first, self.up(F.silu(h))), 1))


class Experts(nn.Module):
    """Experts in one 3-D Parameter; the router's top 2 get their tokens, which are added back in place."""

    def __init__(self, dim: int = 32, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, dim, 64) / math.sqrt(dim))
        self.down = nn.Parameter(torch.randn(experts, 64, dim) / 8)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.norm(x).flatten(0, 1)
        logits = self.router(tokens)
        weights, chosen = logits.softmax(-1).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for expert in range(self.up.shape[0]):
            rows, place = torch.where(chosen == expert)
            h = F.gelu(tokens[rows] @ self.up[expert]) @ self.down[expert]
            out.index_add_(0, rows, h * weights[rows, place, None])
        return x + out.view_as(x), logits


class Tagger(nn.Module):
    """Packed sequences through a bidirectional LSTM, and a log-sum-exp over tags."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(30, 16), nn.LSTM(16, 16, bidirectional=True, batch_first=True)
        self.tags = nn.Linear(32, 5)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.embedding(ids), lengths, batch_first=True, enforce_sorted=False)
        h, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        scores = self.tags(h)
        return scores - torch.logsumexp(scores, -1, keepdim=True)


class StateSpace(nn.Module):
    """A selective scan by cumulative sums of logarithms, with decays as exponentials of their differences."""

    def __init__(self, dim: int = 16, state: int = 8) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.project = nn.Linear(dim, 2 * state + 1)
        self.log_decay = nn.Parameter(torch.zeros(()))
        self.state = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, gate = self.enter(x).chunk(2, -1)
        write, read, step = self.project(h).split([self.state, self.state, 1], -1)
        log = -torch.cumsum(F.softplus(step.squeeze(-1)) * self.log_decay.exp(), -1)
        decay = log[:, :, None] - log[:, None, :]
        decay = decay.masked_fill(torch.ones_like(decay, dtype=torch.bool).triu(1), -1e9).exp()
        mixed = torch.einsum("bts,bus,btu,bud->btd", read, write, decay, h)
        return self.leave(mixed * F.silu(gate))


class LowRankLinear(nn.Linear):
    """A Linear with an adapter, as fine-tuning adds it: the subclass has its own forward."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.a = nn.Parameter(torch.randn(4, inputs) / 8)
        self.b = nn.Parameter(torch.randn(outputs, 4) / 8)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + F.linear(F.linear(input.to(self.weight.dtype), self.a), self.b)


@dataclass
class Latent:
    """What :class:`Autoencoder` returns."""

    sample: torch.Tensor
    mean: torch.Tensor
    parts: tuple[torch.Tensor, ...]


class Autoencoder(nn.Module):
    """Weight norm, an adapter, a shared layer called twice, dtype queries, a data class as the output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 8, 3, padding=1))
        self.shared, self.mean = LowRankLinear(32, 32), nn.Linear(32, 8)
        self.out = nn.Linear(8, 32)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> Latent:
        h = torch.tanh(self.conv(x)).flatten(1)[:, :32].to(self.mean.weight.dtype)
        h = h + self.shared(h)
        h += self.shared(torch.tanh(h)) * self.scale
        mean = self.mean(h)
        noise = torch.linspace(-1, 1, mean.shape[-1], dtype=mean.dtype)
        sample = self.out(mean + 0.1 * noise) / mean.new_full((1,), 2.0)
        return Latent(sample, mean, sample.split(16, -1))


class PrototypeNet(nn.Module):
    """Cosine similarities to prototypes, a variance written by hand, and a distance that cancels."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, dim), nn.GELU(), nn.Linear(dim, dim))
        self.prototypes = nn.Parameter(torch.randn(6, dim))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.body(x)
        centred = h - h.mean(-1, keepdim=True)
        h = centred / ((h * h).mean(-1, keepdim=True) - h.mean(-1, keepdim=True) ** 2 + 1e-5).sqrt()
        unit = h / h.norm(dim=-1, keepdim=True)
        prototypes = self.prototypes / self.prototypes.norm(dim=-1, keepdim=True)
        similarity = unit @ prototypes.T
        distance = (h * h).sum(-1, keepdim=True) - 2 * h @ self.prototypes.T + (self.prototypes**2).sum(-1)
        return 10 * similarity, distance


def _settled(model: nn.Module, *args: torch.Tensor, **kwargs: torch.Tensor) -> Built:
    """In eval mode; BatchNorm with statistics of these inputs, since at 0 and 1 an untrained deep net explodes."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if norms:
        momenta = [m.momentum for m in norms]
        for m in norms:
            m.momentum = 1.0
        with torch.no_grad():
            model.train()(*args, **kwargs)
        for m, momentum in zip(norms, momenta, strict=True):
            m.momentum = momentum
    return model.eval(), args, kwargs


def hf(name: str, *inputs: torch.Tensor, **config: Any) -> Built:
    """A small model of transformers in eval mode, without a cache."""
    import transformers

    cls = getattr(transformers, name)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    words = {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = cls(cls.config_class(**(sizes | words | config)))
    model.config.use_cache = False
    names = ("pixel_values",) if inputs[0].is_floating_point() else ("input_ids", "decoder_input_ids")
    return model.eval(), (), dict(zip(names, inputs, strict=False))


def ids(length: int = 12) -> torch.Tensor:
    return torch.randint(3, 30, (2, length))


HAND_WRITTEN: dict[str, Callable[[], Built]] = {
    "mlp": lambda: _settled(
        nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)), torch.randn(8, 16)
    ),
    "rotary decoder": lambda: _settled(RotaryDecoder(), ids()),
    "resnet": lambda: _settled(ResNet(), torch.randn(4, 3, 16, 16)),
    "unet": lambda: _settled(UNet(), torch.randn(2, 3, 8, 8), torch.tensor([7, 900])),
    "experts": lambda: _settled(Experts(), torch.randn(2, 10, 32)),
    "tagger": lambda: _settled(Tagger(), ids(9), torch.tensor([9, 5])),
    "state space": lambda: _settled(StateSpace(), torch.randn(2, 24, 16)),
    "autoencoder": lambda: _settled(Autoencoder(), torch.randn(3, 2, 8)),
    "prototypes": lambda: _settled(PrototypeNet(), torch.randn(8, 16)),
    "encoder": lambda: _settled(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False),
        torch.randn(2, 10, 32), src_key_padding_mask=torch.arange(10)[None] >= torch.tensor([[10], [6]]),
    ),
}  # fmt: skip

TRANSFORMERS: dict[str, Callable[[], Built]] = {
    "bert": lambda: hf("BertForMaskedLM", ids()),
    "llama": lambda: hf("LlamaForCausalLM", ids(), num_key_value_heads=2),
    "mixtral": lambda: hf("MixtralForCausalLM", ids(), num_key_value_heads=2, num_local_experts=4),
    "gpt2": lambda: hf("GPT2LMHeadModel", ids(), n_embd=32, n_layer=2, n_head=4),
    "t5": lambda: hf(
        "T5ForConditionalGeneration", ids(), ids(6), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4
    ),
    "vit": lambda: hf("ViTModel", torch.randn(2, 3, 32, 32), image_size=32, patch_size=8),
    "mamba": lambda: hf("MambaForCausalLM", ids(), state_size=8),
    "deberta": lambda: hf("DebertaV2Model", ids(), relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "gemma 3": lambda: hf("Gemma3ForCausalLM", ids(), head_dim=8, num_key_value_heads=2, query_pre_attn_scalar=8),
    "segformer": lambda: hf(
        "SegformerModel", torch.randn(2, 3, 64, 64), hidden_sizes=[8, 16], num_encoder_blocks=2, depths=[1, 1],
        sr_ratios=[2, 1], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
    ),
}  # fmt: skip
