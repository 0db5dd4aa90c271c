"""How fast a plan is: timed on the device in this machine, or estimated for one that isn't here.

The two are different types all the way to the reader: a figure's own type says what it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from autoprec.estimate import Estimate, estimate_from_json
from autoprec.measure import Measurement, measurement_from_json

#: A gain that an estimate may miss: it leaves out what overlaps, and what a framework adds.
SURE_GAIN = 1.05
#: Standard errors on each side of a 95% interval.
_INTERVAL = 1.96


class Speed(Protocol):
    """What :class:`autoprec.measure.Comparison` and :class:`EstimatedComparison` have in common."""

    @property
    def speedup(self) -> Measurement | Estimate:
        """How many times as fast as the baseline."""
        ...

    @property
    def control(self) -> Measurement | None:
        """The baseline against itself; None where nothing was timed."""
        ...

    @property
    def candidate_s(self) -> float:
        """Seconds of one step."""
        ...

    @property
    def baseline_s(self) -> float:
        """Seconds of one of the baseline's steps."""
        ...

    @property
    def is_faster(self) -> bool:
        """Faster than the baseline beyond what the figure may be wrong by."""
        ...

    def to_json(self) -> dict[str, Any]:
        """As JSON values; ``kind`` of the speedup says which of the two it is."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedComparison:
    """How many times as fast as the baseline a candidate should be on a device that isn't here.

    Args:
        candidate, baseline: seconds of one step.
    """

    candidate: Estimate
    baseline: Estimate

    @property
    def speedup(self) -> Estimate:
        return Estimate(
            value=self.baseline.value / self.candidate.value,
            unit="x",
            target=self.candidate.target,
            assumptions=self.candidate.assumptions,
        )

    @property
    def control(self) -> None:
        return None

    @property
    def candidate_s(self) -> float:
        return self.candidate.value

    @property
    def baseline_s(self) -> float:
        return self.baseline.value

    @property
    def is_faster(self) -> bool:
        """Faster by more than an estimate may miss."""
        return self.speedup.value > SURE_GAIN

    def to_json(self) -> dict[str, Any]:
        return {
            "speedup": self.speedup.to_json(),
            "control": None,
            "candidate_s": self.candidate_s,
            "baseline_s": self.baseline_s,
        }


def figure_from_json(data: Mapping[str, Any]) -> Measurement | Estimate:
    """The figure that its ``to_json`` wrote, as the type it was.

    Raises:
        UsageError: it is neither.
    """
    return estimate_from_json(dict(data)) if data.get("kind") == "estimated" else measurement_from_json(dict(data))


def standard_error(figure: Measurement | Estimate) -> float:
    """Of a measured figure; 0 of an estimate, which repeats exactly, right or wrong."""
    return (figure.high - figure.low) / (2 * _INTERVAL) if isinstance(figure, Measurement) else 0.0


def is_behind(speed: Speed, rival: Speed) -> bool:
    """Whether the rival is the better choice: measurably faster, or not surely slower where both are estimates."""
    mine, other = speed.speedup, rival.speedup
    if isinstance(mine, Measurement):
        return other.value > mine.high
    return mine.value < SURE_GAIN * other.value


def say_times(figure: Measurement | Estimate) -> str:
    """A ratio in words: with its interval where it was measured, with "estimated" where it wasn't."""
    if isinstance(figure, Measurement):
        return f"{figure.value:.2f} ({figure.low:.2f} to {figure.high:.2f})"
    place = f" for {figure.target}" if figure.target else ""
    return f"{figure.value:.2f} (estimated{place})"
