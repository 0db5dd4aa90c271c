import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parents[1]

#: Rank 0 prints what each call gave.
STUDY = """
import json, os, sys
from dataclasses import replace
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/processes"]
import killers
import torch
from autoprec.errors import AutoprecError
from autoprec.tune.processes.ranks import RanksBench, follow, is_distributed, is_leader
from test_worker import BF16, FP32, bench_of

assert is_distributed()
if not is_leader():
    result = follow(killers.task, torch.device("cpu"))
    Path(os.environ["KILLERS_FOLDER"], "followed").write_text(result)
    sys.exit()
deed = Path(os.environ["KILLERS_FOLDER"], "deed").write_text
results = {}

def tell(name, outcome):
    results[name] = [outcome.state, outcome.loss_gap, list(outcome.finite_losses), outcome.note,
                     outcome.comparison is not None]

with RanksBench(bench_of(killers.task)) as bench:
    if sys.argv[2] == "die":
        tell("fp32", bench.trial(FP32))
        deed("rank1 die")
        bench.trial(BF16)
    tell("fp32", bench.trial(FP32))
    tell("bf16", bench.trial(BF16))
    for when in ("rank0 raise", "rank1 raise", "raise", "rank1 poison", "rank1 nap", "rank0 nap"):
        bench.effort = replace(bench.effort, steps=30 if when.endswith("nap") else 4)
        deed(when)
        tell(when, bench.trial(BF16))
        deed("")
    bench.effort = replace(bench.effort, steps=4)
    tell("again", bench.trial(BF16))
    deed("rank1 raise")
    results["gap raised"] = str(bench.gap(BF16, 1000, 4))
    try:
        bench.speeds({"plan": BF16}, 3)
    except AutoprecError as exc:
        results["speeds raised"] = repr(exc)
    deed("rank1 always raise")
    try:
        bench.reference(77, 4)
    except AutoprecError as exc:
        results["reference raised"] = repr(exc)
    deed("always drop")
    results["gap with dropout"] = bench.gap(FP32, 1001, 4)
    bench.effort = replace(bench.effort, steps=6)
    tell("dropout", bench.trial(FP32, 1002))
    deed("")
    results["gap"] = bench.gap(BF16, 1000, 4)
    results["noise"] = bench.noise((1, 2))
    results["step"] = bench.measure_step_s()
    results["speeds"] = sorted(bench.speeds({"a": BF16, "b": FP32}, 3))
    bench.close("the answer")
print(json.dumps(results))
"""


def _torchrun(folder, how="live"):
    (folder / "deed").write_text("")
    (folder / "study.py").write_text(STUDY)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    # locks of its own: other studies on this machine don't matter here
    own = {"KILLERS_FOLDER": str(folder), "TMPDIR": str(folder), "PYTHONPATH": str(HERE.parents[1])}
    return subprocess.run(
        [*command, str(folder / "study.py"), str(HERE), how],
        env={**os.environ, **own, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run = _torchrun(folder)
    assert run.returncode == 0, run.stderr
    assert (folder / "followed").read_text() == "the answer"
    return json.loads(run.stdout.splitlines()[-1])


def test_ranks_train_one_model_on_data_of_their_own(results, tiny):
    """What two ranks do, by hand in one process: the gradients of both batches, halved."""
    torch.manual_seed(0)
    model = tiny.Planted(0.0, 0.0, 0.0, 1.0)
    optimizer = tiny.sgd(model.parameters())
    expected = []
    streams = [tiny.batches(1), tiny.batches(100_001)]
    for _ in range(4):
        losses = [(model(x) - y).pow(2).mean() for x, y in map(next, streams)]
        loss = sum(losses) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    state, gap, losses, _, is_timed = results["fp32"]
    assert (state, gap, is_timed) == ("complete", 0.0, True)
    assert losses == pytest.approx(expected, rel=1e-5)


def test_a_mix_has_a_small_gap_and_the_same_after_all_that_went_wrong(results):
    state, gap, _, note, is_timed = results["bf16"]
    assert (state, note, is_timed) == ("complete", "", True)
    assert 0 < abs(gap) < 0.005
    assert results["again"] == results["bf16"]


@pytest.mark.parametrize(
    ("when", "note"),
    [
        ("rank0 raise", "ValueError: no such label: 7"),
        ("rank1 raise", "rank 1 raised ValueError: no such label: 7"),
        ("raise", "ValueError: no such label: 7"),
    ],
)
def test_one_ranks_exception_is_the_trials(results, when, note):
    state, gap, losses, said, is_timed = results[when]
    assert (state, gap, losses, is_timed) == ("failed", 0.05, [], False)
    assert said.endswith(note)


def test_one_ranks_bad_number_is_the_trials(results):
    state, gap, losses, *_ = results["rank1 poison"]
    assert (state, gap, losses) == ("diverged", 0.05, [None])


def test_the_clock_of_rank_0_decides(results):
    """Either way the common step is slow, since ranks wait for each other."""
    for when in ("rank0 nap", "rank1 nap"):
        state, _, losses, note, is_timed = results[when]
        assert (state, is_timed) == ("stopped", True)
        assert len(losses) < 30
        assert "times as long as in fp32" in note


def test_other_calls_are_common_too(results):
    assert results["gap raised"] == "nan"
    assert results["speeds raised"] == "StudyError('rank 1 raised ValueError: no such label: 7')"
    assert results["reference raised"] == "TaskError('rank 1 raised ValueError: no such label: 7')"
    assert 0 < abs(results["gap"]) < 0.005
    assert 0 < results["noise"] < 1e-4
    assert results["step"] > 0
    assert results["speeds"] == ["a", "b"]


def test_dropout_is_paired_on_every_rank(results):
    assert results["gap with dropout"] == 0.0
    state, gap, losses, *_ = results["dropout"]
    assert (state, gap, len(losses)) == ("complete", 0.0, 6)


def test_a_rank_that_dies_ends_the_job_and_all_its_processes(tmp_path):
    start = time.monotonic()
    run = _torchrun(tmp_path, "die")
    assert run.returncode != 0
    assert "Signal 9 (SIGKILL)" in run.stderr
    assert time.monotonic() - start < 600
