"""Tasks that train in milliseconds, with planted speed and planted harm.

Speed is planted on a clock of their own, so that no test depends on how busy the machine is.
"""

import torch
from torch import nn

from autoprec.tasks import Task


class Clock:
    """Stands still but for what models say they take."""

    now = 0.0


class Planted(nn.Module):
    """``wide`` takes a time that depends on its format, and may break in bf16.

    ``head`` gives numbers around an offset; around 1000 bf16's steps are 4.
    """

    def __init__(self, fp32_s: float, low_s: float, offset: float, poison: float) -> None:
        super().__init__()
        self.wide = nn.Linear(16, 16)
        self.head = nn.Linear(16, 1)
        self.fp32_s, self.low_s, self.poison = fp32_s, low_s, poison
        nn.init.constant_(self.head.bias, offset)

    def forward(self, x):
        y = self.wide(x)
        if y.dtype == torch.float32:
            Clock.now += self.fp32_s
        else:
            Clock.now += self.low_s
            y = y * self.poison
        return self.head(torch.tanh(y))


def batches(seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(32, 16, generator=generator)
        yield x, x[:, :1].sin() + 0.1 * torch.randn(32, 1, generator=generator)


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def make(*, fp32_s=0.01, low_s=0.01, offset=0.0, poison=1.0, **changes):
    def build_model(seed):
        torch.manual_seed(seed)
        return Planted(fp32_s, low_s, offset, poison)

    def loss(model, batch):
        x, y = batch
        return (model(x) - (y + offset)).pow(2).mean()

    fields = {
        "name": "tiny",
        "build_model": build_model,
        "batches": batches,
        "loss": loss,
        "optimizer": sgd,
        "samples_per_step": 32,
    }
    return Task(**{**fields, **changes})
