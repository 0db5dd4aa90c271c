"""The figures at a report's top, the numbers behind them, and how they were measured."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autoprec.report.data import ConfirmationRow, Headline, Interval, TrialRow
from autoprec.report.explained import limit_headline
from autoprec.report.mix import describe_shares

Result = Mapping[str, Any]


def headlines_of(
    result: Result, trials: Sequence[TrialRow], confirmations: Sequence[ConfirmationRow]
) -> Iterable[Headline]:
    """What was chosen, how fast it is, at what loss, and what held it back."""
    allowed = f"{100 * result['budget']:g}% is allowed"
    accepted = _accepted(confirmations)
    limit = limit_headline(result.get("explanations") or ())
    if accepted is None:
        yield Headline(name="chosen", figure="fp32", detail="no faster mix held")
        best = _best(trials, 100 * result["budget"])
        if best is not None and best.speedup is not None:
            detail = f"trial {best.number}, {best.mix}; not confirmed as faster than fp32"
            yield Headline(name="fastest trial within the budget", figure=_times(best.speedup), detail=detail)
    else:
        winner = next((row for row in result["trials"] if row["plan_sha256"] == result["winner"]), None)
        shares = "" if winner is None else describe_shares(winner["formats"], result["groups"])
        detail = f"{shares} of the matrix products' FLOPs" if shares else ""
        yield Headline(name="chosen", figure=accepted.mix, detail=detail)
        yield Headline(name="speed against fp32", figure=_times(accepted.speedup), detail=_certainty(result, accepted))
        if accepted.loss_gap_pct is not None:
            gap, low, high = (getattr(accepted.loss_gap_pct, end) for end in ("value", "low", "high"))
            detail = f"{low:+z.3f} to {high:+z.3f}% on fresh data; {allowed}"
            yield Headline(name="loss against fp32", figure=f"{gap:+z.3f}%", detail=detail)
    if limit is not None:
        yield limit


def facts_of(
    result: Result, trials: Sequence[TrialRow], confirmations: Sequence[ConfirmationRow]
) -> Iterable[tuple[str, str]]:
    """Name and text of the numbers behind the headlines."""
    accepted = _accepted(confirmations)
    if accepted is not None and accepted.from_scratch:
        yield "loss gap from fresh weights", accepted.from_scratch
    throughput = result["evidence"].get("throughput")
    if throughput:
        rate, baseline, unit = throughput["value"], throughput["baseline"], throughput["unit"]
        kind = " (estimated)" if throughput.get("kind") == "estimated" else ""
        yield "throughput", f"{rate:,.0f} {unit}, fp32 {baseline:,.0f} {unit}{kind}"
    yield "allowed loss gap", f"{100 * result['budget']:g}%"
    noise = result["noise"].get("loss_gap")
    if noise is not None:
        yield "noise of the loss gap", f"{100 * noise:.2g}% (standard deviation, by chance alone)"
    outcomes = Counter(row.outcome for row in trials)
    yield "trials", f"{len(trials)} ({', '.join(f'{count} {outcome}' for outcome, count in outcomes.items())})"
    if result["warm_up"]:
        first, last = result["warm_up"][0], result["warm_up"][-1]
        yield "checkpoint", f"{len(result['warm_up'])} steps in fp32, loss {first:.3f} to {last:.3f}"


def method_of(result: Result) -> Iterable[tuple[str, str]]:
    """How it was searched and measured; what an older result doesn't say is left out."""
    settings = result["settings"]
    objective = result.get("objective") or {}
    if objective.get("kind"):
        least = objective.get("min_speedup")
        yield "objective", objective["kind"] + (f", at {least:g} times fp32's speed or more" if least else "")
    if result.get("method"):
        yield "method", result["method"]
    if result.get("isolation"):
        yield "isolation of trials", result["isolation"]
    if settings.get("checkpoint"):
        yield "checkpoint", settings["checkpoint"]
    effort = settings.get("effort")
    if effort:
        yield "a trial", f"{effort['steps']} paired steps, and up to {effort['rounds']} rounds of timing"
    seconds, overhead = settings.get("seconds"), result.get("overhead_s") or {}
    if seconds:
        yield "took", _duration(seconds)
    if overhead and seconds:
        whole = sum(overhead.values())
        parts = ", ".join(f"{name} {_duration(part)}" for name, part in overhead.items())
        yield "neither training nor timing", f"{whole / seconds:.1%} of it: {parts}"
    problem = result.get("problem")
    if problem:
        place = f" on {problem['device']}" if problem["device"] else ""
        yield "costs of the planner", f"{problem['kind']}{place}, {len(problem['groups'])} groups"


def _accepted(confirmations: Sequence[ConfirmationRow]) -> ConfirmationRow | None:
    """The winner's; another may have been accepted and then beaten."""
    return next((row for row in confirmations if row.is_chosen), None)


def _best(trials: Sequence[TrialRow], budget_pct: float) -> TrialRow | None:
    fitting = [t for t in trials if t.is_placed and t.role != "reference" and t.loss_gap_pct is not None]
    fitting = [t for t in fitting if t.loss_gap_pct is not None and t.loss_gap_pct.value <= budget_pct]
    return max(fitting, key=lambda t: t.speedup.value if t.speedup else 0.0, default=None)


def _times(speed: Interval) -> str:
    return f"{speed.value:.2f}×" + (" (estimated)" if speed.is_estimated else "")


def _certainty(result: Result, accepted: ConfirmationRow) -> str:
    speed = accepted.speedup
    if speed.is_estimated:
        target = result["settings"].get("target")
        return f"estimated{f' for {target}' if target else ''}, unconfirmed there"
    control = "" if accepted.control is None else f"; fp32 against itself {accepted.control.value:.2f}×"
    return f"{speed.low:.2f} to {speed.high:.2f}{control}"


def _duration(seconds: float) -> str:
    """Such as ``48 s``, ``12 min`` or ``3.5 h``."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
