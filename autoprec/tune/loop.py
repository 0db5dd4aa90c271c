"""The trials of a study: propose, measure, record, until they are spent."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from autoprec.measure import measurement_from_json
from autoprec.plan import Plan
from autoprec.tune.bench import Bench
from autoprec.tune.progress import OnProgress, Progress
from autoprec.tune.result import TrialRow
from autoprec.tune.sampler import CONSTRAINT, SPEED_SD, Belief
from autoprec.tune.space import RULES, Space
from autoprec.tune.storage import give_up, take_lease

_ROW = "row"
#: System attribute of a trial: why the sampler proposed it; only a repeat is measured again.
ORIGIN, REPEAT = "autoprec:origin", "repeat"


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Runs trials.

    Args:
        study: Optuna's, with a sampler.
        space: of the plans.
        bench: measures them.
        trials: finished trials wanted, those of earlier runs included.
        deadline: of :func:`time.monotonic`, after which no trial starts; None for none.
        progress: told of each trial.
        predict: what is believed of a mix before it is measured; None where nothing is.
    """

    study: optuna.Study
    space: Space
    bench: Bench
    trials: int
    deadline: float | None
    progress: OnProgress
    predict: Callable[[Mapping[str, Any]], Belief | None] = lambda params: None

    def run(self) -> list[TrialRow]:
        """Run what is left; rows of all finished trials, in order."""
        if not self.study.get_trials(deepcopy=False):
            for name, params in self.space.baselines().items():
                self.study.enqueue_trial(params, user_attrs={"name": name})
        rows = {row.number: row for row in finished_rows(self.study)}
        while len(rows) < self.trials and not self._is_late() and not self._is_exhausted(rows):
            row = self._one(list(rows.values()))
            rows[row.number] = row
            self.progress(
                Progress(stage="trials", done=len(rows), total=self.trials, message=describe_row(row), row=row)
            )
        return [rows[number] for number in sorted(rows)]

    def _is_late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def _is_exhausted(self, rows: Mapping[int, TrialRow]) -> bool:
        """Every mix was measured: nothing is left to learn, but about the scaler."""
        waiting = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        distinct = {tuple(row.formats.values()) for row in rows.values()}
        return not waiting and not self.space.scaler_choices and len(distinct) >= self.space.size

    def _one(self, done: Sequence[TrialRow]) -> TrialRow:
        trial = self.study.ask()
        try:
            take_lease(trial)
            params, plan = self._propose(trial)
            before = [row for row in done if row.plan_sha256 == plan.sha256]
            origin = self._origin(trial)
            if before and origin != REPEAT:
                row = _copy(trial, before[0])
            else:
                # a repeat sees other data: the same batches would only say the same again
                times = sum(row.seconds > 0 for row in before)
                row = self._measure(trial, params, plan, origin, self.bench.data_seed + times)
            self._record(trial, row)
        except BaseException as exc:
            # interrupted, or the storage is gone; a plan's own exceptions are outcomes and don't come here
            _try_to_give_up(self.study, trial, type(exc).__name__)
            raise
        return row

    def _propose(self, trial: Trial) -> tuple[dict[str, Any], Plan]:
        params: dict[str, Any] = {
            group.name: trial.suggest_categorical(group.name, group.choices) for group in self.space.groups
        }
        plan = self.space.plan_of(params)
        if plan.scaler.enabled:
            for name, values in self.space.scaler_choices.items():
                params[name] = trial.suggest_categorical(name, values)
            plan = self.space.plan_of(params)
        return params, plan

    def _origin(self, trial: Trial) -> str:
        """Why the mix was proposed: a baseline has a name, and the sampler marks its own."""
        if "name" in trial.user_attrs:
            return "baseline" if trial.user_attrs["name"] != "search" else "search"
        return self.study.get_trials(deepcopy=False)[trial.number].system_attrs.get(ORIGIN, "search")

    def _measure(self, trial: Trial, params: Mapping[str, Any], plan: Plan, origin: str, seed: int) -> TrialRow:
        predicted = self.predict(params)
        started = time.time()
        outcome = self.bench.trial(plan) if seed == self.bench.data_seed else self.bench.trial(plan, seed)
        comparison = outcome.comparison
        return TrialRow(
            number=trial.number,
            name=trial.user_attrs.get("name", "search"),
            plan_sha256=plan.sha256,
            formats={group.name: params[group.name] for group in self.space.groups},
            scaler=asdict(plan.scaler) if plan.scaler.enabled else {},
            low_share=low_share(self.space, params),
            state=outcome.state,
            loss_gap=outcome.loss_gap,
            speedup=None if comparison is None else comparison.speedup,
            control=None if comparison is None else comparison.control,
            candidate_s=None if comparison is None else comparison.candidate_s,
            baseline_s=None if comparison is None else comparison.baseline_s,
            losses=outcome.finite_losses,
            num_skipped=outcome.num_skipped,
            seconds=outcome.seconds,
            note=outcome.note,
            origin=origin,
            worker=f"{socket.gethostname()}:{os.getpid()}",
            started=started,
            ended=time.time(),
            predicted_speedup=None if predicted is None else predicted.speedup,
            predicted_gap=None if predicted is None else predicted.loss_gap,
        )

    def _record(self, trial: Trial, row: TrialRow) -> None:
        trial.set_user_attr(_ROW, row.to_json())
        trial.set_user_attr("loss_gap", row.loss_gap)
        speed = 0.0
        if row.speedup is not None:
            speed = row.speedup.value
            trial.set_user_attr(SPEED_SD, (row.speedup.high - row.speedup.low) / (2 * 1.96))
        trial.set_constraint(CONSTRAINT, row.loss_gap - self.bench.budget)
        self.study.tell(trial, speed)


def _copy(trial: Trial, before: TrialRow) -> TrialRow:
    """The row of a plan that was measured before: without a purpose it isn't measured again."""
    values = {name: getattr(before, name) for name in TrialRow.__dataclass_fields__}
    note = f"the same plan as trial {before.number}"
    name = trial.user_attrs.get("name", "search")
    return TrialRow(**{**values, "number": trial.number, "name": name, "note": note, "seconds": 0.0})


def _try_to_give_up(study: optuna.Study, trial: Trial, why: str) -> None:
    """When the storage itself is gone, the first exception is the one to see; the trial is reclaimed later."""
    try:
        frozen: FrozenTrial = study.get_trials(deepcopy=False)[trial.number]
        give_up(study, frozen, why)
    except Exception as exc:  # whatever the storage's driver raises
        optuna.logging.get_logger("autoprec").debug("trial %d stays running: %s", trial.number, exc)


def finished_rows(study: optuna.Study) -> list[TrialRow]:
    """Rows of all finished trials of a study, this process's or not."""
    done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return [_row_from_json(trial.user_attrs[_ROW]) for trial in done if _ROW in trial.user_attrs]


def _row_from_json(data: dict[str, Any]) -> TrialRow:
    measured = {
        name: None if data[name] is None else measurement_from_json(data[name]) for name in ("speedup", "control")
    }
    return TrialRow(**{**data, **measured, "losses": tuple(data["losses"])})


def low_share(space: Space, params: Mapping[str, Any]) -> float:
    """Share of the GEMM FLOPs outside the pins that a mix asks to run below fp32."""
    return sum(group.flops_share for group in space.groups if params[group.name] not in ("fp32", RULES))


def describe_row(row: TrialRow) -> str:
    """One line for a person."""
    speed = "not timed" if row.speedup is None else f"{row.speedup.value:.2f}x fp32"
    end = f" ({row.note})" if row.note else ""
    return f"trial {row.number} {row.name}: {speed}, loss {row.loss_gap:+.3%}{end}"
