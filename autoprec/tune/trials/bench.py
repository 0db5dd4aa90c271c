"""Measure one plan: its loss against the reference on the same batches, and its step time against the fp32 model's.

For a target that isn't here the loss is measured all the same, with the target's formats emulated, and the speed is
estimated (:mod:`autoprec.tune.trials.elsewhere`).
"""

from __future__ import annotations

import gc
import math
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from statistics import median
from typing import TypeVar

import torch

from autoprec.backends.registry import reset_backends
from autoprec.estimate import Estimate
from autoprec.measure import Measurement, measure_ratios
from autoprec.plan import Plan
from autoprec.target import Target, load_target
from autoprec.tasks import Batch, Task
from autoprec.tune.studies.lock import device_lock
from autoprec.tune.trials.checkpoint import Checkpoint
from autoprec.tune.trials.elsewhere import Estimator, record_estimator
from autoprec.tune.trials.judge import Judge
from autoprec.tune.trials.outcome import WORST_GAP, Effort, Outcome, State
from autoprec.tune.trials.peak import held_bytes, measure_peak, optimizer_bytes
from autoprec.tune.trials.scratch import FromScratch, Scratch
from autoprec.tune.trials.speed import Speed
from autoprec.tune.trials.trainer import Trainer, own_random_state, relative_gap, take_batches

#: Data seeds whose batches and reference losses are kept; any can be made again.
_NUM_KEPT = 4

_T = TypeVar("_T")


@dataclass
class Bench:
    """Everything that trials of one study share.

    Args:
        task, checkpoint, device: what is trained, from where, on what.
        seed: of the model; data seeds follow it.
        budget: largest allowed relative loss gap.
        effort: of a trial.
        elsewhere: the target, if it isn't here: plans train with its formats emulated, and speeds are estimates.
        weighs: also estimate the peak memory on a CPU; on an accelerator it costs nothing and is always measured.
    """

    task: Task
    checkpoint: Checkpoint
    device: torch.device
    seed: int
    budget: float
    effort: Effort = field(default_factory=Effort)
    elsewhere: Target | None = None
    weighs: bool = False
    _references: OrderedDict[tuple[int, int], list[float]] = field(default_factory=OrderedDict)
    _batches: OrderedDict[tuple[int, int], list[Batch]] = field(default_factory=OrderedDict)
    _baseline: Trainer | None = None
    _estimator: Estimator | None = None
    _scratch: Scratch | None = None

    @property
    def data_seed(self) -> int:
        """Of the trials' batches: not those that the checkpoint has seen."""
        return self.seed + 1

    def trainer(self, plan: Plan | None, jitter: float = 0.0) -> Trainer:
        """The model at the checkpoint, in the plan's formats: emulated where the target isn't here."""
        return Trainer(self.task, self.checkpoint, self._here(plan), device=self.device, seed=self.seed, jitter=jitter)

    def _here(self, plan: Plan | None) -> Plan | None:
        return plan if plan is None or self.elsewhere is None else self.estimator().as_there(plan)

    def batches(self, seed: int, steps: int) -> list[Batch]:
        key = seed, steps
        if key not in self._batches:
            _keep(self._batches, key, take_batches(self.task, seed, steps, self.device))
        self._batches.move_to_end(key)
        return self._batches[key]

    def reference(self, seed: int, steps: int) -> list[float]:
        """The fp32 run's losses on a data seed; run once, as long as it is remembered."""
        key = seed, steps
        if key not in self._references:
            _keep(self._references, key, self.trainer(None).losses(self.batches(seed, steps), seed))
        self._references.move_to_end(key)
        return self._references[key]

    def gap_of(self, losses: Sequence[float], reference: Sequence[float]) -> float:
        """How much worse than the reference, in the task's own direction; NaN if not all are finite."""
        return relative_gap(losses, reference, self.task.direction)

    def measure_step_s(self, steps: int = 3) -> float:
        """Median seconds of an fp32 step, now."""
        # a run that is going on draws its dropout as if this hadn't happened; building a model draws too
        with own_random_state(self.device):
            baseline = self.baseline()
            baseline.step_seconds.clear()
            for batch in islice(cycle(self.batches(self.data_seed, self.effort.steps)), steps + 1):
                baseline.finished_step(batch)
        return median(baseline.step_seconds[-steps:])

    def noise(self, seeds: Sequence[int], jitter: float = 1e-6) -> float:
        """Root mean square of the gap that weights changed by one part in a million make: the task's own chaos."""
        gaps = []
        for seed in seeds:
            reference = self.reference(seed, self.effort.steps)
            jittered = self.trainer(None, jitter).losses(self.batches(seed, self.effort.steps), seed)
            gaps.append(self.gap_of(jittered, reference))
        return math.sqrt(sum(gap**2 for gap in gaps) / len(gaps))

    def baseline(self) -> Trainer:
        """The fp32 model that candidates are timed against, at the checkpoint.

        Not further on: the few batches of a timing are soon learned by heart, and gradients near 0 are slow numbers on
        a CPU.
        """
        if self._baseline is None:
            with own_random_state(self.device):
                baseline = self.trainer(None)
                # an optimizer has no state before its first step, and what is weighed later mustn't count it
                baseline.finished_step(self.batches(self.data_seed, self.effort.steps)[0])
            self._baseline = baseline
        self._baseline.restore()
        return self._baseline

    def estimator(self) -> Estimator:
        """Prices plans for the target that isn't here, or for memory on this CPU; recorded once."""
        if self._estimator is None:
            batch = self.batches(self.data_seed, self.effort.steps)[0]
            with own_random_state(self.device):
                self._estimator = record_estimator(
                    self.task,
                    self.trainer(None).model,
                    lambda model: self.task.loss(model, batch),
                    self.elsewhere or load_target("cpu"),
                    optimizer_bytes=optimizer_bytes(self.baseline().optimizer),
                )
        return self._estimator

    def gap(self, plan: Plan, seed: int, steps: int) -> float:
        """Relative loss gap of a plan on a data seed, NaN if it diverges."""
        reference = self.reference(seed, steps)
        reset_backends()
        return self.gap_of(self.trainer(plan).losses(self.batches(seed, steps), seed), reference)

    def from_scratch(self, plan: Plan, limit_s: float) -> FromScratch:
        """The plan's loss gap where it trains from fresh weights, as the checkpoint was trained here.

        Args:
            plan: to train.
            limit_s: fewer steps than the checkpoint's where they would take longer, but no fewer than 50.
        """
        if self._scratch is None:
            self._scratch = Scratch(self.task, self.checkpoint.losses, device=self.device, seed=self.seed)
        reset_backends()
        return self._scratch.run(self._here(plan), limit_s)

    def speeds(self, plans: Mapping[str, Plan], rounds: int, seed: int = 0) -> Mapping[str, Speed]:
        """Step times of plans against fp32: measured, all of them interleaved, or estimated."""
        if self.elsewhere is not None:
            return {name: self.estimator().speed(plan) for name, plan in plans.items()}
        batches = self.batches(self.data_seed, self.effort.steps)
        candidates = {name: self.trainer(plan).stepper(batches) for name, plan in plans.items()}
        baseline = self.baseline().stepper(batches)
        with device_lock(self.device):
            return measure_ratios(candidates, baseline, rounds=rounds, device=self.device, seed=seed)

    def trial(self, plan: Plan, seed: int | None = None) -> Outcome:
        """Measure one plan.  Whatever it raises is its outcome, not the study's end.

        Args:
            plan: to measure.
            seed: of the data; None is the trials' own, another one repeats a trial on batches it hasn't seen.
        """
        seed = self.data_seed if seed is None else seed
        self.reference(seed, self.effort.steps)  # what fp32 raises is the task's fault, not the plan's
        start = time.monotonic()
        reset_backends()
        try:
            outcome = self._trial(plan, seed)
        except Exception as exc:
            note = f"{type(exc).__name__}: {str(exc)[:500]}"
            outcome = Outcome(state="failed", loss_gap=WORST_GAP * self.budget, note=note)
        gc.collect()
        return replace(outcome, seconds=time.monotonic() - start)

    def _trial(self, plan: Plan, seed: int) -> Outcome:
        reference = self.reference(seed, self.effort.steps)
        batches = self.batches(seed, self.effort.steps)
        self.baseline()  # on the device before anything is weighed
        held = held_bytes(self.device)
        trainer = self.trainer(plan)
        here = self.elsewhere is None  # emulated formats are slow by nature
        judge = Judge(
            lambda losses: self.gap_of(losses, reference),
            self.budget,
            trainer.step_seconds,
            self.measure_step_s if here else None,
        )
        losses = trainer.losses(batches, seed, judge)
        gap = self.gap_of(losses, reference)
        common = {"losses": tuple(losses), "num_skipped": trainer.num_skipped}
        if math.isnan(gap):
            note = f"the {self.task.measured} is not finite at step {len(losses) - 1}"
            return Outcome(state="diverged", loss_gap=WORST_GAP * self.budget, note=note, **common)
        state: State = "stopped" if judge.verdict else "complete"
        return Outcome(
            state=state,
            loss_gap=gap,
            comparison=self._speed(plan, trainer, batches, judge),
            memory_bytes=self._weigh(plan, trainer, batches, held),
            note=judge.verdict,
            **common,
        )

    def _speed(self, plan: Plan, trainer: Trainer, batches: list[Batch], judge: Judge) -> Speed:
        if self.elsewhere is not None:
            return self.estimator().speed(plan)
        baseline = self.baseline().stepper(batches)
        with device_lock(self.device):
            return measure_ratios(
                {"candidate": trainer.stepper(batches)},
                baseline,
                rounds=self._rounds(judge, few=bool(judge.verdict)),
                warm_up=1,
                device=self.device,
                seed=self.seed,
            )["candidate"]

    def _rounds(self, judge: Judge, *, few: bool) -> int:
        affordable = int(self.effort.seconds / max(judge.step_s + 2 * judge.baseline_s, 1e-6))
        return max(5, min(5 if few else self.effort.rounds, affordable))

    def _weigh(self, plan: Plan, trainer: Trainer, batches: list[Batch], held: int) -> Measurement | Estimate | None:
        if self.elsewhere is None and self.device.type != "cpu":
            with device_lock(self.device, shared=True):
                return measure_peak(trainer.stepper(batches), self.device, held)
        return self.estimator().memory(plan) if self.elsewhere is not None or self.weighs else None


def _keep(kept: OrderedDict[tuple[int, int], _T], key: tuple[int, int], value: _T) -> None:
    """Add to a cache, and drop what was used the longest ago."""
    kept[key] = value
    while len(kept) > _NUM_KEPT:
        kept.popitem(last=False)
