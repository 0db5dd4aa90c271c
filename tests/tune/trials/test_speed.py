import pytest

from autoprec.errors import UsageError
from autoprec.estimate import Estimate
from autoprec.measure import Comparison, Measurement
from autoprec.tune.trials.speed import EstimatedComparison, figure_from_json, is_behind, say_times, standard_error

MEASURED = Measurement(value=1.5, low=1.4, high=1.6, rounds=9, unit="x", device="d")
ESTIMATED = Estimate(value=1.5, unit="x", target="h100")


def _compared(candidate_s, baseline_s):
    return EstimatedComparison(
        candidate=Estimate(value=candidate_s, unit="s", target="h100", assumptions=("none",)),
        baseline=Estimate(value=baseline_s, unit="s", target="h100"),
    )


def test_an_estimated_comparison_is_a_ratio_without_a_control():
    comparison = _compared(0.02, 0.03)
    assert comparison.speedup.value == pytest.approx(1.5)
    assert (comparison.speedup.target, comparison.speedup.assumptions) == ("h100", ("none",))
    assert (comparison.candidate_s, comparison.baseline_s, comparison.control) == (0.02, 0.03, None)
    assert comparison.to_json()["speedup"]["kind"] == "estimated"


@pytest.mark.parametrize(("baseline_s", "is_faster"), [(1.0, False), (1.04, False), (1.06, True)])
def test_a_gain_that_an_estimate_may_miss_is_none(baseline_s, is_faster):
    assert _compared(1.0, baseline_s).is_faster is is_faster


@pytest.mark.parametrize("figure", [MEASURED, ESTIMATED])
def test_a_figure_is_read_as_the_type_it_was(figure):
    assert figure_from_json(figure.to_json()) == figure


def test_what_is_neither_is_refused():
    with pytest.raises(UsageError, match="got one of kind 'guessed'"):
        figure_from_json({"kind": "guessed", "value": 1.0})


def test_only_a_measured_figure_has_an_interval():
    assert standard_error(MEASURED) == pytest.approx(0.2 / (2 * 1.96))
    assert standard_error(ESTIMATED) == 0
    assert say_times(MEASURED) == "1.50 (1.40 to 1.60)"
    assert say_times(ESTIMATED) == "1.50 (estimated for h100)"


@pytest.mark.parametrize(("rival", "behind"), [(1.39, False), (1.59, False), (1.61, True)])
def test_a_rival_must_be_measurably_faster(rival, behind):
    def measured(value):
        figure = Measurement(value=value, low=value - 0.1, high=value + 0.1, rounds=9, unit="x", device="d")
        return Comparison(speedup=figure, control=figure, candidate_s=1.0, baseline_s=value)

    assert is_behind(measured(1.5), measured(rival)) is behind


@pytest.mark.parametrize(("rival", "behind"), [(1.4, False), (1.44, True), (1.6, True)])
def test_of_two_estimates_the_rival_stays_unless_it_is_surely_slower(rival, behind):
    assert is_behind(_compared(1.0, 1.5), _compared(1.0, rival)) is behind
