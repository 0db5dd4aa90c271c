from dataclasses import replace

from autoprec.report.chart import BOTTOM, LEFT, RIGHT, TOP, curves_chart, front_chart
from autoprec.report.data import Interval


def test_front_shows_each_trial_that_has_both_numbers(data):
    chart = front_chart(data.trials, data.budget_pct)
    assert [mark.trial.number for mark in chart.marks] == [0, 1, 2, 3]
    for mark in chart.marks:
        assert LEFT <= mark.x_low <= mark.x <= mark.x_high <= RIGHT
        assert BOTTOM >= mark.y_low >= mark.y >= mark.y_high >= TOP


def test_faster_is_right_and_worse_is_up(data):
    by_number = {mark.trial.number: mark for mark in front_chart(data.trials, data.budget_pct).marks}
    assert by_number[2].x > by_number[1].x > by_number[0].x
    assert by_number[3].y < by_number[1].y < by_number[2].y


def test_front_line_runs_through_the_trials_on_the_front(data):
    chart = front_chart(data.trials, data.budget_pct)
    assert len(chart.front.split()) == 2


def test_the_allowed_gap_is_in_the_picture_even_if_no_trial_comes_near(data):
    chart = front_chart(data.trials[:1], 50.0)
    assert TOP <= chart.budget_y <= BOTTOM


def test_no_budget_no_line(data):
    assert front_chart(data.trials, None).budget_y is None


def test_nothing_to_draw_is_no_chart(data):
    assert front_chart(data.trials[4:], 0.5) is None
    assert curves_chart(()) is None
    assert curves_chart((replace(data.curves[0], losses=(float("nan"),)),)) is None


def test_a_curve_is_broken_where_the_loss_is_not_finite(data):
    lines = curves_chart(data.curves).lines
    assert [len(line.stretches) for line in lines] == [1, 1, 2]
    assert len(lines[0].stretches[0].split()) == 60


def test_an_interval_far_beyond_all_readings_ends_at_the_edge(data):
    noisy = replace(data.trials[1], speedup=Interval(value=1.2, low=1.0, high=40.0))
    chart = front_chart((data.trials[0], noisy), data.budget_pct)
    assert chart.x_axis.high < 2
    assert chart.marks[1].x_high == RIGHT


def test_a_gap_that_would_press_all_others_together_is_left_out_and_counted(data):
    far = replace(data.trials[3], loss_gap_pct=Interval(value=40.0))
    chart = front_chart((*data.trials[:3], far), 0.5)
    assert (len(chart.marks), chart.num_beyond) == (3, 1)
    assert chart.y_axis.high < 2


def test_only_complete_trials_have_a_place(data):
    stopped = replace(data.trials[3], outcome="stopped", note="stopped after 5 steps")
    assert [mark.trial.number for mark in front_chart((data.trials[0], stopped), 0.5).marks] == [0]
    assert stopped.end == "stopped after 5 steps"
    assert replace(stopped, note="too slow").end == "stopped: too slow"
