"""Measure one plan: its loss against the reference on the same batches, and its step time against the fp32 model's."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal

import torch

from autoprec.backends.registry import reset_backends
from autoprec.measure import Comparison, measure_ratios
from autoprec.plan import Plan
from autoprec.tasks import Batch, Task
from autoprec.tune.checkpoint import Checkpoint
from autoprec.tune.trainer import Trainer, own_random_state, relative_gap, take_batches

#: ``complete``; ``stopped`` early as hopeless in loss or speed; ``diverged`` to NaN; ``failed`` with an exception.
State = Literal["complete", "stopped", "diverged", "failed"]

#: A run whose gap is beyond this many budgets, or whose step takes this many times the baseline's, is stopped.
_HOPELESS_GAP, _HOPELESS_TIME = 5.0, 1.5
#: A gap for runs without one, in budgets: finite, so that a sampler can learn from it.
WORST_GAP = 10.0
_MIN_STEPS_TO_JUDGE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long a trial takes.

    Args:
        steps: paired steps of the loss.
        rounds: of the timing.
        seconds: that the timing may take; fewer rounds when a step is slow.
    """

    steps: int = 20
    rounds: int = 9
    seconds: float = 5.0

    @classmethod
    def for_step(cls, step_s: float) -> Effort:
        """20 to 50 steps and 9 to 25 rounds, so that a trial takes seconds if a step takes under a tenth of one."""
        steps = min(50, max(20, int(4.0 / step_s)))
        return cls(steps=steps, rounds=min(25, max(9, int(4.0 / (3 * step_s)))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a trial of one plan gave.

    Args:
        state: see :data:`State`.
        loss_gap: relative to the reference loss on the same steps; always finite.
        losses: of its steps.
        comparison: speed against fp32; None where it wasn't timed.
        num_skipped: steps the loss scaler skipped.
        seconds: that all of it took.
        note: why it was stopped or failed.
    """

    state: State
    loss_gap: float
    losses: tuple[float, ...] = ()
    comparison: Comparison | None = None
    num_skipped: int = 0
    seconds: float = 0.0
    note: str = ""

    @property
    def finite_losses(self) -> tuple[float | None, ...]:
        """The losses with None for those that aren't finite, which JSON can't hold."""
        return tuple(loss if math.isfinite(loss) else None for loss in self.losses)


@dataclass
class Bench:
    """Everything that trials of one study share.

    Args:
        task, checkpoint, device: what is trained, from where, on what.
        seed: of the model; data seeds follow it.
        budget: largest allowed relative loss gap.
        effort: of a trial.
    """

    task: Task
    checkpoint: Checkpoint
    device: torch.device
    seed: int
    budget: float
    effort: Effort = field(default_factory=Effort)
    _references: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    _batches: dict[tuple[int, int], list[Batch]] = field(default_factory=dict)
    _baseline: Trainer | None = None

    @property
    def data_seed(self) -> int:
        """Of the trials' batches: not those that the checkpoint has seen."""
        return self.seed + 1

    def trainer(self, plan: Plan | None, jitter: float = 0.0) -> Trainer:
        return Trainer(self.task, self.checkpoint, plan, device=self.device, seed=self.seed, jitter=jitter)

    def batches(self, seed: int, steps: int) -> list[Batch]:
        if (seed, steps) not in self._batches:
            self._batches[seed, steps] = take_batches(self.task, seed, steps, self.device)
        return self._batches[seed, steps]

    def reference(self, seed: int, steps: int) -> list[float]:
        """The fp32 run's losses on a data seed; run once."""
        if (seed, steps) not in self._references:
            self._references[seed, steps] = self.trainer(None).losses(self.batches(seed, steps), seed)
        return self._references[seed, steps]

    def measure_step_s(self, steps: int = 3) -> float:
        """Median seconds of an fp32 step, now."""
        seconds = []
        # a run that is going on draws its dropout as if this hadn't happened; building a model draws too
        with own_random_state(self.device):
            step = self.baseline().stepper(self.batches(self.data_seed, self.effort.steps))
            for _ in range(steps + 1):
                start = time.perf_counter()
                float(step())
                seconds.append(time.perf_counter() - start)
        return median(seconds[1:])

    def noise(self, seeds: Sequence[int], jitter: float = 1e-6) -> float:
        """Root mean square of the gap that weights changed by one part in a million make: the task's own chaos."""
        gaps = []
        for seed in seeds:
            reference = self.reference(seed, self.effort.steps)
            jittered = self.trainer(None, jitter).losses(self.batches(seed, self.effort.steps), seed)
            gaps.append(relative_gap(jittered, reference))
        return math.sqrt(sum(gap**2 for gap in gaps) / len(gaps))

    def baseline(self) -> Trainer:
        """The fp32 model that candidates are timed against, at the checkpoint.

        Not further on: the few batches of a timing are soon learned by heart, and gradients near 0 are slow numbers on
        a CPU.
        """
        if self._baseline is None:
            self._baseline = self.trainer(None)
        self._baseline.restore()
        return self._baseline

    def gap(self, plan: Plan, seed: int, steps: int) -> float:
        """Relative loss gap of a plan on a data seed, NaN if it diverges."""
        return relative_gap(self.trainer(plan).losses(self.batches(seed, steps), seed), self.reference(seed, steps))

    def speeds(self, plans: dict[str, Plan], rounds: int, seed: int = 0) -> dict[str, Comparison]:
        """Step times of plans against fp32, all of them interleaved."""
        batches = self.batches(self.data_seed, self.effort.steps)
        candidates = {name: self.trainer(plan).stepper(batches) for name, plan in plans.items()}
        baseline = self.baseline().stepper(batches)
        return measure_ratios(candidates, baseline, rounds=rounds, device=self.device, seed=seed)

    def trial(self, plan: Plan) -> Outcome:
        """Measure one plan.  Whatever it raises is its outcome, not the study's end."""
        self.reference(self.data_seed, self.effort.steps)  # what fp32 raises is the task's fault, not the plan's
        start = time.monotonic()
        reset_backends()
        try:
            outcome = self._trial(plan)
        except Exception as exc:
            note = f"{type(exc).__name__}: {str(exc)[:500]}"
            outcome = Outcome(state="failed", loss_gap=WORST_GAP * self.budget, note=note)
        gc.collect()
        return replace(outcome, seconds=time.monotonic() - start)

    def _trial(self, plan: Plan) -> Outcome:
        reference = self.reference(self.data_seed, self.effort.steps)
        batches = self.batches(self.data_seed, self.effort.steps)
        trainer = self.trainer(plan)
        judge = _Judge(reference, self.budget, self.measure_step_s)
        losses = trainer.losses(batches, self.data_seed, judge)
        gap = relative_gap(losses, reference)
        common = {"losses": tuple(losses), "num_skipped": trainer.num_skipped}
        if math.isnan(gap):
            note = f"the loss is not finite at step {len(losses) - 1}"
            return Outcome(state="diverged", loss_gap=WORST_GAP * self.budget, note=note, **common)
        rounds = self._rounds(judge, few=bool(judge.verdict))
        comparison = measure_ratios(
            {"candidate": trainer.stepper(batches)},
            self.baseline().stepper(batches),
            rounds=rounds,
            warm_up=1,
            device=self.device,
            seed=self.seed,
        )["candidate"]
        state: State = "stopped" if judge.verdict else "complete"
        return Outcome(state=state, loss_gap=gap, comparison=comparison, note=judge.verdict, **common)

    def _rounds(self, judge: _Judge, *, few: bool) -> int:
        affordable = int(self.effort.seconds / max(judge.step_s + 2 * judge.baseline_s, 1e-6))
        return max(5, min(5 if few else self.effort.rounds, affordable))


class _Judge:
    """Ends a run that can't win: a loss that isn't finite, a gap far over the budget, a step far over fp32's time."""

    def __init__(self, reference: list[float], budget: float, measure_baseline_s: Callable[[], float]) -> None:
        self.reference, self.budget, self.measure_baseline_s = reference, budget, measure_baseline_s
        self.verdict = ""
        self.step_s = self.baseline_s = 0.0
        self._last = time.perf_counter()
        self._seconds: list[float] = []

    def __call__(self, losses: list[float]) -> bool:
        now = time.perf_counter()
        self._seconds.append(now - self._last)
        self._last = now
        if not math.isfinite(losses[-1]):
            return True
        if len(losses) < _MIN_STEPS_TO_JUDGE:
            return False
        gap = relative_gap(losses, self.reference)
        if gap > _HOPELESS_GAP * self.budget:
            self.verdict = f"stopped after {len(losses)} steps at {gap / self.budget:.1f} times the loss budget"
        elif len(losses) == _MIN_STEPS_TO_JUDGE:
            self._judge_speed(len(losses))
        return bool(self.verdict)

    def _judge_speed(self, steps: int) -> None:
        # both right now: on a machine that others use, yesterday's step time says nothing
        self.step_s, self.baseline_s = median(self._seconds[1:]), self.measure_baseline_s()
        if self.step_s > _HOPELESS_TIME * self.baseline_s:
            ratio = self.step_s / self.baseline_s
            self.verdict = f"stopped after {steps} steps, each of which took {ratio:.1f} times as long as in fp32"
        self._last = time.perf_counter()
