"""The built-in tasks in 16 bit: gradients within the format's error, checkpoints both ways, revert bit for bit."""

import copy

import pytest
import torch

import autoprec
from autoprec.tasks import load_task

#: Target → its format, and the relative L2 error of the whole gradient that needs no excuse.
FORMATS = {"a100": (torch.bfloat16, 5e-2), "v100": (torch.float16, 2e-2)}
#: Samples of a batch; statistics over a few images would make the CNN ill-conditioned.
SAMPLES = {"gpt": 1, "cnn": 64, "lstm": 8}


def gradient(task, model, batch) -> torch.Tensor:
    model.zero_grad()
    task.loss(model, batch).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("name", ["gpt", "cnn", "lstm"])
@pytest.mark.parametrize("target", ["a100", "v100"])
def test_gradients_checkpoints_and_revert(name, target):
    if name == "cnn":
        pytest.importorskip("sklearn", reason="the digits task needs scikit-learn: pip install 'autoprec[digits]'")
    task = load_task(name)
    batch = next(iter(task.batches(0)))
    batch = tuple(x[: SAMPLES[name]] for x in batch)
    original = task.build_model(0)
    want = gradient(task, original, batch)

    model = autoprec.convert(copy.deepcopy(original), target=target)
    got = gradient(task, model, batch)
    assert got.dtype == torch.float32
    # What rounded weights alone do in fp32 is the model's own condition: the CNN's is poor at fresh weights.
    dtype, usual = FORMATS[target]
    rounded = copy.deepcopy(original)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.to(dtype))
    floor = error(gradient(task, rounded, batch), want)
    assert error(got, want) <= max(usual, 2 * floor)

    torch.optim.SGD(model.parameters(), lr=0.1).step()
    trained = model.state_dict()
    fresh = task.build_model(1)
    fresh.load_state_dict(trained)
    assert all(torch.equal(a, b) for a, b in zip(fresh.state_dict().values(), trained.values(), strict=True))
    model.load_state_dict(original.state_dict())
    autoprec.revert(model)
    assert type(model) is type(original)
    assert torch.equal(gradient(task, model, batch), want)
