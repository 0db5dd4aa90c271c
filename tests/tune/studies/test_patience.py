import errno
import resource
import sqlite3

import optuna
import pytest
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import TrialState
from sqlalchemy.exc import OperationalError, PendingRollbackError, ProgrammingError

from autoprec.errors import StudyError
from autoprec.tune.studies import patience, storage
from autoprec.tune.studies.patience import PatientStorage
from autoprec.tune.studies.storage import open_study


class Flaky(InMemoryStorage):
    """Fails before or after a call is carried out, a number of times."""

    def __init__(self):
        super().__init__()
        self.before, self.after = [], []

    def set_trial_state_values(self, trial_id, state, values=None):
        return self._flaky(super().set_trial_state_values, trial_id, state, values)

    def get_study_user_attrs(self, study_id):
        return self._flaky(super().get_study_user_attrs, study_id)

    def _flaky(self, call, *arguments):
        if self.before:
            raise self.before.pop()
        answer = call(*arguments)
        if self.after:
            raise self.after.pop()
        return answer


def _gone(said="server closed the connection unexpectedly", kind=OperationalError):
    failure = StorageInternalError("wrapped")
    failure.__cause__ = kind("select 1", {}, Exception(said))
    return failure


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(patience, "_FIRST_PAUSE_S", 0.001)


@pytest.fixture
def inner():
    return Flaky()


@pytest.fixture
def study(inner):
    return optuna.create_study(storage=PatientStorage(inner, "postgresql://host/db", patience_s=0.2))


def test_a_call_is_tried_again_while_the_database_is_away(study, inner):
    pending = StorageInternalError("wrapped")
    pending.__cause__ = PendingRollbackError("can't reconnect until invalid transaction is rolled back")
    inner.before = [_gone(), pending, OSError(errno.ESTALE, "stale handle")]
    assert study.user_attrs == {}
    assert not inner.before


def test_the_end_of_patience_is_said_in_words(study, inner):
    inner.before = [_gone() for _ in range(10_000)]
    with pytest.raises(StudyError, match=r"postgresql://host/db can't be used any more .*server closed.*goes on"):
        _ = study.user_attrs


def test_a_lost_database_is_not_waited_for_again(study, inner):
    inner.before = [_gone() for _ in range(10_000)]
    for _ in range(2):
        with pytest.raises(StudyError):
            _ = study.user_attrs
        left = len(inner.before)
    with pytest.raises(StudyError):
        _ = study.user_attrs
    assert len(inner.before) == left - 1
    inner.before = []
    assert study.user_attrs == {}
    inner.before = [_gone()]
    assert study.user_attrs == {}


@pytest.mark.parametrize(
    "failure",
    [
        _gone("No space left on device"),
        _gone("database or disk is full"),
        _gone("attempt to write a readonly database"),
        _gone("relation trials is gone", ProgrammingError),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EACCES, "Permission denied"),
    ],
)
def test_what_waiting_does_not_mend_is_not_waited_for(study, inner, failure):
    inner.before = [failure] * 2
    with pytest.raises(StudyError):
        _ = study.user_attrs
    assert len(inner.before) == 1


def test_an_end_that_got_through_without_an_answer_is_one(study, inner):
    trial = study.ask()
    inner.after = [_gone()]
    study.tell(trial, 2.0)
    assert (study.trials[0].state, study.trials[0].value) == (TrialState.COMPLETE, 2.0)


def test_an_end_by_another_process_is_not_ones_own(study, inner):
    trial = study.ask()

    def overtaken():
        InMemoryStorage.set_trial_state_values(inner, trial._trial_id, TrialState.FAIL)
        return _gone()

    inner.before = [overtaken()]
    with pytest.raises(UpdateFinishedTrialError):
        study._storage.set_trial_state_values(trial._trial_id, TrialState.COMPLETE, [1.0])


def test_errors_of_the_call_are_not_the_storages(study):
    with pytest.raises(KeyError):
        study._storage.get_trial(99)
    with pytest.raises(optuna.exceptions.DuplicatedStudyError):
        study._storage.create_new_study([StudyDirection.MAXIMIZE], study.study_name)


def test_an_sqlite_file_that_is_locked_for_a_moment_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_BUSY_S", 0.05)
    monkeypatch.setattr(patience, "_FIRST_PAUSE_S", 0.05)
    study = open_study("s", None, tmp_path, {})
    other = sqlite3.connect(tmp_path / "study.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    monkeypatch.setattr(patience.time, "sleep", lambda seconds: other.execute("ROLLBACK"))
    study._storage.create_new_study([StudyDirection.MAXIMIZE], "t")
    assert not other.in_transaction
    other.close()
    assert [known.study_name for known in study._storage.get_all_studies()] == ["s", "t"]


def test_a_full_disk_under_an_sqlite_file_stops_in_words_and_the_study_goes_on_later(tmp_path):
    study = open_study("s", None, tmp_path, {})
    trial = study.ask()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "study.db").stat().st_size // 2, hard))
    try:
        with pytest.raises(StudyError, match=r"study\.db can't be used any more"):
            trial.set_user_attr("row", "x" * 200_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    trial.set_user_attr("row", "x" * 200_000)
    study.tell(trial, 1.0)
    assert [trial.value for trial in open_study("s", None, tmp_path, {}).trials] == [1.0]
