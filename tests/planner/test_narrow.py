"""Which linear layers go to FP8 by rule: one fault class of FP8 conversions a test."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import autoprec
from autoprec.analyze import analyze
from autoprec.lower.matching import RuleMatcher
from autoprec.plan import Formats, Plan, PlanRule
from autoprec.planner.narrow import ASSUMED_TOKENS, narrow_formats
from autoprec.planner.rules import plan_by_rules
from autoprec.recipes import CurrentRecipe, MXFP8Recipe
from autoprec.rulebook import load_rulebook
from autoprec.target import list_targets, load_target

HYBRID = Formats(input="fp8_e4m3", weight="fp8_e4m3", grad_output="fp8_e5m2")


def planned(model, inputs=None, target="h100", **options):
    device = target if not isinstance(target, str) else load_target(target)
    analysis = None if inputs is None else analyze(model, inputs, target=device)
    return plan_by_rules(model, device, load_rulebook(), analysis=analysis, **options)


def rule(plan, fqn):
    return RuleMatcher(plan).rule_for_site(fqn, "linear", 0)


def on_meta(make):
    with torch.device("meta"):
        return make()


def stack(*sizes, first=4096, last=4096):
    """A chain of layers between two that stay high as the first and the last."""
    inner = [first, *sizes, last]
    return on_meta(
        lambda: nn.Sequential(*(nn.Linear(a, b) for a, b in zip([first, *inner], [*inner, last], strict=True)))
    )


# --- which targets, which formats


@pytest.mark.parametrize("name", [t.name for t in list_targets()])
def test_fp8_only_where_the_target_has_it(decoder, name):
    target = load_target(name)
    plan = planned(decoder(), target=name)
    if target.low_format == "fp32":
        assert plan.rules == ()
        return
    formats = rule(plan, "layers.5.up").formats
    fp8 = [f for f in target.formats if f.startswith("fp8_")]
    if not fp8:
        assert formats == Formats.all(target.low_format)
    elif "mxfp8" in target.formats:
        assert formats == Formats.all("mxfp8")
    elif "fp8_e5m2" in fp8:
        assert formats == HYBRID
    else:
        assert formats == Formats.all("fp8_e4m3fnuz")


@pytest.mark.parametrize(("cap", "got"), [("bf16", "bf16"), ("fp16", "fp16"), ("fp8_e4m3", "fp8_e4m3")])
def test_formats_caps_it(decoder, cap, got):
    assert rule(planned(decoder(), formats=cap), "layers.5.up").formats.input == got


@pytest.mark.parametrize("options", [{"level": "O0"}, {"formats": "fp32"}, {"formats": "tf32", "level": "O0"}])
def test_nothing_is_lowered_where_fp32_is_asked_for(decoder, options):
    assert planned(decoder(), **options).rules == ()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_levels_and_formats_are_separate(decoder, level):
    assert rule(planned(decoder(), level=level), "layers.5.up").formats == HYBRID


def test_the_recipe_is_current_scaling_and_in_the_plan(decoder):
    assert planned(decoder()).recipe == {"fp8": CurrentRecipe().to_dict()}
    assert planned(decoder(), formats="bf16").recipe == {}


def test_narrow_formats_follow_the_targets_own_list():
    h100 = load_target("h100")
    assert narrow_formats(h100, None) == HYBRID
    assert narrow_formats(replace(h100, formats=("bf16",)), None) is None
    assert narrow_formats(replace(h100, formats=("fp8_e4m3", "bf16")), None) is None  # no e5m2 for gradients
    assert narrow_formats(replace(h100, formats=("nvfp4", "bf16")), None) is None


def test_a_gpu_that_scales_blocks_itself_gets_mxfp8_and_never_nvfp4(decoder):
    model = decoder()
    plan = planned(model, target="b200")
    assert "nvfp4" in load_target("b200").formats
    found = rule(plan, "layers.5.up")
    assert found.formats == Formats.all("mxfp8")
    assert "estimated" in found.reason
    assert plan.recipe == {"mxfp8": MXFP8Recipe().to_dict()}
    assert not any("nvfp4" in str(r.formats) for r in plan.rules)
    fp8 = planned(model, target="b200", formats="fp8_e4m3")
    assert rule(fp8, "layers.5.up").formats == HYBRID
    assert list(fp8.recipe) == ["fp8"]


def test_mxfp8_needs_multiples_of_its_block():
    plan = planned(stack(4096, 4112), target="b200")
    assert rule(plan, "1").formats == Formats.all("mxfp8")
    left = rule(plan, "2")
    assert left.formats == Formats.all("bf16")
    assert left.reason == "out_features=4112 isn't a multiple of 32, as mxfp8 needs on b200"


def test_a_plan_for_mxfp8_runs_emulated_on_a_cpu():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(4, 64)
    rules = (PlanRule(match=("1",), formats=Formats.all("mxfp8")), PlanRule(match=("*",), formats=Formats.all("bf16")))
    plan = Plan(rules=rules, target="b200", recipe={"mxfp8": MXFP8Recipe().to_dict()})
    row = autoprec.receipt(autoprec.convert(model, plan=plan, example_inputs=x))["1"]
    assert (row.got, row.mechanism) == ("mxfp8", "backend:emulated")


# --- the acceptance model


def test_a_large_decoder_goes_to_fp8_but_for_its_ends_and_each_layer_left_says_why(decoder):
    model = decoder(layers=32)
    plan = planned(model)
    inner = [
        m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.split(".")[1:2] not in (["0"], ["31"])
    ]
    inner.remove(model.lm_head)
    flops = {id(m): m.in_features * m.out_features for m in inner}
    low = 0
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        found = rule(plan, name)
        assert found.reason
        if found.formats == HYBRID:
            low += flops[id(module)]  # a KeyError if an end is among them
        else:
            assert found.formats == Formats.all("bf16")
    assert low >= 0.95 * sum(flops.values())


def test_repeated_blocks_fold_into_few_globs(decoder):
    plan = planned(decoder(layers=80))
    ours = [r for r in plan.rules if not r.match[0].startswith("*")]
    assert len(ours) <= 10
    assert sum(len(r.match) for r in ours) <= 40


def test_a_small_decoder_is_left_in_bf16_with_the_number(decoder):
    plan = planned(decoder(width=128, layers=6, vocabulary=512))
    assert all(r.formats.input in ("bf16", "fp32") for r in plan.rules)
    found = rule(plan, "layers.3.up")
    assert found.reason.startswith("too small to gain, estimated 0.")
    assert f"assuming {ASSUMED_TOKENS} tokens" in found.reason
    assert found.source == "cost"


def test_converted_on_the_meta_device(decoder):
    model = autoprec.convert(decoder(), target="h100")
    row = autoprec.receipt(model)["layers.5.up"]
    assert row.asked == str(HYBRID)


# --- shapes the kernels can't take


@pytest.mark.parametrize(
    ("size", "is_fp8"), [(4096, True), (4097, False), (4088, False), (4080, True), (4104, False), (4112, True)]
)
@pytest.mark.parametrize("side", ["in_features", "out_features"])
def test_dimensions_must_be_multiples_of_16(size, side, is_fp8):
    sizes = (size, 4096) if side == "in_features" else (4096, size)
    model = on_meta(lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(*sizes), nn.Linear(64, 64)))
    found = rule(planned(model), "1")
    assert (found.formats == HYBRID) is is_fp8
    if not is_fp8:
        assert found.reason == f"{side}={size} isn't a multiple of 16, as fp8_e4m3 needs on h100"


@pytest.mark.parametrize(
    ("multiple", "size", "is_fp8"), [(32, 4096, True), (32, 4112, False), (128, 4096, True), (128, 4128, False)]
)
def test_the_multiple_is_the_targets(multiple, size, is_fp8):
    h100 = load_target("h100")
    target = replace(h100, alignment={**h100.alignment, "fp8_e4m3": multiple})
    found = rule(planned(stack(size), target=target), "1")
    assert (found.formats == HYBRID) is is_fp8
    if not is_fp8:
        assert f"isn't a multiple of {multiple}" in found.reason


def test_only_the_violated_dimension_is_named():
    found = rule(
        planned(on_meta(lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(4096, 50257), nn.Linear(64, 64)))), "1"
    )
    assert "out_features=50257" in found.reason
    assert "4096" not in found.reason


# --- tokens


@pytest.mark.parametrize(
    ("tokens", "words"), [(8192, "8192 tokens"), (8191, "8191 tokens, padded to a multiple of 16")]
)
def test_unaligned_tokens_are_padded_where_that_pays(tokens, words):
    model = stack(4096)
    found = rule(planned(model, torch.empty(tokens, 4096, device="meta")), "1")
    assert found.formats == HYBRID
    assert found.reason.endswith(words)


@pytest.mark.parametrize("tokens", [1, 7, 100])
def test_a_few_tokens_are_too_few(tokens):
    found = rule(planned(stack(4096), torch.empty(tokens, 4096, device="meta")), "1")
    assert found.formats == Formats.all("bf16")
    assert "too small to gain" in found.reason
    assert f"{tokens} tokens, padded to a multiple of 16" in found.reason


def test_no_tokens_at_all():
    assert "empty" in rule(planned(stack(4096), torch.empty(0, 4096, device="meta")), "1").reason


def test_one_token_of_inference_reads_and_casts_the_weight_for_nothing():
    found = rule(planned(stack(8192), torch.empty(1, 4096, device="meta"), mode="inference"), "1")
    assert found.formats == Formats.all("bf16")
    assert "1 tokens" in found.reason


# --- layers that are too small


@pytest.mark.parametrize(
    ("sizes", "is_fp8"),
    [
        ((1024, 1024), False),
        ((4096, 1024), False),  # K <= 4096 and N <= 1024 doesn't pay on an H100 by published measurements
        ((1024, 4096), False),
        ((4096, 4096), True),
        ((4096, 14336), True),
        ((14336, 4096), True),
        ((8192, 1024), True),
        ((16, 16), False),
    ],
)
def test_small_layers_on_an_h100(sizes, is_fp8):
    model = on_meta(lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(*sizes), nn.Linear(64, 64)))
    found = rule(planned(model), "1")
    assert (found.formats == HYBRID) is is_fp8
    assert "estimated" in found.reason


def test_a_target_without_a_bandwidth_shows_no_gain():
    target = replace(load_target("h100"), bandwidth_bytes_per_s=None)
    found = rule(planned(stack(4096), target=target), "1")
    assert found.formats == Formats.all("bf16")
    assert found.reason.startswith("nothing shows that it gains: the bandwidth of h100 isn't known")


def test_two_small_layers_stay_for_their_size():
    plan = planned(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16)), torch.randn(16, 64))
    assert "too small to gain" in rule(plan, "0").reason
    assert "too small to gain" in rule(plan, "2").reason


# --- first, last, heads, routers


def test_first_and_last_layer_of_a_model_of_no_family():
    plan = planned(stack(4096))
    assert [rule(plan, name).formats.input for name in "0123"] == ["bf16", "fp8_e4m3", "fp8_e4m3", "bf16"]
    assert rule(plan, "0").reason.startswith("the first layer")
    assert rule(plan, "3").reason.startswith("the last layer")


def test_head_first_and_last_block(decoder):
    plan = planned(decoder())
    for name in ("lm_head", "layers.0.up", "layers.0.attn.q", "layers.11.down"):
        assert rule(plan, name).formats == Formats.all("bf16")
        assert rule(plan, name).source == "family"
    assert rule(plan, "layers.1.up").formats == HYBRID


def test_a_router_is_fp32_and_the_experts_fp8():
    class MoeBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(4096, 4096)
            self.experts = nn.ModuleList(nn.Linear(4096, 4096) for _ in range(3))

    plan = planned(on_meta(lambda: nn.Sequential(*(MoeBlock() for _ in range(4)))))
    assert rule(plan, "1.gate").formats == Formats.all("fp32")
    assert rule(plan, "1.experts.1").formats == HYBRID


# --- tied weights


def test_a_head_tied_to_the_embedding_stays_and_stays_tied(decoder):
    model = decoder(tied=True, vocabulary=32768)
    assert "tied to embed.weight" in rule(planned(model), "lm_head").reason
    before = sum(p.numel() for p in model.parameters())
    autoprec.convert(model, target="h100")
    assert model.lm_head.weight is model.embed.weight
    assert sum(p.numel() for p in model.parameters()) == before


def test_a_tie_counts_under_any_name():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.table = nn.Linear(4096, 4096), nn.Embedding(4096, 4096)
            self.anything, self.end = nn.Linear(4096, 4096), nn.Linear(4096, 4096)
            self.anything.weight = self.table.weight

    assert "tied to table.weight" in rule(planned(on_meta(Tied)), "anything").reason


def test_two_linear_layers_may_share_a_weight_in_fp8():
    model = stack(4096, 4096)
    model[2].weight = model[1].weight
    plan = planned(model)
    assert rule(plan, "1").formats == rule(plan, "2").formats == HYBRID


# --- subclasses, adapters, weights used without a call


class LoRALinear(nn.Linear):
    def __init__(self, inputs, outputs, rank=16):
        super().__init__(inputs, outputs)
        self.lora_A, self.lora_B = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, x):
        return super().forward(x) + 2.0 * self.lora_B(self.lora_A(x))


def test_a_subclass_with_its_own_forward_is_left_alone_and_its_adapters_too():
    model = on_meta(lambda: nn.Sequential(nn.Linear(4096, 4096), LoRALinear(4096, 4096), nn.Linear(4096, 4096)))
    plan = planned(model)
    assert rule(plan, "1").reason.startswith("LoRALinear overrides Linear.forward")
    for name in ("1.lora_A", "1.lora_B"):
        assert rule(plan, name).formats == Formats.all("bf16")
        assert rule(plan, name).reason.startswith("an adapter of rank 16")


def test_the_base_of_a_wrapped_adapter_goes_to_fp8():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer = nn.Linear(4096, 4096).requires_grad_(False)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(4096, 64)})

    plan = planned(on_meta(lambda: nn.Sequential(nn.Linear(64, 64), Wrapper(), nn.Linear(64, 64))))
    assert rule(plan, "1.base_layer").formats == HYBRID
    assert "adapter of rank 64" in rule(plan, "1.lora_A.default").reason


def test_a_subclass_that_only_changes_its_name_goes_to_fp8():
    class Named(nn.Linear):
        pass

    model = on_meta(lambda: nn.Sequential(nn.Linear(64, 64), Named(4096, 4096), nn.Linear(64, 64)))
    assert rule(planned(model), "1").formats == HYBRID


def test_adapters_survive_conversion_and_the_output_stays():
    torch.manual_seed(0)
    model = nn.Sequential(LoRALinear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    x = torch.randn(3, 16)
    before, names = model(x), {name for name, _ in model.named_parameters()}
    autoprec.convert(model, target="h100", example_inputs=x)
    assert {name for name, _ in model.named_parameters()} == names
    assert (model(x) - before).abs().max() <= 2e-2 * before.abs().max()


def test_a_weight_that_attention_uses_without_calling_the_layer():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.attention, self.b = nn.Linear(64, 64), nn.MultiheadAttention(4096, 32), nn.Linear(64, 64)

    found = rule(planned(on_meta(Net)), "attention.out_proj")
    assert found.formats == Formats.all("bf16")
    assert "without calling the layer" in found.reason


def test_a_layer_that_the_example_inputs_never_call():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.used, self.unused, self.b = (nn.Linear(4096, 4096) for _ in range(4))

        def forward(self, x):
            return self.b(self.used(self.a(x)) @ self.unused.weight.T)

    plan = planned(on_meta(Net), torch.empty(8192, 4096, device="meta"))
    assert rule(plan, "used").formats == HYBRID
    assert "isn't called on the example inputs" in rule(plan, "unused").reason


class ByHand(nn.Module):
    """A layer that isn't an nn.Linear and multiplies all the same, as GPT-2's Conv1D does."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(inputs, outputs)), nn.Parameter(torch.empty(outputs))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


def test_a_product_called_by_hand_says_why_it_stays():
    model = on_meta(lambda: nn.Sequential(*(ByHand(4096, 4096) for _ in range(3))))
    found = RuleMatcher(planned(model, torch.empty(8192, 4096, device="meta"))).rule_for_site("1", "addmm", 0)
    assert found.formats == Formats.all("bf16")
    assert (
        found.reason == "only an nn.Linear's own product has kernels below 16 bit, and this is 'addmm' called by hand"
    )


class Experts(nn.Module):
    def __init__(self, count, width=4096):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(count))


@pytest.mark.parametrize(("count", "is_fp8"), [(1, True), (2, True), (8, True), (256, False)])
def test_an_expert_gets_its_share_of_the_tokens(count, is_fp8):
    found = rule(
        planned(on_meta(lambda: nn.Sequential(nn.Linear(64, 64), Experts(count), nn.Linear(64, 64)))), "1.experts.0"
    )
    assert (found.formats == HYBRID) is is_fp8
    assert (f"each to 2 of {count} experts" in found.reason) is (count > 1)


def test_how_many_experts_a_token_goes_to_is_the_configs():
    model = on_meta(lambda: nn.Sequential(nn.Linear(64, 64), Experts(256), nn.Linear(64, 64)))
    model.config = type("Config", (), {"num_experts_per_tok": 128})()
    found = rule(planned(model), "1.experts.0")
    assert found.formats == HYBRID
    assert "each to 128 of 256 experts" in found.reason


def test_lazy_and_double_layers():
    model = nn.Sequential(
        nn.Linear(64, 64), nn.LazyLinear(4096), nn.Linear(64, 64, dtype=torch.float64), nn.Linear(64, 64)
    )
    plan = planned(model)
    assert "no shape before its first call" in rule(plan, "1").reason
    assert "float64" in rule(plan, "2").reason


def test_the_model_is_the_layer():
    model = on_meta(lambda: nn.Linear(4096, 4096))
    plan = planned(model)
    assert rule(plan, "").formats == HYBRID
    assert autoprec.receipt(autoprec.convert(model, plan=plan))[""].asked == str(HYBRID)


# --- values beyond FP8's range


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3, 1e6])
def test_values_are_scaled_before_they_are_cast(scale):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16, bias=False)), scale * torch.randn(8, 16)
    before = model(x)
    plan = Plan(rules=(PlanRule(match=("0",), formats=HYBRID), PlanRule(match=("*",), formats=Formats.all("bf16"))))
    autoprec.convert(model, plan=plan)
    after = model(x)
    assert torch.isfinite(after).all()
    assert (after - before).abs().max() <= 7e-2 * before.abs().max()
