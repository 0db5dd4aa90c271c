"""The cheapest mix within a harm budget, by a price on harm: fast for thousands of groups and hundreds of budgets.

For a price λ the cheapest mix of ``cost + λ·harm`` is found exactly where the edges form a tree, by dynamic programming
over the groups' kinds of storage.  Of other edges the heaviest that form a tree count exactly, and the rest by what the
mix before had at their other end.  λ is searched on a grid that narrows, and swaps of single groups spend what is left
of the budget.  The same prices give a lower bound, so that every answer says how far it can be from the best one.

Dimensions: Q questions (harms and costs of their own), B budgets a question, W prices a question, N = Q·W mixes,
G groups, F options, K kinds of storage.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoprec.planner.arrays import BUDGET_TOLERANCE, Arrays
from autoprec.planner.swaps import Questions, swap_groups
from autoprec.planner.tree import heaviest_tree

_FIRST_PRICES, _PRICES, _ROUNDS = 48, 8, 3
#: Times that edges outside the tree are priced by the mix before.
_REPRICED = 1
#: A saving below this share of all, and a harm below this share of the budget, decide nothing.
_NEGLIGIBLE = 1e-6


@dataclass(frozen=True, slots=True)
class Cheapest:
    """The answers.

    Args:
        choice: number of each group's option, ``[Q, B, G]``; the least harmful mix where none is within the budget.
        cost: seconds with casts, without what is fixed, ``[Q, B]``.
        bound: no mix within the budget costs less, ``[Q, B]``.
    """

    choice: np.ndarray
    cost: np.ndarray
    bound: np.ndarray


def cheapest(
    arrays: Arrays, budgets: np.ndarray, harms: np.ndarray | None = None, costs: np.ndarray | None = None
) -> Cheapest:
    """The cheapest mix that was found within each budget.

    Args:
        arrays: the problem.
        budgets: largest harms, ``[Q, B]`` or ``[1, B]``.
        harms, costs: of the options, ``[Q, G, F]`` or ``[1, G, F]``; the problem's own by default.
    """
    harms = arrays.harm[None] if harms is None else harms
    costs = arrays.cost[None] if costs is None else costs
    count = max(len(budgets), len(harms), len(costs))
    limit = budgets + BUDGET_TOLERANCE * np.abs(budgets)
    questions = Questions(
        arrays=arrays,
        limit=np.broadcast_to(limit, (count, limit.shape[1])),
        harms=np.broadcast_to(harms, (count, *harms.shape[1:])),
        costs=np.broadcast_to(costs, (count, *costs.shape[1:])),
    )
    search = _Search(questions)
    least, most = _price_range(questions)
    prices = np.geomspace(least, most, _FIRST_PRICES, axis=1)
    prices[:, 0] = 0.0  # where the budget doesn't bind
    for _ in range(_ROUNDS):
        low, high = search.narrow(prices, least)
        prices = np.geomspace(low, high, _PRICES, axis=2).reshape(count, -1)
    search.narrow(prices, least)
    choice, cost = swap_groups(questions, search.choice, search.cost)
    return Cheapest(choice, cost, np.minimum(search.bound, cost))


def _price_range(questions: Questions) -> tuple[np.ndarray, np.ndarray]:
    """Prices at which any saving is worth any harm, and at which none is, ``[Q]`` each."""
    allowed, costs = questions.arrays.allowed, questions.costs
    spread = np.where(allowed, costs, -np.inf).max((1, 2)) - np.where(allowed, costs, np.inf).min((1, 2))
    saving = np.maximum(spread + questions.arrays.cast.sum(), np.finfo(float).tiny)
    harm = np.where(allowed, questions.harms, np.inf)
    extra = np.where(allowed, harm - harm.min(axis=2, keepdims=True), 0.0)
    largest = extra.max((1, 2))
    smallest = np.where(extra > 0, extra, np.inf).min((1, 2))
    budget = questions.limit.min(axis=1)
    smallest = np.maximum(smallest, _NEGLIGIBLE * np.where(budget > 0, budget, largest))
    harmless = largest == 0
    smallest[harmless] = largest[harmless] = 1.0
    return _NEGLIGIBLE * saving / np.maximum(largest, smallest), 2 * saving / smallest


class _Search:
    """The best mix of each budget so far, and the best bound."""

    def __init__(self, questions: Questions) -> None:
        self._questions, self._tree = questions, heaviest_tree(questions.arrays)
        mix = questions.least_harmful()
        num_budgets = questions.limit.shape[1]
        self.choice = np.repeat(mix, num_budgets, axis=1)
        self.cost = np.repeat(questions.cost(mix), num_budgets, axis=1)
        self.bound = np.full(questions.limit.shape, -np.inf)

    def narrow(self, prices: np.ndarray, least: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Try the prices, ``[Q, W]``; gives the two, at least ``least``, between which each budget begins to hold."""
        fits = self._try(prices)[:, None] <= self._questions.limit[:, :, None]
        each = np.broadcast_to(prices[:, None], fits.shape)
        high = np.where(fits, each, prices.max(axis=1)[:, None, None]).min(axis=2)
        low = np.where(~fits & (each < high[:, :, None]), each, 0.0).max(axis=2)
        least = least[:, None]
        return np.maximum(low, least), np.maximum(high, least)

    def _try(self, prices: np.ndarray) -> np.ndarray:
        """Keep what is better than before; gives the harm at each price, ``[Q, W]``."""
        best, option = self._by_storage(prices)
        states, value = self._tree.cheapest(best)
        bound = value.reshape(*prices.shape, 1) - prices[:, :, None] * self._questions.limit[:, None]
        self.bound = np.maximum(self.bound, bound.max(axis=1))
        harm = self._keep(_options(option, states, prices.shape))
        for _ in range(_REPRICED if self._tree.outside else 0):
            states, _ = self._tree.cheapest(best + self._outside(states))
            harm = self._keep(_options(option, states, prices.shape))
        return harm

    def _by_storage(self, prices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The lowest ``cost + price · harm`` of each storage and its option, ``[G, K, N]`` each."""
        arrays = self._questions.arrays
        best = np.full((len(arrays.harm), arrays.labels.shape[1], prices.size), np.inf)
        option = np.zeros(best.shape, dtype=np.int16)
        for f in range(arrays.harm.shape[1]):
            groups = np.nonzero(arrays.allowed[:, f])[0]
            stored = arrays.storage[groups, f]
            costs, harms = (
                numbers[:, groups, f].T[:, :, None] for numbers in (self._questions.costs, self._questions.harms)
            )
            priced = (costs + prices * harms).reshape(len(groups), -1)
            before = best[groups, stored]
            best[groups, stored] = np.minimum(priced, before)
            option[groups, stored] = np.where(priced < before, f, option[groups, stored])
        return best, option

    def _outside(self, states: np.ndarray) -> np.ndarray:
        """Half of what each edge outside the tree costs either end by the other's storage, ``[G, K, N]``."""
        arrays = self._questions.arrays
        extra = np.zeros((len(states), arrays.labels.shape[1], states.shape[1]))
        for e in self._tree.outside:
            a, b = arrays.edges[e]
            half = arrays.pair_cost[e] / 2
            extra[a] += half[:, states[b]]
            extra[b] += half[:, states[a]]
        return extra

    def _keep(self, choices: np.ndarray) -> np.ndarray:
        """Take the mixes, ``[Q, W, G]``, that are within a budget and cheaper; gives the harm of all, ``[Q, W]``."""
        harm, cost = self._questions.harm(choices), self._questions.cost(choices)
        fits = harm[:, None] <= self._questions.limit[:, :, None]
        costs = np.where(fits, cost[:, None], np.inf)
        best = costs.argmin(axis=2)
        lowest = costs.min(axis=2)
        better = lowest < self.cost
        self.cost[better] = lowest[better]
        self.choice[better] = choices[np.nonzero(better)[0], best[better]]
        return harm


def _options(option: np.ndarray, states: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Number of the option of each group, ``[Q, W, G]``, for its storage, ``[G, N]``."""
    return np.take_along_axis(option, states[:, None], 1)[:, 0].T.reshape(*shape, -1)
