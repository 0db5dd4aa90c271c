"""A report's data with one trial of each kind, and names that must be escaped."""

import math

import pytest

from autoprec.report.data import ConfirmationRow, Curve, Interval, ReportData, SiteRow, TrialRow


@pytest.fixture
def data() -> ReportData:
    def trial(number, mix, role, speed, gap, **rest):
        return TrialRow(
            number=number, mix=mix, role=role, outcome="complete",
            speedup=Interval(value=speed, low=speed - 0.02, high=speed + 0.03),
            loss_gap_pct=Interval(value=gap, low=gap - 0.05, high=gap + 0.05), **rest,
        )  # fmt: skip

    return ReportData(
        study="gpt-<b>0a1b</b>",
        verdict="1.52 times as fast as fp32, with a loss gap of 0.08%.",
        facts=(("speed", "1.52× (1.50 to 1.55)"), ("A/A control", "1.00× (0.99 to 1.01)")),
        is_measured=True,
        budget_pct=0.5,
        trials=(
            trial(0, "fp32", "reference", 1.0, 0.0, low_share=0.0, is_on_front=True),
            trial(1, "bf16", "baseline", 1.45, 0.31, low_share=1.0),
            trial(2, "mlp bf16", "winner", 1.52, 0.08, low_share=0.93, is_on_front=True),
            trial(3, "all fp16", "candidate", 1.2, 0.9, low_share=1.0),
            TrialRow(number=4, mix="head fp16", role="candidate", outcome="failed", note="not finite <at step 3>"),
        ),
        confirmations=(
            ConfirmationRow(
                mix="mlp bf16",
                speedup=Interval(value=1.51, low=1.5, high=1.53),
                control=Interval(value=1.0, low=0.99, high=1.01),
                loss_gap_pct=Interval(value=0.07, low=0.02, high=0.12),
                is_accepted=True,
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
        environment=(("device", "Test CPU"), ("torch", "2.13.0")),
        command="autoprec tune gpt --trials 50 --seed 0",
    )  # fmt: skip
