import os
import threading
import time

import optuna
import pytest
from optuna.trial import TrialState

from autoprec.tune.studies import lock
from autoprec.tune.studies.lease import LEASE, own_lease
from autoprec.tune.studies.lock import hold
from autoprec.tune.studies.reclaim import (
    ATTEMPT,
    DEATHS,
    EVALUATION,
    MAX_DEATHS,
    WITHDRAWN,
    enqueue,
    evaluation_of,
    has_ended,
)
from autoprec.tune.studies.storage import open_study
from autoprec.tune.studies.turns import Turns

CHOICES = ("fp32", "bf16", "fp8")


@pytest.fixture(params=[None, "s.log"], ids=["sqlite", "journal"])
def study(tmp_path, request):
    study = open_study("s", request.param and str(tmp_path / request.param), tmp_path, {"a": 1})
    study.sampler = optuna.samplers.RandomSampler(seed=0)
    return study


def _kill(trial):
    trial.set_user_attr(LEASE, {**own_lease(), "started": "12"})


def _take(turns, mix=None):
    trial = turns.take()
    if trial is not None:
        assert turns.settle(trial, mix or {"g": f"mix {trial.number}"})
    return trial


def _states(study):
    return [trial.state.name for trial in study.trials]


def test_as_many_trials_as_wanted_are_handed_out(study):
    with Turns(study, 3) as turns:
        trials = [_take(turns) for _ in range(4)]
        assert [trial and trial.number for trial in trials] == [0, 1, 2, None]
        assert turns.finish(trials[0], 1.0)
        assert (_take(turns), turns.num_ended()) == (None, 1)


def test_more_can_be_wanted_later(study):
    with Turns(study, 1) as turns:
        turns.finish(_take(turns), 1.0)
    with Turns(study, 2) as turns:
        assert _take(turns).number == 1


def test_a_baseline_is_planned_once(study):
    with Turns(study, 5) as turns:
        for _ in range(2):
            turns.plan("baseline bf16", {"g": "bf16"}, {"name": "bf16"})
    assert _states(study) == ["WAITING"]


def test_of_a_baseline_that_two_planned_at_the_same_time_one_is_run(study):
    for _ in range(2):
        enqueue(study, {"g": "bf16"}, {EVALUATION: "baseline bf16", "name": "bf16"}, {})
    with Turns(study, 5) as turns:
        first, second = _take(turns), _take(turns)
    assert first.suggest_categorical("g", CHOICES) == "bf16"
    assert second.number == 2
    assert study.trials[1].user_attrs[WITHDRAWN] == "trial 0 is the same"


def test_of_two_that_ask_for_the_last_place_the_first_gets_it(study):
    with Turns(study, 1) as turns:
        first, second = study.ask(), study.ask()
        assert turns._refusal(second._trial_id) == "all wanted trials are taken"
        assert turns._refusal(first._trial_id) is None


def test_a_planned_trial_that_has_no_place_stays_planned(study):
    with Turns(study, 1) as turns:
        turns.plan("a", {"g": "bf16"}, {"name": "bf16"})
        turns.plan("b", {"g": "fp8"}, {"name": "fp8"})
        _take(turns)
        trial_id = study.ask()._trial_id
        turns._withdraw(trial_id, turns._refusal(trial_id))
        assert _take(turns) is None
    assert _states(study) == ["RUNNING", "FAIL", "WAITING"]
    assert evaluation_of(study.trials[2]) == "b"


def test_a_dead_processes_trial_keeps_its_place_and_its_mix(study):
    with Turns(study, 2) as turns:
        dead = _take(turns, {"g": "fp8"})
        _take(turns)
        assert _take(turns) is None
        _kill(dead)
        again = _take(turns)
        assert again.suggest_categorical("g", CHOICES) == "fp8"
        assert again.user_attrs[ATTEMPT] == 2
        assert _take(turns) is None
        turns.finish(again, 1.0)
        assert turns.num_ended() == 1


def test_whoever_takes_the_next_attempt_ends_the_last_one(study):
    with Turns(study, 2) as turns:
        first = _take(turns, {"g": "fp8"})
        # a process that reclaimed it died before it ended it
        enqueue(study, {"g": "fp8"}, {EVALUATION: "trial 0", ATTEMPT: 2, DEATHS: 1}, {})
        again = _take(turns)
        assert again.number == 1
        assert not turns.finish(first, 1.0)
        assert turns.finish(again, 2.0)
    assert _states(study) == ["FAIL", "COMPLETE"]


def test_an_attempt_at_what_was_measured_after_all_is_not_run(study):
    with Turns(study, 1) as turns:
        first = _take(turns)
        enqueue(study, {"g": "fp8"}, {EVALUATION: "trial 0", ATTEMPT: 2, DEATHS: 1}, {})
        turns.finish(first, 1.0)
        assert _take(turns) is None
    assert study.trials[1].user_attrs[WITHDRAWN] == "trial 0 was measured"
    assert sum(map(has_ended, study.trials)) == 1


def test_an_evaluation_that_is_given_up_counts(study):
    with Turns(study, 1) as turns:
        for _ in range(MAX_DEATHS):
            _kill(_take(turns, {"g": "fp8"}))
        assert (_take(turns), turns.num_ended()) == (None, 1)


def test_a_trial_that_was_given_up_is_tried_again(study):
    with Turns(study, 1) as turns:
        turns.give_up(_take(turns, {"g": "fp8"}), "MemoryError")
        again = _take(turns)
        assert again.user_attrs[DEATHS] == 1
        turns.give_up(again, "KeyboardInterrupt", died=False)
        assert _take(turns).user_attrs[DEATHS] == 1


def test_a_mix_is_not_measured_by_two_at_the_same_time(study):
    with Turns(study, 5) as turns:
        assert turns.settle(turns.take(), {"g": "fp8"})
        assert not turns.settle(turns.take(), {"g": "fp8"})
        assert turns.settle(turns.take(), {"g": "fp8"}, is_repeat=True)
    assert study.trials[1].user_attrs[WITHDRAWN] == "its mix is being measured"
    assert _states(study) == ["RUNNING", "FAIL", "RUNNING"]


def test_a_trial_waits_for_the_mix_of_one_before_it(study):
    with Turns(study, 5) as turns:
        first, second = study.ask(), study.ask()
        answers = []
        waiting = threading.Thread(target=lambda: answers.append(turns._has_twin(second, {"g": "fp8"})))
        waiting.start()
        time.sleep(0.3)
        assert not answers
        turns.settle(first, {"g": "fp8"})
        waiting.join()
    assert answers == [True]


def test_workers_of_a_host_choose_one_after_another(study):
    inside, most = [], []

    def work():
        turns = Turns(study, 6)
        trial = turns.take()
        inside.append(trial.number)
        most.append(len(inside))
        time.sleep(0.05)
        inside.remove(trial.number)
        turns.settle(trial, {"g": trial.number})

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 6


def test_a_choice_that_fails_lets_others_choose(study, monkeypatch):
    with Turns(study, 5) as turns:
        turns.give_up(turns.take(), "KeyboardInterrupt", died=False)
        tries = []
        monkeypatch.setattr(lock, "hold", lambda *args, **options: tries.append(1) or hold(*args, **options))
        assert _take(Turns(study, 5)) is not None
    assert tries == [1]


def test_who_still_runs_a_trial_is_known(study):
    with Turns(study, 5) as turns:
        assert turns.running_elsewhere() == []
        trial = _take(turns)
        trial.set_user_attr(LEASE, {**own_lease(), "place": "p", "host": "h", "pid": 7})
        study.ask()
        assert turns.running_elsewhere() == ["a process that has just begun", "h:7"]
        _kill(trial)
        assert turns.running_elsewhere() == ["a process that has just begun"]


def test_a_trial_that_another_process_ended_is_not_recorded(study):
    with Turns(study, 5) as turns:
        trial = _take(turns)
        study.tell(trial.number, state=TrialState.FAIL)
        assert not turns.finish(trial, 1.0)
        with pytest.raises(ValueError):
            turns.finish(_take(turns), None, TrialState.COMPLETE)


def test_a_trial_has_its_lease_before_the_sampler_is_asked(study):
    class Sampler(optuna.samplers.RandomSampler):
        def before_trial(self, study, trial):
            seen.append(trial.user_attrs[LEASE]["pid"])

    seen = []
    study.sampler = Sampler(seed=0)
    with Turns(study, 2) as turns:
        turns.plan("a", {"g": "bf16"}, {"name": "bf16"})
        _take(turns)
        _take(turns)
    assert seen == [os.getpid()] * 2


def test_a_sampler_that_fails_leaves_no_trial_running(study):
    class Sampler(optuna.samplers.RandomSampler):
        def before_trial(self, study, trial):
            raise KeyboardInterrupt

    study.sampler = Sampler(seed=0)
    with Turns(study, 2) as turns, pytest.raises(KeyboardInterrupt):
        turns.take()
    assert _states(study) == ["FAIL"]


def test_a_trial_that_was_made_twice_is_ended(study, monkeypatch):
    create = study._storage.create_new_trial

    def twice(*arguments):
        monkeypatch.undo()
        create(*arguments)  # its answer is lost
        return create(*arguments)

    with Turns(study, 1) as turns:
        monkeypatch.setattr(study._storage, "create_new_trial", twice)
        assert turns.finish(_take(turns), 1.0)
        assert turns.running_elsewhere() == []
    assert _states(study) == ["FAIL", "FAIL", "COMPLETE"]
