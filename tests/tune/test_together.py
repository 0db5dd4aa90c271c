"""Whole studies by several processes: workers on one journal, and the ranks of a torchrun job."""

import json
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from autoprec.tune import search
from autoprec.tune.trials import warmup
from autoprec.tune.trials.outcome import Effort

HERE = Path(__file__).parent

RANKS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import tiny
from autoprec.target import Target
from autoprec.tune import search
from autoprec.tune.trials import warmup
from autoprec.tune.trials.outcome import Effort

warmup.MIN_STEPS = warmup.MAX_STEPS = 20
Effort.for_step = classmethod(lambda cls, step_s: Effort(steps=8, rounds=5))
cpu = Target(name="tiny", title="a processor with bf16", kind="cpu", formats=("bf16", "fp32"), low_format="bf16")
result = search.tune(tiny.make(), target=cpu, trials=4, max_loss_increase=0.2, output_dir=sys.argv[2])
print("RESULT", json.dumps([len(result.trials), result.verdict, result.isolation]), flush=True)
"""


@pytest.fixture
def task_file(tmp_path):
    """A task as users have it: a file."""
    path = tmp_path / "mine.py"
    path.write_text(f"import sys\nsys.path.insert(0, {str(HERE)!r})\nimport tiny\ntask = tiny.make()\n")
    return f"{path}:task"


def test_two_workers_share_one_study(task_file, tmp_path, monkeypatch):
    monkeypatch.setattr(warmup, "MIN_STEPS", 20)
    monkeypatch.setattr(warmup, "MAX_STEPS", 20)
    monkeypatch.setattr(Effort, "for_step", lambda step_s: Effort(steps=8, rounds=5))
    folder = tmp_path / "run"
    result = search.tune(task_file, target="cpu", trials=6, max_loss_increase=0.2, workers=2, output_dir=folder)
    assert len(result.trials) == 6
    assert result.isolation == "process"
    assert {"fp32", "bf16", "rules"} <= {row.name for row in result.trials}
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(folder / "study.log")))
    trials = optuna.load_study(study_name="tiny", storage=storage).trials
    assert not [trial.number for trial in trials if trial.state == TrialState.RUNNING]
    assert json.loads((folder / "result.json").read_text())["settings"]["workers"] == 2


@pytest.mark.slow
def test_the_ranks_of_a_torchrun_job_are_one_worker(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script)]
    done = subprocess.run(
        [*command, str(HERE), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        cwd=HERE.parents[1],
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = [json.loads(line.split("RESULT ")[1]) for line in done.stdout.splitlines() if "RESULT " in line]
    assert len(said) == 2
    assert said[0] == said[1]
    assert said[0][0] == 4
    assert "ranks are the processes" in said[0][2]
