import importlib
import math

import pytest
import torch

from autoprec.plan import Formats, Plan, PlanRule
from autoprec.tasks.byte_gpt import make_task
from autoprec.tune.trials.bench import Bench
from autoprec.tune.trials.scratch import FromScratch, Scratch

CPU = torch.device("cpu")
BF16 = Plan(rules=(PlanRule(match=("*",), formats=Formats.all("bf16")),))
FP32 = Plan(rules=(), level="O0")


@pytest.fixture
def scratch_of(monkeypatch, tmp_path):
    """What runs from scratch a task whose checkpoint took 40 steps."""
    warmup = importlib.import_module("autoprec.tune.trials.warmup")  # the attribute autoprec.tune is the function
    monkeypatch.setattr(warmup, "MIN_STEPS", 40)
    monkeypatch.setattr(warmup, "MAX_STEPS", 40)

    def make(task) -> Scratch:
        checkpoint = warmup.obtain_checkpoint(
            task, tmp_path, identity={}, device=CPU, seed=0, limit_s=60, on_step=lambda done, loss: None
        )
        return Scratch(task, checkpoint.losses, device=CPU, seed=0)

    return make


def test_fp32_from_scratch_is_the_run_that_made_the_checkpoint(tiny, scratch_of):
    run = scratch_of(tiny.make()).run(FP32, 60)
    assert (run.gap, run.steps) == (0.0, 40)
    assert 0 < run.chaos < 1e-4
    assert run.holds(0.0)


def test_a_mix_that_is_harmless_holds_and_the_chaos_is_measured_once(tiny, scratch_of):
    scratch = scratch_of(tiny.make())
    first, second = scratch.run(BF16, 60), scratch.run(FP32, 60)
    assert 0 < abs(first.gap) < 0.02
    assert first.holds(0.02)
    assert first.chaos == second.chaos


def test_a_mix_that_hurts_does_not_hold(tiny, scratch_of):
    run = scratch_of(tiny.make(offset=1000.0)).run(BF16, 60)
    assert run.gap > 0.1
    assert not run.holds(0.05)


def test_a_mix_that_diverges_does_not_hold(tiny, scratch_of):
    run = scratch_of(tiny.make(poison=math.inf)).run(BF16, 60)
    assert (run.gap, run.holds(1.0)) == (None, False)
    assert run.steps < 5


def test_the_time_limit_ends_both_runs_but_not_before_they_say_something(tiny, scratch_of, monkeypatch):
    scratch = scratch_of(tiny.make())
    assert scratch.run(BF16, 0.0).steps == 40  # all there are
    monkeypatch.setattr(importlib.import_module("autoprec.tune.trials.scratch"), "MIN_STEPS", 10)
    assert scratch.run(BF16, 0.0).steps == 10


@pytest.mark.parametrize(("gap", "holds"), [(0.005, True), (0.0069, True), (0.0071, False), (-1.0, True)])
def test_twice_the_chaos_is_allowed_beyond_the_budget(gap, holds):
    assert FromScratch(gap=gap, chaos=0.001, steps=200).holds(0.005) is holds


@pytest.mark.slow
def test_coarse_gradients_hold_from_the_checkpoint_and_not_from_fresh_weights(monkeypatch, tmp_path):
    warmup = importlib.import_module("autoprec.tune.trials.warmup")
    monkeypatch.setattr(warmup, "MAX_STEPS", 200)
    task = make_task(width=48, layers=2, heads=2, context=32, batch=8)
    checkpoint = warmup.obtain_checkpoint(
        task, tmp_path, identity={}, device=CPU, seed=0, limit_s=600, on_step=lambda done, loss: None
    )
    bench = Bench(task=task, checkpoint=checkpoint, device=CPU, seed=0, budget=0.005)
    linear = PlanRule(match=("*::linear",), formats=Formats.all("nvfp4"), backend=("emulated",))
    plan = Plan(rules=(linear, PlanRule(match=("*::*",), formats=Formats.all("bf16"))))
    assert bench.gap(plan, seed=1, steps=20) < bench.budget
    assert not bench.from_scratch(plan, limit_s=600).holds(bench.budget)
