from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from autoprec.errors import StudyError
from autoprec.estimate import Estimate
from autoprec.measure import Comparison, Measurement
from autoprec.plan import Plan
from autoprec.tune.answers.confirm import MAX_ATTEMPTS, Confirmer
from autoprec.tune.answers.result import TrialRow
from autoprec.tune.trials.scratch import FromScratch
from autoprec.tune.trials.speed import EstimatedComparison

BUDGET = 0.005
PLANS = {name: Plan(rules=(), target=name) for name in ("bf16", *(f"m{k}" for k in range(9)))}


class Readings:
    """A bench whose readings are given: speed and the three gaps by plan, and the gaps from scratch."""

    budget, seed, device = BUDGET, 0, torch.device("cpu")
    compare = staticmethod(lambda value: _comparison(value))

    def __init__(self, scratch=None, mode="training", checkpoint=None, **readings):
        self.readings = readings
        self.asked: list[str] = []
        self.scratched: list[str] = []
        self.scratch = scratch or {}
        self.task = SimpleNamespace(mode=mode, checkpoint=checkpoint)
        self.checkpoint = SimpleNamespace(losses=(2.0, 1.0))
        self.num_timings = 0

    def speeds(self, plans, rounds, seed):
        self.num_timings += 1
        if not self.asked or self.asked[-1] != plans["plan"].target:
            self.asked.append(plans["plan"].target)
        return {name: self.compare(self.readings[plan.target][0]) for name, plan in plans.items()}

    def from_scratch(self, plan, limit_s):
        self.scratched.append(plan.target)
        return FromScratch(gap=self.scratch.get(plan.target, 0.0), chaos=0.001, steps=200)

    def gap(self, plan, seed, steps):
        return self.readings[plan.target][1][seed - 1000]


def _measurement(value):
    return Measurement(value=value, low=value - 0.02, high=value + 0.02, rounds=9, unit="x", device="d")


def _comparison(value):
    return Comparison(speedup=_measurement(value), control=_measurement(1.0), candidate_s=1 / value, baseline_s=1.0)


def _row(name, gap=0.001):
    return TrialRow(number=0, name=name, plan_sha256=name, formats={}, loss_gap=gap, speedup=_measurement(1.0))


def _choose(bench, candidates, baseline=None):
    confirmer = Confirmer(bench=bench, noise=1e-5, steps=10, rounds=9)
    rows = [_row(name) if isinstance(name, str) else _row(*name) for name in candidates]
    base = next((row for row in rows if row.name == baseline), None)
    winner, done = confirmer.choose(rows, base, lambda row: PLANS[row.name], lambda row, confirmation: None)
    return (winner.name if winner else None), done


GOOD, BAD, NAN = (0.001, 0.0012, 0.0009), (0.006, 0.007, 0.008), (0.001, float("nan"), 0.001)


def test_the_fastest_that_holds_wins():
    bench = Readings(m0=(1.5, GOOD), m1=(1.4, GOOD))
    winner, done = _choose(bench, ["m0", "m1"])
    assert winner == "m0"
    assert done[0].accepted
    assert done[0].loss_gap.value == pytest.approx(sum(GOOD) / 3)
    assert done[0].loss_gap.low < min(GOOD) < max(GOOD) < done[0].loss_gap.high


@pytest.mark.parametrize("gaps", [BAD, NAN, (0.0, 0.0, 0.014)])
def test_a_loss_that_fails_makes_the_next_one_safer(gaps):
    bench = Readings(m0=(1.5, gaps), m1=(1.45, GOOD), m2=(1.4, GOOD))
    winner, done = _choose(bench, [("m0", 0.003), ("m1", 0.004), ("m2", 0.002)])
    assert winner == "m2"
    assert bench.asked == ["m0", "m2"]
    assert not done[0].holds_loss


def test_a_mix_that_is_no_faster_is_not_trained_again():
    bench = Readings(m0=(1.01, None), m1=(1.3, GOOD))
    winner, done = _choose(bench, ["m0", "m1"])
    assert winner == "m1"
    assert done[0].gaps == ()
    assert "no faster than fp32" in done[0].why


def test_none_that_holds_means_fp32():
    assert _choose(Readings(m0=(1.5, BAD)), ["m0"])[0] is None
    assert _choose(Readings(), [])[0] is None


def test_attempts_end():
    bench = Readings(**{f"m{k}": (1.0, None) for k in range(9)})
    assert _choose(bench, [f"m{k}" for k in range(9)])[0] is None
    assert len(bench.asked) == MAX_ATTEMPTS


def test_the_winner_is_never_slower_than_the_16_bit_baseline():
    bench = Readings(m0=(1.3, GOOD), bf16=(1.5, GOOD), m1=(1.2, GOOD))
    winner, done = _choose(bench, ["m0", "bf16", "m1"], baseline="bf16")
    assert winner == "bf16"
    assert bench.asked == ["bf16", "m0"]  # m1 is behind the baseline
    assert "slower than the 16-bit baseline" in done[1].why


def test_a_baseline_that_fails_is_no_floor():
    bench = Readings(m0=(1.3, GOOD), bf16=(1.5, BAD), m1=(1.2, GOOD))
    assert _choose(bench, ["bf16", "m0", "m1"], baseline="bf16")[0] == "m0"


class Estimated(Readings):
    """The same where the target isn't here."""

    compare = staticmethod(
        lambda value: EstimatedComparison(
            candidate=Estimate(value=1 / value, unit="s", target="t"), baseline=Estimate(value=1.0, unit="s")
        )
    )


def test_the_winner_alone_is_trained_from_scratch():
    bench = Readings(m0=(1.5, BAD), bf16=(1.2, GOOD), m1=(1.4, GOOD))
    winner, done = _choose(bench, [("m0", 0.004), "m1", "bf16"], baseline="bf16")
    assert (winner, bench.scratched) == ("m1", ["m1"])
    assert [c.from_scratch is not None for c in done] == [False, False, True]


@pytest.mark.parametrize("gap", [0.0071, None])
def test_a_plan_that_fails_from_scratch_is_refused_and_the_next_is_safer(gap):
    bench = Readings(scratch={"m0": gap}, m0=(1.5, GOOD), m1=(1.45, GOOD), m2=(1.4, GOOD))
    winner, done = _choose(bench, [("m0", 0.003), ("m1", 0.004), ("m2", 0.002)])
    assert (winner, bench.scratched) == ("m2", ["m0", "m2"])
    assert (done[0].accepted, done[0].holds_loss) == (False, False)
    assert done[0].why.startswith("from fresh weights")
    assert done[0].to_json()["from_scratch"] == {"gap": gap, "chaos": 0.001, "steps": 200}


def test_chaos_excuses_a_gap_from_scratch():
    assert _choose(Readings(scratch={"m0": 0.0069}, m0=(1.5, GOOD)), ["m0"])[0] == "m0"


def test_a_baseline_that_fails_from_scratch_leaves_the_place_to_what_is_behind_it():
    bench = Readings(scratch={"bf16": 0.02}, bf16=(1.5, GOOD), m1=(1.2, GOOD))
    assert _choose(bench, [("bf16", 0.004), ("m1", 0.002)], baseline="bf16")[0] == "m1"
    bench = Readings(scratch={"bf16": 0.02}, bf16=(1.5, GOOD))
    assert _choose(bench, ["bf16"], baseline="bf16")[0] is None


@pytest.mark.parametrize("changes", [{"mode": "inference"}, {"checkpoint": "weights.pt"}])
def test_who_does_not_train_from_scratch_is_not_asked_to(changes):
    bench = Readings(scratch={"m0": 1.0}, m0=(1.5, GOOD), **changes)
    winner, done = _choose(bench, ["m0"])
    assert (winner, bench.scratched, done[0].from_scratch) == ("m0", [], None)


def test_an_estimated_speed_is_taken_once_and_never_passes_for_measured():
    bench = Estimated(m0=(1.04, GOOD), m1=(1.3, GOOD))
    winner, done = _choose(bench, ["m0", "m1"])
    assert (winner, bench.num_timings) == ("m1", 2)
    assert done[0].why == "no faster than fp32 beyond what an estimate may miss"
    assert done[1].why == "faster by an estimate, and the loss holds"
    assert isinstance(done[1].speedup, Estimate)
    assert (done[1].control, done[1].is_measured) == (None, False)
    assert done[1].loss_gap.rounds == 3
    assert (done[1].to_json()["speedup"]["kind"], done[1].to_json()["loss_gap"]["kind"]) == ("estimated", "measured")


def test_an_estimate_no_better_than_the_baselines_is_not_worth_it():
    bench = Estimated(m0=(1.44, GOOD), bf16=(1.4, GOOD))
    winner, done = _choose(bench, ["m0", "bf16"], baseline="bf16")
    assert winner == "bf16"
    assert done[1].why == "not surely faster than the 16-bit baseline (1.40 (estimated for t))"


def test_a_plan_that_fails_when_it_is_timed_again_is_refused_and_the_next_one_wins():
    class Failing(Readings):
        def speeds(self, plans, rounds, seed):
            if plans["plan"].target == "m0":
                raise StudyError("speeds ended its process twice")
            return super().speeds(plans, rounds, seed)

    rows = [replace(_row(name), candidate_s=0.5, baseline_s=1.0) for name in ("m0", "m1")]
    confirmer = Confirmer(bench=Failing(m1=(1.4, GOOD)), noise=1e-5, steps=10, rounds=9)
    winner, done = confirmer.choose(rows, None, lambda row: PLANS[row.name], lambda row, confirmation: None)
    assert winner is not None
    assert winner.name == "m1"
    assert not done[0].accepted
    assert "ended its process twice" in done[0].why


def test_a_plan_that_need_not_be_faster_is_judged_by_its_loss_alone():
    bench = Readings(m0=(0.8, GOOD), m1=(0.8, BAD))
    confirmer = Confirmer(bench=bench, noise=1e-5, steps=10, rounds=9, must_be_faster=False)
    accepted = {name: confirmer.confirm(_row(name), PLANS[name], None).accepted for name in ("m0", "m1")}
    assert accepted == {"m0": True, "m1": False}
