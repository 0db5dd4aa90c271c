"""Whose turn it is: every evaluation of a study ends exactly once, however many processes run it and die.

Storages offer no transactions over trials.  Three facts of theirs carry all of this:

- Trials are numbered in the order in which they were created, so that of two that plan the same, or ask for the last
  free place, everyone finds the same one to be first.
- A trial ends once: of several processes that end it, all but one are told so.
- A trial is taken from the queue once.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from autoprec.tune.studies.lease import LEASE, Heart, Watch, worker_name
from autoprec.tune.studies.lock import in_turn
from autoprec.tune.studies.patience import PatientStorage
from autoprec.tune.studies.reclaim import (
    EVALUATION,
    MIX,
    WITHDRAWN,
    attempt_of,
    enqueue,
    evaluation_of,
    give_up,
    has_ended,
    planned,
    reclaim_stale_trials,
)
from autoprec.tune.studies.storage import sole_process

_OPEN = (TrialState.RUNNING, TrialState.WAITING)
#: How long a process may take to choose a mix, as the others see it.
_CHOOSING_S, _POLL_S = 30.0, 0.1

_NAMELESS = "a process that has just begun"
_NO_PLACE = "all wanted trials are taken"


class Turns:
    """Hands out the trials of a study to this process, as one of several; a context that renews its leases.

    Args:
        study: Optuna's, with a sampler.
        wanted: evaluations in all, those of earlier runs and of other processes included.
        watch, heart: of leases; made where left out.
    """

    def __init__(
        self, study: optuna.Study, wanted: int, *, watch: Watch | None = None, heart: Heart | None = None
    ) -> None:
        self._study, self._wanted = study, wanted
        self._watch = watch or Watch()
        self._heart = heart or Heart(study._storage)
        self._open, self._choosing = ExitStack(), ExitStack()

    def __enter__(self) -> Turns:
        self._open.enter_context(sole_process(self._study))
        self._open.enter_context(self._heart)
        return self

    def __exit__(self, *_: object) -> None:
        self._choosing.close()
        self._open.close()

    def plan(self, evaluation: str, params: Mapping[str, Any], attrs: Mapping[str, Any]) -> None:
        """Enqueue a mix under a name of its own: though several processes plan it, it is run once."""
        with _turn_to_choose(self._study):
            if not any(evaluation_of(trial) == evaluation for trial in self._trials()):
                enqueue(self._study, dict(params), {**attrs, EVALUATION: evaluation}, {})

    def num_ended(self) -> int:
        """Evaluations that are over."""
        return sum(has_ended(trial) for trial in self._trials())

    def running_elsewhere(self) -> list[str]:
        """Other processes that run a trial, by name: the last of them to finish confirms the winner."""
        running = [trial for trial in self._trials() if trial.state == TrialState.RUNNING]
        leases = [trial.user_attrs.get(LEASE) for trial in running if not self._watch.is_stale(trial)]
        # one that took its trial this moment has no lease yet
        return sorted({_NAMELESS if lease is None else worker_name(lease) for lease in leases} - {worker_name()})

    def take(self) -> Trial | None:
        """The next trial to run; None while all that are wanted are over or run by other processes.

        Until :meth:`settle` says its mix, other workers of this host wait with their choice.

        Raises:
            StudyError: the storage is lost.
        """
        self._choosing.close()
        self._choosing.enter_context(_turn_to_choose(self._study))
        trial = None
        try:
            trial = self._next()
        finally:
            if trial is None:
                self._choosing.close()
        return trial

    def _next(self) -> Trial | None:
        while self._has_work():
            trial_id = self._begin()
            reason = self._refusal(trial_id)
            if reason is not None:
                self._withdraw(trial_id, reason)
                continue
            try:
                return Trial(self._study, trial_id)  # asks the sampler
            except BaseException as exc:
                self._give_up(trial_id, type(exc).__name__, died=False)
                raise
        return None

    def _begin(self) -> int:
        """Take a trial from the queue, or make one: as ``Study.ask``, but with a lease before the sampler is asked."""
        study = self._study
        study._thread_local.cached_all_trials = None
        trial_id = study._pop_waiting_trial_id()
        if trial_id is None:
            template = create_trial(state=TrialState.RUNNING, user_attrs={LEASE: self._heart.lease()})
            trial_id = study._storage.create_new_trial(study._study_id, template)
            self._heart.hold(trial_id, has_lease=True)
        else:
            with suppress(UpdateFinishedTrialError):  # its lack of a lease was seen for too long
                self._heart.hold(trial_id)
        return trial_id

    def settle(self, trial: Trial, mix: Mapping[str, Any], *, is_repeat: bool = False) -> bool:
        """Say what the trial measures.

        Args:
            trial: taken.
            mix: all of its parameters.
            is_repeat: whether it is measured again on purpose.

        Returns:
            whether it is to be run: it is withdrawn where a trial before it measures the same at this moment.
        """
        with self._choosing:
            self._study._storage.set_trial_user_attr(trial._trial_id, MIX, dict(mix))
            is_planned = "fixed_params" in self._frozen(trial._trial_id).system_attrs
            if is_repeat or is_planned or not self._has_twin(trial, mix):
                return True
            self._withdraw(trial._trial_id, "its mix is being measured")
            return False

    def finish(self, trial: Trial, value: float | None = None, state: TrialState | None = None) -> bool:
        """Tell the trial's end; False where another process, taking this one for dead, ended it before."""
        self._heart.drop(trial._trial_id)
        try:
            self._study.tell(trial, value, state)
        except (UpdateFinishedTrialError, ValueError):
            if self._frozen(trial._trial_id).state.is_finished():
                return False
            raise
        return True

    def give_up(self, trial: Trial, why: str, *, died: bool = True) -> None:
        """End a trial that wasn't measured, and enqueue its mix again; ``died`` counts against the mix."""
        self._choosing.close()
        self._give_up(trial._trial_id, why, died=died)

    def _give_up(self, trial_id: int, why: str, *, died: bool) -> None:
        self._heart.drop(trial_id)
        give_up(self._study, self._frozen(trial_id), why, died=died)

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _frozen(self, trial_id: int) -> FrozenTrial:
        return self._study._storage.get_trial(trial_id)

    def _has_work(self) -> bool:
        reclaim_stale_trials(self._study, self._watch)
        for trial in self._trials():
            if trial.state == TrialState.RUNNING and self._heart.disowns(trial):
                give_up(self._study, trial, "its end was lost", died=False)
        trials = self._trials()
        taken = sum(has_ended(trial) or trial.state == TrialState.RUNNING for trial in trials)
        return taken < self._wanted or any(_is_retry(t) and t.state == TrialState.WAITING for t in trials)

    def _refusal(self, trial_id: int) -> str | None:
        """Why a trial must not be run."""
        trials = self._trials()
        own = next(trial for trial in trials if trial._trial_id == trial_id)
        if own.state.is_finished():
            return "its process was taken for dead"
        others = [trial for trial in trials if trial is not own]
        for other in others:
            reason = self._rivalry(own, other)
            if reason is not None:
                return reason
        return None if _is_retry(own) or self._has_place(own, others) else _NO_PLACE

    def _has_twin(self, trial: Trial, mix: Mapping[str, Any]) -> bool:
        """Whether a running trial before this one measures the same."""
        deadline = time.monotonic() + _CHOOSING_S
        while True:
            before = [t for t in self._trials()[: trial.number] if t.state == TrialState.RUNNING]
            if any(planned(other) == mix for other in before):
                return True
            # one that has no mix yet may come to the same
            if all(planned(other) or self._watch.is_stale(other) for other in before) or time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)

    def _rivalry(self, own: FrozenTrial, other: FrozenTrial) -> str | None:
        """Why another trial makes this one superfluous."""
        if evaluation_of(own) != evaluation_of(other) or WITHDRAWN in other.user_attrs:
            return None
        if attempt_of(other) < attempt_of(own) and other.state in _OPEN:
            _end(self._study, other)
            other = self._frozen(other._trial_id)
        if has_ended(other):
            return f"trial {other.number} was measured"
        is_first = (attempt_of(own), -own.number) > (attempt_of(other), -other.number)
        return None if is_first else f"trial {other.number} is the same"

    def _has_place(self, own: FrozenTrial, others: Iterable[FrozenTrial]) -> bool:
        """Whether fewer evaluations than wanted come before this one; one that is tried again keeps its place."""
        before = sum(
            has_ended(other) or other.state in _OPEN
            for other in others
            if other.number < own.number or _is_retry(other)
        )
        return before < self._wanted

    def _withdraw(self, trial_id: int, reason: str) -> None:
        self._heart.drop(trial_id)
        own = self._frozen(trial_id)
        with suppress(UpdateFinishedTrialError):
            self._study._storage.set_trial_user_attr(trial_id, WITHDRAWN, reason)
            if reason == _NO_PLACE and EVALUATION in own.user_attrs:
                # somebody may want more trials later
                attrs = {key: value for key, value in own.user_attrs.items() if key in (EVALUATION, "name")}
                enqueue(self._study, planned(own), attrs, own.system_attrs)
            _end(self._study, own)


def _is_retry(trial: FrozenTrial) -> bool:
    return attempt_of(trial) > 1


def _end(study: optuna.Study, trial: FrozenTrial) -> None:
    """Fail a trial, unless it has ended."""
    with suppress(UpdateFinishedTrialError):
        study._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)


def _turn_to_choose(study: optuna.Study) -> AbstractContextManager[None]:
    """Let the workers of this host choose one after another: at the same time, they would choose the same."""
    if not isinstance(study._storage, PatientStorage):
        return nullcontext()
    name = hashlib.sha256(f"{study._storage.name} {study.study_name}".encode()).hexdigest()[:16]
    return in_turn(f"study-{name}", _CHOOSING_S)
