"""A converted model is measured against fp32, and formats are taken back where rounding adds up."""

import copy

import pytest
import torch
from torch import nn

import autoprec
from autoprec.graph.inputs import as_run
from autoprec.verify import refine
from autoprec.verify.deviation import Deviation, compare, observe, observe_rounded


class Chaotic(nn.Module):
    """Each layer multiplies the error of the one before: no single site is to blame."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(depth)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.sin(3 * layer(x))
        return x


def chaotic(depth: int = 6) -> nn.Module:
    torch.manual_seed(0)
    model = Chaotic(depth)
    with torch.no_grad():
        for layer in model.layers:
            layer.weight.mul_(3)
    return model


def test_an_ordinary_model_is_measured_and_left_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    autoprec.convert(model, target="a100", example_inputs=torch.randn(4, 16))
    receipt = autoprec.receipt(model)
    assert receipt.low_precision_share == 1
    assert receipt.notes[0].startswith("measured on the example inputs: outputs differ from fp32 by 0.00")


@pytest.mark.parametrize("target", ["a100", "v100"])
def test_formats_are_taken_back_until_the_model_is_near_enough(target, monkeypatch):
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    model = chaotic(depth=3)
    fp32 = observe(model, as_run(x), gradients=True)
    plain = autoprec.convert(copy.deepcopy(model), target=target)
    before = compare(observe(plain, as_run(x), gradients=True), fp32)
    limit = 0.7 * before.worst
    monkeypatch.setattr(refine, "USUAL", {"bf16": limit, "fp16": limit})
    monkeypatch.setattr(refine, "ROUNDING_MULTIPLE", 0.0)
    autoprec.convert(model, target=target, example_inputs=x)
    after = compare(observe(model, as_run(x), gradients=True), fp32)
    assert after.worst <= limit
    assert 0 < autoprec.receipt(model).low_precision_share < 1
    assert any(rule.reason.startswith("measured") for rule in autoprec.plan_of(model).rules)


def test_a_model_as_ill_conditioned_as_rounded_parameters_are_is_left_alone():
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    model = chaotic()
    fp32 = observe(model, as_run(x), gradients=True)
    floor = compare(observe_rounded(model, as_run(x), torch.bfloat16, gradients=True), fp32)
    assert floor.worst > 5e-2
    autoprec.convert(model, target="a100", example_inputs=x)
    assert autoprec.receipt(model).low_precision_share == 1


def test_a_users_pins_stay_first(tmp_path):
    rules = tmp_path / "mine.toml"
    rules.write_text('[[site]]\nmatch = "layers.0"\nformat = "bf16"\nwhy = "mine"\n')
    model = autoprec.convert(chaotic(), target="a100", example_inputs=torch.randn(8, 32), rules=[rules])
    assert autoprec.receipt(model)["layers.0"].got == "bf16"


def test_a_given_plan_is_measured_but_not_changed():
    plan_model = autoprec.convert(chaotic(), target="a100")
    plan = autoprec.plan_of(plan_model)
    model = autoprec.convert(chaotic(), plan=plan, example_inputs=torch.randn(8, 32))
    assert autoprec.plan_of(model) == plan
    assert "outputs differ from fp32 by" in autoprec.receipt(model).notes[0]


def test_random_draws_are_not_compared():
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    autoprec.convert(model, target="a100", example_inputs=torch.randn(4, 16))
    assert not any("outputs differ" in note for note in autoprec.receipt(model).notes)


def test_a_cache_written_with_gradients_leaves_no_trace():
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key = nn.Linear(8, 8)
            self.register_buffer("cache", torch.zeros(2, 8))

        def forward(self, x):
            self.cache[:] = self.key(x)
            return x @ self.cache.T

    model = autoprec.convert(Cached(), target="a100", example_inputs=torch.randn(2, 8))
    assert not model.cache.requires_grad
    assert torch.equal(model.cache, torch.zeros(2, 8))


def test_vanishing_outputs_have_no_relative_error():
    tiny = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        tiny.weight.fill_(1e-30)
    x = torch.ones(1, 4)
    zero = copy.deepcopy(tiny)
    with torch.no_grad():
        zero.weight.zero_()
    seen = [observe(m, as_run(x), gradients=False) for m in (zero, tiny)]
    assert compare(*seen).outputs < 1e-12


def test_a_gradient_that_is_not_finite_is_the_worst():
    assert Deviation(outputs=0.0, gradient=float("nan")).worst == float("inf")
    assert not Deviation(outputs=0.1).within(Deviation(outputs=0.05))
