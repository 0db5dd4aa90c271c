"""The cheapest mix within a harm budget as a mixed-integer program, with a proof of how good it is.

Each edge has one continuous variable, ``y ≥ Σ x of a's options stored as k - Σ x of b's options stored as k or any``
for each storage k: it is 1 where the two ends differ.  A variable for each pair of storages would give the same answer
several times as slowly.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, diags_array, eye_array, hstack, vstack

from autoprec.planner.arrays import Arrays

log = logging.getLogger(__name__)

_STDOUT = 1
_redirecting = threading.Lock()


@dataclass(frozen=True, slots=True)
class Packed:
    """What the solver found.

    Args:
        choice: number of each group's option, ``[G]``; None where it found nothing in time.
        bound: no mix within the budget costs less, in seconds without what is fixed.
    """

    choice: np.ndarray | None
    bound: float


def pack(arrays: Arrays, budget: float, *, rel_gap: float, time_limit_s: float) -> Packed:
    """Solve for one budget.

    Args:
        arrays: the problem.
        budget: largest harm, at least the least possible.
        rel_gap: stop when no mix can be cheaper by more than this share of the step's seconds, the fixed ones included.
        time_limit_s: stop by then; the solver may take a third longer.
    """
    group, option = np.nonzero(arrays.allowed)
    harm, cost = arrays.harm[group, option], arrays.cost[group, option]
    lowest = np.where(arrays.allowed, arrays.cost, np.inf).min(axis=1)
    # The solver's tolerances are absolute, so that costs are given in units of the step, and the gap is relative to the
    # objective, so that what can't be saved is part of it.
    unit = np.abs(lowest).sum() + abs(arrays.problem.fixed_s) or 1.0
    constant = (lowest.sum() + arrays.problem.fixed_s) / unit
    objective = (cost - lowest[group]) / unit + np.where(group == 0, constant, 0.0)
    edges = [(firm, np.nonzero(cast)[0]) for firm, cast in enumerate(arrays.cast.T)]
    casts = np.concatenate([arrays.cast[pairs, firm] for firm, pairs in edges])
    objective = np.concatenate([objective, casts / unit])
    with _quiet_stdout():
        found = milp(
            objective,
            integrality=np.concatenate([np.ones(len(group)), np.zeros(len(casts))]),
            bounds=Bounds(0, 1),
            constraints=[
                *_choice_and_budget(arrays, group, harm, budget, len(casts)),
                *_casts(arrays, group, option, edges),
            ],
            options={"mip_rel_gap": rel_gap, "time_limit": time_limit_s},
        )
    lowest_possible = -math.inf if found.mip_dual_bound is None else float(found.mip_dual_bound * unit)
    bound = lowest_possible - arrays.problem.fixed_s
    if found.x is None:
        return Packed(None, bound)
    choice = np.zeros(len(arrays.harm), dtype=np.intp)
    chosen = found.x[: len(group)] > 0.5
    choice[group[chosen]] = option[chosen]
    return Packed(choice, bound)


def _choice_and_budget(
    arrays: Arrays, group: np.ndarray, harm: np.ndarray, budget: float, num_edges: int
) -> list[LinearConstraint]:
    """One option a group, and harms in units of the budget."""
    scale = budget if budget > 0 else np.abs(harm).max(initial=0.0) or 1.0
    weights = np.concatenate([harm / scale, np.zeros(num_edges)])
    return [
        LinearConstraint(hstack([_of_group(arrays, group), csr_array((len(arrays.harm), num_edges))]), 1, 1),
        LinearConstraint(csr_array(weights[None]), -np.inf, budget / scale),
    ]


def _casts(
    arrays: Arrays, group: np.ndarray, option: np.ndarray, edges: list[tuple[int, np.ndarray]]
) -> list[LinearConstraint]:
    """A cast where the ends of an edge differ."""
    ones, kinds = _of_group(arrays, group), arrays.storage[group, option]
    y = csr_array(eye_array(sum(len(pairs) for _, pairs in edges)))
    blocks, start = [], 0
    for firm, pairs in edges:
        stored = arrays.labels[firm, kinds]
        a, b = (ones[ends] for ends in arrays.edges[pairs].T)
        for k in np.unique(stored[stored > 0]) if len(pairs) else ():
            same, fits = diags_array(1.0 * (stored == k)), diags_array(1.0 * ((stored == k) | (stored == 0)))
            blocks.append(hstack([a @ same - b @ fits, -y[start : start + len(pairs)]]))
        start += len(pairs)
    return [LinearConstraint(vstack(blocks, format="csr"), -np.inf, 0)] if blocks else []


def _of_group(arrays: Arrays, group: np.ndarray) -> csr_array:
    """Which options a group has, ``[G, options]``."""
    columns = np.arange(len(group))
    return csr_array((np.ones(len(group)), (group, columns)), shape=(len(arrays.harm), len(group)))


@contextmanager
def _quiet_stdout() -> Iterator[None]:
    """HiGHS prints debug lines to stdout from C++, which no option turns off: they go to our log.

    File descriptors belong to the process.  What another thread prints meanwhile isn't lost, but goes to stderr.
    """
    with _redirecting, tempfile.TemporaryFile() as printed:
        try:
            sys.stdout.flush()
            kept = os.dup(_STDOUT)
        except (OSError, ValueError, AttributeError):  # a process without stdout prints nothing
            yield
            return
        os.dup2(printed.fileno(), _STDOUT)
        try:
            yield
        finally:
            with suppress(OSError, AttributeError):  # what C still holds back
                ctypes.CDLL(None).fflush(None)
            os.dup2(kept, _STDOUT)
            os.close(kept)
            printed.seek(0)
            for line in printed.read().decode(errors="replace").splitlines():
                if "Highs" in line:
                    log.debug("the solver printed: %s", line)
                else:
                    print(line, file=sys.stderr)
