import time

import numpy as np
import pytest

from autoprec.errors import UsageError
from autoprec.measure import measure_ratios, measurement_from_json
from autoprec.measure.timing import median_interval


@pytest.fixture
def clock(monkeypatch):
    """A clock that steps move by hand: timings are then exact, and no test waits."""

    class Clock:
        now = 0.0

        def step(self, seconds, log=None, name=""):
            def call():
                self.now += seconds() if callable(seconds) else seconds
                if log is not None:
                    log.append(name)

            return call

    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def test_the_ratio_is_baseline_time_over_candidate_time(clock):
    ratios = measure_ratios({"fast": clock.step(1.0), "slow": clock.step(4.0)}, clock.step(2.0), rounds=5)
    assert ratios["fast"].speedup.value == pytest.approx(2.0)
    assert ratios["slow"].speedup.value == pytest.approx(0.5)
    assert ratios["fast"].control.value == pytest.approx(1.0)
    assert (ratios["slow"].candidate_s, ratios["slow"].baseline_s) == pytest.approx((4.0, 2.0))
    assert ratios["fast"].is_faster
    assert not ratios["fast"].is_slower
    assert ratios["slow"].is_slower


def test_a_drifting_machine_does_not_move_the_ratio(clock):
    def drift():
        return 1.0 + clock.now / 50

    comparison = measure_ratios({"same": clock.step(drift)}, clock.step(drift), rounds=41)["same"]
    assert clock.now > 500  # the last step took ten times as long as the first
    assert comparison.speedup.value == pytest.approx(1.0, abs=0.05)
    assert not comparison.is_faster
    assert not comparison.is_slower


def test_every_round_takes_each_once_and_the_baseline_twice_in_changing_order(clock):
    log: list[str] = []
    measure_ratios({"c": clock.step(1.0, log, "c")}, clock.step(1.0, log, "b"), rounds=12, warm_up=1)
    rounds = ["".join(log[2:][i : i + 3]) for i in range(0, 36, 3)]
    assert len(log) == 2 + 36
    assert {"".join(sorted(r)) for r in rounds} == {"bbc"}
    assert len(set(rounds)) > 1


def test_short_steps_are_read_in_groups(clock):
    log: list[str] = []
    comparison = measure_ratios({"c": clock.step(5e-5, log, "c")}, clock.step(1e-4), rounds=3, warm_up=1)["c"]
    assert len(log) == 1 + 3 * 40  # 2 ms of the shortest
    assert comparison.candidate_s == pytest.approx(5e-5)


def test_the_interval_covers_the_median_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for k in range(200):
        _, low, high = median_interval(rng.lognormal(0.0, 0.1, size=21), seed=k)
        covered += low <= 1.0 <= high
    assert 0.88 <= covered / 200 <= 0.99


def test_too_few_rounds_are_refused():
    with pytest.raises(UsageError, match="rounds is 2"):
        measure_ratios({}, lambda: None, rounds=2)


def test_a_measurement_survives_json_and_an_estimate_is_not_one(clock):
    speedup = measure_ratios({"c": clock.step(1.0)}, clock.step(2.0), rounds=3)["c"].speedup
    assert measurement_from_json(speedup.to_json()) == speedup
    assert speedup.unit == "x"
    assert speedup.rounds == 3
    assert speedup.versions["torch"]
    with pytest.raises(UsageError, match="'estimated'"):
        measurement_from_json({**speedup.to_json(), "kind": "estimated"})
