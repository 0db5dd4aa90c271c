"""Round tick values and the mapping from data to the picture."""

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A linear axis.

    Args:
        label: what it measures, with the unit.
        low, high: data at its two ends.
        start, end: their places in the picture, in user units.
        step: distance of two ticks, in data.
    """

    label: str
    low: float
    high: float
    start: float
    end: float
    step: float

    def at(self, value: float) -> float:
        """The place of a value, rounded to a tenth of a unit."""
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Places and texts of the ticks."""
        count = round((self.high - self.low) / self.step)
        digits = max(0, -math.floor(math.log10(self.step) + 1e-9))
        # adding 0.0 turns -0.0 into 0.0
        values = [round(self.low + i * self.step, digits) + 0.0 for i in range(count + 1)]
        return [(self.at(value), f"{value:.{digits}f}") for value in values]


def fit_axis(label: str, values: Iterable[float], start: float, end: float, max_ticks: int = 6) -> Axis:
    """The axis whose ends are round numbers around all values."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    if high - low < 1e-9 * max(abs(low), abs(high), 1.0):
        room = abs(low) * 0.05 or 1.0
        low, high = low - room, high + room
    step = round_step((high - low) / max_ticks)
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return Axis(label=label, low=low, high=high, start=start, end=end, step=step)


def round_step(at_least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is no less."""
    power = 10.0 ** math.floor(math.log10(at_least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= at_least * (1 - 1e-9))
