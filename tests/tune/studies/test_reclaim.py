import optuna
import pytest
from optuna.trial import TrialState

from autoprec.tune.studies.lease import LEASE, own_lease
from autoprec.tune.studies.reclaim import (
    GIVEN_UP,
    MAX_DEATHS,
    MIX,
    enqueue,
    give_up,
    has_ended,
    reclaim_stale_trials,
)
from autoprec.tune.studies.storage import open_study


@pytest.fixture(params=[None, "s.log"], ids=["sqlite", "journal"])
def study(tmp_path, request):
    return open_study("s", request.param and str(tmp_path / request.param), tmp_path, {"a": 1})


def _running(study, **attrs):
    enqueue(study, {"g": "bf16"}, {"name": "bf16", **attrs}, {})
    trial = study.ask()
    trial.suggest_categorical("g", ["fp32", "bf16"])
    trial.set_user_attr(LEASE, own_lease())
    return trial


def _kill(trial):
    trial.set_user_attr(LEASE, {**own_lease(), "started": "12"})


def test_a_trial_of_this_process_is_left_alone(study):
    _running(study)
    assert reclaim_stale_trials(study) == 0


def test_a_trial_on_another_host_is_left_alone(study):
    _running(study).set_user_attr(LEASE, {"host": "elsewhere", "pid": 1, "started": "1", "place": "p", "beat": 0})
    assert reclaim_stale_trials(study) == 0


def test_a_trial_of_a_dead_process_is_failed_and_enqueued_again(study):
    _kill(_running(study))
    assert reclaim_stale_trials(study) == 1
    assert study.trials[0].state == TrialState.FAIL
    again = study.ask()
    assert again.suggest_categorical("g", ["fp32", "bf16"]) == "bf16"
    assert again.user_attrs["name"] == "bf16"
    assert again.user_attrs["attempt"] == 2


def test_a_stale_trial_is_reclaimed_once(study):
    _kill(_running(study))
    seen_by_another = study.trials[0]
    assert give_up(study, seen_by_another, "gone")
    assert not give_up(study, seen_by_another, "gone")
    assert [trial.state for trial in study.trials] == [TrialState.FAIL, TrialState.WAITING]


def test_a_process_that_dies_while_it_reclaims_loses_nothing(study, monkeypatch):
    _kill(_running(study))
    monkeypatch.setattr(study._storage, "set_trial_state_values", _die)
    with pytest.raises(KeyboardInterrupt):
        reclaim_stale_trials(study)
    monkeypatch.undo()
    assert reclaim_stale_trials(study) == 1
    assert [trial.state for trial in study.trials] == [TrialState.FAIL, TrialState.WAITING]


def _die(*args):
    raise KeyboardInterrupt


def test_what_the_sampler_said_of_a_trial_stays(study):
    trial = study.ask()
    study._storage.set_trial_system_attr(trial._trial_id, "autoprec:origin", "repeat")
    trial.set_user_attr(MIX, {"g": "bf16"})
    trial.set_constraint("loss_gap", 1.0)
    _kill(trial)
    reclaim_stale_trials(study)
    attrs = study.trials[1].system_attrs
    assert attrs["autoprec:origin"] == "repeat"
    assert attrs["fixed_params"] == {"g": "bf16"}
    assert not study.trials[1].constraints


def test_a_trial_that_had_no_mix_yet_is_only_failed(study):
    trial = study.ask()
    trial.suggest_categorical("g", ["fp32", "bf16"])
    _kill(trial)
    assert reclaim_stale_trials(study) == 1
    assert [trial.state for trial in study.trials] == [TrialState.FAIL]
    assert not has_ended(study.trials[0])


def test_a_mix_that_always_takes_its_process_down_is_given_up(study):
    enqueue(study, {"g": "bf16"}, {"name": "bf16"}, {})
    for _ in range(MAX_DEATHS + 2):
        if not study.get_trials(states=(TrialState.WAITING,)):
            break
        _kill(study.ask())
        reclaim_stale_trials(study)
    assert [trial.state for trial in study.trials] == [TrialState.FAIL] * MAX_DEATHS
    assert [has_ended(trial) for trial in study.trials] == [False, False, True]
    assert study.trials[-1].user_attrs[GIVEN_UP] == "its process is gone, 3 times"


def test_being_interrupted_does_not_count_against_a_mix(study):
    enqueue(study, {"g": "bf16"}, {"name": "bf16"}, {})
    for _ in range(MAX_DEATHS + 2):
        trial = study.ask()
        give_up(study, study.trials[trial.number], "KeyboardInterrupt", died=False)
    assert study.trials[-1].state == TrialState.WAITING


def test_a_finished_trial_is_not_given_up(study):
    trial = _running(study)
    frozen = study.trials[0]
    study.tell(trial, 1.0)
    assert not give_up(study, frozen, "gone")
    assert study.trials[0].state == TrialState.COMPLETE


def test_optunas_heartbeat_does_not_see_a_process_that_died_before_its_first_beat(tmp_path):
    """Why leases do: the trial below stays running for ever."""
    with pytest.warns(optuna.exceptions.ExperimentalWarning):
        storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/h.db", heartbeat_interval=1, grace_period=1)
    study = optuna.create_study(storage=storage)
    study._storage.create_new_trial(study._study_id)
    assert study._storage._get_stale_trial_ids(study._study_id) == []
