"""What families keep, with and without a run, and that plain models lose nothing by it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoprec
from autoprec.analyze import analyze
from autoprec.graph.site import Site
from autoprec.lower.matching import RuleMatcher
from autoprec.planner.families import kept_by_families
from autoprec.planner.layers import module_sites
from autoprec.planner.rules import plan_by_rules
from autoprec.rulebook import load_rulebook
from autoprec.target import load_target

RULES = load_rulebook()


class TopKRouter(nn.Module):
    """A router whose projection isn't a layer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16))

    def forward(self, x):
        return F.linear(x, self.weight).softmax(-1).topk(2)


class MoeBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.router = TopKRouter()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        weights, picked = self.router(x)
        out = torch.stack([expert(x) for expert in self.experts], 1)
        chosen = out.gather(1, picked[..., None].expand(-1, -1, out.shape[-1]))
        return (chosen * weights[..., None]).sum(1) * self.gate(x).mean(-1, keepdim=True)


class TimestepEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, t):
        angles = t[:, None] * torch.arange(8) / 8
        return self.linear_2(F.silu(self.linear_1(torch.cat([angles.sin(), angles.cos()], -1))))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.body = TimestepEmbedding(), nn.Linear(16, 16)

    def forward(self, x, t):
        return self.body(x + self.time(t))


class MambaMixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj, self.dt_proj = nn.Linear(16, 16), nn.Linear(16, 16)
        self.A = nn.Parameter(-torch.rand(16))

    def forward(self, x):
        return self.scan(self.in_proj(x), F.softplus(self.dt_proj(x)))

    def scan(self, x, dt):
        state, states = torch.zeros_like(x[:, 0]), []
        for n in range(x.shape[1]):
            state = state * torch.exp(dt[:, n] * self.A) + x[:, n]
            states.append(state)
        return torch.stack(states, 1)


def formats(model, inputs=None, target="a100"):
    device = load_target(target)
    analysis = None if inputs is None else analyze(model, inputs, target=device)
    matcher = RuleMatcher(plan_by_rules(model, device, RULES, analysis=analysis))

    def of(scope, op, index=0):
        found = matcher.rule_for_site(scope, op, index)
        return "follow" if found is None else found.formats.input

    return of


@pytest.mark.parametrize("is_run", [True, False])
def test_routers_are_fp32_whatever_makes_the_projection(is_run):
    of = formats(nn.Sequential(MoeBlock()), torch.randn(8, 16) if is_run else None)
    assert of("0.router", "linear") == of("0.gate", "linear") == "fp32"
    assert of("0.experts.1", "linear") == "bf16"


@pytest.mark.parametrize("is_run", [True, False])
def test_time_embeddings_are_fp32(is_run):
    of = formats(Denoiser(), (torch.randn(4, 16), torch.rand(4) * 1000) if is_run else None)
    assert of("time.linear_1", "linear") == of("time.linear_2", "linear") == "fp32"
    assert of("time", "mul") == of("time", "sin") == "fp32"
    assert of("body", "linear") == "bf16"


@pytest.mark.parametrize("is_run", [True, False])
def test_the_scan_is_fp32_also_in_a_method_of_its_own(is_run):
    of = formats(nn.Sequential(MambaMixer()), torch.randn(2, 3, 16) if is_run else None)
    assert of("0.dt_proj", "linear") == "fp32"
    assert of("0:scan", "mul") == of("0:scan", "add") == "fp32"
    assert of("0.in_proj", "linear") == "bf16"


def test_family_rules_say_so():
    plan = plan_by_rules(nn.Sequential(MoeBlock()), load_target("a100"), RULES)
    (found,) = [rule for rule in plan.rules if rule.source == "family"]
    assert set(found.match) == {"0.gate", "0.router"}
    assert "near-equal experts" in found.reason


def test_a_converted_router_decides_as_in_fp32():
    torch.manual_seed(0)
    model, x = MoeBlock(), torch.randn(256, 16)
    before = model.router(x)[1]
    autoprec.convert(model, target="a100")
    assert torch.equal(model.router(x)[1], before)


def test_high_is_16_bit_and_not_fp32():
    model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 4096)).to("meta")
    kept = kept_by_families(model, RULES, None)
    assert list(kept.high) == ["2", "0"]
    assert kept.fp32 == ()
    assert kept.fp32_sites == frozenset()
    assert kept_by_families(nn.Linear(4, 4), RULES, None).high == {}


def test_a_site_kept_fp32_is_not_also_kept_high():
    kept = kept_by_families(nn.Sequential(MoeBlock()), RULES, None)
    assert kept.fp32_sites == {"0.gate"}
    assert "0.gate" not in kept.high


def test_the_order_of_a_run_counts_and_not_that_of_registration():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.middle, self.first = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            return self.last(self.middle(self.first(x)))

    sites = analyze(Backwards(), torch.randn(2, 8)).sites
    assert set(kept_by_families(Backwards(), RULES, sites).high) == {"first", "last"}


def test_sites_from_modules_alone():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.LSTM(8, 8), nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
    assert [(site.module, site.op) for site in module_sites(model)] == [
        ("0", "conv2d"),
        ("2", "lstm"),
        ("3", "multi_head_attention_forward"),
        ("3.out_proj", "linear"),
        ("4", "linear"),
    ]
    assert module_sites(nn.Linear(8, 8)) == [Site(module="", op="linear", leaf=True)]


class ResidualNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.blocks = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(4))
        self.fc = nn.Linear(16, 10)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        for block in self.blocks:
            x = x + block(x).relu()
        return self.fc(x.mean((2, 3)))


def encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(16, 32), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))


@pytest.mark.parametrize("is_run", [True, False])
@pytest.mark.parametrize(("make", "shape"), [(ResidualNet, (2, 3, 8, 8)), (encoder, (2, 6, 16))])
def test_plain_models_keep_their_share_of_low_products(make, shape, is_run):
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    plan = autoprec.convert(make(), target="a100", example_inputs=x if is_run else None)
    plan = vars(plan)["_autoprec_conversion"].plan
    autoprec.convert(model, plan=plan, example_inputs=x)
    assert autoprec.receipt(model).low_precision_share >= 0.99


@pytest.mark.parametrize("name", ["Bert", "GPT2", "ViT", "ResNet", "Llama"])
def test_transformers_models_keep_their_share_of_low_products(name):
    try:
        import transformers
        from transformers import AutoModel
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"needs transformers: {error}")
    sizes = {
        "Bert": {
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "vocab_size": 99,
        },
        "GPT2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 99},
        "ViT": {
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "image_size": 32,
        },
        "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic"},
        "Llama": {
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "vocab_size": 99,
        },
    }[name]
    torch.manual_seed(0)
    try:
        model = AutoModel.from_config(getattr(transformers, f"{name}Config")(**sizes)).eval()
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"needs {name} of transformers: {error}")
    is_image = name in ("ViT", "ResNet")
    inputs = {"pixel_values": torch.randn(2, 3, 32, 32)} if is_image else {"input_ids": torch.randint(0, 99, (2, 8))}
    autoprec.convert(model, target="a100", example_inputs=inputs)
    assert autoprec.receipt(model).low_precision_share >= 0.99
