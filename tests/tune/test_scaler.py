import importlib

import pytest
import torch
from torch import nn

import autoprec
from autoprec.target import Target
from autoprec.tasks import Task
from autoprec.tune.trials.bench import Effort

CPU = Target(name="tiny", title="a processor with fp16", kind="cpu", formats=("fp16", "fp32"), low_format="fp16")


class TwoScales(nn.Module):
    """Gradients of ``small`` are lost in fp16 without a scale; those of ``large`` overflow from a scale of 2^14 on."""

    def __init__(self, clock) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(16, 1), nn.Linear(16, 1)
        self.clock = clock

    def forward(self, x):
        small, large = self.small(x), self.large(x)
        self.clock.now += 0.01 if small.dtype == torch.float32 else 0.004
        return small, large


def _scale_gradient(x, factor):
    return x.detach() + factor * (x - x.detach())


def _task(clock) -> Task:
    def build_model(seed):
        torch.manual_seed(seed)
        return TwoScales(clock)

    def batches(seed):
        generator = torch.Generator().manual_seed(seed)
        while True:
            x = torch.randn(8, 16, generator=generator)
            yield x, 3 * x[:, :1]

    def loss(model, batch):
        x, y = batch
        small, large = model(x)
        return (_scale_gradient(small, 1e-9) - y).abs().mean() + (_scale_gradient(large, 4.0) - y).abs().mean()

    return Task(
        name="two-scales",
        build_model=build_model,
        batches=batches,
        loss=loss,
        # eps below the smallest gradient: the step doesn't depend on the gradient's size, unless that is 0
        optimizer=lambda params: torch.optim.Adam(params, lr=0.02, eps=1e-20),
    )


def _train(task, plan, scaler, seed) -> tuple[int, float]:
    """Skipped steps and mean loss of 60 steps from fresh weights."""
    model = autoprec.convert(task.build_model(seed), plan=plan)
    optimizer = task.optimizer(model.parameters())
    num_skipped, losses, stream = 0, [], task.stream(seed)
    for _ in range(60):
        optimizer.zero_grad()
        loss = task.loss(model, next(stream))
        scaler.scale(loss).backward()
        before = [param.detach().clone() for param in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        num_skipped += all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        losses.append(loss.item())
    return num_skipped, sum(losses) / len(losses)


@pytest.mark.usefixtures("planted_clock")
def test_the_tuned_scaler_beats_torchs_default(tiny, tmp_path, monkeypatch):
    warmup = importlib.import_module("autoprec.tune.trials.warmup")
    monkeypatch.setattr(warmup, "MIN_STEPS", 15)
    monkeypatch.setattr(warmup, "MAX_STEPS", 15)
    monkeypatch.setattr(Effort, "for_step", lambda step_s: Effort(steps=15, rounds=5))
    task = _task(tiny.Clock)
    result = autoprec.tune(task, target=CPU, trials=16, keep=["*=fp16"], max_loss_increase=0.3, output_dir=tmp_path)
    assert result.plan.scaler.enabled
    tuned, default = [], []
    for seed in range(3):
        tuned.append(_train(task, result.plan, result.plan.grad_scaler("cpu"), seed))
        default.append(_train(task, result.plan, torch.amp.GradScaler("cpu"), seed))
    assert all(ours[0] < theirs[0] for ours, theirs in zip(tuned, default, strict=True)), (tuned, default)
    assert all(ours[1] < theirs[1] for ours, theirs in zip(tuned, default, strict=True)), (tuned, default)
    without = _train(task, result.plan, torch.amp.GradScaler("cpu", enabled=False), 0)
    assert tuned[0][1] < without[1], "the small gradients are lost without a scale"
