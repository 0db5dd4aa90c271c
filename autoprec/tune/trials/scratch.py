"""A plan in training from fresh weights.

Trials start from a checkpoint, which tells mixes apart best, and doesn't show what hurts early training only, such as
gradients rounded too coarsely.  So where the checkpoint was trained here, from fresh weights, a winner is trained from
the same weights on the same data once.  Those runs part by chance alone after a while: weights changed by one part in
a million say how far.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch

from autoprec.plan import Plan
from autoprec.tasks import Task
from autoprec.tune.trials.trainer import Trainer, relative_gap, to_device

_JITTER = 1e-6
#: The plan's share of the time: it may be emulated, and the run that measures chaos is fp32.
_PLAN_SHARE = 0.7
#: Fewer steps would say nothing, so that these are made whatever they take.
MIN_STEPS = 50
#: Runs part by chance to either side: this many times as far is no harm yet.
_CHAOS_ALLOWED = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FromScratch:
    """One run of a plan from fresh weights, against fp32's.

    Args:
        gap: mean over the last half of the steps, relative to fp32's; None where it diverged.
        chaos: the gap that weights changed by one part in a million make, over the same steps.
        steps: of each run.
    """

    gap: float | None
    chaos: float
    steps: int

    def holds(self, budget: float) -> bool:
        """Whether the gap is inside the budget, give or take the chaos."""
        return self.gap is not None and self.gap <= budget + _CHAOS_ALLOWED * self.chaos

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Scratch:
    """Runs plans from fresh weights.

    Args:
        task: that trains.
        reference: losses of the fp32 run that made the checkpoint: these weights, this data.
        device: where.
        seed: of weights and data.
    """

    def __init__(self, task: Task, reference: Sequence[float], *, device: torch.device, seed: int) -> None:
        self._task, self._reference, self._device, self._seed = task, reference, device, seed
        self._jittered: list[float] = []

    def run(self, plan: Plan | None, limit_s: float) -> FromScratch:
        """Train the plan, and fp32 from weights changed a little, which is kept for the next plan.

        Args:
            plan: to train.
            limit_s: seconds that both may take beyond their first :data:`MIN_STEPS` steps.
        """
        start = time.monotonic()
        losses = self._losses(plan, 0.0, len(self._reference), start + _PLAN_SHARE * limit_s)
        if not math.isfinite(losses[-1]):
            return FromScratch(gap=None, chaos=0.0, steps=len(losses))
        if len(self._jittered) < len(losses):
            self._jittered = self._losses(None, _JITTER, len(losses), start + limit_s)
        steps = min(len(losses), len(self._jittered))
        return FromScratch(
            gap=self._gap(losses, steps // 2, steps),
            # of one draw, the larger of two readings: one alone may be small by luck
            chaos=max(abs(self._gap(self._jittered, first, steps)) for first in (0, steps // 2)),
            steps=steps,
        )

    def _losses(self, plan: Plan | None, jitter: float, steps: int, deadline: float) -> list[float]:
        trainer = Trainer(self._task, None, plan, device=self._device, seed=self._seed, jitter=jitter)
        batches = (to_device(batch, self._device) for batch in islice(self._task.stream(self._seed), steps))

        def stop(losses: list[float]) -> bool:
            is_late = len(losses) >= MIN_STEPS and time.monotonic() > deadline
            return is_late or not math.isfinite(losses[-1])

        return trainer.losses(batches, self._seed, stop)

    def _gap(self, losses: Sequence[float], first: int, end: int) -> float:
        return relative_gap(losses[first:end], self._reference[first:end])
