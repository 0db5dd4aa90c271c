import os
import subprocess
import sys
import time

import optuna
import pytest
from optuna.trial import TrialState

from autoprec.tune.studies.lease import LEASE, Heart, Watch, own_lease, worker_name


@pytest.fixture
def trial():
    study = optuna.create_study()
    trial = study.ask()
    trial.study = study
    return trial


def _frozen(trial, lease=None):
    if lease is not None:
        trial.set_user_attr(LEASE, lease)
    return trial.study._storage.get_trial(trial._trial_id)


def test_a_lease_names_its_worker():
    lease = own_lease()
    assert worker_name() == worker_name(lease) == f"{lease['host']}:{os.getpid()}"


def test_an_own_trial_is_not_stale(trial):
    assert not Watch().is_stale(_frozen(trial, own_lease()))


def test_a_dead_process_is_seen_at_once(trial):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    assert Watch().is_stale(_frozen(trial, {**own_lease(), "pid": dead.pid}))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_nobody_has_buried_is_dead(trial):
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    while os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT) is None:
        time.sleep(0.01)
    assert Watch().is_stale(_frozen(trial, {**own_lease(), "pid": zombie.pid}))
    zombie.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_id_that_was_given_to_another_process_is_a_dead_one(trial):
    assert Watch().is_stale(_frozen(trial, {**own_lease(), "started": "12"}))


def test_the_start_of_a_process_that_cannot_be_seen_is_not_held_against_it(trial):
    assert not Watch().is_stale(_frozen(trial, {**own_lease(), "started": "unknown"}))


def test_a_beat_elsewhere_that_stands_still_is_a_dead_one(trial):
    watch, lease = Watch(stale_s=0.05), {**own_lease(), "place": "elsewhere"}
    assert not watch.is_stale(_frozen(trial, lease))
    time.sleep(0.1)
    assert not watch.is_stale(_frozen(trial, {**lease, "beat": 1}))
    time.sleep(0.1)
    assert watch.is_stale(_frozen(trial))


def test_a_clock_elsewhere_does_not_matter(trial):
    trial.study._storage.get_trial(trial._trial_id).datetime_start = None
    assert not Watch().is_stale(_frozen(trial, {**own_lease(), "place": "elsewhere"}))


def test_a_trial_that_gets_no_lease_is_stale_after_a_while(trial):
    watch = Watch(stale_s=0.05)
    assert not watch.is_stale(_frozen(trial))
    time.sleep(0.1)
    assert watch.is_stale(_frozen(trial))


def test_leases_are_renewed(trial):
    with Heart(trial.study._storage, beat_s=0.02) as heart:
        heart.hold(trial._trial_id)
        deadline = time.monotonic() + 20
        while _frozen(trial).user_attrs[LEASE]["beat"] < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert _frozen(trial).user_attrs[LEASE]["beat"] >= 3
        heart.drop(trial._trial_id)
        time.sleep(0.1)
        before = _frozen(trial).user_attrs[LEASE]["beat"]
        time.sleep(0.1)
        assert _frozen(trial).user_attrs[LEASE]["beat"] == before


def test_a_trial_that_was_ended_elsewhere_does_not_stop_the_heart(trial):
    other = trial.study.ask()
    other.study = trial.study
    with Heart(trial.study._storage, beat_s=0.02) as heart:
        heart.hold(trial._trial_id)
        heart.hold(other._trial_id)
        trial.study.tell(trial.number, state=TrialState.FAIL)
        beat = _frozen(other).user_attrs[LEASE]["beat"]
        deadline = time.monotonic() + 20
        while _frozen(other).user_attrs[LEASE]["beat"] <= beat + 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert _frozen(other).user_attrs[LEASE]["beat"] > beat + 1
