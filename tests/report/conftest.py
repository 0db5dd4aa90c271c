"""A report's data with one trial of each kind, and names that must be escaped."""

import math

import pytest

from autoprec.measure import Environment, Measurement
from autoprec.report.data import (
    Cell,
    ConfirmationRow,
    Curve,
    GroupRow,
    Headline,
    Interval,
    ReportData,
    SiteRow,
    TrialRow,
)

START = 1_700_000_000.0


@pytest.fixture
def groups() -> tuple[GroupRow, ...]:
    """A pin, and two groups with one cell of each kind."""
    fitted = Interval(value=12.1, low=11.7, high=12.5)
    return (
        GroupRow(
            group="head<0>", size="", chosen="fp32", saving=None, harm=None, saving_share=None, harm_share=None,
            sentence="Pinned by the user: kept by 'head'.", cells=(None, None, None),
        ),
        GroupRow(
            group="blocks.*.up", size="4 sites, 40% of FLOPs", chosen="bf16", saving=fitted,
            harm=Interval(value=0.012, low=0.01, high=0.014), saving_share=0.62, harm_share=0.3,
            sentence="fp8_e4m3 here would save another 1.2% of the fp32 step and is expected to cost 0.61% of loss, "
            "over the 0.42% that is left of the budget.",
            cells=(
                Cell(format="fp32", is_chosen=False, num_trials=1, note="the reference"),
                Cell(
                    format="bf16", is_chosen=True, num_trials=3, saving=fitted, predicted_saving=11.0,
                    harm=Interval(value=0.012, low=0.01, high=0.014), predicted_harm=0.02, heat="low",
                ),
                Cell(format="fp8_e4m3", is_chosen=False, predicted_saving=13.3, predicted_harm=0.61, heat="over"),
            ),
        ),
        GroupRow(
            group="other ops", size="9 sites", chosen="fp32", saving=None, harm=None, saving_share=None,
            harm_share=None, sentence="No other format is faster here by more than the noise.",
            cells=(Cell(format="fp32", is_chosen=True, note="the reference"), None, None),
        ),
    )  # fmt: skip


@pytest.fixture
def data(groups) -> ReportData:
    def trial(number, mix, role, speed, gap, **rest):
        return TrialRow(
            number=number, mix=mix, role=role, outcome="complete",
            speedup=Interval(value=speed, low=speed - 0.02, high=speed + 0.03),
            loss_gap_pct=Interval(value=gap, low=gap - 0.05, high=gap + 0.05),
            predicted_speedup=speed + 0.04, predicted_gap_pct=gap - 0.02, origin="search", worker="host:17",
            started=START + 20 * number, ended=START + 20 * number + 18, seconds=18.0, **rest,
        )  # fmt: skip

    return ReportData(
        study="gpt-<b>0a1b</b>",
        verdict="1.52 times as fast as fp32, with a loss gap of 0.08%.",
        headlines=(
            Headline(name="chosen", figure="mlp bf16", detail="bf16 93%, fp32 7% of the matrix products' FLOPs"),
            Headline(name="speed against fp32", figure="1.52×", detail="1.50 to 1.55; fp32 against itself 1.00×"),
            Headline(name="loss against fp32", figure="+0.080%", detail="0.5% is allowed"),
            Headline(name="held back by", figure="the loss budget", detail="1 group could be 1.2% faster"),
        ),
        facts=(("throughput", "1,520 samples/s, fp32 1,000 samples/s"), ("allowed loss gap", "0.5%")),
        is_measured=True,
        budget_pct=0.5,
        saved="the fp32 step's time",
        formats=("fp32", "bf16", "fp8_e4m3"),
        groups=groups,
        trials=(
            trial(0, "fp32", "reference", 1.0, 0.0, low_share=0.0, is_on_front=True),
            trial(1, "bf16", "baseline", 1.45, 0.31, low_share=1.0),
            trial(2, "mlp bf16", "winner", 1.52, 0.08, low_share=0.93, is_on_front=True),
            trial(3, "all fp16", "candidate", 1.2, 0.9, low_share=1.0, settings="init scale 1024", num_skipped=2),
            TrialRow(
                number=4, mix="head fp16", role="candidate", outcome="failed", note="not finite <at step 3>",
                worker="host:18", started=START + 30, ended=START + 34, seconds=4.0,
            ),
        ),
        confirmations=(
            ConfirmationRow(
                mix="mlp bf16",
                speedup=Interval(value=1.51, low=1.5, high=1.53),
                control=Interval(value=1.0, low=0.99, high=1.01),
                loss_gap_pct=Interval(value=0.07, low=0.02, high=0.12),
                is_accepted=True,
                is_chosen=True,
                from_scratch="+0.050% over 300 steps; chance alone 0.020%",
                why="the loss gap is inside the budget",
            ),
        ),
        sites=(
            SiteRow(site="blocks.0.attn::matmul#0", asked="bf16", got="bf16", why="a GEMM", mechanism="mode"),
            SiteRow(site="head", asked="bf16", got="fp32", why="no kernel & no <fallback>", mechanism="forward"),
        ),
        curves=(
            Curve(label="fp32", role="reference", losses=tuple(3 * math.exp(-step / 20) + 1 for step in range(60))),
            Curve(label="bf16", role="baseline", losses=tuple(3 * math.exp(-step / 21) + 1 for step in range(60))),
            Curve(label="chosen", role="winner", losses=(4.0, 3.5, math.nan, math.inf, 3.0, 2.5)),
        ),
        method=(("objective", "speed"), ("method", "loop")),
        notes=("head in mxfp8 costs what it does in bf16: no <kernel>",),
        environment=(("device", "Test CPU"), ("torch", "2.13.0")),
        command="autoprec tune gpt --trials 50 --seed 0",
    )  # fmt: skip


def measured(value: float, unit: str = "x") -> Measurement:
    return Measurement(
        value=value, low=value - 0.01, high=value + 0.01, rounds=9, unit=unit, device="a CPU", date="today"
    )


@pytest.fixture
def result(tmp_path) -> dict:
    """A study's JSON as the tuner's own types write it."""
    from autoprec.plan import Formats, Plan, PlanRule
    from autoprec.tune.answers.confirmation import Confirmation
    from autoprec.tune.answers.result import TuneResult
    from autoprec.tune.answers.row import TrialRow

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
