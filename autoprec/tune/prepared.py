"""What a study's trials need: made by its first process, found by all others in its folder and its storage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import optuna
from optuna.storages import BaseStorage

from autoprec.errors import StudyError
from autoprec.planner.problem import Problem, problem_from_json
from autoprec.tune.posing.pose import pose_problem
from autoprec.tune.processes.ranks import RanksBench, is_distributed
from autoprec.tune.processes.worker import WorkerBench
from autoprec.tune.progress import OnProgress, Progress, Stage
from autoprec.tune.request import Request
from autoprec.tune.space import Space
from autoprec.tune.studies.claim import claim
from autoprec.tune.studies.join import CHECKPOINT, require_checkpoint, weights_digest
from autoprec.tune.studies.storage import check_identity, known_identity, open_study
from autoprec.tune.trials.bench import Bench
from autoprec.tune.trials.checkpoint import Checkpoint, load_checkpoint
from autoprec.tune.trials.noise import Noise, measure_noise, refuse_budget
from autoprec.tune.trials.outcome import Effort
from autoprec.tune.trials.prepare import make_space, study_identity, task_identity
from autoprec.tune.trials.warmup import MIN_STEPS, obtain_checkpoint

_EFFORT, _NOISE, _STEP_S, _PROBLEM, _NOTES = "effort", "noise", "step_s", "problem", "pricing_notes"
_WARM_UP_LIMIT_S = 150.0
#: Methods whose proposals rest on the planner's problem.
_PLANNED = ("milp", "loop")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Ready for trials.

    Args:
        study: Optuna's, without a sampler yet.
        space: of the plans, without the choices that can't win.
        bench: measures them, in a process of its own where that can be.
        noise: of the loss gap.
        step_s: seconds of an fp32 step here.
        problem: harm and cost of each choice; None where the method needs none.
        notes: what couldn't be priced, and what was taken instead.
        overhead_s: seconds by stage of what wasn't training or timing a plan.
    """

    study: optuna.Study
    space: Space
    bench: Bench | WorkerBench
    noise: Noise
    step_s: float
    problem: Problem | None
    notes: tuple[str, ...]
    overhead_s: dict[str, float] = field(default_factory=dict)

    @property
    def isolation(self) -> str:
        """Where trials run."""
        return self.bench.isolation if isinstance(self.bench, WorkerBench | RanksBench) else "none: asked for"


@contextmanager
def prepare(request: Request, storage: BaseStorage, progress: OnProgress) -> Iterator[Prepared]:
    """Make or find what the trials need; the worker process ends with the block.

    Args:
        request: the call.
        storage: of the study, open.
        progress: told of each stage.

    Raises:
        StudyError: the study is another's, a checkpoint can't be made or used, or the budget is below the noise.
        TaskError, UsageError: the task or a pin can't be used.
    """

    def on_wait(holder: str) -> None:
        progress(Progress(stage="checkpoint", done=0, total=None, message=f"waiting for {holder} to prepare the study"))

    preparation = _Preparation(request, storage, progress)
    with claim(storage, request.name, "prepare", on_wait=on_wait):
        prepared = preparation.run()
    with ExitStack() as stack:
        if isinstance(prepared.bench, WorkerBench | RanksBench):
            stack.enter_context(prepared.bench)
        yield prepared


class _Preparation:
    def __init__(self, request: Request, storage: BaseStorage, progress: OnProgress) -> None:
        self.request, self.storage, self.progress = request, storage, progress
        self.overhead_s: dict[str, float] = {}

    def run(self) -> Prepared:
        request, place = self.request, self.request.place
        identity = task_identity(request.task, request.seed)
        known = known_identity(self.storage, request.name)
        if known is not None:
            check_identity(request.name, known, identity)  # before a checkpoint is trained for another's study
        is_here = request.task.checkpoint is not None or load_checkpoint(request.folder) is not None
        require_checkpoint(self.storage, request.name, request.folder, is_here=is_here)
        checkpoint = self._checkpoint(identity)
        with self._timed("space"):
            space = make_space(
                request.task, checkpoint, place, seed=request.seed, keep=request.keep, rules=request.rules
            )
            whole = study_identity(identity, space, place, request.budget)
            whole = {**whole, CHECKPOINT: weights_digest(checkpoint.weights)}
            study = open_study(request.name, self.storage, request.folder, whole)
        problem, notes = self._problem(study, space, checkpoint)
        if problem is not None:
            space = space.pruned(problem)
        bench = self._isolated(self._bench(checkpoint))
        noise, step_s = self._noise(study, space, bench)
        return Prepared(
            study=study,
            space=space,
            bench=bench,
            noise=noise,
            step_s=step_s,
            problem=problem,
            notes=notes,
            overhead_s=self.overhead_s,
        )

    def _checkpoint(self, identity: dict[str, Any]) -> Checkpoint:
        request = self.request
        limit_s = _WARM_UP_LIMIT_S if request.timeout is None else min(_WARM_UP_LIMIT_S, request.timeout / 4)

        def on_step(done: int, loss: float) -> None:
            self._tell("checkpoint", done, max(MIN_STEPS, done), f"training a checkpoint: step {done}, loss {loss:.4f}")

        checkpoint = obtain_checkpoint(
            request.task,
            request.folder,
            identity=identity,
            device=request.place.device,
            seed=request.seed,
            limit_s=limit_s,
            on_step=on_step,
        )
        done = len(checkpoint.losses)
        self._tell("checkpoint", done, done, f"checkpoint: {checkpoint.origin}")
        return checkpoint

    def _bench(self, checkpoint: Checkpoint) -> Bench:
        request, place = self.request, self.request.place
        return Bench(
            task=request.task,
            checkpoint=checkpoint,
            device=place.device,
            seed=request.seed,
            budget=request.budget,
            elsewhere=place.elsewhere,
            weighs=request.objective.kind == "memory",
        )

    def _isolated(self, bench: Bench) -> Bench | WorkerBench:
        request = self.request
        if is_distributed():
            return RanksBench(bench)
        if not request.isolate:
            return bench
        return WorkerBench(bench, spec=request.task_name, trial_timeout=request.trial_timeout)

    def _problem(
        self, study: optuna.Study, space: Space, checkpoint: Checkpoint
    ) -> tuple[Problem | None, tuple[str, ...]]:
        """The planner's problem; a study that goes on keeps its own, since its space rests on it."""
        if self.request.method not in _PLANNED:
            return None, ()
        known = study.user_attrs
        if _PROBLEM not in known:
            self._tell("costs", 0, None, "scoring and pricing each choice of format")
            with self._timed("scores and costs"):
                pricing = pose_problem(
                    space,
                    self._bench(checkpoint),
                    rules=self.request.rules,
                    on_step=lambda done, total, what: self._tell("costs", done, total, f"measured {what}"),
                )
            study.set_user_attr(_NOTES, list(pricing.notes))
            study.set_user_attr(_PROBLEM, pricing.problem.to_json())
            known = study.user_attrs
        problem = problem_from_json(known[_PROBLEM])
        problem.save(self.request.folder / "problem.json")
        return problem, tuple(known[_NOTES])

    def _noise(self, study: optuna.Study, space: Space, bench: Bench | WorkerBench) -> tuple[Noise, float]:
        """The task's own noise in the gap, and the step's seconds; a study that goes on keeps its effort and noise."""
        known = study.user_attrs
        if _NOISE not in known:
            step_s = bench.measure_step_s()
            bench.effort = Effort.for_step(step_s)
            self._tell("noise", 0, 1, "measuring the task's own noise")
            noise = measure_noise(bench)
            noise = noise.with_repeats(self._pairs(space, bench), self.request.budget)
            if refusal := refuse_budget(noise, bench):
                raise StudyError(refusal)
            study.set_user_attr(_EFFORT, asdict(bench.effort))
            study.set_user_attr(_STEP_S, step_s)
            study.set_user_attr(_NOISE, noise.to_json())
            known = study.user_attrs
        saved = known[_NOISE]
        bench.effort = Effort(**known[_EFFORT])
        noise = Noise(**{name: saved[name] for name in ("chaos", "between_seeds", "steps", "seeds")})
        self._tell("noise", 1, 1, f"noise: a loss gap is off by {noise.sigma:.2e} of the loss, in {noise.steps} steps")
        return noise, known[_STEP_S]

    def _pairs(self, space: Space, bench: Bench | WorkerBench) -> list[tuple[float, float]]:
        """Gaps of the baselines on two data seeds each."""
        plans = {plan.sha256: plan for plan in map(space.plan_of, space.baselines().values()) if plan.level != "O0"}
        seeds, steps = (bench.data_seed, bench.data_seed + 1), bench.effort.steps
        return [(bench.gap(plan, seeds[0], steps), bench.gap(plan, seeds[1], steps)) for plan in plans.values()]

    def _tell(self, stage: Stage, done: int, total: int | None, message: str) -> None:
        self.progress(Progress(stage=stage, done=done, total=total, message=message))

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.overhead_s[what] = time.monotonic() - start
