import os
import subprocess
import sys

import optuna
import pytest
from optuna.trial import TrialState

from autoprec.errors import StudyError
from autoprec.tune.storage import LEASE, open_study, reclaim_stale_trials, take_lease, without_password

IDENTITY = {"model": "abc", "data": "d"}


@pytest.fixture
def study(tmp_path):
    return open_study("s", None, tmp_path, IDENTITY)


def _running(study, params=None):
    study.enqueue_trial(params or {"g": "bf16"}, user_attrs={"name": "bf16"})
    trial = study.ask()
    trial.suggest_categorical("g", ["fp32", "bf16"])
    take_lease(trial)
    return trial


def test_a_study_goes_on_in_its_folder(tmp_path, study):
    study.add_trial(optuna.create_trial(value=1.0))
    assert len(open_study("s", None, tmp_path, IDENTITY).trials) == 1
    assert (tmp_path / "study.db").is_file()


def test_a_study_of_something_else_is_refused(tmp_path, study):
    with pytest.raises(StudyError) as caught:
        open_study("s", None, tmp_path, {"model": "xyz", "data": "d"})
    assert "model: 'abc' there, 'xyz' here" in str(caught.value)
    assert "data" not in str(caught.value).partition("\n")[2].partition("\n")[0]


@pytest.mark.parametrize("storage", ["nonsense://x", "sqlite:////no/such/folder/x.db"])
def test_a_storage_that_cannot_be_used_is_refused(tmp_path, storage):
    with pytest.raises(StudyError, match="can't be used"):
        open_study("s", storage, tmp_path, IDENTITY)


def test_a_password_is_not_shown():
    assert without_password("postgresql://me:s3cret@host/db") == "postgresql://me:***@host/db"
    assert without_password("sqlite:///a.db") == "sqlite:///a.db"


def test_a_trial_of_this_process_is_left_alone(study):
    _running(study)
    assert reclaim_stale_trials(study) == 0


def test_a_trial_of_a_dead_process_is_failed_and_enqueued_again(study):
    trial = _running(study)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    trial.set_user_attr(LEASE, {**trial.user_attrs[LEASE], "pid": dead.pid})
    assert reclaim_stale_trials(study) == 1
    assert study.trials[0].state == TrialState.FAIL
    again = study.ask()
    assert again.suggest_categorical("g", ["fp32", "bf16"]) == "bf16"
    assert again.user_attrs["name"] == "bf16"


def test_a_pid_that_was_given_to_another_process_is_a_dead_one(study):
    trial = _running(study)
    trial.set_user_attr(LEASE, {**trial.user_attrs[LEASE], "pid": os.getpid(), "started": "12"})
    assert reclaim_stale_trials(study) == 1


def test_a_trial_on_another_host_is_left_alone(study):
    trial = _running(study)
    trial.set_user_attr(LEASE, {"host": "elsewhere", "pid": 1, "started": "1"})
    assert reclaim_stale_trials(study) == 0


def test_a_mix_that_always_takes_its_process_down_is_given_up(study):
    study.enqueue_trial({"g": "bf16"}, user_attrs={"name": "bf16"})
    for _ in range(5):
        waiting = study.get_trials(states=(TrialState.WAITING,))
        if not waiting:
            break
        trial = study.ask()
        trial.suggest_categorical("g", ["fp32", "bf16"])
        trial.set_user_attr(LEASE, {**_lease(trial), "started": "12"})
        reclaim_stale_trials(study)
    assert [t.state for t in study.trials] == [TrialState.FAIL] * 3


def _lease(trial):
    take_lease(trial)
    return trial.user_attrs[LEASE]
