"""Range and cancellation on real data: what no list of ops can see."""

import math

import pytest
import torch
from torch import nn

from autoprec.analyze import Analysis


def fp32_by_range(analysis: Analysis, format_name: str) -> set[str]:
    return {
        row.site.id
        for row in analysis.rows
        if row.verdict(format_name).tag == "fp32" and row.verdict(format_name).source == "range"
    }


class FeedForward(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)
        with torch.no_grad():
            self.wi.weight.mul_(gain)
            self.wo.weight.mul_(gain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.wo(torch.relu(self.wi(x)))


def test_a_projection_beyond_fp16_stays_fp32_there_and_is_named(look) -> None:
    analysis = look(FeedForward(600.0), torch.randn(2, 5, 32))
    verdict = analysis.by_id["wo"].verdict("fp16")
    assert (verdict.tag, verdict.source) == ("fp32", "range")
    assert "fp16 ends at 65504" in verdict.reason
    assert math.isinf(analysis.by_id["wo"].errors["fp16"])
    assert analysis.by_id["wo"].tag_for("bf16") == "low"
    assert analysis.by_id["wi"].tag_for("fp16") == "low"


def test_a_projection_near_the_end_of_fp16_stays_fp32_too(look) -> None:
    x = torch.randn(2, 5, 32)
    inside = look(FeedForward(100.0), x).by_id["wo"]
    assert inside.max_abs is not None
    assert inside.tag_for("fp16") == "low"
    gain = (65504 / 3 / inside.max_abs) ** 0.5 * 100.0
    torch.manual_seed(0)
    near = look(FeedForward(gain), x).by_id["wo"]
    assert near.max_abs is not None
    assert near.max_abs < 65504
    assert near.tag_for("fp16") == "fp32"


def test_inference_asks_for_less_head_room_than_training(look) -> None:
    model, x = FeedForward(200.0), torch.randn(2, 5, 32)
    largest = look(model, x).by_id["wo"].max_abs
    assert largest is not None
    with torch.no_grad():
        model.wo.weight.mul_(65504 / 3 / largest)
    assert look(model, x, mode="training").by_id["wo"].tag_for("fp16") == "fp32"
    assert look(model, x, mode="inference").by_id["wo"].tag_for("fp16") == "low"


class Shifted(nn.Module):
    """((h + shift) - shift) @ W: nothing is large, and everything is lost in between."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.inner, self.outer, self.shift = nn.Linear(16, 16), nn.Linear(16, 16), shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer((self.inner(x) + self.shift) - self.shift)


def test_cancellation_is_charged_to_the_sum_that_rounds_not_to_the_products(look) -> None:
    analysis = look(Shifted(400.0), torch.randn(64, 16))
    for name in ("bf16", "fp16"):
        verdict = analysis.by_id["::add#0"].verdict(name)
        assert (verdict.tag, verdict.source) == ("fp32", "range")
        assert "::sub#0" in verdict.reason
        assert analysis.by_id["inner"].tag_for(name) == analysis.by_id["outer"].tag_for(name) == "low"
    assert analysis.by_id["::sub#0"].errors["bf16"] > 0.2


def test_a_shift_that_costs_nothing_is_left_alone(look) -> None:
    analysis = look(Shifted(0.5), torch.randn(64, 16))
    assert not fp32_by_range(analysis, "bf16")
    assert not fp32_by_range(analysis, "fp16")


def test_cancellation_of_the_products_own_roundings_is_charged_to_the_products(look) -> None:
    class Difference(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 16)
            self.b = nn.Linear(16, 16)
            self.b.load_state_dict(self.a.state_dict())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) - self.b(x + 1e-3)

    assert fp32_by_range(look(Difference(), torch.randn(64, 16)), "bf16") >= {"a", "b"}


def test_a_value_below_fp16_is_seen(look) -> None:
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    with torch.no_grad():
        model[0].weight.mul_(1e-8)
    row = look(model, torch.randn(64, 16)).by_id["0"]
    assert row.tag_for("fp16") == "fp32"
    assert row.tag_for("bf16") == "low"


def test_a_fill_beyond_the_format_is_charged_to_the_fill_alone(look) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            scores = self.q(x) @ self.k(x).transpose(1, 2) / 4.0
            return scores.masked_fill(~keep[:, None, :], -1e9).softmax(-1) @ x

    keep = torch.ones(2, 6, dtype=torch.bool)
    keep[0, 4:] = False
    analysis = look(Attention(), torch.randn(2, 6, 16), keep)
    assert fp32_by_range(analysis, "fp16") == {"::masked_fill#0"}
    assert "-1e+09 is beyond fp16" in analysis.by_id["::masked_fill#0"].reason
    assert not fp32_by_range(analysis, "bf16")


@pytest.mark.parametrize("eps", [1e-12, 1e-6])
def test_an_eps_that_underflows_is_seen_where_a_zero_row_divides_by_it(look, eps: float) -> None:
    class Normalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.lin(x)
            return h / (h.abs().amax(-1, keepdim=True) + eps)

    x = torch.randn(32, 8)
    x[1] = 0.0
    tag = look(Normalized(), x).by_id["::add#0"].verdict("fp16")
    assert (tag.tag == "fp32") == (eps == 1e-12), "1e-6 is a number in fp16, 1e-12 is zero"


def test_angles_made_by_a_product_stay_fp32_if_their_sine_is_off(look) -> None:
    class Fourier(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 32)
            with torch.no_grad():
                self.lin.weight.mul_(scale)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.lin(x) * 6.28).sin()

    x = torch.rand(64, 4)
    wild = look(Fourier(30.0), x).by_id["lin"].verdict("bf16")
    assert (wild.tag, wild.source) == ("fp32", "range")
    assert "::sin#0" in wild.reason
    assert look(Fourier(0.1), x).by_id["lin"].tag_for("bf16") == "low"


def test_comparisons_of_rounded_values_are_followed_to_what_they_steer(look) -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.lin(x)
            return torch.where((h * 1000.0).remainder(1.0) > 0.5, x, -x) * 2.0

    assert "lin" in fp32_by_range(look(Gate(), torch.randn(64, 16)), "bf16")


def test_writes_in_place_and_through_an_index_are_followed(look) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.lin(x)
            h += 400.0
            h[:, :8] -= 400.0
            h[:, 8:] -= 400.0
            return h * 1.0

    analysis = look(Writes(), torch.randn(64, 16))
    assert "::add#0" in fp32_by_range(analysis, "bf16")
    assert analysis.by_id["lin"].tag_for("bf16") == "low"


def test_dropout_draws_the_same_mask_for_every_format(look) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16)).train()
    assert look(model, torch.randn(64, 16)).by_id["1"].errors["bf16"] < 1e-2


def test_a_long_residual_stream_in_16_bit_is_nobodys_fault(look) -> None:
    class Stream(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 3, padding=1)
            self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(depth))
            self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(depth))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.stem(x)
            for conv, norm in zip(self.convs, self.norms, strict=True):
                h = torch.relu(h + norm(conv(h)))
            return h

    analysis = look(Stream(60), torch.randn(4, 3, 8, 8))
    assert not fp32_by_range(analysis, "bf16")
    assert not fp32_by_range(analysis, "fp16")
    assert analysis.by_id["::relu#59"].errors["bf16"] > analysis.by_id["::relu#0"].errors["bf16"]


def test_a_product_that_cancels_what_a_sum_rounded_keeps_both_in_fp32(look) -> None:
    class Balanced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
            with torch.no_grad():
                self.outer.weight.sub_(self.outer.weight.mean(1, keepdim=True))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(self.inner(x) + 100.0)

    analysis = look(Balanced(), torch.randn(64, 16))
    assert fp32_by_range(analysis, "bf16") == {"::add#0", "outer"}
    assert "outer" in analysis.by_id["::add#0"].reason


def test_an_elementwise_result_near_the_end_of_fp16_stays_fp32(look) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.lin(x) * 20000.0).tanh()

    analysis = look(Scaled(), torch.randn(64, 16))
    assert analysis.by_id["::mul#0"].tag_for("fp16") == "fp32"
    assert "fp16 ends at 65504" in analysis.by_id["::mul#0"].reason
    assert analysis.by_id["lin"].tag_for("fp16") == "low"
