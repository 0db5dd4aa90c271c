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
    ],
)
def test_a_wrong_field_is_refused_at_once(changes, says):
    with pytest.raises(TaskError) as caught:
        _task(**changes)
    assert says in str(caught.value)


def test_inference_needs_no_optimizer():
    assert _task(mode="inference", optimizer=None).mode == "inference"


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
