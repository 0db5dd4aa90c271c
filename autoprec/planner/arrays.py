"""A planning problem as arrays, for the solvers.

Dimensions: G groups, F options of the group that has most (shorter groups are padded), E edges, K storage formats.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoprec.errors import UsageError
from autoprec.planner.problem import ANY_STORAGE, Problem

#: A budget is kept up to this share of itself: solvers work in floating point.
BUDGET_TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrays:
    """A problem, encoded.

    Args:
        problem: what was encoded.
        allowed: the options that exist and that no pin forbids, ``[G, F]`` booleans.
        harm, cost: of each option, ``[G, F]``; costs in seconds.
        storage: of each option, ``[G, F]``: 1 to K, or 0 for any.
        num_storages: K.
        edges: the two groups of each edge, ``[E, 2]``, each pair once.
        cast: its seconds, ``[E]``, above 0.
    """

    problem: Problem
    allowed: np.ndarray
    harm: np.ndarray
    cost: np.ndarray
    storage: np.ndarray
    num_storages: int
    edges: np.ndarray
    cast: np.ndarray

    @cached_property
    def differs(self) -> np.ndarray:
        """1 where two storages take a cast, ``[K + 1, K + 1]``."""
        found = 1.0 - np.eye(self.num_storages + 1)
        found[0], found[:, 0] = 0.0, 0.0
        return found

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
        a, b = self.edges.T
        return self.differs[stored[:, a], stored[:, b]] @ self.cast


def encode(problem: Problem, pins: Mapping[str, str] | None = None) -> Arrays:
    """The problem as arrays.

    Args:
        problem: to solve.
        pins: group → the only format it may take.

    Raises:
        UsageError: a pin names a group or a format that the problem hasn't.
    """
    groups = problem.groups
    storages = sorted({option.storage for group in groups for option in group.options} - {ANY_STORAGE})
    number = {ANY_STORAGE: 0} | {name: k + 1 for k, name in enumerate(storages)}
    shape = (len(groups), max(len(group.options) for group in groups))
    harm, cost, storage = np.zeros(shape), np.zeros(shape), np.zeros(shape, dtype=np.intp)
    exists = np.zeros(shape, dtype=bool)
    for g, group in enumerate(groups):
        count = len(group.options)
        exists[g, :count] = True
        harm[g, :count] = [option.harm for option in group.options]
        cost[g, :count] = [option.cost_s for option in group.options]
        storage[g, :count] = [number[option.storage] for option in group.options]
    edges, cast = _edges(problem)
    return Arrays(
        problem=problem,
        allowed=exists & _pinned(problem, pins or {}, shape),
        harm=harm,
        cost=cost,
        storage=storage,
        num_storages=len(storages),
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


def _edges(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of groups and seconds; parallel edges are added up, and an edge inside a group never costs anything."""
    places = {group.name: g for g, group in enumerate(problem.groups)}
    seconds: dict[tuple[int, int], float] = defaultdict(float)
    for edge in problem.edges:
        a, b = sorted((places[edge.a], places[edge.b]))
        if a != b and edge.cast_s > 0:
            seconds[a, b] += edge.cast_s
    return np.array(list(seconds), dtype=np.intp).reshape(-1, 2), np.array(list(seconds.values()), dtype=float)
