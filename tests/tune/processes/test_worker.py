import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

from autoprec.errors import StudyError, TaskError, UsageError
from autoprec.plan import Formats, Plan, PlanRule
from autoprec.tasks import Task, load_task
from autoprec.tune.processes import leaks
from autoprec.tune.processes.child import Call, Reply, _run
from autoprec.tune.processes.leaks import MemoryWatch, read_settings
from autoprec.tune.processes.worker import WorkerBench
from autoprec.tune.studies.lock import device_lock, lock_path
from autoprec.tune.trials.bench import Bench
from autoprec.tune.trials.checkpoint import Checkpoint
from autoprec.tune.trials.outcome import WORST_GAP, Effort

HERE = Path(__file__).parents[1]
SPEC = f"{HERE / 'killers.py'}:task"
BF16 = Plan(rules=(PlanRule(match=("*",), formats=Formats.all("bf16")),))
FP32 = Plan(rules=(), level="O0")


def bench_of(task: Task) -> Bench:
    return Bench(
        task=task,
        checkpoint=Checkpoint(weights=task.build_model(0).state_dict(), origin=""),
        device=torch.device("cpu"),
        seed=0,
        budget=0.005,
        effort=Effort(steps=4, rounds=3, seconds=0.2),  # too few steps to be stopped for their time
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("killers")
    (path / "deed").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KILLERS_FOLDER", str(path))
        # locks of their own: other studies on this machine don't matter here
        patch.setenv("TMPDIR", str(path))
        patch.setattr(tempfile, "tempdir", str(path))
        lock_path.cache_clear()
        yield path
    lock_path.cache_clear()


@pytest.fixture(scope="module")
def shared(folder):
    """One for all tests: starting a process takes seconds."""
    with WorkerBench(bench_of(load_task(SPEC)), spec=SPEC) as worker:
        yield worker


@pytest.fixture
def worker(shared, folder):
    yield shared
    shared.trial_timeout = None
    shared.effort = Effort(steps=4, rounds=3, seconds=0.2)
    (folder / "deed").write_text("")


@pytest.fixture
def here(folder):
    """What the worker runs, in this process."""
    return bench_of(load_task(SPEC))


@pytest.fixture
def do(folder):
    return (folder / "deed").write_text


def _is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"  # a zombie has ended; whoever adopted it is slow to look


def _await(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def test_a_worker_computes_what_this_process_does_bit_for_bit(worker, here):
    outcomes = [bench.trial(BF16) for bench in (here, worker)]
    assert outcomes[0].losses == outcomes[1].losses
    assert outcomes[0].loss_gap == outcomes[1].loss_gap != 0.0
    assert worker.trial(BF16, seed=7).losses == here.trial(BF16, seed=7).losses != outcomes[0].losses
    assert worker.gap(BF16, 1000, 8) == here.gap(BF16, 1000, 8)
    assert worker.noise((1, 2)) == here.noise((1, 2))
    assert worker.reference(5, 8) == here.reference(5, 8)
    assert (worker.num_started, worker.isolation) == (1, "process")
    assert worker.startup_s > 0


def test_it_measures_speed_with_the_effort_of_now(worker):
    worker.effort = Effort(steps=3, rounds=6, seconds=0.2)
    outcome = worker.trial(BF16)
    assert (len(outcome.losses), outcome.comparison.speedup.rounds) == (3, 6)
    assert worker.measure_step_s() > 0
    assert set(worker.speeds({"a": BF16, "b": FP32}, 3)) == {"a", "b"}


def test_a_crash_is_an_outcome_that_says_where(worker, do):
    before = worker.num_started
    do("read_nothing")
    outcome = worker.trial(BF16)
    assert (outcome.state, outcome.loss_gap, outcome.comparison) == ("crashed", WORST_GAP * 0.005, None)
    assert outcome.note.startswith("its process was killed by SIGSEGV (a segmentation fault), in string_at (")
    assert "< _read_nothing (killers.py:" in outcome.note
    assert worker.num_started == before + 1


def test_the_trial_after_a_crash_runs(worker, do):
    do("exit")
    assert worker.trial(BF16).note == "its process exited with code 4"
    do("")
    assert worker.trial(BF16).state == "complete"


def test_a_hang_ends_at_its_limit(worker, do):
    worker.trial(FP32)
    worker.trial_timeout = 2.0
    do("loop")
    outcome = worker.trial(BF16)
    assert outcome.state == "timeout"
    assert outcome.note.startswith("no answer in 2 s, in _loop (killers.py:")
    assert outcome.seconds >= 2.0


def test_waiting_for_another_studys_timing_is_no_hang(worker):
    worker.trial(FP32)
    worker.trial_timeout = 4.0
    with device_lock("cpu"):
        answers = []
        thread = threading.Thread(target=lambda: answers.append(worker.trial(FP32)))
        thread.start()
        time.sleep(6.0)
    thread.join()
    assert (answers[0].state, answers[0].note) == ("complete", "")
    assert answers[0].seconds > 5.0


@pytest.mark.parametrize(("deed", "note"), [("want_memory", "can't allocate memory"), ("raise", "no such label: 7")])
def test_an_exception_fails_the_trial_and_keeps_the_process(worker, do, deed, note):
    worker.trial(FP32)
    before = worker.num_started
    do(deed)
    outcome = worker.trial(BF16)
    assert outcome.state == "failed"
    assert note in outcome.note
    assert worker.num_started == before


def test_leaked_settings_cost_the_process_and_nothing_else(worker, do):
    fp32 = worker.trial(FP32)
    before = worker.num_started
    do("leak")
    note = "it left the default dtype changed, it left autocast on the CPU changed: its process was replaced"
    assert note in worker.trial(BF16).note
    again = worker.trial(FP32)
    assert (again.losses, again.note) == (fp32.losses, "")
    assert worker.num_started == before + 1


def test_growing_memory_is_a_leak(here, monkeypatch):
    monkeypatch.setattr(leaks, "_SLACK_BYTES", {"cpu": 1 << 20, "accelerator": 0})
    monkeypatch.setattr(leaks, "_SLACK_SHARE", 0.0)
    memory, kept = MemoryWatch(here.device), []

    def trial() -> Reply:
        return _run(here, Call(method="trial", args=(FP32,), effort=here.effort), read_settings(), memory)

    trial()
    kept.append(torch.ones(1 << 26, dtype=torch.uint8))
    (leak,) = trial().leaks
    assert "MiB of memory more than after its first trial" in leak


def test_a_process_killed_between_trials_is_no_trials_fault(worker):
    worker.trial(FP32)
    os.kill(worker._child.pid, signal.SIGKILL)
    assert _await(lambda: not worker._child.is_alive())
    outcome = worker.trial(FP32)
    assert (outcome.state, outcome.note) == ("complete", "")


def test_other_calls_are_made_again_once(worker, do, here):
    expected = here.gap(BF16, 1001, 4)
    do("die_once")
    assert worker.gap(BF16, 1001, 4) == expected


def test_a_gap_that_dies_again_is_not_a_number(worker, do, caplog):
    do("die")
    assert math.isnan(worker.gap(BF16, 1000, 4))
    assert "data seed 1000 counts as diverged: gap of task 'tiny' ended its process twice" in caplog.text


def test_a_plan_that_raises_is_not_a_number_either(worker, do, caplog):
    do("raise")
    assert math.isnan(worker.gap(BF16, 1000, 4))
    scratch = worker.from_scratch(BF16, 1.0)
    assert (scratch.gap, scratch.holds(1.0)) == (None, False)
    with pytest.raises(StudyError, match="speeds raised ValueError: no such label: 7"):
        worker.speeds({"plan": BF16}, 3)


def test_a_task_that_dies_in_fp32_ends_the_study_in_words(worker, do):
    do("always die")
    with pytest.raises(StudyError, match=r"ended its process twice .* it trains in fp32: run that alone to see why"):
        worker.measure_step_s()


def test_a_tasks_own_exception_arrives_with_its_traceback(worker, do):
    do("always raise")
    with pytest.raises(TaskError, match="reference raised ValueError: no such label: 7") as caught:
        worker.reference(77, 4)
    (note,) = caught.value.__notes__
    assert note.startswith("In the worker process:\nTraceback")
    assert 'killers.py", line' in note


def test_closures_and_settings_travel(tiny):
    scale = torch.tensor(2.0)
    task = Task(
        name="closure",
        build_model=lambda seed: torch.nn.Linear(16, 1) if torch.manual_seed(seed) else None,
        batches=lambda seed: [(torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)),)],
        loss=lambda model, batch: (scale * model(*batch)).double().square().sum() * torch.ones(()).element_size(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
    )
    torch.set_float32_matmul_precision("high")
    try:
        with WorkerBench(bench_of(task)) as worker:
            assert worker.trial(BF16).losses == bench_of(task).trial(BF16).losses
            assert worker.isolation == "process"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_task_that_cannot_be_sent_is_run_here_and_says_so(here, caplog):
    lock, task = threading.Lock(), here.task

    def loss(model, batch):
        with lock:
            return task.loss(model, batch)

    held = Task(name="held", build_model=task.build_model, batches=task.batches, loss=loss, optimizer=task.optimizer)
    worker = WorkerBench(bench_of(held))
    assert worker.isolation.startswith("none: the task can't be sent to another process (TypeError: cannot pickle")
    assert worker.trial(BF16).losses == here.trial(BF16).losses
    assert "a crash ends the study" in caplog.text


def test_a_task_from_a_module_that_only_this_process_has_is_run_here(tiny):
    worker = WorkerBench(bench_of(tiny.make()))
    assert worker.trial(FP32).loss_gap == 0.0
    assert worker.isolation == (
        "none: a worker process doesn't start (starting raised ModuleNotFoundError: No module named "
        "'autoprec_tiny_tasks')"
    )
    assert worker.num_started == 1


def test_the_limit_follows_the_step(worker):
    worker._step_s, known = None, worker._step_s
    assert worker._limit_s(10) is None
    worker._step_s = 3.0
    assert worker._limit_s(10) == 600.0
    worker._step_s = 1e-3
    assert worker._limit_s(10) == 120.0
    assert worker._fp32_limit_s(10) == 600.0
    worker.trial_timeout = 8.0
    assert worker._limit_s(worker._trial_steps()) == worker._limit_s(1) == 8.0
    assert worker._limit_s(2 * worker._trial_steps()) == 16.0
    worker._step_s = known


def test_a_limit_must_be_positive(here):
    with pytest.raises(UsageError, match="trial_timeout is 0 seconds"):
        WorkerBench(here, trial_timeout=0)


# No ``if __name__ == "__main__"``: a study in a plain script starts once, not again in its worker.
STUDY = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/processes"]
from autoprec.tasks import load_task
from autoprec.tune.processes.worker import WorkerBench
from test_worker import BF16, FP32, SPEC, bench_of

print("script", flush=True)
worker = WorkerBench(bench_of(load_task(SPEC)), spec=SPEC)
print(worker.trial(BF16 if sys.argv[2] == "bf16" else FP32).state, flush=True)
"""


def _study(folder, plan):
    script = folder / "study.py"
    script.write_text(STUDY)
    return subprocess.Popen(
        [sys.executable, str(script), str(HERE), plan],
        cwd=HERE.parents[1],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_what_a_trial_says_before_it_dies_is_heard_and_a_script_leaves_no_process(folder, do):
    do("say")
    out, err = _study(folder, "bf16").communicate(timeout=120)  # ends when all workers have let go of the output
    do("")
    assert (out, err) == ("script\nsaid by the trial\ncrashed\n", "warned by the trial\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_worker_ends_with_its_study(folder, do, number):
    (folder / "pid").unlink(missing_ok=True)
    do("linger")
    study = _study(folder, "bf16")
    try:
        assert _await(lambda: (folder / "pid").is_file() and (folder / "pid").read_text())
        pid = int((folder / "pid").read_text())
        assert _is_running(pid)
        study.send_signal(number)
        study.communicate(timeout=180)
        assert _await(lambda: not _is_running(pid))
    finally:
        study.kill()
        do("")
    assert study.returncode == -number
