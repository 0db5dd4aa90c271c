import pytest

from autoprec.measure import Comparison, Measurement
from autoprec.plan import Plan
from autoprec.tune.confirm import MAX_ATTEMPTS, Confirmer
from autoprec.tune.result import TrialRow

BUDGET = 0.005
PLANS = {name: Plan(rules=(), target=name) for name in ("bf16", *(f"m{k}" for k in range(9)))}


class Readings:
    """A bench whose readings are given: speed and the three gaps by plan."""

    budget, seed = BUDGET, 0

    def __init__(self, **readings):
        self.readings = readings
        self.asked: list[str] = []

    def speeds(self, plans, rounds, seed):
        if not self.asked or self.asked[-1] != plans["plan"].target:
            self.asked.append(plans["plan"].target)
        return {name: _comparison(self.readings[plan.target][0]) for name, plan in plans.items()}

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
