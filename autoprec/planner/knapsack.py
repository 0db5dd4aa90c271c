"""The cheapest mix within a harm budget as a mixed-integer program, with a proof of how good it is.

Each edge has one continuous variable, ``y ≥ Σ x of a's options stored as k - Σ x of b's options stored as k or any``
for each storage k: it is 1 where the two ends differ.  A variable for each pair of storages would give the same answer
several times as slowly.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, eye_array, hstack, vstack

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
    objective = np.concatenate([objective, arrays.cast / unit])
    with _quiet_stdout():
        found = milp(
            objective,
            integrality=np.concatenate([np.ones(len(group)), np.zeros(len(arrays.cast))]),
            bounds=Bounds(0, 1),
            constraints=_constraints(arrays, group, option, harm, budget),
            options={"mip_rel_gap": rel_gap, "time_limit": time_limit_s},
        )
    bound = -np.inf if found.mip_dual_bound is None else found.mip_dual_bound * unit - arrays.problem.fixed_s
    if found.x is None:
        return Packed(None, bound)
    choice = np.zeros(len(arrays.harm), dtype=np.intp)
    chosen = found.x[: len(group)] > 0.5
    choice[group[chosen]] = option[chosen]
    return Packed(choice, bound)


def _constraints(
    arrays: Arrays, group: np.ndarray, option: np.ndarray, harm: np.ndarray, budget: float
) -> list[LinearConstraint]:
    """One option a group, the budget, and a cast where the ends of an edge differ."""
    num_options, num_edges = len(group), len(arrays.cast)
    columns = np.arange(num_options)
    ones = csr_array((np.ones(num_options), (group, columns)), shape=(len(arrays.harm), num_options))
    nothing = csr_array((len(arrays.harm), num_edges))
    scale = budget if budget > 0 else np.abs(harm).max(initial=0.0) or 1.0
    weights = np.concatenate([harm / scale, np.zeros(num_edges)])
    found = [
        LinearConstraint(hstack([ones, nothing]), 1, 1),
        LinearConstraint(csr_array(weights[None]), -np.inf, budget / scale),
    ]
    if num_edges and arrays.num_storages > 1:
        a, b = (ones[ends] for ends in arrays.edges.T)
        stored = arrays.storage[group, option]
        blocks = []
        for k in range(1, arrays.num_storages + 1):
            same = csr_array((np.where(stored == k, 1.0, 0.0), (columns, columns)))
            fits = csr_array((np.where((stored == k) | (stored == 0), 1.0, 0.0), (columns, columns)))
            blocks.append(hstack([a @ same - b @ fits, -eye_array(num_edges)]))
        found.append(LinearConstraint(vstack(blocks, format="csr"), -np.inf, 0))
    return found


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
