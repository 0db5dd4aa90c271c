"""Emulated delayed scaling: scales by the history of each weight's tensors, and what is learned from."""

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoprec
from autoprec.backends import LinearSpec, choose, get_backend
from autoprec.backends.emulated import EmulatedBackend
from autoprec.errors import BackendError
from autoprec.formats import round_to
from autoprec.plan import Formats, Plan, PlanRule
from autoprec.recipes import CurrentRecipe, DelayedRecipe

HYBRID = Formats(input="fp8_e4m3", weight="fp8_e4m3", grad_output="fp8_e5m2")


def spec(**settings: Any) -> LinearSpec:
    return LinearSpec(formats=HYBRID, recipe=DelayedRecipe(**settings))


def tokens(largest: float, seed: int = 0, columns: int = 24) -> Tensor:
    x = torch.randn(16, columns, generator=torch.Generator().manual_seed(seed))
    return x / x.abs().max() * largest


def step(backend: EmulatedBackend, weight: Tensor, largest: float, of: LinearSpec) -> Tensor:
    """The output of one training step."""
    output = backend.linear(tokens(largest), weight, None, of)
    output.backward(tokens(largest, 1, weight.shape[0]))
    return output.detach()


def rounded(x: Tensor, amax: float, name: str = "fp8_e4m3", largest: float = 448.0) -> Tensor:
    """``x`` in a format, scaled as if ``amax`` were its largest value."""
    scale = torch.tensor(largest) / amax
    return round_to(x * scale, name) / scale


@pytest.mark.parametrize(
    ("settings", "last"),
    [({}, 8.0), ({"algorithm": "most_recent"}, 0.5), ({"history_length": 2}, 0.5), ({"margin": 2}, 32.0)],
)
def test_scales_are_those_of_past_steps(settings: dict[str, Any], last: float) -> None:
    backend, weight = EmulatedBackend(), nn.Parameter(torch.eye(24))
    for amax in (2.0, 8.0, 0.5):
        step(backend, weight, amax, spec(**settings))
    x = tokens(20.0)  # beyond what the history knows: saturates
    output = backend.linear(x, weight, None, spec(**settings))
    torch.testing.assert_close(output, rounded(x, last), rtol=1e-6, atol=0)


def test_the_first_step_is_current_scaling() -> None:
    backend, weight = EmulatedBackend(), nn.Parameter(tokens(0.1, 5))
    results = []
    for of in (spec(), LinearSpec(formats=HYBRID, recipe=CurrentRecipe())):
        x = tokens(3.0).requires_grad_()
        weight.grad = None
        output = backend.linear(x, weight, None, of)
        output.backward(torch.full_like(output, 1e-9))
        results.append((output.detach(), x.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][2].any()


def test_gradients_have_a_history_of_their_own() -> None:
    backend, weight = EmulatedBackend(), nn.Parameter(torch.eye(24))
    step(backend, weight, 4.0, spec())
    x = tokens(4.0).requires_grad_()
    grad = tokens(9.0, 3)
    backend.linear(x, weight, None, spec()).backward(grad)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, rounded(grad, 4.0, "fp8_e5m2", 57344.0), rtol=1e-6, atol=0)


def test_evaluation_uses_scales_and_teaches_nothing() -> None:
    backend, weight = EmulatedBackend(), nn.Parameter(torch.eye(24))
    step(backend, weight, 2.0, spec())
    with torch.no_grad():
        x = tokens(64.0)
        torch.testing.assert_close(backend.linear(x, weight, None, spec()), rounded(x, 2.0), rtol=1e-6, atol=0)
    x = tokens(1.0)
    torch.testing.assert_close(backend.linear(x, weight, None, spec()), rounded(x, 2.0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_has_the_scales_of_the_first_pass(reentrant: bool) -> None:
    traces = []
    for recompute in (False, True):
        backend, weight, trace = EmulatedBackend(), nn.Parameter(tokens(1.0, 5)), []

        def site(x: Tensor, backend: EmulatedBackend = backend, weight: Tensor = weight) -> Tensor:
            return backend.linear(x, weight, None, spec())

        for amax in (2.0, 8.0, 1.0):
            x, weight.grad = tokens(amax).requires_grad_(), None
            output = checkpoint(site, x, use_reentrant=reentrant) if recompute else site(x)
            output.square().sum().backward()
            assert x.grad is not None
            assert weight.grad is not None
            trace += [output.detach(), x.grad, weight.grad]
        traces.append(trace)
    assert all(torch.equal(a, b) for a, b in zip(*traces, strict=True))


def test_histories_belong_to_weights() -> None:
    backend, weights = EmulatedBackend(), [nn.Parameter(torch.eye(24)) for _ in range(2)]
    for weight, amax in zip(weights, (2.0, 8.0), strict=True):
        step(backend, weight, amax, spec())
    x = tokens(1.0)
    for weight, amax in zip(weights, (2.0, 8.0), strict=True):
        torch.testing.assert_close(backend.linear(x, weight, None, spec()), rounded(x, amax), rtol=1e-6, atol=0)
    assert not torch.equal(*[backend.linear(x, w, None, spec()) for w in (weights[1], copy.deepcopy(weights[1]))])
    del weight, weights
    gc.collect()
    assert not len(backend._histories)


def test_a_trial_starts_from_nothing() -> None:
    backend, weight, x = EmulatedBackend(), nn.Parameter(torch.eye(24)), tokens(1.0)
    step(backend, weight, 64.0, spec())
    backend.reset()
    torch.testing.assert_close(backend.linear(x, weight, None, spec()), rounded(x, 1.0), rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's, after the break
def test_a_compiled_model_goes_on_learning() -> None:
    x, weight = tokens(1.0), nn.Parameter(torch.eye(24))
    backend, reason = choose("linear", HYBRID, x, weight, ("emulated",), "training", recipe=DelayedRecipe())
    assert backend is not None, reason
    compiled = torch.compile(lambda x: backend.linear(x + 0, weight, None, spec()) * 1, backend="eager")
    for amax in (2.0, 8.0):
        compiled(tokens(amax)).sum().backward()
    torch.testing.assert_close(compiled(x).detach(), rounded(x, 8.0), rtol=1e-6, atol=0)


def test_what_has_no_parameter_to_keep_a_history_for() -> None:
    weight = nn.Parameter(torch.eye(24))
    with pytest.raises(BackendError, match="under a parametrization"):
        EmulatedBackend().linear(tokens(1.0), weight * 2, None, spec())
    with pytest.raises(BackendError, match=r"torch\.func"):
        torch.func.vmap(lambda x: EmulatedBackend().linear(x, weight, None, spec()))(torch.ones(2, 3, 24))


def test_inference_is_refused() -> None:
    backend, reason = choose(
        "linear", HYBRID, tokens(1.0), torch.eye(24), ("emulated",), "inference", recipe=DelayedRecipe()
    )
    assert backend is None
    assert reason.endswith("learns its scales in training steps; use 'current' for inference")
    assert get_backend("emulated").available()[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


PLAN = Plan(
    rules=(
        PlanRule(match=("*::linear",), formats=HYBRID, backend=("emulated",)),
        PlanRule(match=("*",), formats=Formats.all("bf16")),
    ),
    recipe={"fp8": {"recipe": "delayed"}},
)


def train(model: nn.Module, *amaxes: float) -> list[Tensor]:
    losses = []
    for amax in amaxes:
        loss = model(tokens(amax)).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return losses


def test_example_inputs_teach_nothing() -> None:
    # Among what is done with them is a comparison with fp32, gradients and all.
    plain = autoprec.convert(Net(), plan=PLAN)
    shown = autoprec.convert(Net(), plan=PLAN, example_inputs=tokens(64.0))
    assert train(shown, 1.0, 2.0, 1.0) == train(plain, 1.0, 2.0, 1.0)


def test_a_receipt_amid_training_teaches_nothing() -> None:
    plain, shown = (autoprec.convert(Net(), plan=PLAN) for _ in range(2))
    assert train(shown, 1.0, 2.0) == train(plain, 1.0, 2.0)
    assert autoprec.receipt(shown, tokens(64.0))["first"].mechanism == "backend:emulated"
    assert train(shown, 1.0, 2.0) == train(plain, 1.0, 2.0)


def test_what_was_learned_goes_with_the_plan() -> None:
    model, fresh = (autoprec.convert(Net(), plan=PLAN) for _ in range(2))
    train(model, 64.0, 64.0)
    model.zero_grad(set_to_none=True)
    autoprec.convert(autoprec.revert(model), plan=PLAN)
    assert train(model, 1.0, 2.0) == train(fresh, 1.0, 2.0)
