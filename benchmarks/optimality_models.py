"""The models of ``optimality_tables.py``: as modules, and as functions of many mixes' parameters at once.

Shapes: M mixes, B batch, T position, D width, N images, C channels, P patches, K values of a patch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoprec.tasks.byte_gpt import ByteGPT, next_byte_loss
from autoprec.tasks.digits_cnn import digit_loss, noisy_batches
from autoprec.tasks.stdlib_text import text_windows

FORMATS = ("bf16", "fp8_e4m3", "nvfp4")
State = dict[str, Tensor]


class Linears(Protocol):
    """Runs the Linear of a name for all mixes: ``[M, rows, in] → [M, rows, out]``."""

    def __call__(self, params: State, name: str, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Case:
    """One table.

    Args:
        build: the module, from a seed.
        batches: from a seed, without end.
        loss: of the module.
        losses: of all mixes, ``[M]``, from their parameters.
        optimizer: of a list of parameters.
        groups: name → names of its Linear layers.
        special: groups with choices of their own; all others have :data:`FORMATS`.
        calls: name of a layer → how often a forward calls it, where that isn't once.
    """

    build: Callable[[int], nn.Module]
    batches: Callable[[int], Iterator[Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    losses: Callable[[State, Linears, Any], Tensor]
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]
    groups: Mapping[str, tuple[str, ...]]
    special: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    calls: Mapping[str, int] = field(default_factory=dict)

    @property
    def choices(self) -> dict[str, tuple[str, ...]]:
        return {name: self.special.get(name, FORMATS) for name in self.groups}


def _mean_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of each mix: ``[M, rows, classes]`` and ``[rows]`` to ``[M]``."""
    mixes = len(logits)
    each = F.cross_entropy(logits.flatten(0, 1), target.repeat(mixes), reduction="none")
    return each.view(mixes, -1).mean(1)


# GPT: autoprec.tasks.byte_gpt.ByteGPT

_HEADS, _WIDTH, _CONTEXT = 4, 48, 32


def _norm(params: State, name: str, x: Tensor) -> Tensor:
    y = F.layer_norm(x, x.shape[-1:])
    return y * params[f"{name}.weight"][:, None] + params[f"{name}.bias"][:, None]


def _gpt_losses(params: State, linears: Linears, batch: Any) -> Tensor:
    tokens, target = batch
    B, T = tokens.shape
    x = (params["embed.weight"][:, tokens] + params["position.weight"][:, None, :T]).flatten(1, 2)
    M, _, D = x.shape
    for block in ("blocks.0", "blocks.1"):
        qkv = linears(params, f"{block}.attention.qkv", _norm(params, f"{block}.norm_attention", x))
        q, k, v = qkv.view(M * B, T, 3, _HEADS, D // _HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(M, B * T, D)
        x = x + linears(params, f"{block}.attention.out", y)
        y = linears(params, f"{block}.up", _norm(params, f"{block}.norm_mlp", x))
        x = x + linears(params, f"{block}.down", F.gelu(y, approximate="tanh"))
    return _mean_loss(linears(params, "head", _norm(params, "norm", x)), target.flatten())


def gpt() -> Case:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return ByteGPT(width=_WIDTH, layers=2, heads=_HEADS, context=_CONTEXT)

    parts = {"attention": ("attention.qkv", "attention.out"), "up": ("up",), "down": ("down",)}
    return Case(
        build=build,
        batches=lambda seed: text_windows(seed, batch=8, length=_CONTEXT),
        loss=next_byte_loss,
        losses=_gpt_losses,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01),
        groups={
            f"blocks.{k}.{part}": tuple(f"blocks.{k}.{name}" for name in names)
            for k in range(2)
            for part, names in parts.items()
        },
        special=dict.fromkeys(("blocks.1.attention", "blocks.1.up"), FORMATS[1:]),
    )


# CNN: autoprec.tasks.digits_cnn, with patches


class PatchConv(nn.Module):
    """A 3x3 convolution as patches times a Linear, and batch norm."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.product = nn.Linear(9 * channels_in, channels_out, bias=False)
        self.norm = nn.BatchNorm2d(channels_out)

    def forward(self, images: Tensor) -> Tensor:
        """``(N, C, H, W)`` to the same with other channels."""
        y = self.product(F.unfold(images, 3, padding=1).transpose(1, 2)).transpose(1, 2)
        return F.relu(self.norm(y.reshape(len(images), -1, *images.shape[2:])))


class PatchCNN(nn.Module):
    """Four convolutions and two linear layers on 8x8 images."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = (1, width, width, 2 * width, 2 * width)
        self.conv = nn.ModuleList(PatchConv(a, b) for a, b in itertools.pairwise(sizes))
        self.hidden = nn.Linear(4 * sizes[-1], 4 * width)
        self.head = nn.Linear(4 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``(N, 10)`` of ``(N, 1, 8, 8)``."""
        for depth, conv in enumerate(self.conv):
            images = conv(images)
            if depth % 2:
                images = F.max_pool2d(images, 2)
        return self.head(F.relu(self.hidden(images.flatten(1))))


def _cnn_losses(params: State, linears: Linears, batch: Any) -> Tensor:
    images, label = batch
    N, M = len(images), len(params["head.weight"])
    x = images.expand(M, *images.shape)
    for depth in range(4):
        H, W = x.shape[3:]
        patches = F.unfold(x.flatten(0, 1), 3, padding=1).transpose(1, 2).reshape(M, N * H * W, -1)
        y = linears(params, f"conv.{depth}.product", patches)
        mean, var = y.mean(1, keepdim=True), y.var(1, keepdim=True, unbiased=False)
        norm = f"conv.{depth}.norm"
        y = (y - mean) * torch.rsqrt(var + 1e-5) * params[f"{norm}.weight"][:, None] + params[f"{norm}.bias"][:, None]
        x = F.relu(y.view(M, N, H, W, -1).permute(0, 1, 4, 2, 3))
        if depth % 2:
            x = F.max_pool2d(x.flatten(0, 1), 2).view(M, N, -1, H // 2, W // 2)
    hidden = F.relu(linears(params, "hidden", x.flatten(2)))
    return _mean_loss(linears(params, "head", hidden), label)


def cnn() -> Case:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return PatchCNN(16)

    layers = {**{f"conv.{k}": (f"conv.{k}.product",) for k in range(4)}, "hidden": ("hidden",), "head": ("head",)}
    return Case(
        build=build,
        batches=lambda seed: noisy_batches(seed, batch=32, noise=0.5),
        loss=digit_loss,
        losses=_cnn_losses,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
        groups=layers,
        special=dict.fromkeys(("conv.0", "head"), FORMATS[:2]),
    )


# LSTM: autoprec.tasks.byte_lstm, with its products as Linears

_LENGTH = 8


class Cell(nn.Module):
    """One LSTM layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.input = nn.Linear(width, 4 * width)
        self.hidden = nn.Linear(width, 4 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, T, D)`` to the same."""
        return _unroll(self.input(x), self.hidden)


def _unroll(gates: Tensor, hidden: Callable[[Tensor], Tensor]) -> Tensor:
    """``(…, T, 4 D)`` from the inputs to outputs ``(…, T, D)``."""
    h = c = gates.new_zeros(*gates.shape[:-2], gates.shape[-1] // 4)
    outputs = []
    for t in range(gates.shape[-2]):
        i, f, g, o = (gates[..., t, :] + hidden(h)).chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(h)
    return torch.stack(outputs, dim=-2)


class CellLSTM(nn.Module):
    """Embedding, two layers, head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Cell(width) for _ in range(2))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(B, T, 256)`` of the next byte after each of ``(B, T)``."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _lstm_losses(params: State, linears: Linears, batch: Any) -> Tensor:
    tokens, target = batch
    x = params["embed.weight"][:, tokens]
    M, B, T, D = x.shape
    for layer in ("layers.0", "layers.1"):
        gates = linears(params, f"{layer}.input", x.flatten(1, 2)).view(M, B, T, 4 * D)
        x = _unroll(gates, lambda h, layer=layer: linears(params, f"{layer}.hidden", h))
    return _mean_loss(linears(params, "head", x.flatten(1, 2)), target.flatten())


def lstm() -> Case:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return CellLSTM(48)

    layers = {f"layers.{k}.{name}": (f"layers.{k}.{name}",) for k in range(2) for name in ("input", "hidden")}
    return Case(
        build=build,
        batches=lambda seed: text_windows(seed, batch=32, length=_LENGTH),
        loss=next_byte_loss,
        losses=_lstm_losses,
        optimizer=lambda params: torch.optim.Adam(params, lr=2e-3),
        groups={**layers, "head": ("head",)},
        special={"head": ("bf16", "fp8_e4m3", "mxfp8", "nvfp4")},
        calls={f"layers.{k}.hidden": _LENGTH for k in range(2)},
    )


CASES: dict[str, Callable[[], Case]] = {"gpt": gpt, "cnn": cnn, "lstm": lstm}
