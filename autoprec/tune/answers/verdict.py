"""The answer in words, and the evidence that the plan carries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoprec.estimate import Estimate
from autoprec.measure import Environment, Measurement
from autoprec.target import Target
from autoprec.tasks import Task
from autoprec.tune.answers.confirmation import Confirmation
from autoprec.tune.answers.row import TrialRow
from autoprec.tune.trials.speed import say_times

#: A difference in speed that nobody would act on.
_EQUAL = 0.005


def say_faster(row: TrialRow, confirmation: Confirmation, budget: float, mode: str, measured: str = "loss") -> str:
    """The verdict of a confirmed plan.

    Args:
        row: its trial.
        confirmation: of it.
        budget: largest allowed gap.
        mode: of the task.
        measured: what the task is judged by: ``loss`` or ``metric``.
    """
    gap = confirmation.loss_gap
    assert gap is not None  # an accepted confirmation has measured it
    times, seeds = say_times(confirmation.speedup), len(confirmation.gaps)
    its_gap = f"{measured} gap of {gap.value:+.3%} ({gap.low:+.3%} to {gap.high:+.3%}) where {budget:.2%} is allowed"
    if confirmation.control is None:
        does = "train" if mode == "training" else "run"
        where = getattr(confirmation.speedup, "target", "the target")
        return (
            f"{_name(row)} should {does} {times} times as fast as fp32; measured with the target's formats emulated on "
            f"{gap.device}: a {its_gap}, on {seeds} fresh data seeds{_from_scratch(confirmation)}. Unconfirmed: run "
            f"'autoprec tune --confirm plan.json' on {where}."
        )
    does = "trains" if mode == "training" else "runs"
    return (
        f"{_name(row)} {does} {times} times as fast as fp32, at a {its_gap}; confirmed on {seeds} fresh data seeds"
        f"{_from_scratch(confirmation)}; fp32 against itself reads {confirmation.control.value:.3f}."
    )


def say_smaller(row: TrialRow, rows: Sequence[TrialRow]) -> str:
    """How much less memory a plan's step takes than fp32's."""
    whole = next((other.memory_bytes for other in rows if other.name == "fp32"), None)
    if whole is None or row.memory_bytes is None:
        return "Its memory wasn't weighed."
    kind = "measured" if isinstance(row.memory_bytes, Measurement) else "estimated"
    share = row.memory_bytes.value / whole.value
    return f"A step takes {share:.0%} of fp32's memory at its peak ({kind})."


def say_no_gain(rows: Sequence[TrialRow], confirmations: Sequence[Confirmation], budget: float) -> str:
    """The verdict where fp32 stays, with the number of the mix that came closest."""
    refused = max(confirmations, key=lambda c: c.speedup.value, default=None)
    if refused is not None:
        times, control = say_times(refused.speedup), _say_control(refused.control)
        return (
            f"{_stay(refused.speedup)}: the best mix found ({refused.name}) reads {times} times its speed{control}, "
            f"and was refused: {refused.why}."
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
        f"{_stay(closest.speedup)}: the fastest mix {inside}, {_name(closest).lower()}, reads "
        f"{say_times(closest.speedup)} times its speed{_say_control(closest.control)}."
    )


def make_evidence(
    task: Task,
    confirmation: Confirmation | None,
    noise: dict[str, Any],
    budget: float,
    environment: Environment,
    date: str,
    elsewhere: Target | None = None,
) -> dict[str, Any]:
    """What is known of the plan, for its file: each figure says whether it was measured or estimated.

    Args:
        task: that was trained.
        confirmation: of the plan; None for fp32, which is the reference.
        noise: of the loss gap.
        budget: largest allowed loss gap.
        environment: where.
        date: when, where no measured speed has a date.
        elsewhere: the target, if it isn't here: ``kind`` is then ``estimated``, of all but the loss.
    """
    common = {
        "kind": "measured" if elsewhere is None else "estimated",
        "baseline": "fp32",
        "max_loss_increase": budget,
        "noise": noise["loss_gap"],
        "task": task.name,
        "data": task.data,
        "device": environment.device,
        "versions": {"torch": environment.torch, "python": environment.python},
    }
    if task.metric is not None:
        common["metric"] = task.direction
    if elsewhere is not None:
        common["loss_kind"] = f"measured (emulated operands on {environment.device})"
        common["unconfirmed"] = (
            f"the speed is estimated for {elsewhere.title}; 'autoprec tune --confirm plan.json' on one measures it"
        )
    if confirmation is None:
        return {**common, "date": date, "confirmed": False}
    speedup, control = confirmation.speedup, confirmation.control
    unit, per_step = task.throughput_unit()
    evidence = {
        **common,
        "date": speedup.date if isinstance(speedup, Measurement) else date,
        "confirmed": confirmation.accepted and confirmation.is_measured,
        "loss_gap": None if confirmation.loss_gap is None else confirmation.loss_gap.to_json(),
        "speedup": speedup.to_json(),
        "control": None if control is None else control.to_json(),
        "throughput": {
            "kind": "measured" if confirmation.is_measured else "estimated",
            "unit": f"{unit}/s",
            "value": per_step / confirmation.candidate_s,
            "baseline": per_step / confirmation.baseline_s,
        },
    }
    if confirmation.from_scratch is not None:
        evidence["from_scratch"] = confirmation.from_scratch.to_json()
    if not confirmation.accepted:
        evidence["refused"] = confirmation.why
    return evidence


def _from_scratch(confirmation: Confirmation) -> str:
    run = confirmation.from_scratch
    return "" if run is None or run.gap is None else f", and from fresh weights {run.gap:+.3%} over {run.steps} steps"


def _say_control(control: Measurement | None) -> str:
    return f" (fp32 against itself: {control.value:.3f})" if control else ""


def _stay(speedup: Measurement | Estimate) -> str:
    """Whether a mix that may not win is as fast as fp32, or not."""
    is_equal = isinstance(speedup, Measurement) and speedup.low <= 1 + _EQUAL and speedup.high >= 1 - _EQUAL
    return "No difference, so stay in fp32" if is_equal else "Stay in fp32"


def _speed(row: TrialRow) -> float:
    return 0.0 if row.speedup is None else row.speedup.value


def _name(row: TrialRow) -> str:
    if row.name == "search":
        return f"The mix of trial {row.number}"
    named = {"rules": "The rules' plan", "given plan": "The plan"}
    return named.get(row.name, f"Whole-model {row.name}")
