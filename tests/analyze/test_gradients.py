"""Weight gradients under a format, where the forward tells nothing."""

import pytest
import torch
from torch import nn

from autoprec.errors import UsageError


class Invariant(nn.Module):
    """Tiny embeddings, a LayerNorm, and a loss that hardly depends on them: the forward shows nothing.

    The true gradient of the embeddings cancels in the LayerNorm's backward, and what the head's rounding leaves is
    multiplied by 1/std of the embeddings.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.head, self.side = nn.Linear(16, 16, bias=False), nn.Linear(16, 16)
        with torch.no_grad():
            self.embedding.weight.uniform_(-1e-4, 1e-4)
            self.norm.eps = 1e-12
            nn.init.orthogonal_(self.head.weight)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.head(self.norm(self.embedding(ids))), self.side(x)


def test_the_gradient_error_of_each_sites_parameters_is_measured(look) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    analysis = look(model, torch.randn(64, 16), gradients=True)
    for site in ("0", "2"):
        errors = analysis.by_id[site].gradient_errors
        assert 0 < errors["fp16"] < errors["bf16"] < 2e-2
    assert not analysis.by_id["1"].gradient_errors, "it has no parameters"
    assert all(row.source != "gradient" for row in analysis.rows)


def test_a_gradient_that_is_off_keeps_the_products_around_it_in_fp32(look) -> None:
    analysis = look(Invariant(), torch.arange(32), torch.randn(64, 16), gradients=True)
    verdict = analysis.by_id["head"].verdict("bf16")
    assert (verdict.tag, verdict.source) == ("fp32", "gradient")
    assert "gradient of embedding.weight" in verdict.reason
    assert analysis.by_id["head"].errors["bf16"] < 1e-2, "its result alone is fine"
    assert analysis.by_id["embedding"].gradient_errors["bf16"] > 2
    assert analysis.by_id["side"].tag_for("bf16") == "low"


def test_without_gradients_the_forward_lets_it_pass(look) -> None:
    assert look(Invariant(), torch.arange(32), torch.randn(64, 16)).by_id["head"].tag_for("bf16") == "low"


def test_nothing_is_left_on_the_model_and_dropout_draws_alike(look) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 4)).train()
    model[0].weight.grad = torch.ones(16, 16)
    x = torch.randn(64, 16)
    state = torch.get_rng_state()
    analysis = look(model, x, gradients=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model[0].weight.grad, torch.ones(16, 16))
    assert model[2].weight.grad is None
    assert type(model[0]) is nn.Linear
    assert analysis.by_id["0"].gradient_errors["bf16"] < 2e-2


def test_fp16_gradients_are_taken_under_a_loss_scale_that_fits(look) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    for factor in (1e-7, 1e4):
        errors = look(model, torch.randn(64, 16), loss=lambda out, f=factor: (out * f).sum()).by_id["0"].gradient_errors
        assert errors["fp16"] < 1e-2


def test_gradients_of_what_depends_on_no_parameter_are_refused(look) -> None:
    class Fixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    with pytest.raises(UsageError, match="depends on a parameter"):
        look(Fixed(), torch.randn(2), gradients=True)


def test_gradients_are_not_taken_unless_asked_for(look) -> None:
    row = look(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)).by_id["0"]
    assert not row.gradient_errors
