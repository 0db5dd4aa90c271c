"""One finished trial, as a study keeps it and a result shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from autoprec.estimate import Estimate
from autoprec.measure import Measurement
from autoprec.tune.trials.outcome import Outcome, State
from autoprec.tune.trials.speed import figure_from_json

_FIGURES = ("speedup", "control", "memory_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """One finished trial.

    Args:
        number: Optuna's.
        name: ``fp32``, ``bf16``, ``rules``, or ``search``.
        plan_sha256: of its plan.
        formats: group → choice.
        scaler: settings of the loss scaler; empty where the plan needs none.
        recipe: settings of the fp8 and block formats, as the plan has them.
        low_share: share of the GEMM FLOPs that the plan asks to run below fp32, 0 to 1.
        state: see :data:`~autoprec.tune.trials.outcome.State`.
        loss_gap: relative to the reference; 0.005 is half a per cent.
        speedup, control: against fp32; None where it wasn't timed, or, of the control, where the speed is an estimate.
        candidate_s, baseline_s: seconds of a step.
        memory_bytes: a step's peak; None where it wasn't weighed.
        losses: of its steps; None where one isn't finite.
        num_skipped: steps the loss scaler skipped.
        seconds: that the trial took.
        note: why it was stopped or failed.
        origin: ``baseline``, ``front`` (of the solved problem), ``search``, or ``repeat`` of an earlier mix.
        worker: host and process that ran it.
        started, ended: seconds since the epoch, UTC.
        predicted_speedup, predicted_gap: what was believed of the mix before it was measured; None where nothing was.
    """

    number: int
    name: str
    plan_sha256: str
    formats: dict[str, str]
    scaler: dict[str, float] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    low_share: float = 0.0
    state: State = "complete"
    loss_gap: float = 0.0
    speedup: Measurement | Estimate | None = None
    control: Measurement | None = None
    candidate_s: float | None = None
    baseline_s: float | None = None
    memory_bytes: Measurement | Estimate | None = None
    losses: tuple[float | None, ...] = ()
    num_skipped: int = 0
    seconds: float = 0.0
    note: str = ""
    origin: str = "search"
    worker: str = ""
    started: float = 0.0
    ended: float = 0.0
    predicted_speedup: float | None = None
    predicted_gap: float | None = None

    def to_json(self) -> dict[str, Any]:
        figures = {name: getattr(self, name) for name in _FIGURES}
        return {
            **asdict(self),
            **{name: None if figure is None else figure.to_json() for name, figure in figures.items()},
        }

    def __str__(self) -> str:
        """One line for a person."""
        speed = "not timed"
        if self.speedup is not None:
            estimated = " (estimated)" if isinstance(self.speedup, Estimate) else ""
            speed = f"{self.speedup.value:.2f}x fp32{estimated}"
        end = f" ({self.note})" if self.note else ""
        return f"trial {self.number} {self.name}: {speed}, loss {self.loss_gap:+.3%}{end}"


def fields_of(outcome: Outcome) -> dict[str, Any]:
    """The fields of a row that its measurement gives."""
    speed = outcome.comparison
    return {
        "state": outcome.state,
        "loss_gap": outcome.loss_gap,
        "speedup": None if speed is None else speed.speedup,
        "control": None if speed is None else speed.control,
        "candidate_s": None if speed is None else speed.candidate_s,
        "baseline_s": None if speed is None else speed.baseline_s,
        "memory_bytes": outcome.memory_bytes,
        "losses": outcome.finite_losses,
        "num_skipped": outcome.num_skipped,
        "seconds": outcome.seconds,
        "note": outcome.note,
    }


def row_from_json(data: Mapping[str, Any]) -> TrialRow:
    """The row that :meth:`TrialRow.to_json` wrote."""
    figures = {name: None if data[name] is None else figure_from_json(data[name]) for name in _FIGURES}
    return TrialRow(**{**data, **figures, "losses": tuple(data["losses"])})
