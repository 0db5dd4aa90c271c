"""The scaler earns its place: tuned settings beat torch's default on skipped steps and loss, on every seed."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from autoprec.plan import ScalerSettings

PATH = Path(__file__).parents[2] / "benchmarks" / "scaler.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_scaler", PATH)
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tuned_settings_beat_the_default_on_skipped_steps_and_loss(benchmark: ModuleType, seed: int):
    tuned = ScalerSettings(**json.loads(benchmark.RESULT.read_text())["tuned"])
    ours, default = benchmark.train(tuned, seed), benchmark.train(benchmark.DEFAULT, seed)
    assert ours.skipped < default.skipped
    assert ours.loss < default.loss * 0.99


def test_the_task_loses_small_gradients_and_overflows_on_large_ones(benchmark: ModuleType):
    x = torch.ones(2, requires_grad=True)
    benchmark.HalfGradient.apply(x, benchmark.UNDERFLOW_GAIN).backward(torch.tensor([2.0**-6, 2.0**3]))
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 2.0**3]
    x.grad = None
    benchmark.HalfGradient.apply(x, benchmark.overflow_gain(0)).backward(torch.tensor([2.0**-7, 2.0**-5]))
    assert x.grad.tolist() == [2.0**-7, float("inf")]
