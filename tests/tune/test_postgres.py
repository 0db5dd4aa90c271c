"""Studies on a PostgreSQL that is started here; ``benchmarks/postgres_kills.py`` does the same at full size."""

import sys
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from autoprec.errors import StudyError
from autoprec.tune.studies import patience
from autoprec.tune.studies.storage import open_study
from autoprec.tune.studies.turns import Turns

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import postgres_kills
import simulated

pytestmark = [
    pytest.mark.pg,
    pytest.mark.skipif(postgres_kills.find_postgres() is None, reason="PostgreSQL isn't installed"),
]


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("psycopg")
    with postgres_kills.postgres() as server:
        yield server


def _study(server, name):
    study = open_study(name, server.url, Path(), {"a": 1})
    study.sampler = optuna.samplers.RandomSampler(seed=0)
    return study


def test_a_server_that_is_restarted_in_a_trial_is_waited_for(server):
    study = _study(server, "restarted")
    with Turns(study, 1) as turns:
        trial = turns.take()
        turns.settle(trial, {"g": "fp8"})
        server.stop("immediate")
        server.start()
        trial.set_user_attr("loss_gap", 0.1)
        assert turns.finish(trial, 1.5)
    assert [(trial.state, trial.value) for trial in study.trials] == [(TrialState.COMPLETE, 1.5)]


def test_a_server_that_stays_away_ends_the_study_in_words_and_the_study_goes_on_later(server, monkeypatch):
    study = _study(server, "away")
    study._storage._patience_s = 0.3
    monkeypatch.setattr(patience, "_FIRST_PAUSE_S", 0.05)
    with Turns(study, 2) as turns:
        turns.plan("a", {"g": "fp8"}, {"name": "a"})
        trial = turns.take()
        server.stop("fast")
        try:
            with pytest.raises(StudyError, match=r"can't be used any more .*the same command goes on"):
                turns.finish(trial, 1.0)
        finally:
            server.start()
        assert turns.finish(trial, 1.0)
    assert study.trials[0].state == TrialState.COMPLETE


def test_a_wrong_name_is_said_at_once(server):
    with pytest.raises(StudyError, match='database "nosuch" does not exist'):
        open_study("s", server.url.replace("/postgres?", "/nosuch?"), Path(), {})


def test_killed_workers_and_a_restarted_server_lose_nothing(server):
    settings = simulated.Settings(storage=server.url, trials=24, trial_s=0.5)
    end = postgres_kills.run(server, settings, workers=4, kill_every_s=2, max_kills=6, restart_at=10)
    assert end["killed"] > 0
    assert end["server_restarts"] == 1
    assert end["not_ended_once"] == {}
    assert end["left_open"] == 0
    assert end["complete"] + end["given_up"] == 24
    assert end["measured_twice"] == 0
