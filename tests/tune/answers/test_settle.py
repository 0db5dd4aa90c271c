import importlib
import json

import pytest
import torch

from autoprec.errors import PlanFileError, PlanMismatchError, TargetError, UsageError
from autoprec.fingerprint import fingerprint
from autoprec.plan import Formats, Plan, PlanRule
from autoprec.planfile import load_plan
from autoprec.target import Target, load_target
from autoprec.tune.answers.enqueued import Enqueued, Front
from autoprec.tune.answers.settle import settle
from autoprec.tune.trials import prepare
from autoprec.tune.trials.bench import Effort

CPU = Target(name="tiny", title="a processor with bf16", kind="cpu", formats=("bf16", "fp32"), low_format="bf16")
ESTIMATED = {"kind": "estimated", "value": 1.9, "unit": "x", "target": "tiny", "parts": {}, "assumptions": []}

pytestmark = pytest.mark.usefixtures("few_steps", "planted_clock")


@pytest.fixture
def few_steps(monkeypatch):
    warmup = importlib.import_module("autoprec.tune.trials.warmup")
    monkeypatch.setattr(warmup, "MIN_STEPS", 40)
    monkeypatch.setattr(warmup, "MAX_STEPS", 40)
    monkeypatch.setattr(Effort, "for_step", lambda step_s: Effort(steps=10, rounds=7))


def _plan(*low, **evidence):
    """These layers in bf16, the rest in fp32."""
    rules = [PlanRule(match=(name,), formats=Formats.all("bf16")) for name in low]
    rules.append(PlanRule(match=("*",), formats=Formats.all("fp32")))
    return Plan(rules=tuple(rules), target="tiny", evidence=evidence)


def _study(folder, given, *plans, baseline=None, budget=0.005):
    """A folder as a study for a target elsewhere leaves it."""
    given.save(folder / "plan.json")
    queue = tuple(Enqueued(name=f"m{k}", plan=plan, loss_gap=0.001) for k, plan in enumerate(plans))
    Front(plans=queue, baseline=baseline, task="tiny", seed=0, max_loss_increase=budget, target="tiny").save(folder)
    return folder / "plan.json"


def test_a_plan_that_holds_is_written_with_what_was_measured(tiny, tmp_path):
    task, events = tiny.make(fp32_s=1.0, low_s=0.4), []
    path = _study(tmp_path, _plan("wide", kind="estimated", confirmed=False, speedup=ESTIMATED))
    settled = settle(path, task, target=CPU, progress=events.append)
    assert settled.winner == "given plan"
    assert settled.verdict.startswith("The plan trains 2.")
    evidence = load_plan(path).evidence
    assert (evidence["kind"], evidence["confirmed"]) == ("measured", True)
    assert evidence["speedup"]["value"] == pytest.approx(2.5, rel=0.03)
    assert evidence["loss_gap"]["value"] <= 0.005
    assert evidence["estimated_speedup"] == ESTIMATED
    assert load_plan(path).rules == _plan("wide").rules
    document = json.loads((tmp_path / "settled.json").read_text())
    assert document == json.loads(json.dumps(settled.to_json()))
    assert json.loads((tmp_path / "receipt.json").read_text())["recorded"]
    assert {event.stage for event in events} == {"checkpoint", "trials", "confirm"}
    assert settle(path, task, target=CPU).winner == "given plan"  # asked again, it is measured again


def test_where_the_plan_fails_the_next_one_that_holds_takes_its_place(tiny, tmp_path):
    task = tiny.make(fp32_s=1.0, low_s=0.4, offset=1000.0)  # the head breaks in bf16
    path = _study(tmp_path, _plan("wide", "head"), _plan("wide"), _plan("head"))
    settled = settle(path, task, target=CPU)
    assert settled.winner == "m0"
    assert settled.verdict.startswith("The given plan isn't the answer: stopped after 5 steps at")
    assert load_plan(path).rules == _plan("wide").rules
    assert load_plan(path).evidence["confirmed"]
    assert [row.state for row in settled.trials] == ["stopped", "complete", "stopped", "stopped"]


def test_where_none_holds_the_plan_stays_and_says_that_it_was_refused(tiny, tmp_path):
    path = _study(tmp_path, _plan("wide", kind="estimated", confirmed=False), _plan("wide", "head"))
    settled = settle(path, tiny.make(fp32_s=1.0, low_s=1.0), target=CPU)
    assert settled.winner is None
    assert settled.verdict.startswith("No difference, so stay in fp32: the best mix found")
    plan = load_plan(path)
    assert plan.rules == _plan("wide").rules
    assert (plan.evidence["kind"], plan.evidence["confirmed"]) == ("measured", False)
    assert plan.evidence["refused"] == "no faster than fp32 beyond the noise"
    assert plan.evidence["speedup"]["value"] == pytest.approx(1.0, rel=0.03)


def test_what_a_plan_raises_on_the_target_is_said_of_it(tiny, tmp_path):
    class Broken(tiny.Planted):
        def forward(self, x):
            if self.head(torch.zeros(1, 16)).dtype != torch.float32:
                raise RuntimeError("no kernel for this format")
            return super().forward(x)

    def build_model(seed):
        torch.manual_seed(seed)
        return Broken(1.0, 0.4, 0.0, 1.0)

    path = _study(tmp_path, _plan("wide", "head"), _plan("wide"))
    settled = settle(path, tiny.make(build_model=build_model), target=CPU)
    assert settled.winner == "m0"
    assert "isn't the answer: RuntimeError: no kernel for this format" in settled.verdict


def test_the_16_bit_baseline_wins_where_it_is_faster(tiny, tmp_path):
    task = tiny.make(fp32_s=1.0, low_s=0.4)
    path = _study(tmp_path, _plan("head"), baseline=_plan("wide"))
    settled = settle(path, task, target=CPU)
    assert settled.winner == "bf16"
    assert settled.verdict.startswith("The given plan isn't the answer: it reads 1.0") or "0.99" in settled.verdict


def test_one_plan_alone_is_settled_against_the_rules_16_bit(tiny, tmp_path):
    _plan("wide", max_loss_increase=0.02).save(tmp_path / "plan.json")
    settled = settle(tmp_path / "plan.json", tiny.make(fp32_s=1.0, low_s=0.4), target=CPU, output_dir=tmp_path / "out")
    assert settled.winner in ("given plan", "bf16")
    assert settled.budget == 0.02
    assert {row.name for row in settled.trials} == {"given plan", "bf16"}
    assert (tmp_path / "out" / "plan.json").is_file()
    assert load_plan(tmp_path / "plan.json") == _plan("wide", max_loss_increase=0.02)


def test_a_plan_is_settled_on_its_target_alone(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "load_target", lambda name: CPU if name == "auto" else load_target(name))
    path = _study(tmp_path, _plan("wide"))
    with pytest.raises(TargetError, match="confirmed on its target, NVIDIA B200"):
        settle(path, tiny.make(), target="b200")


def test_what_cannot_be_settled_is_named(tiny, tmp_path):
    with pytest.raises(UsageError, match="at least one"):
        settle([], tiny.make())
    with pytest.raises(PlanFileError, match="isn't a file"):
        settle(tmp_path / "none.json", tiny.make())
    _plan("wide", task="mine").save(tmp_path / "plan.json")
    with pytest.raises(UsageError, match="beyond its name 'mine': name it"):
        settle(tmp_path / "plan.json", target=CPU)
    other = fingerprint(torch.nn.Linear(3, 3))
    Plan(rules=_plan("wide").rules, fingerprint=other).save(tmp_path / "plan.json")
    with pytest.raises(PlanMismatchError):
        settle(tmp_path / "plan.json", tiny.make(), target=CPU)
