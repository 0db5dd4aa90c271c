"""FLOPs of one call, the kernels that torch doesn't count among them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoprec.graph.flops import count_flops
from autoprec.graph.record import record


class Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask)


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fused_attention_counts_both_products(is_masked: bool, device: str) -> None:
    q, k, v = (torch.randn(2, 4, n, 8, device=device) for n in (16, 12, 12))
    mask = torch.zeros(2, 1, 16, 12, device=device) if is_masked else None
    (site,) = record(Attention(), lambda m: m(q, k, v, mask)).sites.values()
    assert site.flops == 2 * 2 * (2 * 4 * 16 * 12 * 8)


def test_a_product_counts_two_for_each_multiply_add() -> None:
    out, flops = count_flops(lambda: torch.ones(3, 4) @ torch.ones(4, 5))
    assert out.shape == (3, 5)
    assert flops == 2 * 3 * 4 * 5


@pytest.mark.parametrize(("layer", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_kernels_count_every_weight_at_every_step(layer: type[nn.RNNBase], gates: int) -> None:
    model = layer(6, 8)
    sites = record(model, lambda m: m(torch.randn(5, 2, 6))).sites
    (site,) = [site for site in sites.values() if site.flops]
    assert site.flops == 2 * (5 * 2) * gates * 8 * (6 + 8)
