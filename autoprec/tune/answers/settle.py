"""Settle what a study left open: measure its plans on their target, which was elsewhere when it ran.

Each plan is tried as a trial of a study would be, so that whatever it raises here is said of it and ends nothing; the
fastest that keep the loss are confirmed on data that the study never saw, and the first that holds is the answer.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from autoprec.convert import convert, plan_for, receipt
from autoprec.errors import TargetError, UsageError
from autoprec.fingerprint import check_fingerprint
from autoprec.lower.receipt import Receipt
from autoprec.measure import describe_environment
from autoprec.plan import Plan
from autoprec.planfile import load_plan
from autoprec.rulebook import load_rulebook
from autoprec.target import Target
from autoprec.tasks import BUILTIN_TASKS, Task, load_task
from autoprec.tune.answers.confirm import Confirmer
from autoprec.tune.answers.confirmation import Confirmation
from autoprec.tune.answers.enqueued import Enqueued, Front, load_front
from autoprec.tune.answers.row import TrialRow
from autoprec.tune.answers.settled import Settled, row_of, say_settled
from autoprec.tune.answers.verdict import make_evidence
from autoprec.tune.progress import OnProgress, Progress, silent
from autoprec.tune.trials.bench import Bench, Effort
from autoprec.tune.trials.noise import Noise, measure_noise
from autoprec.tune.trials.prepare import Place, find_place, task_identity
from autoprec.tune.trials.trainer import own_random_state
from autoprec.tune.trials.warmup import obtain_checkpoint

#: Fresh data: neither the trials' nor a confirmation's.
_FIRST_SEED = 2000
_WARM_UP_LIMIT_S = 150.0
#: Name of the plan that was asked about.
GIVEN = "given plan"

PlanPath = str | PathLike[str]


def settle(
    plans: PlanPath | Sequence[PlanPath],
    task: str | Task | None = None,
    *,
    target: str | Target | None = None,
    max_loss_increase: float | None = None,
    seed: int | None = None,
    output_dir: str | PathLike[str] | None = None,
    progress: OnProgress | None = None,
) -> Settled:
    """Measure a study's plans on the device they were made for, and write down which one holds.

    Args:
        plans: path of a ``plan.json``; plans enqueued in a ``front.json`` beside it, and in further paths, take part.
        task: as :func:`autoprec.tune` takes it; None is the one that the front or the plan names.
        target: the device; None is the plan's own.
        max_loss_increase: largest loss gap; None is the study's.
        seed: of model and data; None is the study's.
        output_dir: where the files go, and a checkpoint may lie; None is the plan's folder.
        progress: called with each :class:`~autoprec.tune.Progress`.

    Raises:
        TargetError: the target isn't in this machine.
        PlanFileError, PlanMismatchError: a plan can't be read, or is another model's.
        TaskError, UsageError: the task isn't named, or can't be used.
        StudyError: the loss budget is below the task's own noise.
    """
    paths = [plans] if isinstance(plans, str | PathLike) else list(plans)
    if not paths:
        raise UsageError("settle needs the path of at least one plan.json")
    given = [load_plan(path) for path in paths]
    folder = Path(paths[0]).parent
    front = load_front(folder)
    place = find_place(target or given[0].target)
    if not place.is_here:
        raise TargetError(
            f"a plan is confirmed on its target, {place.target.title} ({place.target.name}), and {place.reason}: run "
            "this there, with the study's folder"
        )
    settlement = _Settlement(
        task=load_task(task or _named_task(front, given[0])),
        place=place,
        given=given[0],
        queue=_queue(given, front),
        baseline=None if front is None or front.baseline is None else _stripped(front.baseline),
        seed=seed if seed is not None else 0 if front is None else front.seed,
        budget=max_loss_increase or _budget(front, given[0]),
        folder=folder if output_dir is None else Path(output_dir),
        progress=progress or silent,
    )
    with own_random_state(place.device):
        settled = settlement.run()
    settled.save()
    return settled


@dataclass(frozen=True, kw_only=True)
class _Settlement:
    """The arguments of one call of :func:`settle`, checked."""

    task: Task
    place: Place
    given: Plan
    queue: tuple[Enqueued, ...]
    baseline: Plan | None
    seed: int
    budget: float
    folder: Path
    progress: OnProgress

    def run(self) -> Settled:
        bench = self._bench()
        model = bench.trainer(None).model
        for item in self.queue:
            check_fingerprint(item.plan, model)
        noise = measure_noise(bench)
        baseline = self._baseline(bench, model)
        plans = {item.plan.sha256: item for item in self.queue}
        if baseline is not None:
            plans.setdefault(baseline.sha256, Enqueued(name=self.place.target.low_format, plan=baseline, loss_gap=0.0))
        rows = [self._try(bench, number, item) for number, item in enumerate(plans.values())]
        rows.sort(key=_speed, reverse=True)
        fit = [row for row in rows if row.state == "complete" and row.loss_gap - noise.sigma <= self.budget]
        confirmer = Confirmer(
            bench=bench,
            noise=noise.sigma,
            steps=min(100, 2 * bench.effort.steps),
            rounds=max(15, bench.effort.rounds),
            first_seed=_FIRST_SEED,
        )
        floor = next((row for row in fit if baseline is not None and row.plan_sha256 == baseline.sha256), None)
        winner, confirmations = confirmer.choose(fit, floor, lambda row: plans[row.plan_sha256].plan, self._tell)
        return self._settled(bench, noise, rows, winner, confirmations, plans)

    def _bench(self) -> Bench:
        def on_step(done: int, loss: float) -> None:
            message = f"training a checkpoint: step {done}, loss {loss:.4f}"
            self.progress(Progress(stage="checkpoint", done=done, total=None, message=message))

        checkpoint = obtain_checkpoint(
            self.task,
            self.folder,
            identity=task_identity(self.task, self.seed),
            device=self.place.device,
            seed=self.seed,
            limit_s=_WARM_UP_LIMIT_S,
            on_step=on_step,
        )
        bench = Bench(
            task=self.task, checkpoint=checkpoint, device=self.place.device, seed=self.seed, budget=self.budget
        )
        bench.effort = Effort.for_step(bench.measure_step_s())
        return bench

    def _baseline(self, bench: Bench, model: torch.nn.Module) -> Plan | None:
        """Whole-model 16 bit: the study's, else what the rules give; None where there is none."""
        low = self.place.target.low_format
        if self.baseline is not None or low == "fp32":
            return self.baseline
        batch = bench.batches(bench.data_seed, 1)[0]

        def run(model: torch.nn.Module) -> Any:
            return self.task.loss(model, batch)

        try:
            return plan_for(model, self.place.target, run, "O1", self.task.mode, low, load_rulebook())
        except Exception as exc:  # whatever the model raises in 16 bit
            message = f"there is no {low} baseline to compare with: {type(exc).__name__}: {exc}"
            self.progress(Progress(stage="trials", done=0, total=None, message=message))
            return None

    def _try(self, bench: Bench, number: int, item: Enqueued) -> TrialRow:
        row = row_of(number, item, bench.trial(item.plan))
        self.progress(Progress(stage="trials", done=number + 1, total=None, message=_describe(row), row=row))
        return row

    def _tell(self, row: TrialRow, confirmation: Confirmation | None) -> None:
        message = f"confirming {row.name} on fresh data" if confirmation is None else f"{row.name}: {confirmation.why}"
        self.progress(Progress(stage="confirm", done=int(confirmation is not None), total=None, message=message))

    def _settled(
        self,
        bench: Bench,
        noise: Noise,
        rows: list[TrialRow],
        winner: TrialRow | None,
        confirmations: list[Confirmation],
        plans: dict[str, Enqueued],
    ) -> Settled:
        of_plan = {confirmation.plan_sha256: confirmation for confirmation in confirmations}
        asked = _stripped(self.given)
        chosen = asked if winner is None else plans[winner.plan_sha256].plan
        environment = describe_environment(self.place.device)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        evidence = make_evidence(self.task, of_plan.get(chosen.sha256), noise.to_json(), self.budget, environment, now)
        row = next(row for row in rows if row.plan_sha256 == asked.sha256)
        if winner is None and "refused" not in evidence:
            evidence["refused"] = row.note or f"loss gap {row.loss_gap:+.3%}"
        estimate = self.given.evidence.get("speedup") or {}
        if chosen == asked and estimate.get("kind") == "estimated":
            evidence["estimated_speedup"] = estimate
        return Settled(
            plan=replace(chosen, evidence=evidence),
            verdict=say_settled(self.task, self.budget, rows, row, winner, confirmations),
            winner=None if winner is None else winner.name,
            trials=tuple(sorted(rows, key=lambda row: row.number)),
            confirmations=tuple(confirmations),
            receipt=None if winner is None else self._receipt(bench, chosen),
            noise=noise,
            budget=self.budget,
            environment=environment,
            folder=self.folder,
        )

    def _receipt(self, bench: Bench, plan: Plan) -> Receipt:
        batch = bench.batches(bench.data_seed, 1)[0]
        model = convert(bench.trainer(None).model, plan=plan, example_inputs=lambda m: self.task.loss(m, batch))
        return receipt(model)


def _queue(given: Sequence[Plan], front: Front | None) -> tuple[Enqueued, ...]:
    """The given plans and the front's, without evidence, each once."""
    items = [Enqueued(name=GIVEN, plan=plan, loss_gap=0.0) for plan in given]
    items += [] if front is None else front.plans
    bare = [replace(item, plan=_stripped(item.plan)) for item in items]
    return tuple({item.plan.sha256: item for item in reversed(bare)}.values())[::-1]


def _stripped(plan: Plan) -> Plan:
    return replace(plan, evidence={})


def _named_task(front: Front | None, plan: Plan) -> str:
    name = str(plan.evidence.get("task", "")) if front is None else front.task
    if not name or (front is None and name not in BUILTIN_TASKS):
        raise UsageError(
            "the plan doesn't say which task it was made for"
            + (f" beyond its name {name!r}" if name else "")
            + ": name it, as file.py:name or pkg.mod:name"
        )
    return name


def _budget(front: Front | None, plan: Plan) -> float:
    if front is not None:
        return front.max_loss_increase
    return float(plan.evidence.get("max_loss_increase", 0.005))


def _speed(row: TrialRow) -> float:
    return 0.0 if row.speedup is None else row.speedup.value


def _describe(row: TrialRow) -> str:
    speed = "not timed" if row.speedup is None else f"{row.speedup.value:.2f}x fp32"
    return f"{row.name}: {speed}, loss {row.loss_gap:+.3%}" + (f" ({row.note})" if row.note else "")
