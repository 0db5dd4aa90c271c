"""``tune``: a study from start to end.

Checkpoint → noise → trials → confirmation → plan.  Each stage is found again in the study's folder and storage when
the same call is made after an interruption.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage

from autoprec.convert import convert, receipt
from autoprec.errors import StudyError, UsageError
from autoprec.lower.receipt import Receipt
from autoprec.measure import describe_environment
from autoprec.plan import Plan
from autoprec.target import Target
from autoprec.tasks import Task, load_task
from autoprec.tune.bench import Bench, Effort
from autoprec.tune.checkpoint import Checkpoint
from autoprec.tune.confirm import NUM_SEEDS, Confirmer
from autoprec.tune.loop import Loop
from autoprec.tune.prepare import Place, find_place, make_space, study_identity, task_identity
from autoprec.tune.progress import OnProgress, Progress, silent
from autoprec.tune.result import Confirmation, TrialRow, TuneResult
from autoprec.tune.sampler import PlanSampler, make_sampler, prior
from autoprec.tune.space import Space
from autoprec.tune.storage import open_study, reclaim_stale_trials, without_password
from autoprec.tune.trainer import own_random_state
from autoprec.tune.verdict import make_evidence, say_faster, say_no_gain
from autoprec.tune.warmup import MIN_STEPS, obtain_checkpoint

_EFFORT, _NOISE = "effort", "noise"
_WARM_UP_LIMIT_S = 150.0


def tune(
    task: str | Task | None = None,
    target: str | Target = "auto",
    trials: int = 50,
    timeout: float | None = None,
    storage: str | BaseStorage | None = None,
    study: str | None = None,
    max_loss_increase: float = 0.005,
    seed: int = 0,
    output_dir: str | PathLike[str] | None = None,
    keep: Sequence[str] = (),
    rules: Iterable[str | PathLike[str]] = (),
    progress: OnProgress | None = None,
) -> TuneResult:
    """Find the fastest mix of formats whose loss stays within a budget, by training on the device in this machine.

    Args:
        task: a :class:`~autoprec.tasks.Task`, or the name of one: built in, ``file.py:name``, ``pkg.mod:name``.
        target: the device in this machine; ``"auto"`` finds it.
        trials: mixes to measure, the baselines included.
        timeout: seconds after which no trial starts; the confirmation's own time is kept free.
        storage: Optuna storage; None is SQLite in the folder.
        study: its name; None is the task's.  The same call goes on with a study that was interrupted.
        max_loss_increase: largest loss gap, relative to the fp32 loss on the same batches: 0.005 is half a per cent.
        seed: of model, data and search.
        output_dir: where its files go; None is ``runs/<study>``.
        keep: pins that always hold, ``GLOB=FORMAT``.
        rules: the user's rule files.
        progress: called with each :class:`~autoprec.tune.Progress`.

    Returns:
        the confirmed plan with its evidence, which is fp32 where nothing was better.

    Raises:
        TaskError, TargetError, RuleError, UsageError: an argument can't be used.
        StudyError: the study is another's, its storage is gone, or the budget is below the task's own noise.
    """
    if trials < 1:
        raise UsageError(f"trials is {trials}; at least 1")
    if timeout is not None and not timeout > 0:
        raise UsageError(f"timeout is {timeout} seconds; it must be above 0")
    if not 0 < max_loss_increase < 1:
        raise UsageError(
            f"max_loss_increase is {max_loss_increase}; allowed: above 0 and below 1, such as 0.005 for 0.5%"
        )
    loaded = load_task(task)
    name = study or loaded.name
    run = _Run(
        task=loaded,
        spec=task if isinstance(task, str) else loaded.name,
        name=name,
        place=find_place(target),
        folder=Path(output_dir) if output_dir is not None else Path("runs") / name,
        storage=storage,
        trials=trials,
        timeout=timeout,
        budget=max_loss_increase,
        seed=seed,
        keep=tuple(keep),
        rules=tuple(rules),
        progress=progress or silent,
        started=time.monotonic(),
    )
    with own_random_state(run.place.device):
        return run.run()


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The arguments of one call of :func:`tune`, checked."""

    task: Task
    spec: str
    name: str
    place: Place
    folder: Path
    storage: str | BaseStorage | None
    trials: int
    timeout: float | None
    budget: float
    seed: int
    keep: tuple[str, ...]
    rules: tuple[str | PathLike[str], ...]
    progress: OnProgress
    started: float

    def run(self) -> TuneResult:
        identity = task_identity(self.task, self.seed)
        checkpoint = self._checkpoint(identity)
        space = make_space(self.task, checkpoint, self.place, seed=self.seed, keep=self.keep, rules=self.rules)
        study = open_study(
            self.name, self.storage, self.folder, study_identity(identity, space, self.place, self.budget)
        )
        reclaim_stale_trials(study)
        bench = Bench(
            task=self.task, checkpoint=checkpoint, device=self.place.device, seed=self.seed, budget=self.budget
        )
        noise, step_s = self._noise(study, bench)
        study.sampler = make_sampler(space, self.seed + len(study.trials), self.budget, noise)
        deadline = None if self.timeout is None else self.started + self.timeout - _confirmation_s(bench, step_s)
        loop = Loop(
            study=study, space=space, bench=bench, trials=self.trials, deadline=deadline, progress=self.progress
        )
        try:
            rows = loop.run()
        except optuna.exceptions.StorageInternalError as exc:
            raise StudyError(
                f"study {self.name!r} lost its storage ({exc}); what is finished is kept, and the same call goes on"
            ) from exc
        winner, confirmations = self._confirm(study, space, bench, rows, noise)
        return self._result(space, bench, rows, winner, confirmations, noise)

    def _checkpoint(self, identity: dict[str, Any]) -> Checkpoint:
        limit_s = _WARM_UP_LIMIT_S if self.timeout is None else min(_WARM_UP_LIMIT_S, self.timeout / 4)

        def on_step(done: int, loss: float) -> None:
            message = f"training a checkpoint: step {done}, loss {loss:.4f}"
            self.progress(Progress(stage="checkpoint", done=done, total=max(MIN_STEPS, done), message=message))

        checkpoint = obtain_checkpoint(
            self.task,
            self.folder,
            identity=identity,
            device=self.place.device,
            seed=self.seed,
            limit_s=limit_s,
            on_step=on_step,
        )
        done = len(checkpoint.losses)
        self.progress(Progress(stage="checkpoint", done=done, total=done, message=f"checkpoint: {checkpoint.origin}"))
        return checkpoint

    def _noise(self, study: optuna.Study, bench: Bench) -> tuple[float, float]:
        """The task's own noise in the gap, and the step's seconds; a study that goes on keeps its effort and noise."""
        known = study.user_attrs
        step_s = bench.measure_step_s()
        if _NOISE in known:
            bench.effort = Effort(**known[_EFFORT])
            return float(known[_NOISE]), step_s
        bench.effort = Effort.for_step(step_s)
        self.progress(Progress(stage="noise", done=0, total=1, message="measuring the task's own noise"))
        noise = math.inf
        for steps in dict.fromkeys((bench.effort.steps, 50)):
            bench.effort = replace(bench.effort, steps=steps)
            noise = bench.noise((bench.data_seed, bench.data_seed + 1))
            message = f"noise: weights changed by 1e-6 move the loss by {noise:.2e} of itself in {steps} steps"
            self.progress(Progress(stage="noise", done=1, total=1, message=message))
            if self.budget >= 2 * noise:
                study.set_user_attr(_EFFORT, asdict(bench.effort))
                study.set_user_attr(_NOISE, noise)
                return noise, step_s
        raise StudyError(
            f"max_loss_increase is {self.budget:.2%}, and weights changed by one part in a million already move the "
            f"loss of task {self.task.name!r} by {noise:.2%} in {bench.effort.steps} steps: a budget below twice that "
            f"can't be told from chance. Allow {2 * noise:.2%} or more, or give the task a checkpoint where training "
            "is calmer"
        )

    def _confirm(
        self, study: optuna.Study, space: Space, bench: Bench, rows: list[TrialRow], noise: float
    ) -> tuple[TrialRow | None, list[Confirmation]]:
        candidates = _shortlist(study, space, rows, self.budget, noise)
        baseline = next((row for row in candidates if row.name == space.low_format), None)
        confirmer = Confirmer(
            bench=bench,
            noise=noise,
            steps=min(100, 2 * bench.effort.steps),
            rounds=max(15, bench.effort.rounds),
        )

        num_ended = 0

        def on_attempt(row: TrialRow, confirmation: Confirmation | None) -> None:
            nonlocal num_ended
            message = f"confirming trial {row.number} on fresh data"
            if confirmation is not None:
                num_ended += 1
                message = f"trial {row.number} again: {confirmation.speedup.value:.2f}x fp32; {confirmation.why}"
            self.progress(Progress(stage="confirm", done=num_ended, total=None, message=message))

        return confirmer.choose(candidates, baseline, lambda row: _plan_of(space, row), on_attempt)

    def _result(
        self,
        space: Space,
        bench: Bench,
        rows: list[TrialRow],
        winner: TrialRow | None,
        confirmations: list[Confirmation],
        noise: float,
    ) -> TuneResult:
        environment = describe_environment(self.place.device)
        measured_noise = {"loss_gap": noise, "seeds": 2, "steps": bench.effort.steps}
        chosen = None
        if winner is None:
            plan = space.plan_of(space.baselines()["fp32"])
            verdict = say_no_gain(rows, confirmations, self.budget)
        else:
            chosen = next(c for c in confirmations if c.accepted and c.plan_sha256 == winner.plan_sha256)
            plan = _plan_of(space, winner)
            verdict = say_faster(winner, chosen, self.budget, self.task.mode)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        evidence = make_evidence(self.task, chosen, measured_noise, self.budget, environment, now)
        result = TuneResult(
            study=self.name,
            task=self.task.name,
            plan=replace(plan, evidence=evidence),
            verdict=verdict,
            winner=None if winner is None else winner.plan_sha256,
            trials=tuple(rows),
            confirmations=tuple(confirmations),
            receipt=self._receipt(bench, plan),
            reference=tuple(bench.reference(bench.data_seed, bench.effort.steps)),
            warm_up=bench.checkpoint.losses,
            noise=measured_noise,
            budget=self.budget,
            groups=tuple(asdict(group) for group in space.groups),
            environment=environment,
            settings=self._settings(bench),
            folder=self.folder,
        )
        result.save()
        return result

    def _receipt(self, bench: Bench, plan: Plan) -> Receipt | None:
        if plan.level == "O0":
            return None
        model = bench.trainer(None).model
        batch = bench.batches(bench.data_seed, 1)[0]
        return receipt(convert(model, plan=plan, example_inputs=lambda model: self.task.loss(model, batch)))

    def _settings(self, bench: Bench) -> dict[str, Any]:
        return {
            "task": self.spec,
            "study": self.name,
            "storage": None if self.storage is None else without_password(self.storage),
            "target": self.place.target.name,
            "trials": self.trials,
            "timeout": self.timeout,
            "seed": self.seed,
            "keep": list(self.keep),
            "rules": [str(file) for file in self.rules],
            "checkpoint": bench.checkpoint.origin,
            "effort": asdict(bench.effort),
            "throughput": dict(zip(("unit", "per_step"), self.task.throughput_unit(), strict=True)),
            "seconds": round(time.monotonic() - self.started, 1),
        }


def _shortlist(
    study: optuna.Study, space: Space, rows: Sequence[TrialRow], budget: float, noise: float
) -> list[TrialRow]:
    """Trials that may beat fp32 inside the budget, the fastest first, by what all trials together say of each."""
    believed = PlanSampler(*prior(space), budget=budget, noise=noise).posterior(study.get_trials(deepcopy=False))
    fit: dict[str, TrialRow] = {}
    for row in rows:
        belief = believed.get(row.number)
        if belief is None or row.state != "complete" or set(row.formats.values()) == {"fp32"}:
            continue
        if belief.speedup > 1 and belief.loss_gap + belief.loss_gap_sd <= budget:
            fit.setdefault(row.plan_sha256, row)
    return sorted(fit.values(), key=lambda row: -believed[row.number].speedup)


def _plan_of(space: Space, row: TrialRow) -> Plan:
    return space.plan_of({**row.formats, **{f"scaler.{name}": value for name, value in row.scaler.items()}})


def _confirmation_s(bench: Bench, step_s: float) -> float:
    """Seconds that two confirmations take, to be kept free of trials."""
    steps = (1 + 2) * NUM_SEEDS * 2 * bench.effort.steps + 2 * 2 * 4 * max(15, bench.effort.rounds)
    return math.ceil(steps * step_s)
