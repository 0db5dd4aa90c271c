"""One process of a study does what only one may do: prepare it, confirm its winner.

Claims are trials of a second study beside the first, since a storage numbers those in the order of their creation: the
first one that is open, and whose process lives, holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from autoprec.tune.studies.lease import LEASE, Heart, Watch, own_lease, worker_name
from autoprec.tune.studies.storage import quiet_optuna

_WHAT = "what"
_POLL_S = 1.0


@contextmanager
def claim(
    storage: BaseStorage,
    name: str,
    what: str,
    *,
    wait: bool = True,
    on_wait: Callable[[str], None] = lambda holder: None,
    poll_s: float = _POLL_S,
) -> Iterator[str | None]:
    """Hold ``what`` of a study until the block ends, as one living process at most does.

    Args:
        storage: of the study.
        name: of the study, which needn't be there yet.
        what: a word, such as ``prepare``.
        wait: for the process that holds it.
        on_wait: told of the process that is waited for, once for each.
        poll_s: seconds between two looks.

    Yields:
        None where it is held here; else, without ``wait``, the name of the process that holds it.

    Raises:
        StudyError: the storage is lost.
    """
    with quiet_optuna():
        claims = optuna.create_study(storage=storage, study_name=f"{name} (claims)", load_if_exists=True)
    template = create_trial(state=TrialState.RUNNING, user_attrs={_WHAT: what, LEASE: own_lease()})
    trial_id = storage.create_new_trial(claims._study_id, template)
    watch, told = Watch(), ""
    try:
        with Heart(storage) as heart:
            heart.hold(trial_id)
            while (holder := _holder(claims, what, watch)) is not None and holder._trial_id != trial_id:
                other = worker_name(holder.user_attrs[LEASE])
                if not wait:
                    yield other
                    return
                if other != told:
                    on_wait(other)
                    told = other
                time.sleep(poll_s)
            yield None
    finally:
        _end(storage, trial_id)


def _holder(claims: optuna.Study, what: str, watch: Watch) -> FrozenTrial | None:
    """The first open claim whose process lives; earlier ones are ended."""
    for trial in claims.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if trial.user_attrs.get(_WHAT) == what:
            if not watch.is_stale(trial):
                return trial
            _end(claims._storage, trial._trial_id)
    return None


def _end(storage: BaseStorage, trial_id: int) -> None:
    with suppress(UpdateFinishedTrialError):  # it may have been taken for a dead process's
        storage.set_trial_state_values(trial_id, TrialState.FAIL)
