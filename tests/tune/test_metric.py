"""A classifier judged by its accuracy, with no loss at all."""

import pytest
import torch
from torch import nn

from autoprec.plan import Formats, Plan, PlanRule
from autoprec.target import load_target
from autoprec.tasks import Task
from autoprec.tune.trials.bench import Bench, Effort
from autoprec.tune.trials.checkpoint import Checkpoint
from autoprec.tune.trials.prepare import find_place, make_space, task_identity

CPU = torch.device("cpu")


def _build(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))


def _batches(seed):
    """Inputs with the labels that the model itself gives them: in fp32 it is always right."""
    teacher, generator = _build(0).eval(), torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(256, 32, generator=generator)
        with torch.no_grad():
            yield x, teacher(x).argmax(-1)


def _accuracy(model, batch):
    return (model(batch[0]).argmax(-1) == batch[1]).float().mean()


TASK = Task(
    name="labels", build_model=_build, batches=_batches, mode="inference", metric=_accuracy, direction="maximize"
)


def _plan(name):
    linear = PlanRule(match=("*::linear",), formats=Formats.all(name))
    return Plan(rules=(linear, PlanRule(match=("*",), formats=Formats.all("bf16"))), mode="inference")


@pytest.fixture(scope="module")
def bench():
    checkpoint = Checkpoint(weights=_build(0).state_dict(), origin="")
    effort = Effort(steps=8, rounds=5)
    return Bench(
        task=TASK, checkpoint=checkpoint, device=CPU, seed=0, budget=0.05, effort=effort, elsewhere=load_target("b200")
    )


def test_fp32_is_right_and_jitter_changes_next_to_nothing(bench):
    assert bench.reference(bench.data_seed, 8) == [1.0] * 8
    assert bench.noise((1, 2)) < 0.001


def test_what_an_accuracy_loses_is_the_gap(bench):
    gaps = {name: bench.trial(_plan(name)).loss_gap for name in ("bf16", "fp8_e4m3", "nvfp4")}
    assert 0 <= gaps["bf16"] < gaps["fp8_e4m3"] < gaps["nvfp4"]
    outcome = bench.trial(_plan("fp8_e4m3"))
    assert outcome.loss_gap == pytest.approx(1 - sum(outcome.losses) / len(outcome.losses))


def test_its_space_and_identity_need_no_loss():
    place = find_place("b200")
    space = make_space(TASK, Checkpoint(weights=_build(0).state_dict(), origin=""), place, seed=0)
    assert {"bf16", "fp8_e4m3", "nvfp4"} <= set(space.groups[0].choices)
    assert space.base.mode == "inference"
    assert task_identity(TASK, 0)["metric"] == "maximize _accuracy"
