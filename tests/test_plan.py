"""The plan's own types: rule order, what they refuse, how they print."""

from dataclasses import replace

import pytest
import torch

from autoprec.errors import UsageError
from autoprec.plan import Formats, Plan, PlanRule, ScalerSettings


def rule(*globs: str, fmt: str = "bf16", **rest) -> PlanRule:
    return PlanRule(match=globs, formats=Formats.all(fmt), **rest)


def test_rules_put_first_win():
    plan = Plan(rules=(rule("*"),)).with_rules_first(rule("head", fmt="fp32"))
    assert [r.match for r in plan.rules] == [("head",), ("*",)]


def test_equal_plans_hash_alike_and_can_be_keys():
    a = Plan(rules=(rule("*"),), evidence={"loss": [1.0, 2.0]})
    assert {a: 1}[replace(a, evidence={"loss": [1.0, 2.0]})] == 1


def test_repr_is_one_line_that_counts_the_formats():
    plan = Plan(rules=(rule("a"), rule("b"), rule("c", fmt="fp32")), target="h100", evidence={"log": "x\n" * 999})
    assert repr(plan) == "Plan(3 rules: 2 bf16, 1 fp32; h100, training, O1)"
    assert repr(Plan(rules=())) == "Plan(0 rules: none; cpu, training, O1)"


def test_an_unknown_format_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match=r"'float16' is no format for weight: use one of fp32, .*bf16.*, follow"):
        Formats(input="bf16", weight="float16", grad_output="bf16")


@pytest.mark.parametrize("match", ["head", (), ("",), ["head"], (3,)])
def test_globs_must_be_a_tuple_of_strings(match):
    with pytest.raises(UsageError, match="must be a tuple of globs"):
        PlanRule(match=match, formats=Formats.all("bf16"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("growth_factor", 1.0),
        ("growth_factor", float("nan")),
        ("backoff_factor", 1.0),
        ("backoff_factor", 0.0),
        ("growth_interval", 0),
        ("min_scale", 0.0),
        ("min_scale", 2.0**17),  # above init_scale
        ("init_scale", 2.0**25),  # above max_scale
        ("max_scale", float("inf")),
    ],
)
def test_scaler_settings_out_of_range_are_refused(name, value):
    with pytest.raises(UsageError, match=r"scaler \w+=.* must be"):
        ScalerSettings(**{name: value})


def test_grad_scaler_has_the_plans_settings():
    settings = ScalerSettings(
        enabled=True, init_scale=512.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=7, min_scale=2.0
    )
    scaler = Plan(rules=(), scaler=settings).grad_scaler("cpu")
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.is_enabled()
    assert scaler.state_dict() == {
        "scale": 512.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "growth_interval": 7,
        "_growth_tracker": 0,
        "min_scale": 2.0,
        "max_scale": 2.0**24,
    }


def test_grad_scaler_of_a_plan_that_needs_none_passes_losses_through():
    scaler = Plan(rules=()).grad_scaler()
    loss = torch.ones(())
    assert not scaler.is_enabled()
    assert scaler.scale(loss) is loss
