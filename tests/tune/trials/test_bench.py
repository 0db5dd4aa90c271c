import math

import pytest
import torch

from autoprec.estimate import Estimate
from autoprec.plan import Formats, Plan, PlanRule
from autoprec.tune.trials.bench import WORST_GAP, Bench, Effort
from autoprec.tune.trials.checkpoint import Checkpoint
from autoprec.tune.trials.trainer import Trainer, take_batches

pytestmark = pytest.mark.usefixtures("planted_clock")

BF16 = Plan(rules=(PlanRule(match=("*",), formats=Formats.all("bf16")),))
FP32 = Plan(rules=(), level="O0")
CPU = torch.device("cpu")


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
    comparison = _bench(tiny.make(fp32_s=3.0, low_s=1.0)).trial(BF16).comparison
    assert comparison.speedup.value == pytest.approx(3, rel=0.02)
    assert comparison.baseline_s == pytest.approx(3.0, rel=0.02)
    assert comparison.is_faster


def test_a_hopeless_loss_is_stopped_early(tiny):
    outcome = _bench(tiny.make(offset=1000.0)).trial(BF16)
    assert outcome.state == "stopped"
    assert len(outcome.losses) == 5
    assert "times the loss budget" in outcome.note
    assert outcome.loss_gap > 5 * 0.005


def test_a_hopeless_step_time_is_stopped_early_and_timed(tiny):
    outcome = _bench(tiny.make(fp32_s=1.0, low_s=4.0)).trial(BF16)
    assert outcome.state == "stopped"
    assert outcome.note == "stopped after 8 steps, each of which took 4.0 times as long as in fp32"
    assert outcome.comparison.speedup.value == pytest.approx(0.25, rel=0.02)
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


def test_another_data_seed_gives_another_reading_of_the_same_plan(tiny):
    bench = _bench(tiny.make())
    first, other = bench.trial(BF16), bench.trial(BF16, seed=bench.data_seed + 1)
    assert first.losses != other.losses
    assert other.loss_gap == pytest.approx(bench.gap(BF16, bench.data_seed + 1, 20))
    assert bench.trial(BF16, seed=bench.data_seed).losses == first.losses


def test_batches_and_references_of_few_seeds_are_kept(tiny):
    bench = _bench(tiny.make())
    gaps = [bench.gap(BF16, seed, 5) for seed in range(9)]
    assert len(bench._batches) == len(bench._references) == 4
    assert bench.gap(BF16, 0, 5) == gaps[0]


def _accuracy(model, batch):
    """Share of the right signs; the planted model is right about half of the time."""
    x, y = batch
    return ((model(x) > 0) == (y > 0)).float().mean()


def test_a_metric_is_judged_in_its_own_direction(tiny):
    judged = {"mode": "inference", "optimizer": None, "metric": _accuracy, "poison": -1.0}
    most = _bench(tiny.make(**judged, direction="maximize"), budget=0.5).trial(BF16)
    least = _bench(tiny.make(**judged, direction="minimize"), budget=0.5).trial(BF16)
    assert most.losses == least.losses
    assert most.loss_gap == -least.loss_gap != 0
    assert all(0 <= value <= 1 for value in most.losses)


def test_a_metric_may_be_a_plain_number_and_not_finite(tiny):
    judged = {"mode": "inference", "optimizer": None, "direction": "maximize"}
    calls = []

    def metric(model, batch):
        calls.append(model(batch[0]).dtype)
        return 1.0

    assert _bench(tiny.make(**judged, metric=metric)).trial(BF16).loss_gap == 0.0
    assert calls
    broken = _bench(tiny.make(**judged, metric=lambda model, batch: model(batch[0]).sum(), poison=math.nan))
    outcome = broken.trial(BF16)
    assert (outcome.state, outcome.note) == ("diverged", "the metric is not finite at step 0")


def test_memory_is_estimated_on_a_cpu_where_it_is_asked_for(tiny):
    bench = _bench(tiny.make())
    assert bench.trial(BF16).memory_bytes is None
    bench.weighs = True
    weighed = bench.trial(BF16).memory_bytes
    assert isinstance(weighed, Estimate)
    assert weighed.parts["optimizer"] == pytest.approx(4 * (16 * 16 + 16 + 16 + 1))  # momentum


def test_a_plan_from_scratch_starts_at_fresh_weights(tiny):
    task = tiny.make()
    losses = tuple(Trainer(task, None, None, device=CPU, seed=0).losses(take_batches(task, 0, 10, CPU), 0))
    bench = _bench(task)
    bench.checkpoint = Checkpoint(weights=bench.checkpoint.weights, losses=losses, origin="")
    assert bench.from_scratch(FP32, 60.0).gap == 0.0
    assert bench.from_scratch(BF16, 60.0).gap != 0.0


def test_the_noise_is_what_jitter_does(tiny):
    bench = _bench(tiny.make())
    noise = bench.noise((1, 2))
    assert 0 < noise < 1e-4
    assert bench.noise((1, 2), jitter=1e-3) > 10 * noise


@pytest.mark.parametrize(("step_s", "steps", "rounds"), [(0.001, 50, 25), (0.1, 40, 13), (0.16, 25, 9), (2.0, 20, 9)])
def test_effort_follows_the_step(step_s, steps, rounds):
    assert Effort.for_step(step_s) == Effort(steps=steps, rounds=rounds)
