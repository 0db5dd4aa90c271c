"""The cheapest mixes of a problem for one harm budget, or for many: the front between cost and harm."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from autoprec.errors import UsageError
from autoprec.planner.arrays import BUDGET_TOLERANCE, Arrays, encode
from autoprec.planner.knapsack import pack
from autoprec.planner.lagrange import cheapest
from autoprec.planner.problem import Problem

#: A mix this close to the best possible cost of a step counts as the best.
REL_GAP = 1e-3
#: Beyond this many groups that have a choice, the exact solver takes longer than its answer is worth.
MAX_EXACT_GROUPS = 500

Method = Literal["milp", "lagrange", "reference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A mix and what is known of it.

    Args:
        mix: group → format.
        cost_s: seconds of a step, casts and fixed seconds included.
        harm: sum of the groups' harms.
        method: what found it: the mixed-integer program, prices on harm, or nothing, as it is the reference.
        gap: no mix within the same budget is cheaper by more than this share of ``cost_s``; infinite if unknown.
    """

    mix: Mapping[str, str]
    cost_s: float
    harm: float
    method: Method
    gap: float = math.inf

    @property
    def is_proven(self) -> bool:
        """Whether it is the best, to one part in a thousand."""
        return self.gap <= REL_GAP

    def to_json(self) -> dict[str, Any]:
        return {
            "mix": dict(self.mix),
            "cost_s": self.cost_s,
            "harm": self.harm,
            "method": self.method,
            "gap": self.gap if math.isfinite(self.gap) else None,
        }


def solve(
    problem: Problem, budget: float, *, pins: Mapping[str, str] | None = None, time_limit_s: float = 2.0
) -> Solution:
    """The cheapest mix whose harm is within a budget.

    Prices on harm come first.  Where they leave more than :data:`REL_GAP` open, the exact solver follows, up to
    :data:`MAX_EXACT_GROUPS` groups; the better answer counts.  The same call gives the same answer, unless the exact
    solver runs out of time.

    Args:
        problem: to solve.
        budget: largest harm, in the problem's own unit; kept to one part in a million.
        pins: group → the only format it may take.
        time_limit_s: of the exact solver.

    Raises:
        UsageError: no mix is within the budget, or a pin names what the problem hasn't.
    """
    arrays = encode(problem, pins)
    if math.isnan(budget) or budget + BUDGET_TOLERANCE * abs(budget) < arrays.least_harm:
        raise UsageError(
            f"no mix has a harm of {budget:.4g} or less; the least harmful has {arrays.least_harm:.4g}"
            + (f" with {', '.join(f'{name}={value}' for name, value in pins.items())}" if pins else "")
        )
    return _solve(arrays, [min(budget, _most_harm(arrays))], time_limit_s, time_limit_s)[0]


def front(
    problem: Problem,
    num_budgets: int = 40,
    *,
    pins: Mapping[str, str] | None = None,
    time_limit_s: float = 12.0,
) -> list[Solution]:
    """The cheapest mixes for budgets from the smallest harm to all harm, the cheapest and most harmful first.

    None is worse than another in both cost and harm, but for the reference mix, which is always there.

    Args:
        problem: to solve.
        num_budgets: budgets tried, in equal ratios; several may have the same mix.
        pins: group → the only format it may take.
        time_limit_s: of the exact solver for all budgets together; 2 seconds at most for each.

    Raises:
        UsageError: a pin names what the problem hasn't, or there is no budget to try.
    """
    if num_budgets < 1:
        raise UsageError(f"num_budgets is {num_budgets}; at least 1")
    arrays = encode(problem, pins)
    reference = _solution(arrays, arrays.reference, "reference", -math.inf)
    found = _solve(arrays, _budgets(arrays, num_budgets), min(2.0, time_limit_s), time_limit_s)
    return _nondominated([*found, reference], reference)


def _budgets(arrays: Arrays, count: int) -> Sequence[float]:
    """From the smallest harm that a choice adds to that of the most harmful mix; the least harmful mix's as well."""
    harm = np.where(arrays.allowed, arrays.harm, np.inf)
    extra = np.where(arrays.allowed, arrays.harm - harm.min(axis=1, keepdims=True), 0.0)
    if not (extra > 0).any():
        return [arrays.least_harm]
    smallest, all_harm = extra[extra > 0].min(), extra.max(axis=1).sum()
    return [arrays.least_harm, *(arrays.least_harm + np.geomspace(smallest, all_harm, count)).tolist()]


def _most_harm(arrays: Arrays) -> float:
    """A budget above this one says the same; an infinite one can't be computed with."""
    return float(np.where(arrays.allowed, arrays.harm, -np.inf).max(axis=1).sum())


def _solve(arrays: Arrays, budgets: Sequence[float], each_s: float, all_s: float) -> list[Solution]:
    """One solution a budget, none of which is below the least harm."""
    deadline = time.monotonic() + all_s
    priced = cheapest(arrays, np.array([budgets]))
    is_small = (arrays.allowed.sum(axis=1) > 1).sum() <= MAX_EXACT_GROUPS
    found = []
    for budget, choice, bound in zip(budgets, priced.choice[0], priced.bound[0].tolist(), strict=True):
        best = _solution(arrays, choice, "lagrange", bound)
        left_s = min(each_s, deadline - time.monotonic())
        if is_small and not best.is_proven and left_s > 0:
            packed = pack(arrays, budget, rel_gap=REL_GAP, time_limit_s=left_s)
            bound = max(bound, packed.bound)
            best = _solution(arrays, choice, "lagrange", bound)
            if packed.choice is not None:
                exact = _solution(arrays, packed.choice, "milp", bound)
                if exact.harm <= budget + BUDGET_TOLERANCE * abs(budget) and exact.cost_s < best.cost_s:
                    best = exact
        found.append(best)
    return found


def _solution(arrays: Arrays, choice: np.ndarray, method: Method, bound: float) -> Solution:
    """Evaluated by the problem itself, whatever a solver said; ``bound`` is without the fixed seconds."""
    mix = arrays.mix(choice)
    cost_s = arrays.problem.cost_s(mix)
    missing = cost_s - arrays.problem.fixed_s - bound
    gap = 0.0 if missing <= 0 else missing / cost_s if cost_s > 0 else math.inf
    return Solution(mix=mix, cost_s=cost_s, harm=arrays.problem.harm(mix), method=method, gap=gap)


def _nondominated(found: Sequence[Solution], reference: Solution) -> list[Solution]:
    """Sorted by cost; of mixes of one cost and harm the one that is best known."""
    kept: list[Solution] = []
    for one in sorted(found, key=lambda s: (s.cost_s, s.harm, s.gap)):
        if (
            not kept
            or one.harm < min(s.harm for s in kept)
            or (one is reference and one.mix not in [s.mix for s in kept])
        ):
            kept.append(one)
    return kept
