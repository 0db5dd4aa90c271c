import importlib
import json
import re

import optuna
import pytest
import torch

import autoprec
from autoprec.errors import StudyError, TaskError, UsageError
from autoprec.lower.matching import RuleMatcher
from autoprec.target import Target
from autoprec.tune.search import tune as tune_on
from autoprec.tune.trials.bench import Bench, Effort

CPU = Target(name="tiny", title="a processor with bf16", kind="cpu", formats=("bf16", "fp32"), low_format="bf16")

pytestmark = pytest.mark.usefixtures("few_steps", "planted_clock")


@pytest.fixture
def few_steps(monkeypatch):
    """A checkpoint of 40 steps, and short trials: these tasks learn in fewer."""
    # by module: the attribute autoprec.tune is the function
    warmup = importlib.import_module("autoprec.tune.trials.warmup")
    monkeypatch.setattr(warmup, "MIN_STEPS", 40)
    monkeypatch.setattr(warmup, "MAX_STEPS", 40)
    monkeypatch.setattr(Effort, "for_step", lambda step_s: Effort(steps=10, rounds=7))


def tune(task, **arguments):
    """On a device whose formats don't depend on this machine, in this process, which has the planted clock."""
    return tune_on(task, **{"target": CPU, "isolate": False, **arguments})


def _format(plan, fqn):
    rule = RuleMatcher(plan).rule_for_site(fqn, "linear", 0)
    return "none" if rule is None else rule.formats.input


def test_it_finds_planted_speed_and_avoids_planted_harm(tiny, tmp_path):
    events = []
    result = tune(tiny.make(low_s=0.004, offset=1000.0), trials=8, output_dir=tmp_path, progress=events.append)
    assert result.is_faster, result.verdict
    assert "times as fast as fp32" in result.verdict
    assert (_format(result.plan, "wide"), _format(result.plan, "head")) == ("bf16", "fp32")

    rows = {row.name: row for row in result.trials}
    assert rows["fp32"].loss_gap == 0.0
    assert rows["bf16"].state == "stopped"
    assert len({row.plan_sha256 for row in result.trials if not row.note.startswith("the same plan")}) > 3

    evidence = result.plan.evidence
    assert evidence["confirmed"]
    assert evidence["speedup"]["low"] > 1
    assert evidence["loss_gap"]["value"] <= result.budget
    assert evidence["throughput"]["unit"] == "samples/s"

    written = json.loads((tmp_path / "result.json").read_text())
    assert written == json.loads(json.dumps(result.to_json()))
    assert written["outcome"] == "faster"
    assert written["winner"] in {trial["plan_sha256"] for trial in written["trials"] if trial["is_confirmed"]}
    assert json.loads((tmp_path / "receipt.json").read_text())["recorded"]
    assert {event.stage for event in events} == {"checkpoint", "costs", "noise", "trials", "confirm"}

    model = autoprec.convert(tiny.make(offset=1000.0).build_model(0), plan=str(tmp_path / "plan.json"))
    model(torch.ones(2, 16))


def test_where_low_precision_does_not_pay_the_answer_is_fp32_with_a_number(tiny, tmp_path):
    result = tune(tiny.make(low_s=0.03), trials=5, output_dir=tmp_path)
    assert not result.is_faster
    assert re.match(r"(No difference, so stay|Stay) in fp32: the fastest mix inside the loss budget", result.verdict)
    assert re.search(r"reads (0\.\d\d|1\.00) \(.* to (0\.\d\d|1\.00)\) times its speed", result.verdict)
    assert result.plan.level == "O0"
    assert not result.plan.evidence["confirmed"]
    assert json.loads((tmp_path / "result.json").read_text())["winner"] is None


def test_where_all_formats_are_equal_it_says_that_there_is_no_difference(tiny, tmp_path):
    # long steps, beside which it doesn't show how often a converted model looks at the clock
    result = tune(tiny.make(fp32_s=1.0, low_s=1.0), trials=5, output_dir=tmp_path)
    assert result.verdict.startswith("No difference, so stay in fp32:")
    assert result.plan.level == "O0"
    assert result.outcome == "no_gain"


def test_the_smallest_plan_may_be_a_slower_one(tiny, tmp_path):
    result = tune(tiny.make(low_s=0.012), trials=6, objective="memory", max_loss_increase=0.2, output_dir=tmp_path)
    assert result.winner is not None
    assert re.match(r"A step takes \d\d% of fp32's memory at its peak \(estimated\)", result.verdict)
    rows = {row.name: row for row in result.trials}
    assert rows["bf16"].memory_bytes.value < rows["fp32"].memory_bytes.value


def test_an_interrupted_study_goes_on_and_keeps_its_trials(tiny, tmp_path):
    task = tiny.make()

    def interrupt(event):
        if event.stage == "trials" and event.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(task, trials=5, output_dir=tmp_path, progress=interrupt)
    checkpoint = (tmp_path / "checkpoint.safetensors").read_bytes()
    before = optuna.load_study(study_name="tiny", storage=f"sqlite:///{tmp_path / 'study.db'}").trials
    result = tune(task, trials=5, output_dir=tmp_path)
    assert [row.number for row in result.trials][:2] == [0, 1]
    assert len(result.trials) == 5
    assert result.trials[0].losses == tuple(before[0].user_attrs["row"]["losses"])
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == checkpoint
    assert {"fp32", "bf16", "rules"} <= {row.name for row in result.trials}
    assert len(tune(task, trials=5, output_dir=tmp_path).trials) == 5


def test_a_trial_that_is_interrupted_is_done_again(tiny, tmp_path, monkeypatch):
    task = tiny.make()
    measure = Bench.trial
    calls = []

    def once(self, plan, seed=None):
        calls.append(plan.sha256)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(self, plan, seed)

    monkeypatch.setattr(Bench, "trial", once)
    with pytest.raises(KeyboardInterrupt):
        tune(task, trials=4, output_dir=tmp_path)
    result = tune(task, trials=4, output_dir=tmp_path)
    assert calls[1] in calls[2:]
    assert calls[1] in {row.plan_sha256 for row in result.trials}


def test_no_plan_is_measured_twice_on_the_same_data_and_a_small_space_ends_early(tiny, tmp_path, monkeypatch):
    seen = []
    measure = Bench.trial

    def trial(self, plan, seed=None):
        seen.append((plan.sha256, seed))
        return measure(self, plan, seed)

    monkeypatch.setattr(Bench, "trial", trial)
    result = tune(tiny.make(), trials=40, keep=["head=fp32"], output_dir=tmp_path)
    assert len(seen) == len(set(seen))
    assert len({tuple(row.formats.values()) for row in result.trials}) == 6  # wide × other
    assert len(result.trials) < 40


def test_pins_hold_in_every_trial(tiny, tmp_path):
    result = tune(tiny.make(low_s=0.005), trials=5, keep=["wide=fp32"], output_dir=tmp_path)
    assert _format(result.plan, "wide") == "fp32"
    assert all("wide" not in row.formats for row in result.trials)


def test_a_study_of_another_task_is_refused(tiny, tmp_path):
    tune(tiny.make(), trials=2, output_dir=tmp_path)
    with pytest.raises(StudyError, match="data"):
        tune(tiny.make(data="other"), trials=2, output_dir=tmp_path)
    with pytest.raises(StudyError, match="max_loss_increase"):
        tune(tiny.make(), trials=2, max_loss_increase=0.1, output_dir=tmp_path)


def test_a_budget_below_the_tasks_noise_is_refused(tiny, tmp_path):
    with pytest.raises(StudyError, match=r"below twice that can't be told from chance. Allow"):
        tune(tiny.make(), trials=2, max_loss_increase=1e-9, output_dir=tmp_path)


def test_an_inference_task_is_only_evaluated(tiny, tmp_path):
    result = tune(tiny.make(mode="inference", optimizer=None, low_s=0.005), trials=4, output_dir=tmp_path)
    assert result.warm_up == ()
    assert result.plan.mode == "inference"


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"trials": 0}, UsageError, "trials is 0"),
        ({"timeout": 0.0}, UsageError, "timeout is 0.0"),
        ({"max_loss_increase": 5.0}, UsageError, "such as 0.005 for 0.5%"),
        ({"task": "missing.py:task"}, TaskError, "no file"),
        ({"keep": ["nothing=bf16"]}, UsageError, "matches no site"),
    ],
)
def test_wrong_arguments_are_named(tiny, tmp_path, arguments, error, says):
    with pytest.raises(error, match=says):
        tune(**{"task": tiny.make(), "trials": 2, "output_dir": tmp_path, **arguments})


def test_a_task_that_raises_in_fp32_is_named(tiny, tmp_path):
    with pytest.raises(TaskError, match="step 0 in fp32 raised RuntimeError"):
        tune(tiny.make(loss=lambda model, batch: model(batch[0][:, :3]).sum()), output_dir=tmp_path)


def test_a_loss_that_is_nan_in_fp32_is_named(tiny, tmp_path):
    with pytest.raises(StudyError, match="NaN at step 0"):
        tune(tiny.make(loss=lambda model, batch: model(batch[0]).sum() * float("nan")), output_dir=tmp_path)
