"""Forwards as people write them: branches, Python numbers, variadic arguments; parameters of one dtype for sharding."""

import math

import pytest
import torch
from torch import nn

import autoprec


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, scale=None):
        if scale is not None:
            x = x * scale
        if x.mean() > 0:
            return self.a(x)
        return self.b(x).softmax(-1)


class PythonNumbers(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)

    def forward(self, x):
        n, t, c = x.shape
        scores = (self.q(x) @ x.transpose(1, 2)) * float(1.0 / math.sqrt(c))
        return scores.softmax(-1) @ x / len(x) + int(t) * n * 1e-3


class Variadic(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, *xs, **options):
        hidden = [self.lin(x) for x in xs]
        a, b = torch.stack(hidden).sum(0).split(2, -1)
        return {"out": torch.cat([a, b * options.get("gain", 1.0)], -1), "n": len(hidden)}


def built(cls: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return cls()


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    assert float(((got - want).abs().max() / want.abs().max()).detach()) < 2e-2


@pytest.mark.parametrize("target", ["a100", "v100"])
def test_both_sides_of_a_data_dependent_branch_run_in_the_plan(target):
    up, down = torch.rand(3, 8), -torch.rand(3, 8)
    original = built(Branching)
    # recorded on one side only: the other one falls under the op rules
    model = autoprec.convert(built(Branching), target=target, example_inputs=up)
    for args in ((up,), (down,), (up, -2.0)):
        assert_near(model(*args), original(*args))
    assert autoprec.receipt(model)["a"].got in ("bf16", "fp16")
    assert autoprec.receipt(model, down)["b"].got in ("bf16", "fp16")


@pytest.mark.parametrize("target", ["a100", "v100"])
def test_numbers_taken_from_shapes_are_not_frozen(target):
    original = built(PythonNumbers)
    model = autoprec.convert(built(PythonNumbers), target=target, example_inputs=torch.randn(2, 5, 8))
    for shape in ((2, 5, 8), (3, 7, 8), (1, 1, 8)):
        x = torch.randn(shape)
        assert_near(model(x), original(x))


@pytest.mark.parametrize("target", ["a100", "v100"])
def test_variadic_arguments_and_nested_outputs_keep_their_shape(target):
    xs = [torch.randn(2, 4) for _ in range(3)]
    original = built(Variadic)
    model = autoprec.convert(built(Variadic), target=target, example_inputs=lambda m: m(*xs, gain=2.0))
    got, want = model(*xs, gain=2.0), original(*xs, gain=2.0)
    assert list(got) == ["out", "n"]
    assert got["n"] == 3
    assert_near(got["out"], want["out"])


@pytest.mark.parametrize("target", ["a100", "v100"])
def test_training_keeps_parameters_in_one_dtype_so_that_any_unit_can_be_sharded(target):
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    autoprec.convert(model, target=target)
    model(torch.randn(4, 8)).sum().backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
