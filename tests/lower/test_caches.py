"""A table that a forward casts and keeps comes back in fp32, bit for bit."""

import copy

import pytest
import torch
from torch import nn

import autoprec


class Positions(nn.Module):
    def __init__(self, is_buffer: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        table = torch.arange(8.0) / 7
        if is_buffer:
            self.register_buffer("table", table, persistent=False)
        else:
            self.table = table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        self.table = self.table.to(h.dtype)
        return self.linear(h + self.table)


@pytest.mark.parametrize("is_buffer", [True, False])
@pytest.mark.parametrize("is_copied", [True, False])
def test_revert_gives_back_the_fp32_table(is_buffer: bool, is_copied: bool) -> None:
    model = Positions(is_buffer)
    table = model.table.clone()
    x = torch.randn(4, 8)
    with torch.no_grad():
        before = model(x)
        autoprec.convert(model, "a100")
        if is_copied:
            model = copy.deepcopy(model)
        model(x)
        assert model.table.dtype == torch.bfloat16
        autoprec.revert(model)
        assert torch.equal(model.table, table)
        assert torch.equal(model(x), before)


def test_a_model_that_the_user_moved_to_16_bit_stays_there() -> None:
    model = Positions(is_buffer=True)
    autoprec.convert(model, "a100")
    model.bfloat16()
    autoprec.revert(model)
    assert model.table.dtype == torch.bfloat16
