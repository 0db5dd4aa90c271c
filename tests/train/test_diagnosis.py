"""Where the first value that isn't finite comes from, for each kind of place."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoprec.errors import UsageError
from autoprec.train import Finding, diagnose


class Exp(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 1e3).exp()


class Root(nn.Module):
    """The square root's derivative at 0 is infinite."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 0).sqrt()


class HalfGradient(nn.Module):
    """Overflows in the backward where the scale is too large."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad.half().float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.Function.apply(x)


def build(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Identity(), *middle), nn.Linear(2, 1))


def run(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(1, 2)).square().sum()


def test_a_sound_model_has_no_finding():
    assert diagnose(build(nn.Tanh()), run) is None


def test_an_overflow_in_a_forward_names_the_module():
    model = build(Exp())
    nn.init.ones_(model[0].weight)
    finding = diagnose(model, run)
    assert finding == Finding(where="forward", module="1.1")
    assert str(finding) == "the forward of module '1.1' gives values that aren't finite from inputs that are"


def test_a_bad_derivative_names_op_module_and_parameter():
    finding = diagnose(build(Root()), run)
    assert finding is not None
    assert (finding.where, finding.op, finding.module) == ("backward", "SqrtBackward0", "1.1")
    assert finding.parameter in ("0.weight", "0.bias")


def test_a_recomputed_module_is_seen_as_it_was_called():
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build(Root())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    finding = diagnose(Checkpointed(), run)
    assert finding is not None
    assert (finding.op, finding.module) == ("SqrtBackward0", "inner.1.1")


def test_an_overflow_by_the_scale_alone_is_found_at_that_scale():
    model = build(HalfGradient())
    assert diagnose(model, run) is None
    finding = diagnose(model, run, scale=1e9)
    assert finding is not None
    assert (finding.op, finding.module) == ("FunctionBackward", "1.1")


def test_a_bad_parameter_is_told_from_a_bad_forward():
    model = build()
    with torch.no_grad():
        model[2].bias.fill_(float("nan"))
    assert diagnose(model, run) == Finding(where="parameter", module="2", parameter="2.bias")


def test_bad_data_is_told_from_a_bad_model():
    finding = diagnose(build(), lambda model: model(torch.full((1, 2), float("nan"))).sum())
    assert finding == Finding(where="input", module="")


def test_a_bad_loss_function_is_told_from_a_bad_model():
    assert diagnose(build(), lambda model: (model(torch.ones(1, 2)) * 0).log().sum()) == Finding(where="loss")


class Masked(nn.Module):
    """An additive mask holds -inf on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.mask = nn.Linear(2, 2), Mask()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.lin(x) + self.mask(x)).softmax(-1)


class Mask(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([0.0, float("-inf")])


def test_an_infinity_that_is_meant_is_no_finding():
    assert diagnose(Masked(), run) is None


def test_gradients_and_hooks_stay_as_they_were():
    model = build(Root())
    model[0].weight.grad = torch.full((2, 2), 7.0)
    diagnose(model, run)
    assert torch.equal(model[0].weight.grad, torch.full((2, 2), 7.0))
    assert model[2].weight.grad is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_run_without_a_loss_is_refused():
    with pytest.raises(UsageError, match="gave NoneType without a gradient"):
        diagnose(build(), lambda model: None)
