"""A storage that outlives its server's restart: each call is tried again for a while, and the end is said in words."""

from __future__ import annotations

import errno
import json
import re
import time
from collections.abc import Callable, Container, Sequence
from typing import Any, TypeVar

from optuna.distributions import BaseDistribution
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState

from autoprec.errors import StudyError
from autoprec.tune.studies.journal import is_full

T = TypeVar("T")

#: How long a server may be away.
PATIENCE_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
#: What databases say of a failure that waiting doesn't mend: no room, no right to write, a damaged or missing file.
_LASTING = re.compile(
    r"no space|disk is full|disk full|disk quota|readonly|read-only|malformed|not a database|unable to open|disk I/O"
    r"|no such table|does not exist|authentication|permission denied",
    re.IGNORECASE,
)
#: What a file system says of a failure that may pass.
_PASSING = (errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR, errno.EBUSY)


class PatientStorage(BaseStorage):
    """Passes every call on to another storage, and again where the database was away.

    A call may have been carried out when its answer got lost.  Carried out twice, most change nothing; a trial ended
    twice is recognised, and a trial created twice leaves one behind without a lease, which is ended like any other
    whose process is gone.

    Args:
        inner: the storage.
        name: as it may be shown.
        patience_s: seconds for which a call is tried again.
    """

    def __init__(self, inner: BaseStorage, name: str, patience_s: float = PATIENCE_S) -> None:
        self._inner = inner
        self.name = name
        self._patience_s = patience_s
        self._is_lost = False

    def _call(self, method: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        deadline = time.monotonic() + self._patience_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                answer = method(*args, **kwargs)
            except Exception as exc:
                if (failure := storage_failure(exc)) is None:
                    raise
                # once lost, it isn't waited for again by every call that cleans up
                if self._is_lost or is_lasting(failure) or time.monotonic() + pause_s > deadline:
                    self._is_lost = True
                    raise StudyError(describe_loss(self.name, failure)) from exc
            else:
                self._is_lost = False
                return answer
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        tries = 0

        def once() -> bool:
            nonlocal tries
            tries += 1
            try:
                return self._inner.set_trial_state_values(trial_id, state, values)
            except UpdateFinishedTrialError:
                # an earlier try may have got through
                ended = self._inner.get_trial(trial_id)
                wanted = None if values is None else list(values)
                if tries > 1 and (ended.state, ended.values) == (state, wanted):
                    return True
                raise

        return self._call(once)

    def create_new_study(self, directions: Sequence[StudyDirection], study_name: str | None = None) -> int:
        return self._call(self._inner.create_new_study, directions, study_name)

    def delete_study(self, study_id: int) -> None:
        self._call(self._inner.delete_study, study_id)

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        self._call(self._inner.set_study_user_attr, study_id, key, value)

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        self._call(self._inner.set_study_system_attr, study_id, key, value)

    def get_study_id_from_name(self, study_name: str) -> int:
        return self._call(self._inner.get_study_id_from_name, study_name)

    def get_study_name_from_id(self, study_id: int) -> str:
        return self._call(self._inner.get_study_name_from_id, study_id)

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        return self._call(self._inner.get_study_directions, study_id)

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        return self._call(self._inner.get_study_user_attrs, study_id)

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        return self._call(self._inner.get_study_system_attrs, study_id)

    def get_all_studies(self) -> list[FrozenStudy]:
        return self._call(self._inner.get_all_studies)

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        return self._call(self._inner.create_new_trial, study_id, template_trial)

    def set_trial_param(
        self, trial_id: int, param_name: str, param_value_internal: float, distribution: BaseDistribution
    ) -> None:
        self._call(self._inner.set_trial_param, trial_id, param_name, param_value_internal, distribution)

    def get_trial_id_from_study_id_trial_number(self, study_id: int, trial_number: int) -> int:
        return self._call(self._inner.get_trial_id_from_study_id_trial_number, study_id, trial_number)

    def set_trial_intermediate_value(self, trial_id: int, step: int, intermediate_value: float) -> None:
        self._call(self._inner.set_trial_intermediate_value, trial_id, step, intermediate_value)

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        self._call(self._inner.set_trial_user_attr, trial_id, key, value)

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        self._call(self._inner.set_trial_system_attr, trial_id, key, value)

    def get_trial(self, trial_id: int) -> FrozenTrial:
        return self._call(self._inner.get_trial, trial_id)

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        return self._call(self._inner.get_all_trials, study_id, deepcopy, states)

    def remove_session(self) -> None:
        self._inner.remove_session()


def storage_failure(exc: Exception) -> Exception | None:
    """What a database or disk said, out of what Optuna raised; None if it is about the call, not about the storage."""
    from sqlalchemy.exc import IntegrityError, SQLAlchemyError

    cause = exc.__cause__ if isinstance(exc, StorageInternalError) and isinstance(exc.__cause__, Exception) else exc
    # a line of a journal that isn't JSON
    is_damage = isinstance(cause, json.JSONDecodeError) or str(cause) == "Invalid log format."
    is_storage = isinstance(cause, (OSError, SQLAlchemyError, StorageInternalError))
    return cause if is_damage or (is_storage and not isinstance(cause, IntegrityError)) else None


def is_lasting(failure: Exception) -> bool:
    """Whether waiting can't mend it."""
    from sqlalchemy.exc import DBAPIError, InterfaceError, InternalError, OperationalError

    if isinstance(failure, OSError):
        return failure.errno not in _PASSING
    if isinstance(failure, DBAPIError):
        may_pass = isinstance(failure, (OperationalError, InterfaceError, InternalError))
        return not (may_pass or failure.connection_invalidated) or bool(_LASTING.search(str(failure.orig)))
    # what else SQLAlchemy says is of a connection that just broke; a damaged journal stays so
    return isinstance(failure, ValueError)


def describe_loss(name: str, failure: Exception) -> str:
    """For a person: what happened to the storage, and what to do."""
    said = str(getattr(failure, "orig", None) or failure).strip().splitlines()
    why = f"{type(failure).__name__}: {said[0] if said else ''}"
    if isinstance(failure, OSError) and is_full(failure):
        why += "; make room"
    return (
        f"the storage {name} can't be used any more ({why}). What is finished is kept: when the storage is there "
        "again, the same command goes on"
    )
