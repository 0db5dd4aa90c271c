"""What a trial of one plan gave, and how much effort a trial is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from autoprec.estimate import Estimate
from autoprec.measure import Measurement
from autoprec.tune.trials.speed import Speed

#: ``complete``; ``stopped`` early as hopeless in loss or speed; ``diverged`` to NaN; ``failed`` with an exception;
#: ``crashed``: its process died; ``timeout``: it took too long, and its process was ended.
State = Literal["complete", "stopped", "diverged", "failed", "crashed", "timeout"]

#: A gap for runs without one, in budgets: finite, so that a sampler can learn from it.
WORST_GAP = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long a trial takes.

    Args:
        steps: paired steps of the loss.
        rounds: of the timing.
        seconds: that the timing may take; fewer rounds when a step is slow.
    """

    steps: int = 20
    rounds: int = 9
    seconds: float = 5.0

    @classmethod
    def for_step(cls, step_s: float) -> Effort:
        """20 to 50 steps and 9 to 25 rounds, so that a trial takes seconds if a step takes under a tenth of one."""
        steps = min(50, max(20, int(4.0 / step_s)))
        return cls(steps=steps, rounds=min(25, max(9, int(4.0 / (3 * step_s)))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a trial of one plan gave.

    Args:
        state: see :data:`State`.
        loss_gap: relative to the reference on the same steps; always finite.
        losses: of its steps (of an inference task with a metric, the metric).
        comparison: speed against fp32, timed or estimated; None where it wasn't timed.
        memory_bytes: a step's peak: measured on an accelerator, estimated on a CPU and for a target that isn't here;
            None where the trial didn't get that far.
        num_skipped: steps the loss scaler skipped.
        seconds: that all of it took.
        note: why it was stopped or failed.
    """

    state: State
    loss_gap: float
    losses: tuple[float, ...] = ()
    comparison: Speed | None = None
    memory_bytes: Measurement | Estimate | None = None
    num_skipped: int = 0
    seconds: float = 0.0
    note: str = ""

    @property
    def finite_losses(self) -> tuple[float | None, ...]:
        """The losses with None for those that aren't finite, which JSON can't hold."""
        return tuple(loss if math.isfinite(loss) else None for loss in self.losses)
