"""Times steps in units of one fixed matrix product, the *yardstick*, which takes turns with them.

On a machine that others use, seconds of one minute can't be added to seconds of the next; multiples of the yardstick
can.  One reading of the yardstick makes them seconds again.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Mapping, Sequence

import torch

from autoprec.measure.costcache import YARDSTICK, CostCache, Reading
from autoprec.measure.environment import describe_environment
from autoprec.measure.measurement import Comparison, Measurement
from autoprec.measure.timing import Step, measure_ratios

#: A reading takes at least this long, by repeating a short step.
_READING_S = 0.0025
#: What a look beforehand, at how often to repeat it, takes at least.
_LOOK_S, _MAX_CALLS = 0.0005, 1024
#: The rounds of one comparison take about this long, as far as they are few or many enough.
_COMPARISON_S = 0.15
_MIN_ROUNDS, _MAX_ROUNDS = 5, 9
#: Rows of the yardstick's matrices: a millisecond or so.
_CPU_SIZE, _GPU_SIZE = 384, 4096
_UNIT_READINGS = 20

#: Device and threads → the unit that this process measures in.
_units: dict[tuple[torch.device, int], Reading] = {}


class Ruler:
    """Measures steps on one device in yardsticks.

    Args:
        device: of this machine.
        cache: readings of earlier runs, and where new ones go; None keeps them only here.
    """

    def __init__(self, device: torch.device | str, cache: CostCache | None = None) -> None:
        self.device = torch.device(device)
        self.environment = describe_environment(self.device)
        self._cache = cache
        self._readings: dict[str, Reading] = {}
        self._yardstick = _yardstick(self.device)
        self.unit = self._unit()

    def _unit(self) -> Reading:
        """Seconds of the yardstick: the cache's, else the process's, so that what one process measures adds up."""
        place = self.device, self.environment.threads
        unit = self.known(YARDSTICK)
        if unit is None:
            unit = self.keep(YARDSTICK, _units.get(place) or _read_unit(*place))
        _units[place] = unit
        return unit

    def known(self, key: str) -> Reading | None:
        """A reading of this run or an earlier one."""
        found = self._readings.get(key)
        return self._cache.get(key) if found is None and self._cache is not None else found

    def keep(self, key: str, reading: Reading) -> Reading:
        """Remembers a reading."""
        self._readings[key] = reading
        if self._cache is not None:
            self._cache.put(key, reading)
        return reading

    def read(self, steps: Mapping[str, Step], label: str = "", parts: int = 1) -> dict[str, Reading]:
        """Times steps in turns with the yardstick.

        All readings are made about equally long: a longer one is likelier to be interrupted.

        Args:
            steps: name → a call; they take turns.
            label: what is measured, for a reader of the cache.
            parts: equal parts of a step; a reading is of one.
        """
        if not steps:
            return {}
        alone = {name: seconds_of(step, self.device) for name, step in steps.items()}
        span = max(_READING_S, *alone.values())
        times = {name: max(1, round(span / seconds)) for name, seconds in alone.items()}
        scale = max(1, round(span / self.unit.value))
        compared = measure_ratios(
            {name: _repeated(step, times[name]) for name, step in steps.items()},
            _repeated(self._yardstick, scale),
            rounds=min(_MAX_ROUNDS, max(_MIN_ROUNDS, int(_COMPARISON_S / (span * (len(steps) + 2))))),
            warm_up=1,
            device=self.device,
        )
        return {
            name: _reading(comparison, scale / (times[name] * parts), f"{label} {name}".strip())
            for name, comparison in compared.items()
        }

    def seconds(self, readings: Sequence[Reading], counts: Sequence[int] | None = None) -> Measurement:
        """The sum of readings, each so many times, in seconds."""
        counts = [1] * len(readings) if counts is None else counts
        counted = list(zip(counts, readings, strict=True))
        value = sum(n * r.value for n, r in counted)
        below = math.hypot(*(n * (r.value - r.low) for n, r in counted))
        above = math.hypot(*(n * (r.high - r.value) for n, r in counted))
        return Measurement(
            value=value * self.unit.value,
            low=max(0.0, value - below) * self.unit.value,
            high=(value + above) * self.unit.value,
            rounds=min(r.rounds for r in readings),
            unit="s",
            device=self.environment.device,
            versions={"torch": self.environment.torch, "python": self.environment.python},
            date=max(r.date for r in readings),
        )


def seconds_of(step: Step, device: torch.device) -> float:
    """About how long one call takes, after a first one; the better of two looks."""
    _timed(step, device)
    calls = 1
    while _timed(_repeated(step, calls), device) < _LOOK_S and calls < _MAX_CALLS:
        calls *= 4
    return max(1e-9, min(_timed(_repeated(step, calls), device) for _ in range(2)) / calls)


def _timed(step: Step, device: torch.device) -> float:
    start = time.perf_counter()
    step()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start


def _yardstick(device: torch.device) -> Step:
    size = _CPU_SIZE if device.type == "cpu" else _GPU_SIZE
    # no random numbers: who measures leaves the generator alone
    matrix = torch.linspace(-1.0, 1.0, size * size, device=device).view(size, size)
    return lambda: matrix @ matrix


def _read_unit(device: torch.device, threads: int) -> Reading:
    step = _yardstick(device)
    _timed(step, device)
    readings = sorted(_timed(step, device) for _ in range(_UNIT_READINGS))
    # the lower quartile: what others on the machine do only adds
    return Reading(
        value=readings[_UNIT_READINGS // 4],
        low=readings[0],
        high=readings[_UNIT_READINGS // 2],
        rounds=_UNIT_READINGS,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        label=f"seconds of the yardstick with {threads} threads",
    )


def _repeated(step: Step, times: int) -> Step:
    if times == 1:
        return step

    def repeated() -> None:
        for _ in range(times):
            step()

    return repeated


def _reading(comparison: Comparison, scale: float, label: str) -> Reading:
    """The candidate's time in baselines, times ``scale``."""
    speedup = comparison.speedup
    return Reading(
        value=scale / speedup.value,
        low=scale / speedup.high,
        high=scale / speedup.low,
        rounds=speedup.rounds,
        date=speedup.date,
        label=label,
    )
