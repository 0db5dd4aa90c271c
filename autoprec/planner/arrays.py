"""A planning problem as arrays, for the solvers.

Dimensions: G groups, F options of the group that has most (shorter groups are padded), E pairs of groups with edges
between them, K kinds of storage: what options have in common whose casts cost the same, and kind 0 for any storage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoprec.errors import UsageError
from autoprec.planner.problem import ANY_STORAGE, Option, Problem

#: A budget is kept up to this share of itself: solvers work in floating point.
BUDGET_TOLERANCE = 1e-6

_ANY = (ANY_STORAGE, ANY_STORAGE)


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrays:
    """A problem, encoded.

    Args:
        problem: what was encoded.
        allowed: the options that exist and that no pin forbids, ``[G, F]`` booleans.
        harm, cost: of each option, ``[G, F]``; costs in seconds.
        storage: kind of each option, ``[G, F]``.
        labels: number of each kind's format at edges and at firm edges, ``[2, K]``; 0 for any.
        edges: the two groups of each pair, ``[E, 2]``.
        cast: seconds of the pair's edges and firm edges, ``[E, 2]``.
    """

    problem: Problem
    allowed: np.ndarray
    harm: np.ndarray
    cost: np.ndarray
    storage: np.ndarray
    labels: np.ndarray
    edges: np.ndarray
    cast: np.ndarray

    @cached_property
    def differs(self) -> np.ndarray:
        """1 where two kinds of storage take a cast, at edges and at firm edges, ``[2, K, K]``."""
        a, b = self.labels[:, :, None], self.labels[:, None]
        return ((a != b) & (a > 0) & (b > 0)).astype(float)

    @cached_property
    def pair_cost(self) -> np.ndarray:
        """Seconds of each pair's casts by the kinds at its ends, ``[E, K, K]``."""
        return np.tensordot(self.cast, self.differs, axes=1)

    @cached_property
    def reference(self) -> np.ndarray:
        """The first allowed option of each group, ``[G]``."""
        return self.allowed.argmax(axis=1)

    @cached_property
    def least_harm(self) -> float:
        """No mix has less."""
        return float(np.where(self.allowed, self.harm, np.inf).min(axis=1).sum())

    def mix(self, choice: np.ndarray) -> dict[str, str]:
        """Group → format of the options of these numbers, ``[G]``."""
        groups = self.problem.groups
        return {group.name: group.options[k].format for group, k in zip(groups, choice.tolist(), strict=True)}

    def cast_seconds(self, choices: np.ndarray) -> np.ndarray:
        """Seconds of the casts of many mixes, ``[N, G] → [N]``."""
        stored = self.storage[np.arange(len(self.storage)), choices]
        a, b = (stored[:, ends] for ends in self.edges.T)
        usual, firm = self.differs
        return usual[a, b] @ self.cast[:, 0] + firm[a, b] @ self.cast[:, 1]


def encode(problem: Problem, pins: Mapping[str, str] | None = None) -> Arrays:
    """The problem as arrays.

    Args:
        problem: to solve.
        pins: group → the only format it may take.

    Raises:
        UsageError: a pin names a group or a format that the problem hasn't.
    """
    groups = problem.groups
    pairs = {_stored(option) for group in groups for option in group.options} - {_ANY}
    kinds = {pair: k for k, pair in enumerate([_ANY, *sorted(pairs)])}
    names = {name: k for k, name in enumerate(sorted({ANY_STORAGE, *(name for pair in pairs for name in pair)}))}
    shape = (len(groups), max(len(group.options) for group in groups))
    harm, cost, storage = np.zeros(shape), np.zeros(shape), np.zeros(shape, dtype=np.intp)
    exists = np.zeros(shape, dtype=bool)
    for g, group in enumerate(groups):
        count = len(group.options)
        exists[g, :count] = True
        harm[g, :count] = [option.harm for option in group.options]
        cost[g, :count] = [option.cost_s for option in group.options]
        storage[g, :count] = [kinds[_stored(option)] for option in group.options]
    edges, cast = _edges(problem)
    return Arrays(
        problem=problem,
        allowed=exists & _pinned(problem, pins or {}, shape),
        harm=harm,
        cost=cost,
        storage=storage,
        labels=np.array([[names[name] for name in pair] for pair in kinds]).T,
        edges=edges,
        cast=cast,
    )


def _pinned(problem: Problem, pins: Mapping[str, str], shape: tuple[int, int]) -> np.ndarray:
    places = {group.name: g for g, group in enumerate(problem.groups)}
    allowed = np.ones(shape, dtype=bool)
    for name, format_name in pins.items():
        if name not in places:
            known = ", ".join(places)
            raise UsageError(f"pin {name}={format_name}: the problem has no group {name!r}; it has {known[:300]}")
        group = problem.groups[places[name]]
        allowed[places[name]] = False
        allowed[places[name], group.options.index(group.option(format_name))] = True
    return allowed


def _stored(option: Option) -> tuple[str, str]:
    return option.stored(firm=False), option.stored(firm=True)


def _edges(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of groups and seconds; parallel edges are added up, and an edge inside a group never costs anything."""
    places = {group.name: g for g, group in enumerate(problem.groups)}
    seconds: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for edge in problem.edges:
        a, b = sorted((places[edge.a], places[edge.b]))
        if a != b and edge.cast_s > 0:
            seconds[a, b][edge.firm] += edge.cast_s
    pairs, cast = np.array(list(seconds), dtype=np.intp), np.array(list(seconds.values()), dtype=float)
    return pairs.reshape(-1, 2), cast.reshape(-1, 2)
