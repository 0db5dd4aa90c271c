"""Ends a run that can't win, so that its time goes to one that may."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

#: A run whose gap is beyond this many budgets, or whose step takes this many times the baseline's, is stopped.
_HOPELESS_GAP, _HOPELESS_TIME = 5.0, 1.5
_MIN_STEPS_TO_JUDGE = 5
#: Steps after which the time is looked at: a run must be slow both times, since a neighbour may be the cause of one.
_LOOKS = (5, 8)


class Judge:
    """Stops at a loss that isn't finite, a gap far over the budget, or a step far over fp32's time.

    Args:
        gap_of: the gap of the losses so far.
        budget: largest allowed gap.
        step_seconds: of the run, as it goes on.
        measure_baseline_s: seconds of an fp32 step, now; None where a step's time here says nothing.

    Attributes:
        verdict: why the run was stopped; empty if it wasn't, or isn't finite.
        step_s, baseline_s: median seconds of a step; 0 before they are known.
    """

    def __init__(
        self,
        gap_of: Callable[[Sequence[float]], float],
        budget: float,
        step_seconds: Sequence[float],
        measure_baseline_s: Callable[[], float] | None,
    ) -> None:
        self._gap_of, self._budget = gap_of, budget
        self._step_seconds, self._measure_baseline_s = step_seconds, measure_baseline_s
        self._num_slow = 0
        self.verdict = ""
        self.step_s = self.baseline_s = 0.0

    def __call__(self, losses: list[float]) -> bool:
        """Whether the run ends here."""
        if not math.isfinite(losses[-1]):
            return True
        if len(losses) < _MIN_STEPS_TO_JUDGE:
            return False
        gap = self._gap_of(losses)
        if gap > _HOPELESS_GAP * self._budget:
            self.verdict = f"stopped after {len(losses)} steps at {gap / self._budget:.1f} times the loss budget"
        elif len(losses) in _LOOKS and self._measure_baseline_s is not None:
            self._judge_speed(len(losses), self._measure_baseline_s())
        return bool(self.verdict)

    def _judge_speed(self, steps: int, baseline_s: float) -> None:
        # both right now: on a machine that others use, yesterday's step time says nothing
        first = 1 if steps == _LOOKS[0] else _LOOKS[0]
        self.step_s, self.baseline_s = median(self._step_seconds[first:]), baseline_s
        self._num_slow += self.step_s > _HOPELESS_TIME * self.baseline_s
        if self._num_slow == len(_LOOKS):
            ratio = self.step_s / self.baseline_s
            self.verdict = f"stopped after {steps} steps, each of which took {ratio:.1f} times as long as in fp32"
