"""A plan may ask only that an op's arguments agree, without naming a format."""

import torch
from torch import nn

import autoprec
from autoprec.plan import Formats, Plan, PlanRule


def test_a_product_asked_to_be_fixed_keeps_its_arguments_in_fp32():
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8), torch.randn(2, 8)
    want = model(x)
    rules = (
        PlanRule(match=("*::linear",), formats=Formats.all("fixed")),
        PlanRule(match=("*::matmul",), formats=Formats.all("bf16")),
    )
    autoprec.convert(model, plan=Plan(rules=rules))
    assert torch.equal(model(x), want)
