"""Time steps against each other on a machine that others use too.

A time alone means little there: the clock, the caches and the neighbours change from minute to minute.  So candidates
and baseline take turns in one process, in random order within each round, and only ratios within a round count.
"""

import math
import random
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from autoprec.errors import UsageError
from autoprec.measure.environment import describe_environment
from autoprec.measure.measurement import Comparison, Measurement

Step = Callable[[], object]

_RESAMPLES = 1000
#: A reading is at least this long, else the clock's own noise counts.
_MIN_READING_S = 0.002
_MAX_CALLS = 1000


def measure_ratios(
    candidates: Mapping[str, Step],
    baseline: Step,
    *,
    rounds: int = 15,
    warm_up: int = 2,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Comparison]:
    """Compare each candidate's step time with the baseline's.

    Each round takes one reading of every candidate and two of the baseline; the second is the control.

    Args:
        candidates: name → a call that does one step.
        baseline: a call that does one step.
        rounds: readings of each; at least 3.
        warm_up: calls of each before the first reading.
        device: what the steps run on; work there is waited for.
        seed: of the order within rounds and of the bootstrap.
    """
    if rounds < 3:
        raise UsageError(f"rounds is {rounds}; an interval needs at least 3")
    device = torch.device(device)
    steps: list[Step] = [baseline, baseline, *candidates.values()]
    calls = _calls_per_reading(steps, warm_up, device)
    readings = np.empty((rounds, len(steps)))
    order = list(range(len(steps)))
    shuffle = random.Random(seed).shuffle
    for row in readings:
        shuffle(order)
        for k in order:
            row[k] = _read(steps[k], calls, device)
    environment = describe_environment(device)
    versions = {"torch": environment.torch, "python": environment.python}

    def ratio(k: int) -> Measurement:
        value, low, high = median_interval(readings[:, 0] / readings[:, k], seed)
        return Measurement(
            value=value, low=low, high=high, rounds=rounds, unit="x", device=environment.device, versions=versions
        )

    control = ratio(1)
    baseline_s = float(np.median(readings[:, :2]))
    return {
        name: Comparison(
            speedup=ratio(k), control=control, candidate_s=float(np.median(readings[:, k])), baseline_s=baseline_s
        )
        for k, name in enumerate(candidates, start=2)
    }


def median_interval(values: np.ndarray, seed: int = 0) -> tuple[float, float, float]:
    """Median of ``values`` and its 95% bootstrap interval."""
    picks = np.random.default_rng(seed).integers(len(values), size=(_RESAMPLES, len(values)))
    low, high = np.quantile(np.median(values[picks], axis=1), (0.025, 0.975))
    return float(np.median(values)), float(low), float(high)


def _calls_per_reading(steps: list[Step], warm_up: int, device: torch.device) -> int:
    """Calls that make the shortest step's reading long enough; one for all, so that ratios stay ratios of steps."""
    shortest = math.inf
    for step in dict.fromkeys(steps):
        for _ in range(max(1, warm_up)):
            shortest = min(shortest, _read(step, 1, device))
    return min(_MAX_CALLS, max(1, math.ceil(_MIN_READING_S / max(shortest, 1e-9))))


def _read(step: Step, calls: int, device: torch.device) -> float:
    """Seconds of one call, mean of ``calls``; the device's own work is inside."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        step()
    _wait(device)
    return (time.perf_counter() - start) / calls


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
