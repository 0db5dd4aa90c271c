"""A study's JSON as a report's data."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from autoprec.report.command import command_line, command_of
from autoprec.report.data import ConfirmationRow, Curve, Interval, ReportData, Role, SiteRow, TrialRow
from autoprec.report.explained import read_groups, saved_thing
from autoprec.report.facts import facts_of, headlines_of, method_of
from autoprec.report.mix import describe_mix, describe_settings

__all__ = ["command_line", "read_result"]

_MIB = 2.0**20
#: Standard deviations on each side of a 95% interval.
_INTERVAL = 1.96


def read_result(result: Mapping[str, Any], receipt: Mapping[str, Any] | None = None, command: str = "") -> ReportData:
    """What a report shows of a study.

    Args:
        result: see :mod:`autoprec.tune.answers.result`; what isn't in it, such as explanations, isn't shown.
        receipt: of the chosen plan; None where the answer is fp32.
        command: that ran the study; by default one made from its settings.
    """
    noise = result["noise"].get("loss_gap")
    trials = _mark_front([_trial(row, result["winner"], noise) for row in result["trials"]])
    if (result.get("objective") or {}).get("kind") != "memory":  # it says little then, and takes a column
        trials = [replace(trial, memory_mib=None) for trial in trials]
    mix_of = {row["plan_sha256"]: trial.mix for row, trial in zip(result["trials"], trials, strict=True)}
    confirmations = tuple(_confirmation(row, mix_of, result["winner"]) for row in result["confirmations"])
    explanations = result.get("explanations") or ()
    formats, groups = read_groups(explanations, result["budget"])
    return ReportData(
        study=result["study"],
        verdict=result["verdict"],
        headlines=tuple(headlines_of(result, trials, confirmations)),
        facts=tuple(facts_of(result, trials, confirmations)),
        is_measured=_is_measured(result),
        budget_pct=100 * result["budget"],
        saved=saved_thing(explanations),
        formats=formats,
        groups=groups,
        trials=tuple(trials),
        confirmations=confirmations,
        sites=tuple(_site(row) for row in (receipt or {}).get("rows", ())),
        curves=tuple(_curves(result, trials)),
        method=tuple(method_of(result)),
        notes=tuple(result["settings"].get("pricing_notes") or ()),
        environment=tuple((name.replace("_", " "), str(value)) for name, value in result["environment"].items()),
        command=command or command_of(result),
    )


def _is_measured(result: Mapping[str, Any]) -> bool:
    """Whether no speed in it is an estimate."""
    figures = [row["speedup"] for row in (*result["trials"], *result["confirmations"])]
    kinds = {figure["kind"] for figure in figures if figure is not None}
    return "estimated" not in {*kinds, result["evidence"].get("kind")}


def _trial(row: Mapping[str, Any], winner: str | None, noise: float | None) -> TrialRow:
    predicted_gap = row.get("predicted_gap")
    return TrialRow(
        number=row["number"],
        mix=row["name"] if row["name"] != "search" else describe_mix(row["formats"]),
        role=_role(row, winner),
        outcome=row["state"],
        speedup=_figure(row["speedup"]),
        loss_gap_pct=_gap(row, noise),
        predicted_speedup=row.get("predicted_speedup"),
        predicted_gap_pct=None if predicted_gap is None else 100 * predicted_gap,
        memory_mib=_figure(row.get("memory_bytes"), 1 / _MIB),
        low_share=row["low_share"],
        settings=describe_settings(row["scaler"], row.get("recipe", {})),
        num_skipped=row["num_skipped"],
        origin=row.get("origin", ""),
        worker=row.get("worker", ""),
        started=row.get("started", 0.0),
        ended=row.get("ended", 0.0),
        seconds=row["seconds"],
        note=row["note"],
    )


def _gap(row: Mapping[str, Any], noise: float | None) -> Interval | None:
    """Its interval is the task's own noise; one that was stopped early saw fewer steps than that is known for."""
    if row["state"] not in ("complete", "stopped"):
        return None
    gap = 100 * row["loss_gap"]
    if noise is None or row["state"] != "complete" or row["name"] == "fp32":
        return Interval(value=gap)
    half = 100 * _INTERVAL * noise
    return Interval(value=gap, low=gap - half, high=gap + half)


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


def _confirmation(row: Mapping[str, Any], mix_of: Mapping[str, str], winner: str | None) -> ConfirmationRow:
    speedup = _figure(row["speedup"])
    assert speedup is not None
    return ConfirmationRow(
        mix=mix_of.get(row["plan_sha256"], row["name"]),
        speedup=speedup,
        control=_figure(row["control"]),
        loss_gap_pct=_figure(row["loss_gap"], 100),
        is_accepted=row["accepted"],
        is_chosen=row["accepted"] and row["plan_sha256"] == winner,
        why=row["why"],
        from_scratch=_from_scratch(row.get("from_scratch")),
    )


def _from_scratch(run: Mapping[str, Any] | None) -> str:
    if run is None:
        return ""
    gap = "diverged" if run["gap"] is None else f"{100 * run['gap']:+.3f}%"
    return f"{gap} over {run['steps']} steps; chance alone {100 * run['chaos']:.3f}%"


def _figure(data: Mapping[str, Any] | None, factor: float = 1) -> Interval | None:
    """A Measurement or an Estimate, as its own kind says."""
    if data is None:
        return None
    if data["kind"] == "estimated":
        return Interval(value=factor * data["value"], is_estimated=True)
    return Interval(value=factor * data["value"], low=factor * data["low"], high=factor * data["high"])


def _site(row: Mapping[str, Any]) -> SiteRow:
    return SiteRow(**{key: row[key] for key in ("site", "asked", "got", "why", "mechanism")})


def _curves(result: Mapping[str, Any], trials: list[TrialRow]) -> Iterable[Curve]:
    if result["reference"]:
        yield Curve(label="fp32", role="reference", losses=_losses(result["reference"]))
    for row, trial in zip(result["trials"], trials, strict=True):
        # a repeat saw other batches
        if trial.role in ("baseline", "winner") and trial.origin != "repeat" and row["losses"]:
            label = f"{trial.mix} (chosen)" if trial.role == "winner" else trial.mix
            yield Curve(label=label, role=trial.role, losses=_losses(row["losses"]))


def _losses(values: Iterable[float | None]) -> tuple[float, ...]:
    return tuple(math.nan if value is None else value for value in values)
