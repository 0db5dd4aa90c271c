"""Several processes in one study; ``benchmarks/many_workers.py`` measures how fast they are together."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import postgres_kills
import simulated


def test_killed_workers_of_a_journal_lose_nothing(tmp_path):
    settings = simulated.Settings(storage=str(tmp_path / "s.log"), trials=20, trial_s=0.3)
    end = postgres_kills.run(None, settings, workers=3, kill_every_s=1.0, max_kills=6)
    assert end["killed"] > 0
    assert end["not_ended_once"] == {}
    assert end["left_open"] == 0
    assert end["complete"] + end["given_up"] == 20
    assert end["measured_twice"] == 0
