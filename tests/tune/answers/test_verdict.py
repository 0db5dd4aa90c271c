import pytest

from autoprec.estimate import Estimate
from autoprec.measure import Measurement, describe_environment
from autoprec.target import load_target
from autoprec.tune.answers.confirmation import Confirmation
from autoprec.tune.answers.result import TrialRow
from autoprec.tune.answers.verdict import make_evidence, say_faster, say_no_gain
from autoprec.tune.trials.scratch import FromScratch


def _measured(value, low, high, unit="x"):
    return Measurement(value=value, low=low, high=high, rounds=9, unit=unit, device="d")


def _row(name="search", speed=None, gap=0.001, **formats):
    return TrialRow(
        number=7,
        name=name,
        plan_sha256=name,
        formats=formats or {"a": "bf16"},
        loss_gap=gap,
        speedup=None if speed is None else _measured(speed, speed - 0.1, speed + 0.1),
        control=None if speed is None else _measured(1.01, 0.99, 1.02),
    )


def _confirmed(accepted=True, why="faster, and the loss holds", **changes):
    fields = dict(
        plan_sha256="search",
        name="search",
        loss_gap=_measured(0.001, -0.0005, 0.0025, "relative"),
        gaps=(0.001, 0.002, 0.0),
        speedup=_measured(1.5, 1.45, 1.55),
        control=_measured(1.001, 0.99, 1.01),
        candidate_s=0.02,
        baseline_s=0.03,
        accepted=accepted,
        holds_loss=accepted,
        why=why,
    )
    return Confirmation(**{**fields, **changes})


def _estimated():
    return _confirmed(speedup=Estimate(value=1.5, unit="x", target="h100"), control=None)


@pytest.mark.parametrize(
    ("name", "mode", "starts"),
    [
        ("search", "training", "The mix of trial 7 trains 1.50 (1.45 to 1.55) times as fast as fp32"),
        ("bf16", "training", "Whole-model bf16 trains"),
        ("rules", "inference", "The rules' plan runs"),
    ],
)
def test_a_gain_is_said_with_its_numbers(name, mode, starts):
    text = say_faster(_row(name), _confirmed(), 0.005, mode)
    assert text.startswith(starts)
    assert "a loss gap of +0.100% (-0.050% to +0.250%) where 0.50% is allowed; confirmed on 3 fresh data seeds" in text
    assert text.endswith("fp32 against itself reads 1.001.")


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([_row("fp32", 1.0, 0.0, a="fp32"), _row(speed=0.4)], "inside the loss budget, the mix of trial 7, reads 0.40"),
        ([_row(speed=2.0, gap=0.3)], "(loss gap +30.000%, over the budget of 0.50%)"),
        ([_row("bf16", 0.4), _row("bf16", 0.3)], "whole-model bf16, reads 0.40 (0.30 to 0.50) times its speed"),
        ([_row("fp32", 1.0, 0.0, a="fp32"), _row()], "no mix could be timed"),
        ([], "no mix could be timed"),
    ],
)
def test_no_gain_is_an_answer_with_the_number_that_came_closest(rows, says):
    text = say_no_gain(rows, [], 0.005)
    assert text.startswith("Stay in fp32")
    assert says in text


def test_a_mix_that_was_refused_is_named_with_the_reason():
    text = say_no_gain([], [_confirmed(accepted=False, why="diverged on fresh data")], 0.005)
    assert "reads 1.50 (1.45 to 1.55) times its speed" in text
    assert "was refused: diverged on fresh data" in text


def test_the_evidence_says_what_was_measured_where(tiny):
    environment = describe_environment()
    evidence = make_evidence(tiny.make(), _confirmed(), {"loss_gap": 1e-6}, 0.005, environment, "2026-01-01")
    assert evidence["throughput"] == {
        "kind": "measured",
        "unit": "samples/s",
        "value": 1600.0,
        "baseline": pytest.approx(1066.67, rel=1e-4),
    }
    assert (evidence["kind"], evidence["confirmed"], evidence["noise"]) == ("measured", True, 1e-6)
    assert evidence["versions"]["torch"] == environment.torch
    fp32 = make_evidence(tiny.make(), None, {"loss_gap": 1e-6}, 0.005, environment, "2026-01-01")
    assert (fp32["confirmed"], fp32["date"]) == (False, "2026-01-01")
    assert "speedup" not in fp32
    refused = make_evidence(
        tiny.make(), _confirmed(False, "no", loss_gap=None), {"loss_gap": 0.0}, 0.005, environment, "2026-01-01"
    )
    assert (refused["confirmed"], refused["refused"], refused["loss_gap"]) == (False, "no", None)
    assert refused["speedup"]["value"] == 1.5


def test_every_figure_of_an_estimated_plan_says_so(tiny):
    text = say_faster(_row(), _estimated(), 0.005, "training")
    assert text.startswith("The mix of trial 7 should train 1.50 (estimated for h100) times as fast as fp32; measured")
    assert "formats emulated on d: a loss gap of +0.100%" in text
    assert text.endswith("Unconfirmed: run 'autoprec tune --confirm plan.json' on h100.")

    environment, target = describe_environment(), load_target("h100")
    evidence = make_evidence(tiny.make(), _estimated(), {"loss_gap": 0.0}, 0.005, environment, "2026-01-01", target)
    assert (evidence["kind"], evidence["confirmed"], evidence["control"]) == ("estimated", False, None)
    assert evidence["loss_kind"] == f"measured (emulated operands on {environment.device})"
    assert (evidence["speedup"]["kind"], evidence["throughput"]["kind"]) == ("estimated", "estimated")
    assert evidence["loss_gap"]["kind"] == "measured"
    assert "estimated for NVIDIA H100" in evidence["unconfirmed"]
    fp32 = make_evidence(tiny.make(), None, {"loss_gap": 0.0}, 0.005, environment, "2026-01-01", target)
    assert (fp32["kind"], fp32["confirmed"]) == ("estimated", False)

    text = say_no_gain([], [_confirmed(False, "no", speedup=_estimated().speedup, control=None)], 0.005)
    assert text.endswith("reads 1.50 (estimated for h100) times its speed, and was refused: no.")


def test_a_run_from_scratch_is_said(tiny):
    confirmation = _confirmed(from_scratch=FromScratch(gap=0.002, chaos=0.001, steps=200))
    assert "seeds, and from fresh weights +0.200% over 200 steps; fp32" in say_faster(
        _row(), confirmation, 0.005, "training"
    )
    evidence = make_evidence(tiny.make(), confirmation, {"loss_gap": 0.0}, 0.005, describe_environment(), "")
    assert evidence["from_scratch"] == {"gap": 0.002, "chaos": 0.001, "steps": 200}


def test_a_metric_is_called_one(tiny):
    assert "at a metric gap of +0.100%" in say_faster(_row(), _confirmed(), 0.005, "inference", "metric")
    task = tiny.make(mode="inference", optimizer=None, metric=lambda model, batch: 1.0, direction="maximize")
    evidence = make_evidence(task, _confirmed(), {"loss_gap": 0.0}, 0.005, describe_environment(), "")
    assert evidence["metric"] == "maximize"
