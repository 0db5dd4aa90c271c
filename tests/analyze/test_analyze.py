"""The call itself: arguments, what it returns, and plain models, which must stay low."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoprec.analyze import Analysis, analyze
from autoprec.errors import UsageError

FORMATS = ("bf16", "fp16")


class SelfAttention(nn.Module):
    def __init__(self, dim: int, is_fused: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.is_fused = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), is_fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        if self.is_fused:
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-1, -2) / (d // 4) ** 0.5
            mask = torch.ones(t, t, dtype=torch.bool).triu(1)
            h = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
        return self.out(h.transpose(1, 2).reshape(b, t, d))


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = x.dtype
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(before)


class Decoder(nn.Module):
    """Pre-norm decoder; ``is_gated``: RMS norms and a gated feed-forward, else LayerNorm and GELU."""

    def __init__(self, is_fused: bool, is_gated: bool, dim: int = 64, depth: int = 2) -> None:
        super().__init__()
        norm = RMSNorm if is_gated else nn.LayerNorm
        self.embedding, self.is_gated = nn.Embedding(100, dim), is_gated
        self.attentions = nn.ModuleList(SelfAttention(dim, is_fused) for _ in range(depth))
        self.norms = nn.ModuleList(norm(dim) for _ in range(2 * depth + 1))
        self.ups = nn.ModuleList(nn.Linear(dim, 4 * dim) for _ in range(depth))
        self.gates = nn.ModuleList(nn.Linear(dim, 4 * dim) for _ in range(depth))
        self.downs = nn.ModuleList(nn.Linear(4 * dim, dim) for _ in range(depth))
        self.head = nn.Linear(dim, 100, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + 0.02 * torch.arange(ids.shape[1])[:, None]
        for i, attention in enumerate(self.attentions):
            x = x + attention(self.norms[2 * i](x))
            h = self.norms[2 * i + 1](x)
            h = F.silu(self.gates[i](h)) * self.ups[i](h) if self.is_gated else F.gelu(self.ups[i](h))
            x = x + self.downs[i](h)
        return F.cross_entropy(self.head(self.norms[-1](x)).flatten(0, 1), ids.flatten())


class ResidualCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(4))
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.max_pool2d(F.relu(self.stem(x), inplace=True), 2)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            h = F.relu(h + norm(conv(h)))
        return self.head(F.adaptive_avg_pool2d(h, 1).flatten(1))


PLAIN = {
    "decoder": lambda: (Decoder(is_fused=False, is_gated=False), torch.randint(0, 100, (2, 32))),
    "decoder fused": lambda: (Decoder(is_fused=True, is_gated=False), torch.randint(0, 100, (2, 32))),
    "gated decoder": lambda: (Decoder(is_fused=False, is_gated=True), torch.randint(0, 100, (2, 32))),
    "cnn": lambda: (ResidualCNN(), torch.randn(4, 3, 16, 16)),
    "encoder layer": lambda: (nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), torch.randn(2, 16, 64)),
    "lstm": lambda: (nn.LSTM(16, 32, 2), torch.randn(20, 4, 16)),
    "fnn": lambda: (
        nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10), nn.LogSoftmax(-1)),
        torch.randn(8, 16),
    ),
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("is_training", [False, True])
def test_plain_models_stay_low_whole(look, name: str, is_training: bool) -> None:
    model, x = PLAIN[name]()
    analysis = look(model.train(is_training), x)
    assert any(site.flops for site in analysis.sites)
    for format_name in FORMATS:
        assert analysis.low_flops_share(format_name) == 1.0
        needed = [
            r.site.id for r in analysis.rows if r.tag_for(format_name) == "fp32" and r.source_for(format_name) != "op"
        ]
        assert not needed


@pytest.mark.parametrize("name", ["BertModel", "GPT2LMHeadModel", "ViTModel", "LlamaForCausalLM", "ResNetModel"])
def test_plain_transformers_stay_low(look, name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'autoprec[hf]'")
    try:
        cls = getattr(transformers, name)
    except (ImportError, RuntimeError) as error:  # a torchvision that doesn't fit torch
        pytest.skip(f"transformers can't import {name} here: {error}")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    own = {
        "GPT2LMHeadModel": {"n_embd": 64, "n_layer": 2, "n_head": 4},
        "ViTModel": sizes | {"image_size": 32, "patch_size": 8},
        "ResNetModel": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]},
    }
    words = {"vocab_size": 100, "bos_token_id": 0, "eos_token_id": 1, "attn_implementation": "eager"}
    config = own.get(name, sizes) | (words if name not in ("ViTModel", "ResNetModel") else {})
    model = cls(cls.config_class(**config)).eval()
    x = torch.randn(2, 3, 32, 32) if name in ("ViTModel", "ResNetModel") else torch.randint(0, 100, (2, 16))
    analysis = look(model, x)
    for format_name in FORMATS:
        assert analysis.low_flops_share(format_name) >= 0.99


def test_rows_tell_ranges_errors_and_who_reads_whom(look) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    analysis = look(model, torch.randn(8, 16))
    assert [row.site.id for row in analysis.rows] == ["0", "1", "2"]
    assert analysis.edges == (("0", "1"), ("1", "2"))
    first, relu, last = analysis.rows
    assert (first.tag, first.source) == ("low", "op")
    assert relu.tag == "follow"
    assert (relu.producers, relu.consumers) == (("0",), ("2",))
    assert 0 < first.errors["fp16"] < first.errors["bf16"] < 1e-2
    with torch.no_grad():
        assert relu.max_abs is not None
        assert 0 < relu.max_abs <= (first.max_abs or 0)
    assert last.site.flops == 2 * 8 * 16 * 4
    assert analysis.by_id["2"] is last
    assert analysis.tags() == analysis.tags("bf16") == {"0": "low", "1": "follow", "2": "low"}


def test_an_analysis_is_json(look) -> None:
    model = nn.Linear(16, 16)
    with torch.no_grad():
        model.weight.mul_(1e6)
    document = look(nn.Sequential(model), torch.randn(8, 16)).to_json()
    again = json.loads(json.dumps(document, allow_nan=False))
    (row,) = again["rows"]
    assert row["errors"]["fp16"] == "inf"
    assert row["verdicts"]["fp16"]["tag"] == "fp32"
    assert again["formats"] == ["bf16", "fp16"]
    assert again["is_measured"] is True


def test_without_inputs_the_layers_speak_by_their_op(look) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LSTM(8, 4))
    analysis = analyze(model, target="v100")
    assert not analysis.is_measured
    assert analysis.tags() == {"0": "low", "2": "low"}
    assert analysis.low_format == "fp16"
    assert analysis.by_id["0"].max_abs is None


@pytest.mark.parametrize("inputs", ["tensor", "tuple", "dict", "run"])
def test_inputs_come_in_four_forms(inputs: str) -> None:
    x = torch.randn(8, 4)
    forms = {"tensor": x, "tuple": (x,), "dict": {"input": x}, "run": lambda model: [model(x), model(x)]}
    analysis = analyze(nn.Linear(4, 4), forms[inputs], target="a100")
    assert analysis.sites[0].flops == (2 if inputs == "run" else 1) * 2 * 8 * 4 * 4


def test_a_site_called_twice_reports_its_worst_call() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    small, large = torch.randn(8, 16), torch.randn(8, 16) * 1e6
    analysis = analyze(model, lambda m: (m(small), m(large)), target="v100")
    assert analysis.rows[0].tag_for("fp16") == "fp32"
    assert analysis.rows[0].tag_for("bf16") == "low"


def test_one_format_may_be_asked_for(look) -> None:
    analysis = look(nn.Linear(4, 4), torch.randn(2, 4), formats=("fp16",))
    assert analysis.low_format == "fp16"
    with pytest.raises(UsageError, match="'bf16' wasn't analysed, only fp16"):
        analysis.rows[0].verdict("bf16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"formats": ("fp8_e4m3",)}, "give 'bf16', 'fp16' or both"),
        ({"formats": ()}, "give 'bf16', 'fp16' or both"),
        ({"gradients": True, "example_inputs": None}, "gradients need example_inputs"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        analyze(nn.Linear(4, 4), **{"example_inputs": torch.randn(2, 4), "target": "a100", **arguments})


def test_the_model_must_be_a_module() -> None:
    with pytest.raises(UsageError, match="model is a function"):
        analyze(lambda x: x, torch.randn(2), target="a100")  # type: ignore[arg-type]


def test_a_model_on_the_meta_device_is_judged_by_op_and_provenance() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)), torch.randn(4, 16)
    analysis: Analysis = analyze(model, x, target="a100")
    assert analysis.tags() == {"0": "low", "1": "fp32"}
    assert not analysis.by_id["0"].errors


def test_the_model_and_the_callers_random_numbers_are_as_before(look) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)).train()
    x = torch.randn(8, 16)
    state, weights = torch.get_rng_state(), model[0].weight.clone()
    look(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model[0].weight, weights)
    assert model.training
    assert set(vars(model)) == set(vars(nn.Sequential()))


def test_gradients_of_the_caller_and_requires_grad_do_not_matter() -> None:
    x = torch.randn(8, 16, requires_grad=True)
    analysis = analyze(nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True)), (x,), target="a100")
    assert analysis.tags()["0"] == "low"
    assert x.grad is None


def test_sparse_operands_and_shapes_that_depend_on_values_are_taken_along(look) -> None:
    class Irregular(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
            h = torch.sparse.mm(adjacency, self.lin(x))
            picked = h[h.sum(-1) > 0]
            return self.out(picked * 2.0 + 1.0) + picked.new_empty(8).normal_()

    adjacency = torch.eye(16).to_sparse()
    analysis = look(Irregular(), torch.randn(16, 8), adjacency)
    assert analysis.by_id["lin"].tag_for("bf16") == analysis.by_id["out"].tag_for("bf16") == "low"
