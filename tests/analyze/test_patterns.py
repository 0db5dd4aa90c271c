"""Computations written out by hand are named, and what they would lose in 16 bit stays fp32."""

import torch
import torch.nn.functional as F
from torch import nn

from autoprec.analyze import SiteReport


class Head(nn.Module):
    """A projection, and then something written by hand."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.lin = nn.Linear(16, 16)
        with torch.no_grad():
            self.lin.weight.mul_(gain)


def is_pattern(row: SiteReport, format_name: str, words: str) -> bool:
    verdict = row.verdict(format_name)
    return verdict.tag == "fp32" and verdict.source == "pattern" and words in verdict.reason


def test_a_square_by_multiplication_in_a_hand_written_norm(look) -> None:
    class Norm(Head):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.lin(x)
            return h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6)

    analysis = look(Norm(), torch.randn(4, 16))
    assert is_pattern(analysis.by_id["::mul#0"], "fp16", "layer or RMS norm")
    assert analysis.by_id["::rsqrt#0"].tag == "fp32"
    assert "layer or RMS norm" in analysis.by_id["::rsqrt#0"].reason
    assert analysis.by_id["lin"].tag_for("fp16") == "low"
    assert analysis.by_id["::mul#1"].tag == "follow", "its other operand is fp32 already"


def test_a_norm_by_pow_names_every_member(look) -> None:
    class Norm(Head):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.lin(x)
            centred = h - h.amax(-1, keepdim=True)
            return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()

    analysis = look(Norm(), torch.randn(4, 16))
    assert is_pattern(analysis.by_id["::sub#0"], "bf16", "layer or RMS norm")
    for site in ("::pow#0", "::mean#0", "::add#0", "::sqrt#0"):
        assert "layer or RMS norm" in analysis.by_id[site].reason


def test_a_hand_written_softmax_and_log_sum_exp(look) -> None:
    class Softmax(Head):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = self.lin(x)
            e = (h - h.amax(-1, keepdim=True)).exp()
            return e / e.sum(-1, keepdim=True), h.exp().sum(-1).log()

    analysis = look(Softmax(), torch.randn(4, 16))
    assert is_pattern(analysis.by_id["::sub#0"], "bf16", "hand-written softmax")
    assert "log-sum-exp" in analysis.by_id["::log#0"].reason


def test_a_hand_written_cosine_similarity(look) -> None:
    class Cosine(Head):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = self.lin(x), self.lin(x.flip(0))
            return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))

    assert is_pattern(look(Cosine(), torch.randn(4, 16)).by_id["::mul#0"], "fp16", "cosine similarity")


def test_a_hand_written_variance(look) -> None:
    class Variance(Head):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.lin(x)
            d = h - h.mean(-1, keepdim=True)
            return (d * d).mean(-1)

    assert "variance" in look(Variance(), torch.randn(4, 16)).by_id["::mean#1"].reason


def test_differences_of_a_cumulative_sum(look) -> None:
    class Segments(Head):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sums = self.lin(x).cumsum(0)
            return sums[8:] - sums[:-8]

    row = look(Segments(), torch.randn(64, 16)).by_id["::sub#0"]
    assert row.tag == "follow", "the sums come in fp32"
    assert "cumulative sum" in row.reason


def test_a_focal_loss_keeps_its_clamp_in_fp32_where_the_bound_would_round_to_one(look) -> None:
    class Focal(Head):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            p = torch.sigmoid(self.lin(x)).clamp(1e-4, 1 - 1e-4)
            bce = -(y * p.log() + (1 - y) * (1 - p).log())
            return (torch.where(y == 1, 1 - p, p) ** 2 * bce).sum(-1)

    analysis = look(Focal(8.0), torch.randn(4, 16), torch.randint(0, 2, (4, 16)).float())
    for name in ("bf16", "fp16"):
        for site in ("::sigmoid#0", "::clamp#0"):
            assert is_pattern(analysis.by_id[site], name, "focal loss")
        assert analysis.by_id["lin"].tag_for(name) == "low"


class Rope(Head):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 16, 2).float() / 16), persistent=False)


def test_rotary_tables_stay_fp32_however_the_angles_are_made(look) -> None:
    class ByEinsum(Rope):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            t = torch.arange(x.shape[1], dtype=self.inv_freq.dtype)
            angles = torch.einsum("i,j->ij", t, self.inv_freq).repeat(1, 2)
            q = self.lin(x)
            return q * angles.cos() + q.flip(-1) * angles.sin()

    class ByMatmul(Rope):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            angles = (self.inv_freq[:, None].float() @ positions[None, :].float()).T.repeat(1, 2)
            return self.lin(x) * angles.cos()

    x = torch.randn(1, 300, 16)
    analysis = look(ByEinsum(), x)
    assert is_pattern(analysis.by_id["::einsum#0"], "bf16", "position embeddings")
    assert analysis.by_id["lin"].tag_for("bf16") == "low"
    analysis = look(ByMatmul(), x, torch.arange(300))
    assert is_pattern(analysis.by_id["::matmul#0"], "fp16", "position embeddings")
    assert analysis.by_id["lin"].tag_for("fp16") == "low"


def test_a_timestep_embedding_is_fp32_and_the_layers_on_it_are_low(look) -> None:
    class Timestep(Head):
        def forward(self, t: torch.Tensor) -> torch.Tensor:
            frequencies = torch.exp(-torch.arange(8).float() / 8 * 9.2)
            angles = t.float()[:, None] * frequencies
            return self.lin(torch.cat([angles.sin(), angles.cos()], -1))

    analysis = look(Timestep(), torch.tensor([10, 900]))
    assert analysis.by_id["::sin#0"].tag == "fp32"
    assert "position embeddings" in analysis.by_id["::sin#0"].reason
    assert analysis.by_id["lin"].tag_for("bf16") == "low"


def test_a_router_is_fp32_from_its_projection_on_and_the_experts_are_low(look) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(16, 4, bias=False)
            self.experts = nn.Parameter(torch.randn(4, 16, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            p, chosen = self.gate(x).softmax(-1).topk(1, -1)
            return torch.einsum("nd,ndk->nk", x, self.experts[chosen[:, 0]]) * p

    analysis = look(Experts(), torch.randn(64, 16))
    for name in ("bf16", "fp16"):
        assert is_pattern(analysis.by_id["gate"], name, "router")
        assert analysis.by_id["::einsum#0"].tag_for(name) == "low"


def test_a_mask_of_the_dtypes_minimum_is_added_in_fp32_where_the_sum_would_overflow(look) -> None:
    class Attention(Head):
        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            q = self.lin(x)
            scores = -(q @ q.transpose(1, 2)).abs()
            scores = scores + (~keep[:, None, :]).to(scores.dtype) * torch.finfo(scores.dtype).min
            return scores.softmax(-1) @ x

    keep = torch.ones(1, 5, dtype=torch.bool)
    keep[0, :2] = False
    analysis = look(Attention(8.0), torch.randn(1, 5, 16), keep)
    assert is_pattern(analysis.by_id["::add#0"], "fp16", "mask's mark")
    assert is_pattern(analysis.by_id["::neg#0"], "fp16", "from the dtype of its result")
    assert analysis.by_id["::add#0"].tag_for("bf16") == "follow", "bf16 reaches as far as fp32"
    assert analysis.by_id["::matmul#0"].tag_for("fp16") == "low"


def test_library_ops_need_no_pattern(look) -> None:
    class Library(Head):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.layer_norm(self.lin(x), (16,)).softmax(-1)

    analysis = look(Library(), torch.randn(4, 16))
    assert {row.source for row in analysis.rows} == {"op"}
