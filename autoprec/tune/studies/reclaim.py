"""What becomes of a trial whose process is gone.

An *evaluation* is a mix to be measured.  It has one trial, and another one, with the same ``evaluation`` and the next
``attempt``, each time a process dies in it.  It ends as a complete or pruned trial, or as a failed one marked
:data:`GIVEN_UP`.  Other failed trials are attempts that another one followed, or were withdrawn before they ran.
"""

from __future__ import annotations

from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState, create_trial

from autoprec.tune.studies.lease import Watch

#: User attributes.  What the attempts of one evaluation have in common; which of them this is; in how many of the
#: earlier ones the process died; why a failed trial is the end of its evaluation; why it wasn't run; its mix.
EVALUATION, ATTEMPT, DEATHS, GIVEN_UP, WITHDRAWN = "evaluation", "attempt", "deaths", "given_up", "withdrawn"
MIX = "mix"
#: A mix that takes its process down is given up after so many.
MAX_DEATHS = 3

_PREFIX = "autoprec:"


def evaluation_of(trial: FrozenTrial) -> str:
    """What the trial is an attempt at."""
    return trial.user_attrs.get(EVALUATION, f"trial {trial.number}")


def attempt_of(trial: FrozenTrial) -> int:
    """Which attempt at its evaluation the trial is, from 1."""
    return trial.user_attrs.get(ATTEMPT, 1)


def has_ended(trial: FrozenTrial) -> bool:
    """Whether the trial is the end of its evaluation."""
    if trial.state == TrialState.FAIL:
        return GIVEN_UP in trial.user_attrs
    return trial.state.is_finished()


def planned(trial: FrozenTrial) -> dict[str, Any]:
    """A trial's mix; empty where its process died before it had one."""
    return trial.user_attrs.get(MIX) or trial.system_attrs.get("fixed_params", {})


def enqueue(study: optuna.Study, params: dict[str, Any], attrs: dict[str, Any], system: dict[str, Any]) -> None:
    """Plan a trial, with the system attributes of our own that a sampler gave to an earlier attempt."""
    kept = {key: value for key, value in system.items() if key.startswith(_PREFIX)}
    template = create_trial(state=TrialState.WAITING, user_attrs=attrs, system_attrs={"fixed_params": params, **kept})
    study.add_trial(template)


def reclaim_stale_trials(study: optuna.Study, watch: Watch | None = None) -> int:
    """End the running trials of processes that are gone, and enqueue their mixes again.

    Args:
        study: Optuna's.
        watch: the process's own, which sees in time that a process on another host is gone.

    Returns:
        how many this process ended: of several that see the same one, one does.
    """
    watch = watch or Watch()
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    return sum(give_up(study, trial, "its process is gone") for trial in running if watch.is_stale(trial))


def give_up(study: optuna.Study, trial: FrozenTrial, why: str, *, died: bool = True) -> bool:
    """End a trial that wasn't measured, and enqueue its mix again, unless its process died too often.

    The next attempt is enqueued before this one ends: a process that dies in between leaves too much behind, never too
    little, and whoever takes the next attempt ends this one first.

    Args:
        study: Optuna's.
        trial: as it was last seen.
        why: for whoever reads the study.
        died: whether it counts against the mix; being interrupted doesn't.

    Returns:
        whether this process ended it.
    """
    deaths = trial.user_attrs.get(DEATHS, 0) + died
    evaluation, attempt = evaluation_of(trial), attempt_of(trial)
    try:
        if deaths >= MAX_DEATHS:
            study._storage.set_trial_user_attr(trial._trial_id, GIVEN_UP, f"{why}, {deaths} times")
        elif planned(trial) and not any(
            evaluation_of(other) == evaluation and attempt_of(other) > attempt
            for other in study.get_trials(deepcopy=False)
        ):
            attrs = {EVALUATION: evaluation, ATTEMPT: attempt + 1, DEATHS: deaths, "again": why}
            attrs["name"] = trial.user_attrs.get("name", "search")
            enqueue(study, planned(trial), attrs, trial.system_attrs)
        study._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
    except UpdateFinishedTrialError:
        return False
    return True
