"""A second measurement of one plan, which had no say in choosing it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from autoprec.estimate import Estimate
from autoprec.measure import Measurement
from autoprec.tune.trials.scratch import FromScratch


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """A longer, repeated measurement of one plan on data that no trial has seen.

    Args:
        plan_sha256, name: of the trial.
        loss_gap: mean over the data seeds with its interval; always measured.
        gaps: of each data seed; None where it diverged.
        speedup: against fp32; an Estimate where the target isn't here.
        control: fp32 against itself; None where nothing was timed.
        candidate_s, baseline_s: seconds of a step, medians where they were timed.
        accepted: whether the plan may be reported.
        holds_loss: False where the loss was measured and failed.
        why: in words.
        from_scratch: a run from fresh weights; None where none was asked for.
    """

    plan_sha256: str
    name: str
    loss_gap: Measurement | None
    gaps: tuple[float | None, ...]
    speedup: Measurement | Estimate
    control: Measurement | None
    candidate_s: float
    baseline_s: float
    accepted: bool
    holds_loss: bool
    why: str
    from_scratch: FromScratch | None = None

    @property
    def is_measured(self) -> bool:
        """Whether the speed was measured, and not estimated for a target that isn't here."""
        return isinstance(self.speedup, Measurement)

    def to_json(self) -> dict[str, Any]:
        figures = {name: getattr(self, name) for name in ("loss_gap", "speedup", "control")}
        return {
            **asdict(self),
            **{name: None if figure is None else figure.to_json() for name, figure in figures.items()},
        }
