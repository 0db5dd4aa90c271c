"""What a value is made of, and what it is for."""

import torch
from torch import nn

from autoprec.analyze import Verdict


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.out = nn.Linear(8, 8), nn.Linear(8, 8)


def by_provenance(verdict: Verdict, words: str) -> bool:
    return verdict.tag == "fp32" and verdict.source == "provenance" and words in verdict.reason


def test_a_product_of_positions_alone_stays_fp32(look) -> None:
    class Distances(Projected):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            t = torch.arange(x.shape[0]).float()[:, None]
            return self.lin(x) + (t @ t.T).sum()

    analysis = look(Distances(), torch.randn(300, 8))
    assert by_provenance(analysis.by_id["::matmul#0"].verdict("bf16"), "integer positions")
    assert analysis.by_id["lin"].tag_for("bf16") == "low"


def test_a_product_of_buffers_alone_stays_fp32(look) -> None:
    class Constants(Projected):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("basis", torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lin(x) + (self.basis @ self.basis)[0] + x @ self.basis

    analysis = look(Constants(), torch.randn(4, 8))
    assert by_provenance(analysis.by_id["::matmul#0"].verdict("bf16"), "constants")
    assert analysis.by_id["::matmul#1"].tag_for("bf16") == "low", "an activation is in it"


def test_what_the_author_upcast_stays_fp32_only_if_all_of_it_was(look) -> None:
    class Upcast(Projected):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.lin(x)
            both = h.float() @ h.T.float()
            return self.out(h.float()) + both.sum()

    analysis = look(Upcast(), torch.randn(4, 8))
    assert by_provenance(analysis.by_id["::matmul#0"].verdict("fp16"), "the author cast")
    assert analysis.by_id["out"].tag_for("fp16") == "low", "the layer's weight was not"


def test_a_cast_back_to_the_inputs_dtype_is_no_upcast(look) -> None:
    class CastsBack(Projected):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.lin(x)
            wide = h.float().tanh()
            return wide.to(h.dtype) @ wide.T.to(h.dtype)

    class Literal(Projected):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.lin(x)
            return h.to(torch.float32) @ h.T.to(torch.float32)

    x = torch.randn(4, 8)
    assert look(Literal(), x).by_id["::matmul#0"].tag_for("bf16") == "fp32"
    back = look(CastsBack(), x).by_id["::matmul#0"]
    assert back.tag_for("bf16") == "low"


def test_everything_from_an_argmin_back_to_the_product_stays_fp32(look) -> None:
    class Codebook(Projected):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.randn(5, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.lin(x)
            scores = (h @ self.codes.T) * 2.0
            return self.out(self.codes[scores.argmax(-1)])

    analysis = look(Codebook(), torch.randn(6, 8))
    assert by_provenance(analysis.by_id["::matmul#0"].verdict("bf16"), "the argmax")
    assert by_provenance(analysis.by_id["::mul#0"].verdict("bf16"), "the argmax")
    assert analysis.by_id["lin"].tag_for("bf16") == "low"
    assert analysis.by_id["out"].tag_for("bf16") == "low"


def test_an_index_that_nothing_reads_costs_nothing(look) -> None:
    class Answer(Projected):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lin(x).argmax(-1)

    assert look(Answer(), torch.randn(6, 8)).by_id["lin"].tag_for("bf16") == "low"


def test_a_position_computed_by_a_product_and_turned_to_an_index(look) -> None:
    class Lookup(Projected):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(64, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            index = (self.lin(x).sigmoid() * 60).long()
            return self.table(index.view(-1))

    analysis = look(Lookup(), torch.randn(6, 8))
    assert by_provenance(analysis.by_id["lin"].verdict("fp16"), "the long")


def test_the_products_that_feed_a_decomposition_stay_fp32(look) -> None:
    class Whiten(Projected):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = self.lin(x)
            gram = h.T @ h / len(h) + torch.eye(8, dtype=h.dtype)
            return torch.linalg.svdvals(h), h @ torch.linalg.inv(gram)

    analysis = look(Whiten(), torch.randn(32, 8))
    assert by_provenance(analysis.by_id["lin"].verdict("bf16"), "svdvals")
    assert by_provenance(analysis.by_id["::matmul#0"].verdict("bf16"), "linalg_inv")
    assert analysis.by_id["::matmul#1"].tag_for("bf16") == "low"


def test_what_a_norm_stands_between_is_another_region(look) -> None:
    class Normed(Projected):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm(self.lin(x))
            return self.out(x[h.sum(-1).argsort()])

    assert look(Normed(), torch.randn(6, 8)).by_id["lin"].tag_for("bf16") == "low"
