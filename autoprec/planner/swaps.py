"""Better mixes by changing one group at a time, for many budgets at once.

Dimensions: Q questions, M mixes of each, B budgets of each, R rows of mixes, G groups, F options, K kinds of storage.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoprec.planner.arrays import Arrays


@dataclass(frozen=True, kw_only=True, eq=False)
class Questions:
    """One problem with several sets of numbers.

    Args:
        arrays: groups, options and edges.
        limit: largest harms, ``[Q, B]``.
        harms, costs: of the options, ``[Q, G, F]``.
    """

    arrays: Arrays
    limit: np.ndarray
    harms: np.ndarray
    costs: np.ndarray

    def harm(self, mixes: np.ndarray) -> np.ndarray:
        """Harm of each question's mixes, ``[Q, M, G] → [Q, M]``."""
        return np.take_along_axis(self.harms[:, None], mixes[..., None], 3)[..., 0].sum(axis=2)

    def cost(self, mixes: np.ndarray) -> np.ndarray:
        """Seconds of each question's mixes with their casts, ``[Q, M, G] → [Q, M]``."""
        own = np.take_along_axis(self.costs[:, None], mixes[..., None], 3)[..., 0].sum(axis=2)
        return own + self.arrays.cast_seconds(mixes.reshape(-1, mixes.shape[2])).reshape(own.shape)

    def least_harmful(self) -> np.ndarray:
        """The mix of least harm, of equals the cheapest, ``[Q, 1, G]``."""
        harm = np.where(self.arrays.allowed, self.harms, np.inf)
        least = harm <= harm.min(axis=2, keepdims=True)
        return np.where(least, self.costs, np.inf).argmin(axis=2)[:, None]


def swap_groups(questions: Questions, mixes: np.ndarray, cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Change the group that saves most and stays within the budget, until none does.

    Args:
        questions: what is asked.
        mixes: one for each budget, ``[Q, B, G]``; one that breaks its budget changes only to one of no more harm.
        cost: of these mixes, ``[Q, B]``.

    Returns:
        mixes and costs that are no worse.
    """
    num_groups, num_options = questions.arrays.harm.shape
    groups = np.arange(num_groups)
    question = np.repeat(np.arange(len(mixes)), mixes.shape[1])
    choice, limit, seconds = mixes.reshape(-1, num_groups).copy(), questions.limit.reshape(-1), cost.reshape(-1).copy()
    active = np.arange(len(choice))
    # Each change lowers the cost, so that this ends by itself; few changes are left after a search by prices.
    for _ in range(2 * num_groups):
        costs, harms, now = questions.costs[question[active]], questions.harms[question[active]], choice[active]
        rows = np.arange(len(active))[:, None]
        harm = harms[rows, groups, now]
        change = costs - costs[rows, groups, now][:, :, None] + _cast_change(questions.arrays, now)
        slack = np.maximum(limit[active] - harm.sum(axis=1), 0.0)
        fits = questions.arrays.allowed & (harms - harm[:, :, None] <= slack[:, None, None])
        change = np.where(fits, change, np.inf).reshape(len(active), -1)
        best = change.argmin(axis=1)
        saved = change.min(axis=1)
        better = saved < -1e-12 * np.abs(seconds[active])
        if not better.any():
            break
        active, best = active[better], best[better]
        choice[active, best // num_options] = best % num_options
        seconds[active] += saved[better]
    return choice.reshape(mixes.shape), seconds.reshape(cost.shape)


def _cast_change(arrays: Arrays, choices: np.ndarray) -> np.ndarray:
    """Change of the casts' seconds when one group alone takes each of its options, ``[R, G] → [R, G, F]``."""
    groups = np.arange(len(arrays.storage))
    stored = arrays.storage[groups, choices]
    a, b = arrays.edges.T
    by_storage = np.zeros((len(groups), len(choices), arrays.labels.shape[1]))
    for differ, cast in zip(arrays.differs, arrays.cast.T[:, :, None, None], strict=True):
        np.add.at(by_storage, a, cast * differ[stored[:, b].T])
        np.add.at(by_storage, b, cast * differ[stored[:, a].T])
    now = by_storage[groups[:, None], np.arange(len(choices)), stored.T]
    return (by_storage[groups[:, None], :, arrays.storage] - now[:, None]).transpose(2, 0, 1)
