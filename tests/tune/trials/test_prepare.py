from types import SimpleNamespace

import pytest
import torch

from autoprec.errors import TargetError
from autoprec.target import Target, load_target
from autoprec.tune.trials import prepare
from autoprec.tune.trials.checkpoint import Checkpoint
from autoprec.tune.trials.prepare import find_place, make_space, study_identity, task_identity


def _target(**fields) -> Target:
    return Target(**{"name": "t", "title": "T", "kind": "cpu", "formats": ("fp32",), "low_format": "fp32", **fields})


@pytest.fixture
def here(monkeypatch):
    """A machine whose own device is the given one."""

    def make(own: Target) -> None:
        monkeypatch.setattr(prepare, "load_target", lambda name: own if name == "auto" else load_target(name))

    return make


def test_a_target_that_is_not_here_is_stood_for_by_the_device_that_is(here):
    here(_target(name="cpu"))
    place = find_place("h100")
    assert (place.target.name, place.device, place.is_here) == ("h100", torch.device("cpu"), False)
    assert place.reason == "this machine has T (cpu)"
    assert place.elsewhere == place.target


def test_another_gpu_than_the_one_asked_for_stands_for_it(here):
    here(load_target("a100"))
    place = find_place("h100")
    assert (place.device, place.is_here) == (torch.device("cuda"), False)
    place = find_place("a100")
    assert (place.device, place.is_here, place.reason, place.elsewhere) == (torch.device("cuda"), True, "", None)
    own = _target(name="mine", kind="cuda")
    assert find_place(own).is_here  # a description of one's own GPU


def test_an_unknown_target_and_one_that_cannot_be_priced_are_refused(here):
    here(_target(name="cpu"))
    with pytest.raises(TargetError, match="no target 'h10'"):
        find_place("h10")
    with pytest.raises(TargetError, match="ascend-910b isn't here, and its speed can't be estimated"):
        find_place("ascend-910b")


def test_a_processor_is_here_if_its_formats_are(here, monkeypatch):
    here(load_target("a100"))
    monkeypatch.setattr(prepare, "cpu_info", lambda: ("a processor", frozenset({"avx512_bf16"})))
    assert find_place(_target()).device == torch.device("cpu")
    assert find_place("cpu").is_here
    assert find_place("cpu-avx512-bf16").is_here
    place = find_place("cpu-amx")
    assert (place.device, place.is_here) == (torch.device("cpu"), False)
    assert place.reason == "this machine's a processor lacks amx_tile, amx_bf16"
    peaks = {"fp32": 1e12, "fp8_e4m3": 1e13}
    odd = _target(formats=("fp8_e4m3", "fp32"), peaks_flops=peaks, bandwidth_bytes_per_s=1e11)
    assert find_place(odd).reason == "no processor here multiplies fp8_e4m3"


def test_studies_of_targets_elsewhere_are_kept_apart(here, tiny):
    here(_target(name="cpu"))
    task = tiny.make()
    weights = task.build_model(0).state_dict()
    checkpoint = Checkpoint(weights=weights, origin="")

    def identity(target):
        place = find_place(target)
        space = make_space(task, checkpoint, place, seed=0)
        return study_identity({}, space, place, 0.005)

    assert identity("h100")["estimated_for"] == "h100"
    assert identity("h200")["estimated_for"] == "h200"
    assert identity(_target())["estimated_for"] == ""


def test_the_identity_knows_the_metric(tiny):
    def accuracy(model, batch):
        return 1.0

    judged = {"mode": "inference", "optimizer": None, "metric": accuracy}
    most, least = tiny.make(**judged, direction="maximize"), tiny.make(**judged)
    assert task_identity(most, 0)["metric"].startswith("maximize ")
    assert task_identity(most, 0)["metric"].endswith("accuracy")
    assert task_identity(most, 0) != task_identity(least, 0)


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
