from collections.abc import Callable

import pytest
import torch
from torch import nn

from autoprec.analyze import Analysis, analyze

Look = Callable[..., Analysis]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def look() -> Look:
    """Analyses a model on positional inputs, for both 16-bit formats."""

    def look(model: nn.Module, *inputs: torch.Tensor, **options: object) -> Analysis:
        return analyze(model, inputs, target="a100", **options)

    return look
