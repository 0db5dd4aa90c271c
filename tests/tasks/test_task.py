import dataclasses
import itertools

import pytest
import torch

from autoprec.errors import TaskError
from autoprec.tasks import Task


def _task(**changes) -> Task:
    fields = {
        "name": "t",
        "build_model": lambda seed: torch.nn.Linear(2, 1),
        "batches": lambda seed: [seed, seed + 1],
        "loss": lambda model, batch: torch.zeros(()),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
    }
    return Task(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": ""}, "Task.name is ''"),
        ({"build_model": 3}, "build_model is 3, which can't be called"),
        ({"batches": [1, 2]}, "batches is [1, 2]"),
        ({"optimizer": None}, "needs optimizer(params)"),
        ({"mode": "evaluation"}, "allowed: 'training', 'inference'"),
        ({"loss": None}, "loss is None, which can't be called"),
        ({"metric": 3, "mode": "inference"}, "metric is 3, which can't be called"),
        ({"metric": max}, "a training task is judged by the loss that it trains on"),
        ({"direction": "maximize", "mode": "inference"}, "there is no metric: a loss is minimized"),
        ({"direction": "up", "metric": max, "mode": "inference"}, "allowed: 'minimize', 'maximize'"),
    ],
)
def test_a_wrong_field_is_refused_at_once(changes, says):
    with pytest.raises(TaskError) as caught:
        _task(**changes)
    assert says in str(caught.value)


def test_inference_needs_no_optimizer():
    assert _task(mode="inference", optimizer=None).mode == "inference"


def test_an_inference_task_may_be_judged_by_a_metric():
    judged = {"mode": "inference", "optimizer": None, "metric": lambda model, batch: 0.5, "direction": "maximize"}
    task = _task(**judged)
    assert (task.measured, task.has_loss) == ("metric", True)
    assert (task.evaluate(None, None).item(), task.loss(None, None).item()) == (0.5, 0.0)
    assert (_task().measured, _task().evaluate(None, None).item()) == ("loss", 0.0)

    alone = _task(**judged, loss=None)
    assert not alone.has_loss
    assert alone.loss(None, None).item() == 0.5  # whatever calls the model through its loss still can
    other = dataclasses.replace(alone, metric=lambda model, batch: 0.25)
    assert (other.has_loss, other.loss(None, None).item()) == (False, 0.25)


def test_the_stream_starts_again_and_refuses_no_data():
    assert list(itertools.islice(_task().stream(5), 5)) == [5, 6, 5, 6, 5]
    with pytest.raises(TaskError, match=r"batches\(5\) gave no batch"):
        next(_task(batches=lambda seed: []).stream(5))


@pytest.mark.parametrize(
    ("fields", "unit"),
    [
        ({"tokens_per_step": 8, "samples_per_step": 2}, ("tokens", 8)),
        ({"samples_per_step": 2}, ("samples", 2)),
        ({}, ("steps", 1)),
    ],
)
def test_throughput_is_counted_in_the_finest_unit_known(fields, unit):
    assert _task(**fields).throughput_unit() == unit
