import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from autoprec.errors import StudyError
from autoprec.tune.trials.bench import Effort
from autoprec.tune.trials.noise import Noise, between_seeds, measure_noise, refuse_budget

NAN = float("nan")


class Chaotic:
    """A bench whose chaos falls with the number of steps."""

    data_seed = 1

    def __init__(self, budget, chaos, mode="training"):
        self.budget, self.chaos, self.effort = budget, chaos, Effort(steps=20)
        self.task = SimpleNamespace(name="t", mode=mode, measured="loss")

    def noise(self, seeds):
        return self.chaos[self.effort.steps]


def test_two_readings_of_a_plan_give_its_spread():
    assert between_seeds([(0.001, 0.003)], 0.005) == pytest.approx(0.002 / math.sqrt(2))
    assert between_seeds([(0.001, 0.001), (0.002, 0.004)], 0.005) == pytest.approx(0.001)


@pytest.mark.parametrize("pairs", [[], [(NAN, 0.001)], [(0.02, 0.03)], [(math.inf, 0.0)]])
def test_plans_far_off_tell_nothing(pairs):
    assert between_seeds(pairs, 0.005) is None
    assert between_seeds([*pairs, (0.0, 0.002)], 0.005) == pytest.approx(math.sqrt(2) * 1e-3)


def test_the_larger_of_the_two_counts():
    noise = Noise(chaos=0.001, steps=20)
    assert noise.sigma == 0.001
    repeated = noise.with_repeats([(0.0, 0.004)], 0.005)
    assert repeated.sigma == repeated.between_seeds == pytest.approx(0.004 / math.sqrt(2))
    assert noise.with_repeats([(0.0, 1e-6)], 0.005).sigma == 0.001
    assert repeated.to_json() == {
        "loss_gap": repeated.sigma,
        "chaos": 0.001,
        "between_seeds": repeated.between_seeds,
        "seeds": 2,
        "steps": 20,
    }


def test_a_budget_clear_of_the_chaos_needs_no_longer_trials():
    bench = Chaotic(0.005, {20: 0.002})
    assert (measure_noise(bench).sigma, bench.effort.steps) == (0.002, 20)


def test_more_steps_are_tried_before_a_budget_is_refused():
    bench = Chaotic(0.005, {20: 0.003, 50: 0.001})
    noise = measure_noise(bench)
    assert (noise.sigma, noise.steps, bench.effort.steps) == (0.001, 50, 50)


def test_a_budget_in_the_noise_is_refused_in_words():
    with pytest.raises(StudyError, match=r"already move it by 0\.40% in 50 steps") as caught:
        measure_noise(Chaotic(0.005, {20: 0.003, 50: 0.004}))
    assert "Allow 0.80% or more, or give the task a checkpoint where training is calmer" in str(caught.value)


def test_what_repeats_show_is_refused_too():
    bench = Chaotic(0.005, {20: 0.001}, mode="inference")
    noise = replace(measure_noise(bench), between_seeds=0.004)
    assert "one plan's gap differs by 0.40% from data seed to data seed in 20 steps" in refuse_budget(noise, bench)
    assert refuse_budget(noise, bench).endswith("give the task larger batches")
    assert refuse_budget(replace(noise, between_seeds=None), bench) == ""
