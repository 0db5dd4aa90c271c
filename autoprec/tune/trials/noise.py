"""How far a loss gap is off by chance: what a budget must stand clear of.

Two causes.  A run parts from itself when its weights change by one part in a million: chaos, measured before the first
trial.  And a plan's gap differs from one stretch of data to the next, which shows once plans were measured on two data
seeds each.  The noise is the larger of the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autoprec.errors import StudyError

if TYPE_CHECKING:
    from autoprec.tune.processes.worker import WorkerBench
    from autoprec.tune.trials.bench import Bench

#: Steps of a trial where fewer don't show a gap of the budget's size.
MAX_STEPS = 50
#: A budget must be this many times the noise.
CLEAR = 2.0
#: Plans that are measured on a second data seed.
NUM_REPEATED = 3
#: Beyond this many budgets a plan's gap says nothing about those that may win: its spread grows with it.
_FAR = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Of one paired loss gap.

    Args:
        chaos: root mean square of the gap that weights changed by one part in a million make.
        between_seeds: standard deviation of a plan's gap from data seed to data seed; None before it was measured.
        steps: of each run.
        seeds: data seeds of the chaos.
    """

    chaos: float
    steps: int
    between_seeds: float | None = None
    seeds: int = 2

    @property
    def sigma(self) -> float:
        """Standard deviation of a gap that nothing but chance makes."""
        return max(self.chaos, self.between_seeds or 0.0)

    def with_repeats(self, pairs: Sequence[tuple[float, float]], budget: float) -> Noise:
        """Also what plans measured on two data seeds show.

        Args:
            pairs: the two gaps of each plan.
            budget: plans far beyond it don't count.
        """
        return replace(self, between_seeds=between_seeds(pairs, budget))

    def to_json(self) -> dict[str, Any]:
        return {
            "loss_gap": self.sigma,
            "chaos": self.chaos,
            "between_seeds": self.between_seeds,
            "seeds": self.seeds,
            "steps": self.steps,
        }


def between_seeds(pairs: Sequence[tuple[float, float]], budget: float) -> float | None:
    """Standard deviation of one plan's gap from data seed to data seed, pooled; None where no plan tells.

    Args:
        pairs: gaps of each plan on two data seeds; one that isn't finite doesn't count.
        budget: a plan whose mean gap is beyond twice of it doesn't count either.
    """
    near = [(a, b) for a, b in pairs if math.isfinite(a + b) and abs(a + b) / 2 <= _FAR * budget]
    # two readings a and b have the variance (a - b)² / 2
    return math.sqrt(sum((a - b) ** 2 / 2 for a, b in near) / len(near)) if near else None


def measure_noise(bench: Bench | WorkerBench) -> Noise:
    """The chaos, with trials as long as they must be for the budget to stand clear of it.

    Sets ``bench.effort.steps``.

    Raises:
        StudyError: the budget doesn't even stand clear of it then.
    """
    noise = _chaos(bench)
    if refuse_budget(noise, bench) and bench.effort.steps < MAX_STEPS:
        bench.effort = replace(bench.effort, steps=MAX_STEPS)
        noise = _chaos(bench)
    if refusal := refuse_budget(noise, bench):
        raise StudyError(refusal)
    return noise


def _chaos(bench: Bench | WorkerBench) -> Noise:
    seeds = bench.data_seed, bench.data_seed + 1
    return Noise(chaos=bench.noise(seeds), steps=bench.effort.steps, seeds=len(seeds))


def refuse_budget(noise: Noise, bench: Bench | WorkerBench) -> str:
    """Why the budget can't be told from chance, and what would help; empty if it can."""
    if bench.budget >= CLEAR * noise.sigma:
        return ""
    task, allowed = bench.task, CLEAR * noise.sigma
    if noise.sigma == noise.chaos:
        cause = f"weights changed by one part in a million already move it by {noise.chaos:.2%}"
    else:
        cause = f"one plan's gap differs by {noise.sigma:.2%} from data seed to data seed"
    where = "a checkpoint where training is calmer, " if task.mode == "training" else ""
    return (
        f"max_loss_increase is {bench.budget:.2%} of the {task.measured} of task {task.name!r}, and {cause} in "
        f"{noise.steps} steps: a budget below twice that can't be told from chance. Allow {allowed:.2%} or more, or "
        f"give the task {where}larger batches"
    )
