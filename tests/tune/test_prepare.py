from types import SimpleNamespace

import pytest
import torch

from autoprec.errors import TargetError
from autoprec.target import Target, load_target
from autoprec.tune import prepare
from autoprec.tune.prepare import find_place, task_identity


def _target(**fields) -> Target:
    return Target(**{"name": "t", "title": "T", "kind": "cpu", "formats": ("fp32",), "low_format": "fp32", **fields})


@pytest.fixture
def here(monkeypatch):
    """A machine whose own device is the given one."""

    def make(own: Target) -> None:
        monkeypatch.setattr(prepare, "load_target", lambda name: own if name == "auto" else load_target(name))

    return make


def test_a_target_that_is_not_here_is_refused(here):
    here(_target(name="cpu"))
    with pytest.raises(TargetError, match=r"which is 'cpu' \(T\), and the target is 'h100'"):
        find_place("h100")


def test_another_gpu_than_the_one_asked_for_is_refused(here):
    here(load_target("a100"))
    with pytest.raises(TargetError, match="which is 'a100'"):
        find_place("h100")
    assert find_place("a100").device == torch.device("cuda")


def test_a_processor_is_always_here(here):
    here(load_target("a100"))
    assert find_place(_target()).device == torch.device("cpu")


def test_the_identity_knows_the_data_and_the_model(tiny):
    task = tiny.make()
    assert task_identity(task, 0) == task_identity(task, 0)
    assert task_identity(task, 0)["data"] != task_identity(task, 1)["data"]
    moved = tiny.make(batches=lambda seed: ((x + 1e-3, y) for x, y in tiny.batches(seed)))
    assert task_identity(moved, 0)["data"] != task_identity(task, 0)["data"]
    wider = tiny.make(build_model=lambda seed: torch.nn.Linear(16, 1))
    assert task_identity(wider, 0)["model"] != task_identity(task, 0)["model"]
    strange = tiny.make(batches=lambda seed: iter([SimpleNamespace(x=seed)]))
    assert task_identity(strange, 0)["data"]
