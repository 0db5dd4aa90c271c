import signal
import subprocess
import sys
from pathlib import Path

import optuna
from optuna.trial import TrialState

HERE = Path(__file__).parent
RUN = """
import itertools, os, signal, sys, time
sys.path.insert(0, sys.argv[1])
import tiny
from autoprec.target import Target
from autoprec.tune import search
from autoprec.tune.trials import warmup
from autoprec.tune.trials.bench import Effort

ticks = itertools.count()
time.perf_counter = lambda: tiny.Clock.now + 1e-3 * next(ticks)
warmup.MIN_STEPS = warmup.MAX_STEPS = 20
Effort.for_step = lambda step_s: Effort(steps=8, rounds=5)
armed = []
base = tiny.make()

def loss(model, batch):
    if armed:
        os.kill(os.getpid(), signal.SIGKILL)
    return base.loss(model, batch)

def progress(event):
    if event.stage == "trials" and event.done == 2 and sys.argv[3] == "die":
        armed.append(True)

cpu = Target(name="tiny", title="a processor with bf16", kind="cpu", formats=("bf16", "fp32"), low_format="bf16")
where = {"target": cpu, "output_dir": sys.argv[2], "isolate": False}
result = search.tune(tiny.make(loss=loss), trials=4, progress=progress, **where)
print(len(result.trials))
"""


def _run(folder, how):
    command = [sys.executable, "-c", RUN, str(HERE), str(folder), how]
    return subprocess.run(command, capture_output=True, text=True, cwd=HERE.parents[1], timeout=300, check=False)


def test_a_study_killed_in_a_trial_goes_on_with_the_same_command(tmp_path):
    killed = _run(tmp_path, "die")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    before = optuna.load_study(study_name="tiny", storage=storage).trials
    assert [t.state for t in before[:3]] == [TrialState.COMPLETE, TrialState.COMPLETE, TrialState.RUNNING]

    again = _run(tmp_path, "live")
    assert (again.returncode, again.stdout.strip()) == (0, "4"), again.stderr
    after = optuna.load_study(study_name="tiny", storage=storage).trials
    assert after[2].state == TrialState.FAIL
    assert [t.params for t in after if t.user_attrs.get("attempt") == 2] == [after[2].params]
    assert sum(t.state == TrialState.COMPLETE for t in after) == 4
    assert [t.user_attrs["row"] for t in after[:2]] == [t.user_attrs["row"] for t in before[:2]]
