"""The answer in words, and the evidence that the plan carries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoprec.measure import Environment, Measurement
from autoprec.tasks import Task
from autoprec.tune.result import Confirmation, TrialRow


def say_faster(row: TrialRow, confirmation: Confirmation, budget: float, mode: str) -> str:
    """The verdict of a confirmed plan."""
    gap = confirmation.loss_gap
    assert gap is not None  # an accepted confirmation has measured it
    does = "trains" if mode == "training" else "runs"
    return (
        f"{_name(row)} {does} {_times(confirmation.speedup)} times as fast as fp32, at a loss gap of {gap.value:+.3%} "
        f"({gap.low:+.3%} to {gap.high:+.3%}) where {budget:.2%} is allowed; confirmed on {len(confirmation.gaps)} "
        f"fresh data seeds; fp32 against itself reads {confirmation.control.value:.3f}."
    )


def say_no_gain(rows: Sequence[TrialRow], confirmations: Sequence[Confirmation], budget: float) -> str:
    """The verdict where fp32 stays, with the number of the mix that came closest."""
    refused = max(confirmations, key=lambda c: c.speedup.value, default=None)
    if refused is not None:
        return (
            f"Stay in fp32: the best mix found ({refused.name}) reads {_times(refused.speedup)} times its speed (fp32 "
            f"against itself: {refused.control.value:.3f}), and was refused: {refused.why}."
        )
    mixes = [row for row in rows if row.speedup is not None and set(row.formats.values()) != {"fp32"}]
    fitting = [row for row in mixes if row.loss_gap <= budget]
    closest = max(fitting or mixes, key=_speed, default=None)
    if closest is None:
        return "Stay in fp32: no mix could be timed; see the trials' notes."
    assert closest.speedup is not None
    inside = (
        "inside the loss budget" if fitting else f"(loss gap {closest.loss_gap:+.3%}, over the budget of {budget:.2%})"
    )
    return (
        f"Stay in fp32: the fastest mix {inside}, {_name(closest).lower()}, reads {_times(closest.speedup)} times "
        "its speed" + (f" (fp32 against itself: {closest.control.value:.3f})." if closest.control else ".")
    )


def make_evidence(
    task: Task,
    confirmation: Confirmation | None,
    noise: dict[str, Any],
    budget: float,
    environment: Environment,
    date: str,
) -> dict[str, Any]:
    """What was measured of the plan, for its file.

    Args:
        task: that was trained.
        confirmation: of the plan; None for fp32, which is the reference.
        noise: of the loss gap.
        budget: largest allowed loss gap.
        environment: where.
        date: when, for fp32.
    """
    common = {
        "kind": "measured",
        "baseline": "fp32",
        "max_loss_increase": budget,
        "noise": noise["loss_gap"],
        "task": task.name,
        "data": task.data,
        "device": environment.device,
        "versions": {"torch": environment.torch, "python": environment.python},
    }
    if confirmation is None or confirmation.loss_gap is None:
        return {**common, "date": date, "confirmed": False}
    unit, per_step = task.throughput_unit()
    return {
        **common,
        "date": confirmation.speedup.date,
        "confirmed": confirmation.accepted,
        "loss_gap": confirmation.loss_gap.to_json(),
        "speedup": confirmation.speedup.to_json(),
        "control": confirmation.control.to_json(),
        "throughput": {
            "unit": f"{unit}/s",
            "value": per_step / confirmation.candidate_s,
            "baseline": per_step / confirmation.baseline_s,
        },
    }


def _times(speedup: Measurement) -> str:
    return f"{speedup.value:.2f} ({speedup.low:.2f} to {speedup.high:.2f})"


def _speed(row: TrialRow) -> float:
    return 0.0 if row.speedup is None else row.speedup.value


def _name(row: TrialRow) -> str:
    if row.name == "search":
        return f"The mix of trial {row.number}"
    return "The rules' plan" if row.name == "rules" else f"Whole-model {row.name}"
