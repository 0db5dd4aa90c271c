"""A study's JSON as a report's data."""

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from autoprec.report.data import ConfirmationRow, Curve, Interval, ReportData, Role, SiteRow, TrialRow

#: Groups that a mix names one by one; more are counted.
_NUM_NAMED = 3

#: Settings of a study that the command line has an option for, in its order.
_OPTIONS = {
    "target": "--target",
    "trials": "--trials",
    "timeout": "--timeout",
    "max_loss_increase": "--max-loss-increase",
    "seed": "--seed",
    "keep": "--keep",
    "rules": "--rules",
    "storage": "--storage",
    "study": "--study",
    "output_dir": "--output-dir",
}


def read_result(result: Mapping[str, Any], receipt: Mapping[str, Any] | None = None, command: str = "") -> ReportData:
    """What a report shows of a study.

    Args:
        result: see :mod:`autoprec.tune.result`.
        receipt: of the chosen plan; None where the answer is fp32.
        command: that ran the study; by default one made from its settings.
    """
    trials = _mark_front([_trial(row, result["winner"]) for row in result["trials"]])
    mix_of = {row["plan_sha256"]: trial.mix for row, trial in zip(result["trials"], trials, strict=True)}
    confirmations = tuple(_confirmation(row, mix_of) for row in result["confirmations"])
    return ReportData(
        study=result["study"],
        verdict=result["verdict"],
        facts=tuple(_facts(result, trials, confirmations)),
        is_measured=True,
        budget_pct=100 * result["budget"],
        trials=tuple(trials),
        confirmations=confirmations,
        sites=tuple(_site(row) for row in (receipt or {}).get("rows", ())),
        curves=tuple(_curves(result, trials)),
        environment=tuple((name.replace("_", " "), str(value)) for name, value in result["environment"].items()),
        command=command or _command_of(result),
    )


def command_line(task: str, settings: Mapping[str, Any]) -> str:
    """The command that runs the study again; settings that weren't given are left out."""
    words = ["autoprec", "tune", task]
    for name, option in _OPTIONS.items():
        value = settings.get(name)
        values = value if isinstance(value, list | tuple) else [] if value is None else [value]
        words += [word for item in values for word in (option, str(item))]
    return shlex.join(words)


def _command_of(result: Mapping[str, Any]) -> str:
    given = {"max_loss_increase": f"{100 * result['budget']:g}%", "study": result["study"]}
    settings = {**result["settings"], **given}
    return command_line(settings.get("task") or result["task"], settings)


def describe_mix(formats: Mapping[str, str]) -> str:
    """A mix in words: the format that most groups have, and the groups that differ."""
    if not formats:
        return ""
    (most, _), *others = Counter(formats.values()).most_common()
    if not others:
        return f"all {most}"
    exceptions = [f"{group}: {name}" for group, name in formats.items() if name != most]
    named, rest = exceptions[:_NUM_NAMED], len(exceptions) - _NUM_NAMED
    return f"{most}; " + ", ".join(named) + (f" and {rest} more" if rest > 0 else "")


def _trial(row: Mapping[str, Any], winner: str | None) -> TrialRow:
    has_gap = row["state"] in ("complete", "stopped")
    return TrialRow(
        number=row["number"],
        mix=row["name"] if row["name"] != "search" else describe_mix(row["formats"]),
        role=_role(row, winner),
        outcome=row["state"],
        speedup=None if row["speedup"] is None else _interval(row["speedup"]),
        loss_gap_pct=Interval(value=100 * row["loss_gap"]) if has_gap else None,
        low_share=row["low_share"],
        note=row["note"],
    )


def _role(row: Mapping[str, Any], winner: str | None) -> Role:
    if row["plan_sha256"] == winner:
        return "winner"
    if row["name"] == "fp32":
        return "reference"
    return "candidate" if row["name"] == "search" else "baseline"


def _mark_front(trials: list[TrialRow]) -> list[TrialRow]:
    points = [_point(trial) for trial in trials if trial.is_placed]
    return [
        replace(trial, is_on_front=trial.is_placed and not any(_beats(other, _point(trial)) for other in points))
        for trial in trials
    ]


def _point(trial: TrialRow) -> tuple[float, float]:
    assert trial.speedup is not None
    assert trial.loss_gap_pct is not None
    return trial.speedup.value, trial.loss_gap_pct.value


def _beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and one[0] >= other[0] and one[1] <= other[1]


def _confirmation(row: Mapping[str, Any], mix_of: Mapping[str, str]) -> ConfirmationRow:
    return ConfirmationRow(
        mix=mix_of.get(row["plan_sha256"], row["name"]),
        speedup=_interval(row["speedup"]),
        control=_interval(row["control"]),
        loss_gap_pct=None if row["loss_gap"] is None else _interval(row["loss_gap"], 100),
        is_accepted=row["accepted"],
        why=row["why"],
    )


def _interval(measured: Mapping[str, Any], factor: float = 1) -> Interval:
    return Interval(value=factor * measured["value"], low=factor * measured["low"], high=factor * measured["high"])


def _site(row: Mapping[str, Any]) -> SiteRow:
    return SiteRow(**{key: row[key] for key in ("site", "asked", "got", "why", "mechanism")})


def _facts(
    result: Mapping[str, Any], trials: list[TrialRow], confirmations: tuple[ConfirmationRow, ...]
) -> Iterable[tuple[str, str]]:
    accepted = next((row for row in confirmations if row.is_accepted), None)
    if result["winner"] and accepted:
        yield "speed", f"{accepted.speedup.shown(2, '×')} fp32's"
        yield "fp32 against itself", accepted.control.shown(2, "×")
        if accepted.loss_gap_pct:
            yield "loss gap", accepted.loss_gap_pct.shown(3, "%")
    throughput = result["evidence"].get("throughput")
    if throughput:
        rate, baseline, unit = throughput["value"], throughput["baseline"], throughput["unit"]
        yield "throughput", f"{rate:,.0f} {unit}, fp32 {baseline:,.0f} {unit}"
    yield "allowed loss gap", f"{100 * result['budget']:g}%"
    noise = result["noise"].get("loss_gap")
    if noise is not None:
        yield "noise of the loss gap", f"{100 * noise:.2g}% (the same run from weights changed by 1e-6)"
    outcomes = Counter(row.outcome for row in trials)
    yield "trials", f"{len(trials)} ({', '.join(f'{count} {outcome}' for outcome, count in outcomes.items())})"
    if result["warm_up"]:
        first, last = result["warm_up"][0], result["warm_up"][-1]
        yield "checkpoint", f"{len(result['warm_up'])} steps in fp32, loss {first:.3f} to {last:.3f}"


def _curves(result: Mapping[str, Any], trials: list[TrialRow]) -> Iterable[Curve]:
    if result["reference"]:
        yield Curve(label="fp32", role="reference", losses=_losses(result["reference"]))
    for row, trial in zip(result["trials"], trials, strict=True):
        if trial.role in ("baseline", "winner") and row["losses"]:
            label = f"{trial.mix} (chosen)" if trial.role == "winner" else trial.mix
            yield Curve(label=label, role=trial.role, losses=_losses(row["losses"]))


def _losses(values: Iterable[float | None]) -> tuple[float, ...]:
    return tuple(math.nan if value is None else value for value in values)
