"""The cheapest kind of storage of each group where the edges form a forest, for many costs at once.

Dimensions: N cost tables, G groups, K kinds of storage.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import minimum_spanning_tree

from autoprec.planner.arrays import Arrays


@dataclass(frozen=True, eq=False)
class Tree:
    """The heaviest edges that form a forest.

    Args:
        order: groups, each after its parent, ``[G]``.
        parent: of each group, ``[G]``; -1 of a root.
        cast: seconds by the kinds at the group and at its parent, ``[K, K]`` each; None of a root.
        outside: numbers of the pairs that are left out.
    """

    order: list[int]
    parent: list[int]
    cast: list[np.ndarray | None]
    outside: list[int]

    def cheapest(self, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The cheapest storage of each group, and what all of them cost with the forest's casts.

        Args:
            table: cost of each group in each storage, ``[G, K, N]``; infinite where it can't have it.

        Returns:
            storages ``[G, N]`` and costs ``[N]``.
        """
        total = table.copy()
        for g in reversed(self.order):
            if (cast := self.cast[g]) is not None:
                total[self.parent[g]] += (total[g][:, None] + cast[:, :, None]).min(axis=0)
        state = np.empty((len(table), table.shape[2]), dtype=np.intp)
        value = np.zeros(table.shape[2])
        for g in self.order:
            if (cast := self.cast[g]) is not None:
                state[g] = (total[g] + cast[:, state[self.parent[g]]]).argmin(axis=0)
            else:
                state[g] = total[g].argmin(axis=0)
                value += total[g].min(axis=0)
        return state, value


def heaviest_tree(arrays: Arrays) -> Tree:
    """The forest of the edges whose casts cost most."""
    groups = len(arrays.harm)
    a, b = arrays.edges.T
    inside = minimum_spanning_tree(coo_array((-arrays.cast.sum(axis=1), (a, b)), shape=(groups, groups))).tocoo()
    cast_of = {tuple(pair): cost for pair, cost in zip(arrays.edges.tolist(), arrays.pair_cost, strict=True)}
    chosen = set(zip(inside.row.tolist(), inside.col.tolist(), strict=True))
    near: dict[int, list[int]] = defaultdict(list)
    for u, v in sorted(chosen):
        near[u].append(v)
        near[v].append(u)
    order: list[int] = []
    parent = [-1] * groups
    seen = [False] * groups
    for root in range(groups):
        waiting = [] if seen[root] else [root]
        while waiting:
            g = waiting.pop()
            seen[g] = True
            order.append(g)
            for other in near[g]:
                if not seen[other]:
                    parent[other] = g
                    waiting.append(other)
    return Tree(
        order=order,
        parent=parent,
        cast=[None if p < 0 else cast_of[min(g, p), max(g, p)] for g, p in enumerate(parent)],
        outside=[e for e, pair in enumerate(cast_of) if pair not in chosen],
    )
