"""A receipt before the first call says which backend takes each layer, and why."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoprec
from autoprec.errors import ConversionError
from autoprec.lower.receipt import Receipt
from autoprec.plan import Formats, Plan, PlanRule

HYBRID = Formats(input="fp8_e4m3", weight="fp8_e4m3", grad_output="fp8_e5m2")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up, self.odd = nn.Conv1d(4, 4, 1), nn.Linear(32, 48), nn.Linear(48, 10)
        self.high = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.high(self.odd(self.up(self.conv(x))))


def convert(*, backend: tuple[str, ...] = (), recipe: dict[str, Any] | None = None, **options: Any) -> Receipt:
    rules = (
        PlanRule(match=("high",), formats=Formats.all("bf16"), reason="the last layer"),
        PlanRule(match=("*",), formats=HYBRID, backend=backend, reason="as the target's best"),
    )
    plan = Plan(rules=rules, recipe={} if recipe is None else {"fp8": recipe})
    return autoprec.receipt(autoprec.convert(Net(), plan=plan, **options))


def test_a_layer_that_a_backend_takes_names_it_and_has_not_run() -> None:
    row = convert()["up"]
    assert (row.asked, row.got, row.mechanism) == ("fp8_e4m3/fp8_e4m3/fp8_e5m2", "", "backend:emulated")
    assert row.why.startswith("as the target's best; not transformer_engine: has no kernels for cpu")
    assert "emulated: rounds the operands exactly" in row.why
    assert row.why.endswith("how many tokens it gets isn't known before a call")
    assert convert(backend=("native",))["up"].mechanism == "backend:native"


def test_a_layer_that_none_takes_says_what_it_will_run_in(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="autoprec"):
        receipt = convert(backend=("native",))
    row = receipt["odd"]
    assert (row.got, row.mechanism) == ("bf16", "frame")
    assert row.why == (
        "will run in bf16: not native: out_features=10 isn't a multiple of 16 (plan: as the target's best)"
    )
    assert row in receipt.refused
    assert any("odd asked for fp8_e4m3/fp8_e4m3/fp8_e5m2 and got bf16" in record.message for record in caplog.records)


def test_what_is_no_linear_layer_has_no_kernel() -> None:
    row = convert()["conv"]
    assert (row.got, row.mechanism) == ("bf16", "frame")
    assert "only linear layers have kernels below 16 bit, and this is 'conv1d'" in row.why


def test_a_16_bit_layer_needs_no_backend() -> None:
    row = convert()["high"]
    assert (row.asked, row.got, row.why, row.mechanism) == ("bf16", "", "the last layer", "frame")
    assert autoprec.receipt(autoprec.convert(Net(), plan=Plan(rules=())))["up"].mechanism == "none"


def test_strict_refuses_before_the_first_call() -> None:
    with pytest.raises(ConversionError, match=r"odd: asked fp8_e4m3/fp8_e4m3/fp8_e5m2, got bf16"):
        convert(backend=("native",), strict=True)


def test_a_model_that_is_nowhere_yet_gets_the_answer_of_its_target() -> None:
    with torch.device("meta"):
        receipt = convert(backend=("native",))
    assert receipt["up"].mechanism == "backend:native"


def test_the_answer_is_that_of_the_recorded_receipt() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 48), nn.Linear(48, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    plan = Plan(
        rules=(
            PlanRule(match=("*::linear",), formats=HYBRID, backend=("native",)),
            PlanRule(match=("*",), formats=Formats.all("bf16")),
        )
    )
    asked = autoprec.receipt(autoprec.convert(Pair(), plan=plan))
    ran = autoprec.receipt(autoprec.convert(Pair(), plan=plan, example_inputs=torch.randn(4, 32)))
    for before, after in zip(asked, ran, strict=True):
        assert before.mechanism == after.mechanism
        assert before.got in ("", after.got)


def test_a_lazy_layer_has_no_shape_to_ask_for() -> None:
    model = nn.Sequential(nn.LazyLinear(32), nn.Linear(32, 32))
    plan = Plan(
        rules=(
            PlanRule(match=("*::linear",), formats=HYBRID),
            PlanRule(match=("*",), formats=Formats.all("bf16")),
        )
    )
    row = autoprec.receipt(autoprec.convert(model, plan=plan))["0"]
    assert row.got == "bf16"
    assert "a lazy layer has no shape before its first call" in row.why
    assert model(torch.randn(4, 16)).shape == (4, 32)
