"""Places of the bars in the picture of which process ran which trial, and when."""

from collections.abc import Sequence
from dataclasses import dataclass

from autoprec.report.axis import Axis, fit_axis
from autoprec.report.data import TrialRow

WIDTH = 880
_LEFT, _RIGHT, _TOP, _LANE, _BAR = 8, WIDTH - 12, 4, 44, 16
_NAME = 14  # of its lane, above the bars
#: A pause longer than this share of the busy time is drawn as short as that.
_LONGEST_PAUSE = 0.05
#: A number needs so much room for each digit.
_DIGIT = 8.0

_UNITS = ((120.0, 1.0, "seconds"), (7200.0, 60.0, "minutes"), (float("inf"), 3600.0, "hours"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A trial: its place, and its number where there is room for it."""

    trial: TrialRow
    x: float
    width: float
    y: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One lane for each process.

    Args:
        lanes: names and places of their texts.
        pauses: places where time in which nothing ran is cut short, and how long it was.
        height: of the picture.
    """

    x_axis: Axis
    lanes: tuple[tuple[str, float], ...]
    bars: tuple[Bar, ...]
    pauses: tuple[tuple[float, str], ...]
    height: float
    width: float = WIDTH
    bar_height: float = _BAR


def timeline(trials: Sequence[TrialRow]) -> Timeline | None:
    """The picture; None where no trial says when it ran."""
    ran = sorted((t for t in trials if t.seconds > 0 and t.ended > t.started > 0), key=lambda t: t.started)
    if not ran:
        return None
    pauses = _pauses(ran)
    whole = _without(pauses, max(t.ended for t in ran)) - ran[0].started
    unit_s, unit = next((s, name) for most, s, name in _UNITS if whole <= most)
    cut = " (pauses cut short)" if pauses else ""
    # the far end's own label would be cut at the picture's edge
    x_axis = fit_axis(f"{unit} since the first trial{cut}", [0.0, whole / unit_s], _LEFT, _RIGHT, max_ticks=8)

    def at(time: float) -> float:
        return x_axis.at((_without(pauses, time) - ran[0].started) / unit_s)

    workers = list(dict.fromkeys(t.worker for t in ran))
    bars = []
    for trial in ran:
        x, end = at(trial.started), at(trial.ended)
        width, number = max(1.0, round(end - x, 1)), str(trial.number)
        y = _TOP + workers.index(trial.worker) * _LANE + _NAME + 4
        label = number if width >= _DIGIT * len(number) + 4 else ""
        bars.append(Bar(trial=trial, x=x, width=width, y=y, label=label))
    return Timeline(
        x_axis=x_axis,
        lanes=tuple((name or "a process", _TOP + k * _LANE + _NAME) for k, name in enumerate(workers)),
        bars=tuple(bars),
        pauses=tuple((at(start), f"{(end - start) / 3600:.1f} h without a trial cut out") for start, end in pauses),
        height=_TOP + len(workers) * _LANE + 44,
    )


def _pauses(ran: Sequence[TrialRow]) -> list[tuple[float, float]]:
    """Parts of the time that are left out: of long pauses all but a little."""
    gaps, until, idle = [], ran[0].ended, 0.0
    for trial in ran[1:]:
        if trial.started > until:
            gaps.append((until, trial.started))
            idle += trial.started - until
        until = max(until, trial.ended)
    longest = _LONGEST_PAUSE * (until - ran[0].started - idle)
    kept = longest / 2
    return [(start + kept, end - kept) for start, end in gaps if end - start > 2 * longest and end - start > 60.0]


def _without(pauses: Sequence[tuple[float, float]], time: float) -> float:
    return time - sum(min(time, end) - start for start, end in pauses if time > start)
