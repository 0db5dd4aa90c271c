"""The trials of a study: propose, measure, record, until they are spent; as one of several processes, or alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import Trial, TrialState

from autoprec.errors import StudyError
from autoprec.estimate import Estimate
from autoprec.measure import Measurement
from autoprec.plan import Plan
from autoprec.tune.answers.row import TrialRow, fields_of, row_from_json
from autoprec.tune.processes.worker import WorkerBench
from autoprec.tune.progress import OnProgress, Progress
from autoprec.tune.sampling.objective import Objective
from autoprec.tune.sampling.plan_sampler import PlanSampler
from autoprec.tune.sampling.sampler import CONSTRAINT, ORIGIN, REPEAT, SPEED_SD
from autoprec.tune.space import RULES, Space
from autoprec.tune.studies.lease import worker_name
from autoprec.tune.studies.turns import Turns
from autoprec.tune.trials.bench import Bench
from autoprec.tune.trials.speed import standard_error

_ROW = "row"
_POLL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Runs trials.

    Args:
        study: Optuna's, with a sampler.
        space: of the plans.
        bench: measures them.
        objective: whose value the trials are told.
        beliefs: predicts a mix before it is measured.
        trials: trials wanted, those of earlier runs and of other processes included.
        deadline: of :func:`time.monotonic`, after which no trial starts; None for none.
        progress: told of each trial.
    """

    study: optuna.Study
    space: Space
    bench: Bench | WorkerBench
    objective: Objective
    beliefs: PlanSampler
    trials: int
    deadline: float | None
    progress: OnProgress

    def run(self) -> list[TrialRow]:
        """Run what is left; rows of all finished trials, in order, when no process runs one any more."""
        with Turns(self.study, self.trials) as turns:
            for name, params in self.space.baselines().items():
                turns.plan(name, params, {"name": name})
            while True:
                trial = None if self._is_over() else turns.take()
                if trial is not None:
                    self._one(turns, trial)
                elif turns.running_elsewhere():
                    time.sleep(_POLL_S)
                else:
                    break
        return finished_rows(self.study)

    def _is_over(self) -> bool:
        """No time is left, or every mix was measured and has no settings to try."""
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return True
        if self.space.size > self.trials:
            return False
        rows = finished_rows(self.study)
        waiting = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        distinct = {tuple(row.formats.values()): row.formats for row in rows}
        return (
            not waiting
            and len(distinct) >= self.space.size
            and not any(self.space.settings(formats) for formats in distinct.values())
        )

    def _one(self, turns: Turns, trial: Trial) -> None:
        try:
            params = self._propose(trial)
            plan = self.space.plan_of(params)
            is_repeat = self._origin(trial) == REPEAT
            if not turns.settle(trial, params, is_repeat=is_repeat):
                return
            rows = finished_rows(self.study)
            before = [row for row in rows if row.plan_sha256 == plan.sha256]
            if before and not is_repeat:
                row = _copy(trial, before[0])
            else:
                # a repeat sees other data: the same batches would only say the same again
                times = sum(row.seconds > 0 for row in before)
                row = self._measure(trial, params, plan, self.bench.data_seed + times)
            self._record(turns, trial, row)
        except UpdateFinishedTrialError as exc:
            # this process was taken for dead, and the mix is measured elsewhere
            _try_to_give_up(turns, trial, exc)
            return
        except BaseException as exc:
            # interrupted, or the storage is gone; a plan's own exceptions are outcomes and don't come here
            _try_to_give_up(turns, trial, exc)
            raise
        done = turns.num_ended()
        self.progress(Progress(stage="trials", done=done, total=max(done, self.trials), message=str(row), row=row))

    def _propose(self, trial: Trial) -> dict[str, Any]:
        """A choice for each group, and the settings that go with them."""
        params: dict[str, Any] = {
            group.name: trial.suggest_categorical(group.name, group.choices) for group in self.space.groups
        }
        while missing := {name: v for name, v in self.space.settings(params).items() if name not in params}:
            for name, values in missing.items():
                params[name] = trial.suggest_categorical(name, values)
        return params

    def _origin(self, trial: Trial) -> str:
        """Why the mix was proposed: a baseline has a name, and the sampler marks its own."""
        frozen = self.study._storage.get_trial(trial._trial_id)
        if frozen.user_attrs.get("name", "search") != "search":
            return "baseline"
        return frozen.system_attrs.get(ORIGIN, "search")

    def _measure(self, trial: Trial, params: Mapping[str, Any], plan: Plan, seed: int) -> TrialRow:
        predicted = self.beliefs.predict(params, self.study.get_trials(deepcopy=False))
        started = time.time()
        outcome = self.bench.trial(plan, seed)
        return TrialRow(
            number=trial.number,
            name=trial.user_attrs.get("name", "search"),
            plan_sha256=plan.sha256,
            formats={group.name: params[group.name] for group in self.space.groups},
            scaler=asdict(plan.scaler) if plan.scaler.enabled else {},
            recipe=dict(plan.recipe),
            low_share=low_share(self.space, params),
            **fields_of(outcome),
            origin=self._origin(trial),
            worker=worker_name(),
            started=started,
            ended=time.time(),
            predicted_speedup=None if predicted is None else predicted.speedup,
            predicted_gap=None if predicted is None else predicted.loss_gap,
        )

    def _record(self, turns: Turns, trial: Trial, row: TrialRow) -> None:
        trial.set_user_attr(_ROW, row.to_json())
        trial.set_user_attr("loss_gap", row.loss_gap)
        value, error = self._value(turns, row)
        if value:
            trial.set_user_attr(SPEED_SD, error)
        trial.set_constraint(CONSTRAINT, row.loss_gap - self.bench.budget)
        turns.finish(trial, value)

    def _value(self, turns: Turns, row: TrialRow) -> tuple[float, float]:
        """What the objective makes large, and its standard error; 0 where it wasn't measured."""
        if self.objective.kind != "memory":
            return (0.0, 0.0) if row.speedup is None else (row.speedup.value, standard_error(row.speedup))
        whole = row.memory_bytes if row.name == "fp32" else self._fp32_bytes(turns)
        if whole is None or row.memory_bytes is None:
            return 0.0, 0.0
        saved = whole.value / row.memory_bytes.value
        return saved, saved * standard_error(row.memory_bytes) / row.memory_bytes.value

    def _fp32_bytes(self, turns: Turns) -> Measurement | Estimate | None:
        """Of the reference's trial, which comes first, and may be running elsewhere."""
        while True:
            reference = next((row for row in finished_rows(self.study) if row.name == "fp32"), None)
            if reference is not None or not turns.running_elsewhere():
                return None if reference is None else reference.memory_bytes
            time.sleep(_POLL_S)


def _copy(trial: Trial, before: TrialRow) -> TrialRow:
    """The row of a plan that was measured before: without a purpose it isn't measured again."""
    values = {name: getattr(before, name) for name in TrialRow.__dataclass_fields__}
    note = f"the same plan as trial {before.number}"
    name = trial.user_attrs.get("name", "search")
    return TrialRow(**{**values, "number": trial.number, "name": name, "note": note, "seconds": 0.0})


def _try_to_give_up(turns: Turns, trial: Trial, why: BaseException) -> None:
    """When the storage itself is gone, the first exception is the one to see; the trial is reclaimed later."""
    try:
        turns.give_up(trial, type(why).__name__, died=not isinstance(why, (KeyboardInterrupt, StudyError)))
    except Exception as exc:  # whatever the storage's driver raises
        optuna.logging.get_logger("autoprec").debug("trial %d stays running: %s", trial.number, exc)


def finished_rows(study: optuna.Study) -> list[TrialRow]:
    """Rows of all finished trials of a study, this process's or not, in order."""
    done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return [row_from_json(trial.user_attrs[_ROW]) for trial in done if _ROW in trial.user_attrs]


def low_share(space: Space, params: Mapping[str, Any]) -> float:
    """Share of the GEMM FLOPs outside the pins that a mix asks to run below fp32."""
    return sum(group.flops_share for group in space.groups if params[group.name] not in ("fp32", RULES))
