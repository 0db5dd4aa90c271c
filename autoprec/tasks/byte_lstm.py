"""A byte-level LSTM on the standard library's source."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from autoprec.tasks.byte_gpt import VOCABULARY, next_byte_loss
from autoprec.tasks.stdlib_text import text_identity, text_windows
from autoprec.tasks.task import Task


class ByteLSTM(nn.Module):
    """Embedding, stacked LSTM, head."""

    def __init__(self, *, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, num_layers=layers, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(B, T, V)`` of the next byte after each of ``(B, T)``."""
        hidden_BTC, _ = self.lstm(self.embed(tokens))
        return self.head(hidden_BTC)


def make_task(*, width: int = 256, layers: int = 2, length: int = 64, batch: int = 16) -> Task:
    """The LSTM task; the defaults give 1.2M parameters and 1,024 tokens a step."""

    def build_model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return ByteLSTM(width=width, layers=layers)

    def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=2e-3)

    return Task(
        name="lstm",
        build_model=build_model,
        batches=lambda seed: text_windows(seed, batch=batch, length=length),
        loss=next_byte_loss,
        optimizer=optimizer,
        samples_per_step=batch,
        tokens_per_step=batch * length,
        data=f"{text_identity()} {batch}x{length}",
    )
