"""Step time and memory of whole plans: formats followed through the graph, and peaks against real ones."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoprec
from autoprec.analyze import analyze
from autoprec.estimate import estimate_memory, estimate_step
from autoprec.estimate.activations import transformer_activations
from autoprec.estimate.flow import place
from autoprec.estimate.step import gemm_flops
from autoprec.graph.site import Site
from autoprec.lower.matching import RuleMatcher
from autoprec.measure import measure_peak_memory
from autoprec.plan import Formats, Plan, PlanRule
from autoprec.planner.rules import plan_by_rules
from autoprec.rulebook import load_rulebook
from autoprec.target import load_target
from autoprec.tasks.byte_gpt import ByteGPT

TARGET = load_target("cpu-avx512-bf16")
HYBRID = Formats(input="fp8_e4m3", weight="fp8_e4m3", grad_output="fp8_e5m2")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def asked(plan):
    matcher = RuleMatcher(plan)

    def formats(site):
        found = matcher.rule_for_site(site.scope, site.op, site.index)
        return None if found is None else found.formats

    return formats


def plan_of(model, inputs, *first):
    analysis = analyze(model, inputs, target=TARGET)
    return analysis.rows, plan_by_rules(model, TARGET, load_rulebook(), analysis=analysis).with_rules_first(*first)


def fp32(*globs):
    return PlanRule(match=globs, formats=Formats.all("fp32"))


def test_formats_follow_the_graph():
    rows, plan = plan_of(nn.Sequential(nn.Embedding(9, 64), Block()), torch.randint(0, 9, (4, 16)))
    found = {item.site.id: item for item in place(rows, asked(plan), "bf16")}
    assert {name: item.output for name, item in found.items()} == {
        "0": "fp32",
        "1.norm": "fp32",
        "1.up": "bf16",
        "1::gelu#0": "bf16",
        "1.down": "bf16",
        "1::add#0": "fp32",  # the residual it is added to is fp32
    }
    assert [(c.producer, c.source, c.format) for c in found["1.up"].casts] == [("1.norm", "fp32", "bf16")]
    assert found["1.down"].casts == ()


def test_products_below_16_bit_give_16_bit():
    rows, plan = plan_of(Block(), torch.randn(4, 16, 64), PlanRule(match=("up",), formats=HYBRID))
    found = {item.site.id: item for item in place(rows, asked(plan), "bf16")}
    assert found["up"].output == "bf16"
    assert found["up"].formats == HYBRID


def test_a_pin_to_fp32_costs_casts_and_time():
    x = torch.randn(64, 64, 64)
    rows, plan = plan_of(Block(), x)
    _, pinned = plan_of(Block(), x, fp32("up"))
    low, high = (estimate_step(rows, asked(p), TARGET, low="bf16") for p in (plan, pinned))
    assert low.unit == "s"
    assert low.target == TARGET.name
    assert low.value == pytest.approx(sum(low.parts.values()))
    assert low.parts["products"] < high.parts["products"]
    assert estimate_step(rows, asked(plan), TARGET, low="bf16", mode="inference").value < low.value / 2
    assert low.assumptions


def test_attention_has_flops_where_torch_counts_none():
    shapes = ((2, 4, 32, 16),) * 3
    site = Site(module="", op="scaled_dot_product_attention", input_shapes=shapes, output_shapes=shapes[:1])
    assert gemm_flops(site) == 2 * 2 * (2 * 4 * 32 * 32 * 16)


@pytest.mark.parametrize("pins", [(), ("blocks.*.up", "blocks.*.down"), ("blocks.*",), ("*",)])
def test_peak_memory_is_within_15_percent_of_the_real_one(pins):
    torch.manual_seed(0)
    model = ByteGPT(width=64, layers=3, heads=2, context=64)
    tokens = torch.randint(0, 256, (4, 64))
    rows, plan = plan_of(model, tokens, *([fp32(*pins)] if pins else []))
    num_params = sum(p.numel() for p in model.parameters())
    estimated = estimate_memory(rows, asked(plan), num_params=num_params, low="bf16")
    autoprec.convert(model, plan=plan)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    real = 12 * num_params + measure_peak_memory(step)
    assert estimated.value == pytest.approx(real, rel=0.15)
    assert estimated.value == pytest.approx(sum(estimated.parts.values()))


def test_memory_of_inference_and_of_other_optimizers():
    model = Block()
    rows, plan = plan_of(model, torch.randn(4, 16, 64))
    count = sum(p.numel() for p in model.parameters())
    adam = estimate_memory(rows, asked(plan), num_params=count, low="bf16")
    sgd = estimate_memory(rows, asked(plan), num_params=count, low="bf16", optimizer_bytes=0)
    inference = estimate_memory(rows, asked(plan), num_params=count, low="bf16", mode="inference")
    assert adam.value - sgd.value == 8 * count
    assert inference.parts["low copies"] == 2 * (model.up.weight.numel() + 256 + model.down.weight.numel() + 64)
    assert inference.value < sgd.value


def test_low_formats_save_activations():
    model, x = Block(), torch.randn(64, 64, 64)
    rows, plan = plan_of(model, x)
    parts = {}
    for name, first in {
        "fp32": (fp32("*"),),
        "bf16": (),
        "fp8": (PlanRule(match=("up", "down"), formats=HYBRID),),
    }.items():
        chosen = plan.with_rules_first(*first)
        parts[name] = estimate_memory(rows, asked(chosen), num_params=1000, low="bf16").parts["activations"]
    assert parts["fp8"] < parts["bf16"] < parts["fp32"]


def test_activations_by_size_alone():
    found = transformer_activations(width=12288, layers=96, vocabulary=51200, batch=1, length=2048)
    assert found.parts["layers"] == 34 * 2048 * 12288 * 96
    assert found.value == sum(found.parts.values())


def test_an_empty_plan_is_fp32():
    rows, _ = plan_of(Block(), torch.randn(4, 16, 64))
    placed = place(rows, asked(Plan(rules=())), "fp32")
    assert {item.output for item in placed} == {"fp32"}
    assert not any(item.casts for item in placed)
