import math
import time

import pytest
import torch
from torch import nn

import autoprec
from autoprec.errors import UsageError
from autoprec.plan import Formats, Plan, PlanRule
from autoprec.tune.posing.gradient_errors import group_gradient_errors
from autoprec.tune.space import role_formats


def plan_of(site: str, choice: str) -> Plan:
    rules = (
        PlanRule(match=(site,), formats=role_formats(choice, "training")),
        PlanRule(match=("*::*",), formats=Formats.all("fp32")),
        PlanRule(match=("*::*",), formats=Formats.all("bf16")),
    )
    return Plan(rules=rules)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 16), nn.BatchNorm1d(16))


@pytest.fixture
def losses():
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(64, 32, generator=generator), torch.randn(64, 16, generator=generator)) for _ in range(2)]
    return [lambda m, x=x, y=y: (m(x) - y).square().mean() for x, y in batches]


def test_the_error_is_that_of_the_converted_models_gradient(model, losses):
    model[2].eval()
    found = group_gradient_errors(model, losses, {"fp8": plan_of("0", "fp8_e4m3")})["fp8"]
    batch_norm = {name: value.clone() for name, value in model[4].named_buffers()}

    def gradient():
        model.zero_grad()
        values = [loss(model) for loss in losses]
        (sum(values) / 2).backward()
        model[4].load_state_dict({**model[4].state_dict(), **batch_norm})
        return torch.cat([p.grad.flatten() for p in model.parameters()]), [v.item() for v in values]

    exact, exact_losses = gradient()
    autoprec.convert(model, plan=plan_of("0", "fp8_e4m3"))
    low, low_losses = gradient()
    error = (low - exact).square().sum()
    assert found.gradient == pytest.approx(error.item(), rel=1e-4)
    assert found.relative == pytest.approx((error / exact.square().sum()).item(), rel=1e-4)
    assert found.loss == pytest.approx(sum((a - b) ** 2 for a, b in zip(low_losses, exact_losses, strict=True)) / 2)


def test_wider_formats_are_nearer_and_fp32_is_exact(model, losses):
    plans = {c: plan_of("3", c) for c in ("fp32", "fp16", "bf16", "fp8_e4m3", "nvfp4")}
    found = group_gradient_errors(model, losses, plans)
    errors = [found[c].relative for c in plans]
    assert errors[0] == 0
    assert errors == sorted(set(errors))


def test_dropout_of_a_model_is_no_error_of_a_format_that_rounds_at_random(model, losses):
    found = group_gradient_errors(model, losses, {"nvfp4": plan_of("0", "nvfp4")})["nvfp4"]
    model[2].p = 0.0
    assert found == group_gradient_errors(model, losses, {"nvfp4": plan_of("0", "nvfp4")})["nvfp4"]
    assert found.relative < 0.5


def test_the_model_is_left_as_it_was(model, losses):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    group_gradient_errors(model, losses, {c: plan_of("*", c) for c in ("bf16", "nvfp4")})
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(bool((p.grad == 1).all()) for p in model.parameters())
    assert all(module.training for module in model.modules())
    assert [type(m) for m in model] == [nn.Linear, nn.GELU, nn.Dropout, nn.Linear, nn.BatchNorm1d]


def test_no_plan_is_begun_after_the_time_limit(model, losses, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def slow(m):
        now[0] += 1.0
        return losses[0](m)

    plans = {number: plan_of("0", "bf16") for number in range(5)}
    # one second for fp32, then one for each plan
    assert list(group_gradient_errors(model, [slow], plans, limit_s=2.5)) == [0, 1]


def test_a_plan_that_overflows_has_an_infinite_error(model, losses):
    with torch.no_grad():
        model[3].weight.mul_(1e6)
    assert group_gradient_errors(model, losses, {"": plan_of("3", "fp16")})[""].relative == math.inf


def test_a_converted_model_is_refused(model, losses):
    autoprec.convert(model, plan=plan_of("0", "bf16"))
    with pytest.raises(UsageError, match="revert"):
        group_gradient_errors(model, losses, {})
