"""Mixes as numbers: a categorical parameter per group, and what the planner says of each choice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from autoprec.errors import UsageError
from autoprec.formats import FORMATS
from autoprec.planner.arrays import Arrays, encode
from autoprec.planner.problem import ANY_STORAGE, Edge, Option, Problem, ProblemGroup

Numbers = Mapping[str, Mapping[Any, float]]

#: Harm of a choice that gives no finite numbers, in units of the largest finite one.
_TAKEN_AWAY = 10.0


@dataclass(frozen=True, eq=False)
class Encoding:
    """Groups and choices in the study's order.

    Dimensions: G groups, F choices of the group that has most, K choices of all groups together, n mixes.

    Args:
        problem: harms, and costs in units of the reference's.
        choices: group → values of its parameter.
    """

    problem: Problem
    choices: dict[str, tuple[Any, ...]]

    @cached_property
    def arrays(self) -> Arrays:
        return encode(self.problem)

    @property
    def sizes(self) -> list[int]:
        return [len(values) for values in self.choices.values()]

    @property
    def size(self) -> int:
        """Number of mixes."""
        return math.prod(self.sizes)

    @cached_property
    def harm(self) -> np.ndarray:
        """Of every choice, ``(K,)``."""
        return self.arrays.harm[self.arrays.allowed]

    @cached_property
    def cost(self) -> np.ndarray:
        """Of every choice, ``(K,)``."""
        return self.arrays.cost[self.arrays.allowed]

    @cached_property
    def kinds(self) -> np.ndarray:
        """A number for each choice's value, the same in all groups, ``(K,)``."""
        names = [option.format for group in self.problem.groups for option in group.options]
        number = {name: k for k, name in enumerate(dict.fromkeys(names))}
        return np.array([number[name] for name in names])

    def indices(self, params: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Numbers of a mix's choices; None if the parameters are another study's."""
        try:
            return tuple(values.index(params[name]) for name, values in self.choices.items())
        except (KeyError, ValueError):
            return None

    def params(self, mix: Sequence[int]) -> dict[str, Any]:
        return {name: values[k] for (name, values), k in zip(self.choices.items(), mix, strict=True)}

    def onehot(self, mixes: np.ndarray) -> np.ndarray:
        """``(n, G)`` numbers as ``(n, K)`` zeros and ones."""
        starts = np.cumsum([0, *self.sizes[:-1]])
        found = np.zeros((len(mixes), len(self.harm)))
        found[np.arange(len(mixes))[:, None], starts + mixes] = 1.0
        return found

    def table(self, columns: np.ndarray) -> np.ndarray:
        """``(…, K)`` numbers as ``(…, G, F)``, zero where a group has fewer choices."""
        found = np.zeros((*columns.shape[:-1], *self.arrays.allowed.shape))
        found[..., self.arrays.allowed] = columns
        return found

    def base_cost(self, mixes: np.ndarray) -> np.ndarray:
        """What the choices alone don't say of the cost: the fixed part and the casts, ``(n,)``."""
        return self.problem.fixed_s + self.arrays.cast_seconds(mixes)


def encode_numbers(
    harms: Numbers, costs: Numbers, *, casts: Sequence[tuple[str, str, float]] = (), fixed: float = 1.0
) -> Encoding:
    """From plain numbers.

    Args:
        harms, costs: group → choice → number; costs in units of the reference's whole cost.
        casts: ``(group, group, cost)`` where the two store their numbers differently.
        fixed: what no choice changes; 1 where costs are changes against the reference.

    Raises:
        UsageError: harms and costs name different choices.
    """
    groups = []
    for name, by_choice in costs.items():
        if name not in harms or set(harms[name]) != set(by_choice):
            raise UsageError(
                f"group {name!r}: harms for {sorted(map(str, harms.get(name, ())))}, costs for "
                f"{sorted(map(str, by_choice))}; both need one number for each choice"
            )
        options = tuple(
            Option(format=str(choice), harm=float(harms[name][choice]), cost_s=float(cost), storage=_storage(choice))
            for choice, cost in by_choice.items()
        )
        groups.append(ProblemGroup(name=name, options=options))
    edges = tuple(Edge(a=a, b=b, cast_s=cost) for a, b, cost in casts)
    problem = Problem(groups=tuple(groups), edges=edges, fixed_s=fixed)
    return Encoding(problem, {name: tuple(by_choice) for name, by_choice in costs.items()})


def encode_problem(problem: Problem, choices: Mapping[str, Sequence[str]]) -> Encoding:
    """From a planner's problem, for a study whose parameters are ``choices``; costs become shares of the reference's.

    A choice that the problem took away, since it gives no finite numbers, counts as one that does much harm and saves
    nothing.

    Raises:
        UsageError: the problem lacks a group, or its reference costs nothing.
    """
    by_name = {group.name: group for group in problem.groups}
    missing = sorted(choices.keys() - by_name.keys())
    if missing:
        raise UsageError(f"the problem has no group {missing[0]!r}; it has {', '.join(by_name)[:300]}")
    unit = problem.cost_s({group.name: group.options[0].format for group in problem.groups})
    if not unit > 0:
        raise UsageError(f"the problem's reference takes {unit} seconds; a step must take some time")
    worst = _TAKEN_AWAY * max((o.harm for group in problem.groups for o in group.options), default=0.0)

    def option(group: ProblemGroup, value: str) -> Option:
        known = next((o for o in group.options if o.format == value), None)
        found = known or replace(group.options[0], format=value, harm=worst or 1.0)
        return replace(found, cost_s=found.cost_s / unit)

    groups = tuple(
        ProblemGroup(name=name, options=tuple(option(by_name[name], str(value)) for value in choices[name]))
        for name in choices
    )
    left = [group.options[0].cost_s for group in problem.groups if group.name not in choices]
    edges = tuple(replace(e, cast_s=e.cast_s / unit) for e in problem.edges if {e.a, e.b} <= choices.keys())
    scaled = replace(problem, groups=groups, edges=edges, fixed_s=(problem.fixed_s + sum(left)) / unit)
    return Encoding(scaled, {name: tuple(values) for name, values in choices.items()})


def _storage(choice: Any) -> str:
    """Formats below 16 bit give 16-bit results."""
    if choice not in FORMATS:
        return ANY_STORAGE
    return "fp32" if FORMATS[choice].bits >= 32 else "fp16" if choice == "fp16" else "bf16"
