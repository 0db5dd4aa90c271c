"""Places of the marks in the pictures of the front and of the losses; the templates draw them."""

import math
from dataclasses import dataclass

from autoprec.report.axis import Axis, fit_axis
from autoprec.report.data import Curve, Interval, Role, TrialRow

# User units of the pictures: they scale with the page, and at 400 px the text is still 11 px.
WIDTH, HEIGHT = 440, 310
LEFT, RIGHT, TOP, BOTTOM = 52, 420, 26, 264
#: A trial whose gap is larger than so many budgets isn't in the picture.
_BUDGETS_SHOWN = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A trial in the front's picture, with the ends of its intervals."""

    trial: TrialRow
    x: float
    x_low: float
    x_high: float
    y: float
    y_low: float
    y_high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontChart:
    """Loss gap against speed.

    Args:
        front: an SVG polyline.
        budget_y: place of the allowed gap.
        num_beyond: trials whose gap is so large that they would press all others together.
    """

    x_axis: Axis
    y_axis: Axis
    marks: tuple[Mark, ...]
    front: str
    budget_y: float | None
    num_beyond: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A loss curve as SVG polylines: one for each stretch of finite losses."""

    label: str
    role: Role
    stretches: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvesChart:
    """Loss against step."""

    x_axis: Axis
    y_axis: Axis
    lines: tuple[Line, ...]


def front_chart(trials: tuple[TrialRow, ...], budget_pct: float | None) -> FrontChart | None:
    """The picture of all complete trials; None if there is none."""
    everywhere = [(t, t.speedup, t.loss_gap_pct) for t in trials if t.is_placed and t.speedup and t.loss_gap_pct]
    highest = math.inf if budget_pct is None else _BUDGETS_SHOWN * budget_pct
    placed = [(trial, speedup, gap) for trial, speedup, gap in everywhere if gap.value <= highest]
    if not placed:
        return None
    # one reading in a noisy moment has an interval that would press all others together: it leaves the picture
    rightmost = 1.3 * max(speedup.value for _, speedup, _ in placed)
    x_values = [min(end, rightmost) for _, speedup, _ in placed for end in ends_of(speedup)]
    y_values = [end for _, _, gap in placed for end in ends_of(gap)]
    x_axis = fit_axis("speed, times fp32", x_values, LEFT, RIGHT)
    y_axis = fit_axis("loss gap, % of fp32's", [*y_values, budget_pct or 0.0], BOTTOM, TOP)
    marks = tuple(_mark(trial, speedup, gap, x_axis, y_axis) for trial, speedup, gap in placed)
    on_front = sorted((mark.x, mark.y) for mark in marks if mark.trial.is_on_front)
    budget_y = None if budget_pct is None else y_axis.at(budget_pct)
    return FrontChart(
        x_axis=x_axis,
        y_axis=y_axis,
        marks=marks,
        front=polyline(on_front),
        budget_y=budget_y,
        num_beyond=len(everywhere) - len(placed),
    )


def curves_chart(curves: tuple[Curve, ...]) -> CurvesChart | None:
    """The picture of the loss curves; None if there is none."""
    losses = [loss for curve in curves for loss in curve.losses if math.isfinite(loss)]
    if not losses:
        return None
    longest = max(len(curve.losses) for curve in curves)
    x_axis = fit_axis("step", [0, max(longest - 1, 1)], LEFT, RIGHT)
    y_axis = fit_axis("loss", losses, BOTTOM, TOP)
    lines = tuple(
        Line(label=curve.label, role=curve.role, stretches=_stretches(curve.losses, x_axis, y_axis)) for curve in curves
    )
    return CurvesChart(x_axis=x_axis, y_axis=y_axis, lines=lines)


def ends_of(interval: Interval) -> tuple[float, float, float]:
    """Low end, value, high end; the value where no interval was taken."""
    low = interval.value if interval.low is None else interval.low
    high = interval.value if interval.high is None else interval.high
    return low, interval.value, high


def _mark(trial: TrialRow, speedup: Interval, gap: Interval, x_axis: Axis, y_axis: Axis) -> Mark:
    x_low, x, x_high = (x_axis.at(value) for value in ends_of(speedup))
    y_low, y, y_high = (y_axis.at(value) for value in ends_of(gap))
    return Mark(trial=trial, x=x, x_low=x_low, x_high=min(x_high, x_axis.end), y=y, y_low=y_low, y_high=y_high)


def _stretches(losses: tuple[float, ...], x_axis: Axis, y_axis: Axis) -> tuple[str, ...]:
    stretches: list[list[tuple[float, float]]] = [[]]
    for step, loss in enumerate(losses):
        if math.isfinite(loss):
            stretches[-1].append((x_axis.at(step), y_axis.at(loss)))
        elif stretches[-1]:
            stretches.append([])
    return tuple(polyline(points) for points in stretches if points)


def polyline(points: list[tuple[float, float]]) -> str:
    """The points as SVG writes them."""
    return " ".join(f"{x:g},{y:g}" for x, y in points)
