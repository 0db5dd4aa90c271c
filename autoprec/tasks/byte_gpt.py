"""A byte-level GPT on the standard library's source: the default task."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoprec.tasks.stdlib_text import text_identity, text_windows
from autoprec.tasks.task import Batch, Task

VOCABULARY = 256

# Shapes: B batch, T position, C width, H heads, D width of a head, V vocabulary.


class Attention(nn.Module):
    """Causal self-attention with one projection for query, key and value."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, T, C)`` to the same."""
        B, T, C = x.shape
        q_BHTD, k_BHTD, v_BHTD = self.qkv(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        return self.out(y_BHTD.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    """Attention and a feed-forward net, each behind a norm and a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, T, C)`` to the same."""
        x = x + self.attention(self.norm_attention(x))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


class ByteGPT(nn.Module):
    """A GPT over bytes; the head is a Linear of its own, not tied to the embedding."""

    def __init__(self, *, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(B, T, V)`` of the next byte after each of ``(B, T)``."""
        positions_T = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.position(positions_T)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_byte_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of the next byte, in nats."""
    tokens_BT, target_BT = batch
    return F.cross_entropy(model(tokens_BT).flatten(0, 1), target_BT.flatten())


def make_task(*, width: int = 256, layers: int = 4, heads: int = 4, context: int = 256, batch: int = 4) -> Task:
    """The GPT task.

    The defaults give 3.4M parameters and 1,024 tokens a step: on two CPU cores matmuls take most of a step, and a
    study of 50 trials ends in minutes.
    """

    def build_model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return ByteGPT(width=width, layers=layers, heads=heads, context=context)

    def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)

    return Task(
        name="gpt",
        build_model=build_model,
        batches=lambda seed: text_windows(seed, batch=batch, length=context),
        loss=next_byte_loss,
        optimizer=optimizer,
        samples_per_step=batch,
        tokens_per_step=batch * context,
        data=f"{text_identity()} {batch}x{context}",
    )
