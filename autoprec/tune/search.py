"""``tune``: a study from start to end.

Checkpoint → costs → noise → trials → confirmation → plan.  Each stage is found again in the study's folder and storage
when the same call is made after an interruption, or by another process.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from typing import Any

import torch
from optuna.storages import BaseStorage

from autoprec.target import Target
from autoprec.tasks import Task
from autoprec.tune.answers.answer import Answer, confirmation_s
from autoprec.tune.answers.result import TuneResult
from autoprec.tune.answers.row import TrialRow
from autoprec.tune.loop import Loop
from autoprec.tune.prepared import Prepared, prepare
from autoprec.tune.processes.crew import Crew
from autoprec.tune.processes.ranks import RanksBench, follow, is_distributed, is_leader
from autoprec.tune.progress import OnProgress, Progress, silent
from autoprec.tune.request import Request, make_request
from autoprec.tune.sampling.methods import trials_of
from autoprec.tune.sampling.objective import Kind
from autoprec.tune.sampling.sampler import make_sampler, plan_sampler
from autoprec.tune.studies.claim import claim
from autoprec.tune.studies.storage import open_storage
from autoprec.tune.trials.trainer import own_random_state


def tune(
    task: str | Task | None = None,
    target: str | Target = "auto",
    trials: int | None = None,
    timeout: float | None = None,
    storage: str | BaseStorage | None = None,
    study: str | None = None,
    max_loss_increase: float = 0.005,
    seed: int = 0,
    output_dir: str | PathLike[str] | None = None,
    keep: Sequence[str] = (),
    rules: Iterable[str | PathLike[str]] = (),
    progress: OnProgress | None = None,
    *,
    method: str = "loop",
    objective: Kind = "speed",
    min_speedup: float | None = None,
    workers: int = 1,
    trial_timeout: float | None = None,
    isolate: bool = True,
) -> TuneResult:
    """Find the fastest mix of formats whose loss stays within a budget, by training on the device in this machine.

    A target that isn't in this machine is tuned for all the same: its formats are emulated, so that losses are
    measured, and its speeds are estimated; :func:`autoprec.tune.answers.settle` measures them there.

    Args:
        task: a :class:`~autoprec.tasks.Task`, or the name of one: built in, ``file.py:name``, ``pkg.mod:name``.
        target: the device; ``"auto"`` finds the one in this machine.
        trials: mixes to measure, the baselines included; None is 50, or as many as ``timeout`` allows.
        timeout: seconds after which no trial starts; the confirmation's own time is kept free.
        storage: Optuna storage, see :mod:`autoprec.tune.studies.storage`; None is a file in the folder.
        study: its name; None is the task's.  The same call goes on with a study that was interrupted.
        max_loss_increase: largest loss gap, relative to the fp32 loss on the same batches: 0.005 is half a per cent.
        seed: of model, data and search.
        output_dir: where its files go; None is ``runs/<study>``.
        keep: pins that always hold, ``GLOB=FORMAT``.
        rules: the user's rule files.
        progress: called with each :class:`~autoprec.tune.Progress`.
        method: who proposes mixes, see :data:`autoprec.tune.sampling.methods.Method`.
        objective: ``speed``: the fastest mix; ``loss``: the lowest loss gap at ``min_speedup``; ``memory``: the
            smallest; ``front``: all of the best.
        min_speedup: against fp32, for the objective ``loss``.
        workers: processes that run trials here; the same call on other hosts joins in.  Under ``torchrun`` a trial
            spans the ranks instead: all of them make this call, and get its result.
        trial_timeout: seconds after which a trial counts as hung; None takes many times what fp32's steps take.
        isolate: run trials in a process of their own, so that one that crashes or hangs ends nothing else.

    Returns:
        the confirmed plan with its evidence, which is fp32 where nothing was better.

    Raises:
        TaskError, TargetError, RuleError, UsageError: an argument can't be used.
        StudyError: the study is another's, its storage is gone, or the budget is below the task's own noise.
    """
    request = make_request(
        task=task,
        target=target,
        trials=trials,
        timeout=timeout,
        storage=storage,
        study=study,
        max_loss_increase=max_loss_increase,
        objective=objective,
        min_speedup=min_speedup,
        method=method,
        workers=workers,
        trial_timeout=trial_timeout,
        isolate=isolate,
        seed=seed,
        output_dir=output_dir,
        keep=keep,
        rules=rules,
    )
    run = _Run(request, progress or silent)
    with own_random_state(request.place.device):
        if is_distributed() and not is_leader():
            return follow(request.task, request.place.device)
        return run.whole()


def run_trials(**arguments: Any) -> None:
    """What a further worker does: trials, until the study has all of them.

    Args:
        arguments: of :func:`make_request`.
    """
    request = make_request(**arguments)
    with own_random_state(request.place.device):
        _Run(request, silent).trials_only()


class _Run:
    """One process's part in a study."""

    def __init__(self, request: Request, progress: OnProgress) -> None:
        self.request, self.progress = request, progress

    def whole(self) -> TuneResult:
        """Prepare, run trials beside the other workers, confirm."""
        request = self.request
        storage = open_storage(request.storage, request.folder, request.workers)
        crew = self._crew()  # refuses a task that can't be sent to other processes before anything is trained
        with prepare(request, storage, self.progress) as prepared:
            with crew:
                rows = self._trials(prepared)
            with claim(storage, request.name, "confirm", on_wait=self._on_wait):
                answer = Answer(request=request, prepared=prepared, rows=rows, progress=self.progress)
                result = answer.find()
            if isinstance(prepared.bench, RanksBench):
                prepared.bench.close(result)
            return result

    def trials_only(self) -> None:
        """Find what another process prepared, and run trials."""
        request = self.request
        storage = open_storage(request.storage, request.folder, request.workers)
        with prepare(request, storage, self.progress) as prepared:
            self._trials(prepared)

    def _crew(self) -> AbstractContextManager[object]:
        request = self.request
        if request.workers == 1:
            return nullcontext()
        return Crew(
            run_trials,
            request.arguments(),
            request.workers - 1,
            num_devices=torch.cuda.device_count() if request.place.device.type == "cuda" else 0,
            on_event=lambda message: self._tell("trials", message),
        )

    def _trials(self, prepared: Prepared) -> list[TrialRow]:
        request, study = self.request, prepared.study
        objective, noise = request.objective, prepared.noise.sigma
        study.sampler = make_sampler(
            prepared.space,
            request.seed,
            request.budget,
            noise,
            problem=prepared.problem,
            method=request.method,
            objective=objective,
        )
        beliefs = plan_sampler(prepared.space, request.budget, noise, problem=prepared.problem, objective=objective)
        deadline = None
        if request.timeout is not None:
            from_scratch = request.task.mode == "training" and request.task.checkpoint is None
            kept = confirmation_s(prepared.bench, prepared.step_s, from_scratch)
            deadline = request.started + request.timeout - kept
        loop = Loop(
            study=study,
            space=prepared.space,
            bench=prepared.bench,
            objective=objective,
            beliefs=beliefs,
            trials=trials_of(request.method, len(prepared.space.baselines()), request.trials),
            deadline=deadline,
            progress=self.progress,
        )
        start = time.monotonic()
        rows = loop.run()
        own = sum(row.seconds for row in rows if row.started >= time.time() - (time.monotonic() - start))
        prepared.overhead_s["search and storage"] = max(0.0, time.monotonic() - start - own / request.workers)
        return rows

    def _on_wait(self, holder: str) -> None:
        self._tell("confirm", f"waiting for {holder}, which confirms the winner")

    def _tell(self, stage: Any, message: str) -> None:
        self.progress(Progress(stage=stage, done=0, total=None, message=message))
