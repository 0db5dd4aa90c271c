"""Choices that can be in no good mix, whatever the other groups take."""

from __future__ import annotations

import numpy as np

from autoprec.planner.arrays import Arrays, encode
from autoprec.planner.problem import Option, Problem


def never_helps(problem: Problem, margin: float = 0.05) -> dict[tuple[str, str], str]:
    """Choices that another choice of the same group beats beside any neighbours, in time and in harm.

    Args:
        problem: harms, costs and casts.
        margin: a choice stays if it would win at this share less than it is priced.

    Returns:
        ``(group, format)`` → why.  A group's reference is never among them.
    """
    arrays = encode(problem)
    extra = _worst_casts(arrays)
    found = {}
    for g, group in enumerate(problem.groups):
        kinds = arrays.storage[g].tolist()
        for k, option in enumerate(group.options[1:], start=1):
            at_best_s = option.cost_s - margin * abs(option.cost_s)
            for j, other in enumerate(group.options):
                casts_s = float(extra[g, kinds[j], kinds[k]])
                if j != k and other.harm <= option.harm and other.cost_s + casts_s < at_best_s:
                    found[group.name, option.format] = _say(option, other, casts_s)
                    break
    return found


def _worst_casts(arrays: Arrays) -> np.ndarray:
    """What one kind of storage costs at most more than another beside any neighbours, ``[G, K, K]``."""
    num_kinds = arrays.labels.shape[1]
    found = np.zeros((len(arrays.storage), num_kinds, num_kinds))
    for (a, b), cost in zip(arrays.edges.tolist(), arrays.pair_cost, strict=True):
        for group, neighbour in ((a, b), (b, a)):
            beside = cost[:, np.unique(arrays.storage[neighbour][arrays.allowed[neighbour]])]
            found[group] += (beside[:, None] - beside[None]).max(axis=2)
    return found


def _say(option: Option, other: Option, casts_s: float) -> str:
    casts = f" and at most {casts_s:.3g} s of casts" if casts_s > 0 else ""
    return (
        f"{option.format} takes {option.cost_s:.3g} s a step and {other.format} {other.cost_s:.3g} s{casts}, and its "
        f"harm of {option.harm:.3g} isn't below {other.harm:.3g}"
    )
