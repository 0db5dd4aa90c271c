"""The bounded scaler: its bounds, and a state that survives a checkpoint."""

import copy
import json
import pickle

import pytest
import torch
from torch import nn

from autoprec.errors import TrainingError, UsageError
from autoprec.plan import ScalerSettings
from autoprec.scaler import BoundedGradScaler


class HalfGradient(torch.autograd.Function):
    """Identity whose gradient, times 100, goes through fp16: it overflows above 655."""

    @staticmethod
    def forward(ctx, w):
        return w.clone()

    @staticmethod
    def backward(ctx, grad):
        return (grad * 100).half().float()


def scaler_of(**fields) -> BoundedGradScaler:
    return BoundedGradScaler(ScalerSettings(enabled=True, **fields), device="cpu")


def train(scaler: torch.amp.GradScaler, steps: int, grad: float = 1.0, seen: list[float] | None = None) -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(steps):
        if seen is not None:
            seen.append(scaler.get_scale())
        scaler.scale((HalfGradient.apply(weight) * grad).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def test_the_scale_stops_at_its_floor_and_ceiling():
    scaler = scaler_of(init_scale=64.0, min_scale=8.0, growth_interval=1, max_scale=256.0)
    train(scaler, 50, grad=float("nan"))
    assert scaler.get_scale() == 8.0
    train(scaler, 50, grad=1e-3)
    assert scaler.get_scale() == 256.0
    scaler.update(1e9)
    assert scaler.get_scale() == 256.0


def test_torchs_own_scale_reaches_zero():
    # the fault that the floor is for; if torch repairs it, the floor can go
    scaler = torch.amp.GradScaler("cpu")
    train(scaler, 200, grad=float("nan"))
    assert scaler.get_scale() == 0.0


def test_it_finds_the_scale_as_torch_does_within_the_bounds():
    ours, theirs = scaler_of(growth_interval=3), torch.amp.GradScaler("cpu", growth_interval=3)
    a: list[float] = []
    b: list[float] = []
    train(ours, 40, seen=a)
    train(theirs, 40, seen=b)
    assert a == b
    assert 1.0 < min(a) < max(a)


@pytest.mark.parametrize("steps", [0, 1, 5, 23])
def test_a_checkpoint_goes_on_to_the_last_bit(steps):
    original = scaler_of(init_scale=1000.0 / 3, growth_factor=1.7, backoff_factor=0.3, growth_interval=4)
    train(original, steps)
    state = json.loads(json.dumps(original.state_dict()))
    resumed = scaler_of()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    copies = [resumed, copy.deepcopy(original), pickle.loads(pickle.dumps(original))]
    expected: list[float] = []
    train(original, 30, seen=expected)
    for scaler in copies:
        seen: list[float] = []
        train(scaler, 30, seen=seen)
        assert seen == expected
        assert scaler.state_dict() == original.state_dict()


def test_a_resumed_run_skips_no_steps_that_a_fresh_one_would():
    scaler = scaler_of()
    train(scaler, 20)
    settled: list[float] = []
    resumed = scaler_of()
    resumed.load_state_dict(scaler.state_dict())
    train(resumed, 5, seen=settled)
    assert len(set(settled)) == 1
    assert settled[0] < 65536.0 / 100


def test_torchs_state_is_taken_with_the_bounds_that_are_here():
    scaler = scaler_of(max_scale=2.0**20)
    scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=9).state_dict())
    assert (scaler.get_scale(), scaler.get_growth_interval(), scaler.max_scale) == (4.0, 9, 2.0**20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": None}, "scale=None"),
        ({"scale": 0.0}, "scale=0.0"),
        ({"scale": float("nan")}, "scale=nan"),
        ({"growth_interval": 0}, "growth_interval=0"),
        ({"backoff_factor": 2.0}, "backoff_factor=2.0"),
        ({"min_scale": "1"}, "min_scale='1'"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(change, message):
    scaler = scaler_of(init_scale=128.0)
    before = scaler.state_dict()
    with pytest.raises(TrainingError, match=message):
        scaler.load_state_dict({**before, **change})
    with pytest.raises(TrainingError, match="_growth_tracker=None"):
        scaler.load_state_dict({k: v for k, v in before.items() if k != "_growth_tracker"})
    assert scaler.state_dict() == before


def test_an_empty_state_says_why_it_is_empty():
    with pytest.raises(TrainingError, match="saved with scaling disabled"):
        scaler_of().load_state_dict({})
    BoundedGradScaler(ScalerSettings(), device="cpu").load_state_dict({})


def test_unscaling_what_was_never_scaled_is_refused():
    weight = nn.Parameter(torch.ones(2))
    weight.sum().backward()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for act in (scaler_of().unscale_, scaler_of().step):
        with pytest.raises(TrainingError, match=r"call scaler\.scale\(loss\)\.backward\(\) first"):
            act(optimizer)
    assert torch.equal(weight.grad, torch.ones(2))


def test_an_optimizer_without_gradients_is_named_by_its_groups():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    scaler = scaler_of()
    scaler.scale(copy.deepcopy(model)(torch.ones(1, 4)).sum()).backward()
    with pytest.raises(
        TrainingError, match=r"this SGD has a gradient \(group 0: 1 parameters, group 1: 1 parameters\)"
    ):
        scaler.step(optimizer)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_here_is_refused_not_disabled():
    with pytest.raises(UsageError, match="device='cpu'"):
        BoundedGradScaler(ScalerSettings(enabled=True), device="cuda")
    assert scaler_of().is_enabled()
