"""An estimated number: a type of its own, so that nothing can pass it off as measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from autoprec.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number that nobody measured.

    Args:
        value: the number.
        unit: ``s``, ``bytes``, or ``x`` for a ratio.
        target: the device it is for; empty where it doesn't depend on one.
        parts: what it adds up from, in the same unit; empty for a ratio.
        assumptions: what it rests on, for a reader.
    """

    value: float
    unit: str
    target: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"kind": "estimated", **asdict(self), "parts": dict(self.parts), "assumptions": list(self.assumptions)}

    def __str__(self) -> str:
        place = f" on {self.target}" if self.target else ""
        return f"{self.value:.4g}{self.unit} (estimated{place})"


def estimate_from_json(data: dict[str, Any]) -> Estimate:
    """The Estimate that :meth:`Estimate.to_json` wrote.

    Raises:
        UsageError: the data is something else, a measurement for example.
    """
    if data.get("kind") != "estimated":
        raise UsageError(f"wanted an estimate, got one of kind {data.get('kind')!r}")
    fields = {key: value for key, value in data.items() if key != "kind"}
    return Estimate(**{**fields, "assumptions": tuple(fields.get("assumptions", ()))})
