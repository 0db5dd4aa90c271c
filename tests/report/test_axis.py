import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.report.axis import fit_axis, round_step

numbers = st.floats(-1e6, 1e6, allow_nan=False)


@pytest.mark.parametrize(
    ("at_least", "expected"), [(0.11, 0.2), (1.0, 1.0), (1.0001, 2.0), (3, 5), (5.1, 10), (0.05, 0.05), (700, 1000)]
)
def test_round_step_is_the_next_of_one_two_five(at_least, expected):
    assert round_step(at_least) == pytest.approx(expected)


@given(st.lists(numbers, min_size=1, max_size=20))
def test_an_axis_holds_all_values_between_its_ends(values):
    axis = fit_axis("x", values, 50, 400)
    for value in values:
        assert 49.9 <= axis.at(value) <= 400.1
    assert 2 <= len(axis.ticks) <= 9


def test_an_axis_may_run_upwards():
    axis = fit_axis("loss", [0.0, 1.0], 250, 10)
    assert axis.at(0.0) == 250
    assert axis.at(1.0) == 10


def test_tick_texts_have_the_digits_of_the_step_and_no_negative_zero():
    assert [text for _, text in fit_axis("x", [-0.2, 0.2], 0, 100, max_ticks=4).ticks] == [
        "-0.2",
        "-0.1",
        "0.0",
        "0.1",
        "0.2",
    ]


def test_equal_values_and_no_values_still_give_an_axis():
    assert fit_axis("x", [1.0, 1.0], 0, 100).low < 1.0 < fit_axis("x", [1.0], 0, 100).high
    assert fit_axis("x", [], 0, 100).ticks
    assert fit_axis("x", [float("nan"), float("inf")], 0, 100).ticks
