import pytest

from autoprec.measure import Measurement, describe_environment
from autoprec.tune.result import Confirmation, TrialRow
from autoprec.tune.verdict import make_evidence, say_faster, say_no_gain


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


def _confirmed(accepted=True, why="faster, and the loss holds"):
    return Confirmation(
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
        "unit": "samples/s",
        "value": 1600.0,
        "baseline": pytest.approx(1066.67, rel=1e-4),
    }
    assert (evidence["kind"], evidence["confirmed"], evidence["noise"]) == ("measured", True, 1e-6)
    assert evidence["versions"]["torch"] == environment.torch
    fp32 = make_evidence(tiny.make(), None, {"loss_gap": 1e-6}, 0.005, environment, "2026-01-01")
    assert (fp32["confirmed"], fp32["date"]) == (False, "2026-01-01")
    assert "speedup" not in fp32
