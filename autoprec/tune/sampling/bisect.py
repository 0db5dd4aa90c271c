"""The first trials: halve the solved front until the last mix that keeps the limit is found.

The front's order is right more often than its scale, so a handful of trials finds where the limit cuts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from autoprec.planner.lagrange import cheapest
from autoprec.tune.sampling.encoding import Encoding
from autoprec.tune.sampling.history import Mix

_BUDGETS = 40


def front_mixes(encoding: Encoding) -> list[Mix]:
    """Mixes that are cheapest for their harm, the cheapest first."""
    arrays = encoding.arrays
    harm = np.where(arrays.allowed, arrays.harm, np.inf)
    extra = np.where(arrays.allowed, arrays.harm - harm.min(axis=1, keepdims=True), 0.0)
    if not (extra > 0).any():
        return []
    steps = np.geomspace(extra[extra > 0].min(), extra.max(axis=1).sum(), _BUDGETS)
    budgets = arrays.least_harm + np.concatenate([[0.0], steps])
    found = {tuple(mix) for mix in cheapest(arrays, budgets[None]).choice[0].tolist()}
    mixes = np.array(sorted(found), dtype=int)
    onehot = encoding.onehot(mixes)
    cost = onehot @ encoding.cost + encoding.base_cost(mixes)
    harms = onehot @ encoding.harm
    front: list[Mix] = []
    least = np.inf
    for k in np.lexsort((harms, cost)):
        if harms[k] < least:
            least = harms[k]
            front.append(tuple(mixes[k].tolist()))
    return front


def next_on_front(front: Sequence[Mix], outcome: Mapping[Mix, bool | None]) -> Mix | None:
    """The mix that tells most about where the limit cuts the front.

    Args:
        front: mixes from the best by the objective, which break the limit first, to the safest.
        outcome: of measured mixes, whether they keep the limit; None of one that is being measured.

    Returns:
        None when the cut is found.
    """
    known = [(k, outcome[mix]) for k, mix in enumerate(front) if mix in outcome]
    low = max((k for k, kept in known if kept is False), default=-1)
    high = min((k for k, kept in known if kept is True), default=len(front))
    stops = [low, *(k for k, kept in known if kept is None and low < k < high), high]
    spans = [(b - a, a) for a, b in pairwise(stops)]
    span, start = max(spans, key=lambda pair: pair[0])
    return front[start + span // 2] if span > 1 else None
