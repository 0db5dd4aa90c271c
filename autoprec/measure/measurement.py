"""A measured number with its interval, and a comparison with its control.

An *estimate* for a device that isn't here is another type, so that nothing can pass one off as the other.
"""

from __future__ import annotations

import datetime
from dataclasses import asdict, dataclass, field
from typing import Any

from autoprec.errors import UsageError


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A number that was measured on this device.

    Args:
        value: the number: a median or a mean, as its maker says.
        low, high: its 95% interval, in the same unit.
        rounds: readings behind it.
        unit: ``x`` for a ratio, ``s``, ``bytes``, ``relative`` for a share of the reference.
        device: where.
        versions: of torch and Python.
        date: when, UTC, ISO 8601.
    """

    value: float
    low: float
    high: float
    rounds: int
    unit: str
    device: str
    versions: dict[str, str] = field(default_factory=dict)
    date: str = field(default_factory=_now)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "measured", **asdict(self)}

    def __str__(self) -> str:
        return f"{self.value:.4g}{self.unit} ({self.low:.4g} … {self.high:.4g})"


def measurement_from_json(data: dict[str, Any]) -> Measurement:
    """The Measurement that :meth:`Measurement.to_json` wrote.

    Raises:
        UsageError: the data is something else, an estimate for example.
    """
    if data.get("kind") != "measured":
        raise UsageError(f"wanted a measurement, got one of kind {data.get('kind')!r}")
    return Measurement(**{key: value for key, value in data.items() if key != "kind"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How many times as fast as the baseline a candidate is.

    Args:
        speedup: baseline time over candidate time, median of the rounds' own ratios.
        control: the same for the baseline against itself in the same rounds; what it is away from 1 is noise.
        candidate_s, baseline_s: median seconds of one call.
    """

    speedup: Measurement
    control: Measurement
    candidate_s: float
    baseline_s: float

    @property
    def is_faster(self) -> bool:
        """Faster beyond what the control shows as noise."""
        return self.speedup.low > max(1.0, self.control.high)

    @property
    def is_slower(self) -> bool:
        """Slower beyond what the control shows as noise."""
        return self.speedup.high < min(1.0, self.control.low)

    def to_json(self) -> dict[str, Any]:
        return {
            "speedup": self.speedup.to_json(),
            "control": self.control.to_json(),
            "candidate_s": self.candidate_s,
            "baseline_s": self.baseline_s,
        }
