import math

import pytest
import torch

from autoprec.plan import Formats, Plan, PlanRule
from autoprec.tune.bench import WORST_GAP, Bench, Effort
from autoprec.tune.checkpoint import Checkpoint

pytestmark = pytest.mark.usefixtures("planted_clock")

BF16 = Plan(rules=(PlanRule(match=("*",), formats=Formats.all("bf16")),))
FP32 = Plan(rules=(), level="O0")


def _bench(task, budget=0.005) -> Bench:
    weights = task.build_model(0).state_dict()
    return Bench(
        task=task,
        checkpoint=Checkpoint(weights=weights, origin=""),
        device=torch.device("cpu"),
        seed=0,
        budget=budget,
        effort=Effort(steps=20, rounds=5),
    )


def test_fp32_against_itself_has_no_gap_at_all(tiny):
    outcome = _bench(tiny.make()).trial(FP32)
    assert (outcome.state, outcome.loss_gap, len(outcome.losses)) == ("complete", 0.0, 20)
    assert outcome.comparison.baseline_s > 0


def test_timing_in_between_leaves_dropout_paired(tiny):
    class Dropped(tiny.Planted):
        def forward(self, x):
            return super().forward(torch.nn.functional.dropout(x, 0.5))

    def build_model(seed):
        torch.manual_seed(seed)
        return Dropped(0.01, 0.01, 0.0, 1.0)

    outcome = _bench(tiny.make(build_model=build_model)).trial(FP32)
    assert (outcome.state, outcome.loss_gap) == ("complete", 0.0)


def test_a_mix_has_a_small_gap_and_the_same_each_time(tiny):
    bench = _bench(tiny.make())
    first, second = bench.trial(BF16), bench.trial(BF16)
    assert first.losses == second.losses
    assert 0 < abs(first.loss_gap) < 0.005


def test_planted_speed_is_seen(tiny):
    comparison = _bench(tiny.make(fp32_s=0.03, low_s=0.01)).trial(BF16).comparison
    assert comparison.speedup.value == pytest.approx(3)
    assert comparison.baseline_s == pytest.approx(0.03)
    assert comparison.is_faster


def test_a_hopeless_loss_is_stopped_early(tiny):
    outcome = _bench(tiny.make(offset=1000.0)).trial(BF16)
    assert outcome.state == "stopped"
    assert len(outcome.losses) == 5
    assert "times the loss budget" in outcome.note
    assert outcome.loss_gap > 5 * 0.005


def test_a_hopeless_step_time_is_stopped_early_and_timed(tiny):
    outcome = _bench(tiny.make(low_s=0.04)).trial(BF16)
    assert outcome.state == "stopped"
    assert outcome.note == "stopped after 5 steps, each of which took 4.0 times as long as in fp32"
    assert outcome.comparison.speedup.value == pytest.approx(0.25)
    assert outcome.comparison.speedup.rounds == 5


def test_a_diverged_run_has_a_finite_gap(tiny):
    outcome = _bench(tiny.make(poison=math.inf)).trial(BF16)
    assert (outcome.state, outcome.loss_gap, outcome.comparison) == ("diverged", WORST_GAP * 0.005, None)
    assert outcome.finite_losses[-1] is None
    assert len(outcome.losses) < 5


def test_an_exception_is_an_outcome(tiny):
    bench = _bench(tiny.make())
    bench.reference(bench.data_seed, 20)
    forward = tiny.Planted.forward

    def broken(self, x):
        raise RuntimeError("no kernel for this format")

    tiny.Planted.forward = broken
    try:
        outcome = bench.trial(BF16)
    finally:
        tiny.Planted.forward = forward
    assert (outcome.state, outcome.loss_gap) == ("failed", WORST_GAP * 0.005)
    assert outcome.note == "RuntimeError: no kernel for this format"


def test_the_noise_is_what_jitter_does(tiny):
    bench = _bench(tiny.make())
    noise = bench.noise((1, 2))
    assert 0 < noise < 1e-4
    assert bench.noise((1, 2), jitter=1e-3) > 10 * noise


@pytest.mark.parametrize(("step_s", "steps", "rounds"), [(0.001, 50, 25), (0.1, 40, 13), (0.16, 25, 9), (2.0, 20, 9)])
def test_effort_follows_the_step(step_s, steps, rounds):
    assert Effort.for_step(step_s) == Effort(steps=steps, rounds=rounds)
