import pytest

from autoprec.errors import UsageError
from autoprec.estimate import Estimate
from autoprec.measure import Measurement
from autoprec.tune.speed import EstimatedComparison, figure_from_json, say_times, standard_error, upper_end

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
    assert (upper_end(MEASURED), upper_end(ESTIMATED)) == (1.6, 1.5)
    assert say_times(MEASURED) == "1.50 (1.40 to 1.60)"
    assert say_times(ESTIMATED) == "1.50 (estimated for h100)"
