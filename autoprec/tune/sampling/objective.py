"""What a study wants: the fastest mix within a loss budget, the lowest loss at a speed, the smallest, or the front."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import numpy as np
from scipy.special import ndtr

from autoprec.errors import UsageError

Kind = Literal["speed", "loss", "memory", "front"]

#: A front is explored at these multiples of the budget, in turns.
_FRONT_BUDGETS = (1.0, 0.25, 0.5, 2.0, 4.0)
#: The solver is asked at these multiples of a budget: the models may be wrong either way.
_SOLVER_BUDGETS = (0.5, 0.7, 1.0, 1.4, 2.0)
#: A mean of three gaps must be so many standard deviations below the budget: one-sided 84% of Student's t.
_CONFIRM_MARGIN = 1.32 / math.sqrt(3)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """What a mix is believed to do, in the light of all trials.

    Args:
        speedup, speedup_sd: in units of fp32's speed; for the objective ``memory`` of fp32's bytes over its own.
        loss_gap, loss_gap_sd: relative to the reference loss.
    """

    speedup: float
    loss_gap: float
    loss_gap_sd: float
    speedup_sd: float = 0.0


@dataclass(frozen=True, slots=True)
class Beliefs:
    """Of many mixes: means and standard deviations, ``(n,)`` each; cost in units of fp32's step (or bytes)."""

    cost: np.ndarray
    cost_sd: np.ndarray
    gap: np.ndarray
    gap_sd: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What to look for.

    Args:
        kind: ``speed``: the fastest within the loss budget; ``loss``: the lowest loss gap of those as fast as
            ``min_speedup``; ``memory``: the smallest within the budget; ``front``: the best at every loss gap.
        budget: largest loss gap.
        min_speedup: for ``loss`` alone.

    Raises:
        UsageError: of these arguments.
    """

    kind: Kind
    budget: float
    min_speedup: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise UsageError(f"objective {self.kind!r} is unknown; allowed: {', '.join(get_args(Kind))}")
        if not 0 < self.budget < math.inf:
            raise UsageError(f"the loss budget is {self.budget}; it must be above 0 and finite")
        if (self.kind == "loss") != (self.min_speedup is not None):
            raise UsageError(
                f"objective {self.kind!r} with min_speedup={self.min_speedup}: 'loss' needs the speed to reach, such "
                "as min_speedup=1.5, and no other objective takes it"
            )
        if self.min_speedup is not None and not 0 < self.min_speedup < math.inf:
            raise UsageError(f"min_speedup is {self.min_speedup}; it must be above 0 and finite")

    def budget_at(self, turn: int) -> float:
        """The loss gap that a trial aims at; a front takes turns."""
        return self.budget * (_FRONT_BUDGETS[turn % len(_FRONT_BUDGETS)] if self.kind == "front" else 1.0)

    def acquisition(self, beliefs: Beliefs, best: float, turn: int = 0) -> np.ndarray:
        """Expected gain on the best mix so far times the chance that the mix is allowed, ``(n,)``.

        Args:
            beliefs: of the candidates.
            best: :meth:`value` of the best allowed mix.
            turn: number of the trial.
        """
        if self.min_speedup is not None:
            allowed = ndtr((1 / self.min_speedup - beliefs.cost) / beliefs.cost_sd)
            return allowed * _expected_gain(best, beliefs.gap, beliefs.gap_sd)
        allowed = ndtr((self.budget_at(turn) - beliefs.gap) / beliefs.gap_sd)
        return allowed * _expected_gain(best, beliefs.cost, beliefs.cost_sd)

    def value(self, beliefs: Beliefs) -> np.ndarray:
        """What is to be small, ``(n,)``."""
        return beliefs.gap if self.kind == "loss" else beliefs.cost

    def allowed(self, beliefs: Beliefs, caution: float, turn: int = 0) -> np.ndarray:
        """Whether each mix keeps the limit with ``caution`` standard deviations to spare, ``(n,)`` booleans."""
        if self.min_speedup is not None:
            return beliefs.cost + caution * beliefs.cost_sd <= 1 / self.min_speedup
        return beliefs.gap + caution * beliefs.gap_sd <= self.budget_at(turn)

    def is_feasible(self, belief: Belief, caution: float = 1.0) -> bool:
        """Whether a mix may be the answer."""
        if self.min_speedup is not None:
            return belief.speedup - caution * belief.speedup_sd >= self.min_speedup
        limit = self.budget * (max(_FRONT_BUDGETS) if self.kind == "front" else 1.0)
        return belief.loss_gap + caution * belief.loss_gap_sd <= limit

    def rank(self, belief: Belief) -> float:
        """Sorts mixes that are feasible, the best first."""
        return belief.loss_gap if self.kind == "loss" else -belief.speedup

    def shortlist(self, beliefs: Mapping[T, Belief], noise: float = 0.0, fallback: float = 1.0) -> list[T]:
        """Mixes that may be the answer, in the order in which to confirm them until one holds.

        With noise a faster mix close to the budget gives way to a surer one: what it gains is weighted with the square
        root of the chance that three fresh measurements confirm it.

        Args:
            beliefs: name of a mix → what is believed of it.
            noise: standard deviation of a measured gap.
            fallback: speedup of what is taken when none holds.
        """
        kept = {name: belief for name, belief in beliefs.items() if self.is_feasible(belief)}
        if not noise or self.kind in ("loss", "front"):
            return sorted(kept, key=lambda name: self.rank(kept[name]))

        def promise(name: T) -> float:
            belief = kept[name]
            gain = 1 / fallback - 1 / belief.speedup
            sd = math.hypot(belief.loss_gap_sd, noise / math.sqrt(3))
            chance = float(ndtr((self.budget - _CONFIRM_MARGIN * noise - belief.loss_gap) / sd))
            return gain * math.sqrt(chance) if gain > 0 else gain

        return sorted(kept, key=promise, reverse=True)

    def solver_budgets(self, gap: float, turn: int) -> np.ndarray:
        """Harms that the solver is asked for; ``gap`` is the best mix's."""
        center = max(gap, 0.05 * self.budget) if self.kind == "loss" else self.budget_at(turn)
        return center * np.array(_SOLVER_BUDGETS)

    def __str__(self) -> str:
        """In words, for a verdict."""
        if self.kind == "loss":
            return f"the lowest loss gap at {self.min_speedup:g} times fp32's speed or more"
        if self.kind == "front":
            return f"the fastest mix at every loss gap up to {max(_FRONT_BUDGETS) * self.budget:.3%}"
        return (
            f"the {'smallest' if self.kind == 'memory' else 'fastest'} mix whose loss gap is at most {self.budget:.3%}"
        )


def _expected_gain(best: float, mean: np.ndarray, sd: np.ndarray) -> np.ndarray:
    """E[max(best − y, 0)] of normal numbers."""
    z = (best - mean) / sd
    return sd * (z * ndtr(z) + np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi))
