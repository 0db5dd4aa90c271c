import json
from dataclasses import asdict

import pytest

from autoprec.measure import Environment, Measurement
from autoprec.report import render_report
from autoprec.report.read import command_line, describe_mix, read_result


def measured(value: float, unit: str = "x") -> Measurement:
    return Measurement(
        value=value, low=value - 0.01, high=value + 0.01, rounds=9, unit=unit, device="a CPU", date="today"
    )


@pytest.fixture
def result(tmp_path) -> dict:
    """A study's JSON as the tuner's own types write it."""
    from autoprec.plan import Formats, Plan, PlanRule
    from autoprec.tune.result import Confirmation, TrialRow, TuneResult

    def trial(number: int, name: str, formats: dict, speed: float | None, gap: float, **rest) -> TrialRow:
        return TrialRow(
            number=number,
            name=name,
            plan_sha256=f"{name}{number}",
            formats=formats,
            loss_gap=gap,
            speedup=None if speed is None else measured(speed),
            losses=(3.0, 2.0, None, 1.5),
            **rest,
        )

    trials = (
        trial(0, "fp32", {"a": "fp32"}, 1.0, 0.0),
        trial(1, "bf16", {"a": "bf16"}, 1.4, 0.004, low_share=1.0),
        trial(2, "search", {"a": "bf16", "b": "fp32", "c": "bf16"}, 1.5, 0.001, low_share=0.9),
        trial(3, "search", {"a": "fp16"}, 0.5, 0.03, state="stopped", note="too slow"),
        trial(4, "search", {"a": "fp16"}, None, 0.05, state="diverged", note="the loss is not finite"),
        trial(5, "search", {"a": "bf16", "b": "fp32", "c": "fp32"}, 1.2, 0.002),
    )
    refused = Confirmation(
        plan_sha256="search5", name="search", loss_gap=None, gaps=(None, 0.1), speedup=measured(1.1),
        control=measured(1.0), candidate_s=0.1, baseline_s=0.11,
        holds_loss=False, accepted=False, why="the loss diverged",
    )  # fmt: skip
    accepted = Confirmation(
        plan_sha256="search2", name="search", loss_gap=measured(0.0012, "relative"), gaps=(0.001, 0.0014),
        speedup=measured(1.49), control=measured(1.0), candidate_s=0.1, baseline_s=0.15,
        holds_loss=True, accepted=True, why="",
    )  # fmt: skip
    environment = Environment(
        device="a CPU",
        device_kind="cpu",
        cpu="a CPU",
        cores=2,
        threads=2,
        torch="2.13.0",
        python="3.11",
        system="Linux",
    )
    plan = Plan(rules=(PlanRule(match=("*::linear",), formats=Formats.all("bf16")),))
    return TuneResult(
        study="s", task="my tasks/t.py:task", plan=plan, verdict="1.49 times as fast", winner="search2", trials=trials,
        confirmations=(refused, accepted), receipt=None, reference=(3.0, 2.0, 1.8, 1.5), warm_up=(5.0, 3.0),
        noise={"loss_gap": 0.0004, "seeds": [1], "steps": 20}, budget=0.005, groups=(), environment=environment,
        settings={"target": "auto", "trials": 6, "seed": 3, "keep": ["head=fp32"], "timeout": None}, folder=tmp_path,
    ).to_json()  # fmt: skip


def test_a_study_as_the_tuner_writes_it_is_read(result):
    data = read_result(json.loads(json.dumps(result)))
    assert [row.role for row in data.trials] == ["reference", "baseline", "winner", *["candidate"] * 3]
    assert data.budget_pct == pytest.approx(0.5)
    assert data.trials[2].loss_gap_pct.value == pytest.approx(0.1)
    assert data.trials[2].mix == "bf16; b: fp32"
    facts = dict(data.facts)
    assert facts["speed"] == "1.49× (1.48 to 1.50) fp32's"
    assert facts["trials"] == "6 (4 complete, 1 stopped, 1 diverged)"


def test_a_trial_without_a_loss_shows_none_and_its_reason(result):
    diverged = read_result(result).trials[4]
    assert diverged.loss_gap_pct is None
    assert diverged.speedup is None
    assert diverged.note == "the loss is not finite"


def test_the_front_has_the_trials_that_none_beats(result):
    assert [row.number for row in read_result(result).trials if row.is_on_front] == [0, 2]


def test_the_curves_are_the_references_the_baselines_and_the_winners(result):
    curves = read_result(result).curves
    assert [curve.label for curve in curves] == ["fp32", "bf16", "bf16; b: fp32 (chosen)"]


def test_confirmations_name_their_mix_and_say_why(result):
    refused, accepted = read_result(result).confirmations
    assert (refused.mix, refused.is_accepted, refused.why) == ("fp32; a: bf16", False, "the loss diverged")
    assert accepted.loss_gap_pct.value == pytest.approx(0.12)


def test_the_receipts_rows_are_the_sites(result):
    row = {"site": "head", "op": "linear", "asked": "bf16", "got": "fp32", "why": "w", "mechanism": "frame", "flops": 3}
    (site,) = read_result(result, {"rows": [row]}).sites
    assert asdict(site) == {"site": "head", "asked": "bf16", "got": "fp32", "why": "w", "mechanism": "frame"}
    assert not site.is_as_asked


def test_no_gain_is_a_verdict_too(result):
    data = read_result({**result, "winner": None, "outcome": "no_gain", "verdict": "stay in fp32"})
    assert "winner" not in {row.role for row in data.trials}
    assert "speed" not in dict(data.facts)
    assert "stay in fp32" in render_report({**result, "winner": None, "verdict": "stay in fp32"})


def test_the_command_is_one_that_a_shell_takes(result):
    assert read_result(result).command == (
        "autoprec tune 'my tasks/t.py:task' --target auto --trials 6 --max-loss-increase 0.5% --seed 3 "
        "--keep head=fp32 --study s"
    )
    assert read_result(result, command="autoprec tune t.py:task").command == "autoprec tune t.py:task"
    assert command_line("gpt", {"keep": ["a=bf16", "*.b=fp32"]}) == "autoprec tune gpt --keep a=bf16 --keep '*.b=fp32'"


@pytest.mark.parametrize(
    ("formats", "words"),
    [
        ({}, ""),
        ({"a": "bf16", "b": "bf16"}, "all bf16"),
        ({"a": "bf16", "b": "bf16", "head": "fp32"}, "bf16; head: fp32"),
        (dict(zip("abcdefghijk", ["x"] * 6 + ["y"] * 5, strict=True)), "x; g: y, h: y, i: y and 2 more"),
    ],
)
def test_a_mix_in_words(formats, words):
    assert describe_mix(formats) == words
