"""Candidates for the next trial: a small space's mixes, or a large one's solved ones and the best mixes' neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from autoprec.planner.lagrange import cheapest
from autoprec.tune.sampling.encoding import Encoding
from autoprec.tune.sampling.history import Mix
from autoprec.tune.sampling.surrogate import Model

#: Spaces up to this size are listed in full.
_MAX_LISTED = 4096
#: Draws of the models that the solver answers, beside their means.
_DRAWS = 8
#: For each change of one group, so many of a second one; with few groups all.
_SECOND_CHANGES, _FEW_GROUPS = 3, 10
_SEEDS = 3


def candidates(
    encoding: Encoding, cost: Model, gap: Model, best: Sequence[Mix], budgets: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Mixes worth a look, ``(n, G)``, each once.

    Args:
        encoding: of the mixes.
        cost, gap: what is believed.
        best: the best mixes so far, whose neighbours are tried.
        budgets: harms that the solver is asked for.
        rng: of all draws.
    """
    if encoding.size <= _MAX_LISTED:
        return np.array(list(product(*map(range, encoding.sizes))), dtype=int).reshape(encoding.size, -1)
    found = _solved(encoding, cost, gap, budgets, rng)
    for mix in best[:_SEEDS]:
        found |= set(_neighbours(mix, encoding.sizes, rng))
    return np.array(sorted(found), dtype=int)


def _solved(encoding: Encoding, cost: Model, gap: Model, budgets: np.ndarray, rng: np.random.Generator) -> set[Mix]:
    """The cheapest mixes for each budget, at what is expected and at draws from what is believed."""
    harms = np.maximum(gap.tables(_DRAWS + 1, rng), 0.0)
    answer = cheapest(encoding.arrays, budgets[None], harms, cost.tables(_DRAWS + 1, rng))
    return {tuple(mix) for mix in answer.choice.reshape(-1, len(encoding.sizes)).tolist()}


def _neighbours(mix: Mix, sizes: Sequence[int], rng: np.random.Generator) -> Iterator[Mix]:
    """All mixes that differ in one group, and of each some that differ in two."""
    for g, k in _changes(mix, sizes):
        one = (*mix[:g], k, *mix[g + 1 :])
        yield one
        second = [(h, j) for h, j in _changes(mix, sizes) if h > g]
        if len(sizes) > _FEW_GROUPS and second:
            second = [second[i] for i in rng.integers(len(second), size=_SECOND_CHANGES)]
        for h, j in second:
            yield (*one[:h], j, *one[h + 1 :])


def _changes(mix: Mix, sizes: Sequence[int]) -> list[tuple[int, int]]:
    return [(g, k) for g, size in enumerate(sizes) for k in range(size) if k != mix[g]]
