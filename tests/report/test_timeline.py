from dataclasses import replace
from itertools import pairwise

from autoprec.report.timeline import WIDTH, timeline


def test_each_process_has_a_lane_and_each_trial_a_bar(data):
    line = timeline(data.trials)
    assert [name for name, _ in line.lanes] == ["host:17", "host:18"]
    assert [bar.trial.number for bar in line.bars] == [0, 1, 4, 2, 3]
    assert len({bar.y for bar in line.bars}) == 2
    assert all(bar.x >= 0 and bar.x + bar.width <= WIDTH for bar in line.bars)


def test_bars_of_one_lane_are_in_order_and_as_long_as_their_trials(data):
    bars = [bar for bar in timeline(data.trials).bars if bar.trial.worker == "host:17"]
    assert all(a.x + a.width < b.x for a, b in pairwise(bars))
    assert max(bar.width for bar in bars) - min(bar.width for bar in bars) < 0.3


def test_a_night_between_two_runs_is_cut_short_and_said(data):
    night = 9 * 3600.0
    late = replace(data.trials[3], started=data.trials[3].started + night, ended=data.trials[3].ended + night)
    line = timeline((*data.trials[:3], late))
    ((place, text),) = line.pauses
    assert text == "9.0 h without a trial cut out"
    assert line.bars[-2].x < place < line.bars[-1].x
    # what ran still fills the picture
    assert sum(bar.width for bar in line.bars) > 0.6 * WIDTH
    assert "pauses cut short" in line.x_axis.label


def test_a_number_is_only_where_it_has_room(data):
    trials = [replace(data.trials[1], number=1000 + k, started=1e9 + k, ended=1e9 + k + 0.9) for k in range(200)]
    assert {bar.label for bar in timeline(trials).bars} == {""}
    assert {bar.label for bar in timeline(trials[:3]).bars} == {"1000", "1001", "1002"}


def test_trials_that_took_no_time_of_their_own_are_left_out(data):
    assert timeline([replace(row, seconds=0.0) for row in data.trials]) is None
    assert timeline([replace(row, started=0.0, ended=0.0) for row in data.trials]) is None
