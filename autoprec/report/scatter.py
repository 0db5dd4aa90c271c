"""Places of the marks in the two pictures of what was predicted against what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from autoprec.report.axis import Axis, fit_axis
from autoprec.report.chart import BOTTOM, LEFT, RIGHT, TOP, Mark, ends_of
from autoprec.report.data import Interval, TrialRow

#: A gap beyond so many budgets would press all others together.
_BUDGETS_SHOWN = 6.0

Pair = tuple[TrialRow, float, Interval]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterChart:
    """What was measured, upwards, against what was predicted of the same mix.

    Args:
        marks: one for each trial; only the measured side has an interval.
        line: where both agree, as an SVG polyline.
        miss: median distance of the two, in words.
        num_beyond: trials outside the picture.
    """

    x_axis: Axis
    y_axis: Axis
    marks: tuple[Mark, ...]
    line: str
    miss: str
    num_beyond: int


def speed_scatter(trials: Sequence[TrialRow]) -> ScatterChart | None:
    """Of the speed; None where nothing was predicted, or nothing measured."""
    pairs = [
        (trial, trial.predicted_speedup, trial.speedup)
        for trial in _told(trials)
        if trial.predicted_speedup is not None and trial.speedup is not None
    ]
    if not pairs:
        return None
    miss = median(abs(measured.value / predicted - 1) for _, predicted, measured in pairs)
    kind = "estimated" if any(measured.is_estimated for _, _, measured in pairs) else "measured"
    labels = ("speed predicted, times fp32", f"speed {kind}")
    highest = 1.3 * max(max(predicted, measured.value) for _, predicted, measured in pairs)
    return _chart(pairs, labels, f"{max(100 * miss, 0.1):.1f}%", highest, 0)


def gap_scatter(trials: Sequence[TrialRow], budget_pct: float | None) -> ScatterChart | None:
    """Of the loss gap; None where nothing was predicted."""
    pairs = [
        (trial, trial.predicted_gap_pct, trial.loss_gap_pct)
        for trial in _told(trials)
        if trial.predicted_gap_pct is not None and trial.loss_gap_pct is not None
    ]
    highest = float("inf") if budget_pct is None else _BUDGETS_SHOWN * budget_pct
    near = [(trial, x, y) for trial, x, y in pairs if max(abs(x), abs(y.value)) <= highest]
    if not near:
        return None
    miss = median(abs(measured.value - predicted) for _, predicted, measured in near)
    labels = ("loss gap predicted, %", "loss gap measured, %")
    return _chart(near, labels, f"{max(miss, 0.001):.3f}% of the loss", highest, len(pairs) - len(near))


def _told(trials: Sequence[TrialRow]) -> list[TrialRow]:
    """Those that measured something new."""
    return [trial for trial in trials if trial.is_placed and trial.role != "reference" and trial.seconds > 0]


def _chart(pairs: Sequence[Pair], labels: tuple[str, str], miss: str, highest: float, beyond: int) -> ScatterChart:
    """Both axes have one scale, so that the line where both agree is the diagonal."""
    values = [x for _, x, _ in pairs] + [min(end, highest) for _, _, y in pairs for end in ends_of(y)]
    x_axis, y_axis = fit_axis(labels[0], values, LEFT, RIGHT), fit_axis(labels[1], values, BOTTOM, TOP)
    marks = tuple(_mark(trial, x, y, x_axis, y_axis) for trial, x, y in pairs)
    line = f"{x_axis.start},{y_axis.start} {x_axis.end},{y_axis.end}"
    return ScatterChart(x_axis=x_axis, y_axis=y_axis, marks=marks, line=line, miss=miss, num_beyond=beyond)


def _mark(trial: TrialRow, predicted: float, measured: Interval, x_axis: Axis, y_axis: Axis) -> Mark:
    x, (low, y, high) = x_axis.at(predicted), (y_axis.at(value) for value in ends_of(measured))
    return Mark(trial=trial, x=x, x_low=x, x_high=x, y=y, y_low=low, y_high=max(high, y_axis.end))
