"""A result's explanations as the rows of the report's two tables of groups."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoprec.report.data import Cell, GroupRow, Headline, Heat, Interval

#: Standard deviations on each side of a 95% interval.
_INTERVAL = 1.96
#: Of the loss budget, up to which a harm counts as low.
_LOW = 0.1

_LIMITS = {
    "budget": ("the loss budget", "over the loss budget"),
    "speed": ("the speed asked for", "slower than asked for"),
    "not measured": ("the number of trials", "not measured: more trials would settle it"),
    "not confirmed": ("the noise", "not better beyond the noise, or it didn't hold on fresh data"),
}


def read_groups(
    explanations: Sequence[Mapping[str, Any]], budget: float
) -> tuple[tuple[str, ...], tuple[GroupRow, ...]]:
    """Formats as columns, and a row for each group.

    Args:
        explanations: see :mod:`autoprec.tune.answers.explain`.
        budget: largest allowed loss gap.
    """
    formats = tuple(dict.fromkeys(option["format"] for entry in explanations for option in entry["options"]))
    rows = [_group(entry, formats, budget) for entry in explanations]
    saved = sum(_clear(row.saving) for row in rows)
    harmed = sum(_clear(row.harm) for row in rows)
    return formats, tuple(_with_shares(row, saved, harmed) for row in rows)


def saved_thing(explanations: Sequence[Mapping[str, Any]]) -> str:
    """What savings are shares of, in words."""
    kinds = {(entry["of"], entry["kind"]) for entry in explanations if entry["options"]}
    of, kind = min(kinds, default=("time", "measured"))
    thing = "the peak memory of an fp32 step" if of == "memory" else "the fp32 step's time"
    return thing + (", estimated" if kind == "estimated" else "")


def limit_headline(explanations: Sequence[Mapping[str, Any]]) -> Headline | None:
    """What held the whole plan back: of the limits the one that keeps most from being saved; None if nothing says."""
    if not explanations:
        return None
    total: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for entry in explanations:
        if entry["would_change"] is not None and entry["limit"] in _LIMITS:
            total[entry["limit"]] += entry["would_change"]["saving"]
            count[entry["limit"]] += 1
    if not total:
        detail = "no group has another format that is better beyond the noise"
        return Headline(name="held back by", figure="no faster format", detail=detail)
    limit = max(total, key=lambda name: total[name])
    figure, why = _LIMITS[limit]
    kind = ", estimated" if any(entry["kind"] == "estimated" for entry in explanations) else ""
    groups = f"{count[limit]} group{'s' if count[limit] > 1 else ''}"
    detail = f"another format in {groups} would save {100 * total[limit]:.1f}% of the fp32 step{kind}, but is {why}"
    if limit == "speed":
        detail = f"another format in {groups} would lose less, but the mix would be {why}"
    return Headline(name="held back by", figure=figure, detail=detail)


def _group(entry: Mapping[str, Any], formats: Sequence[str], budget: float) -> GroupRow:
    is_estimated = entry["kind"] == "estimated"
    cells = {option["format"]: _cell(option, budget, is_estimated=is_estimated) for option in entry["options"]}
    chosen = cells.get(entry["chosen"])
    saving, harm = _of_chosen(chosen, is_estimated=is_estimated)
    return GroupRow(
        group=entry["group"],
        size=", ".join(_size(entry)),
        chosen=entry["chosen"],
        saving=saving,
        harm=harm,
        saving_share=None,
        harm_share=None,
        sentence=entry["sentence"],
        cells=tuple(cells.get(name) for name in formats),
    )


def _size(entry: Mapping[str, Any]) -> Iterable[str]:
    if entry["num_sites"] is not None:
        yield f"{entry['num_sites']} site{'' if entry['num_sites'] == 1 else 's'}"
    if entry["flops_share"]:
        yield f"{entry['flops_share']:.0%} of FLOPs"


def _of_chosen(cell: Cell | None, *, is_estimated: bool) -> tuple[Interval | None, Interval | None]:
    if cell is None:
        return None, None
    saving, harm = cell.saving, cell.harm
    if saving is None and cell.predicted_saving is not None:
        saving = Interval(value=cell.predicted_saving, is_estimated=True)
    if harm is None and cell.predicted_harm is not None:
        harm = Interval(value=cell.predicted_harm, is_estimated=True)
    return saving, harm


def _cell(option: Mapping[str, Any], budget: float, *, is_estimated: bool) -> Cell:
    predicted, after = option["predicted"] or {}, option["after_trials"]
    harm = after["harm"] if after else predicted.get("harm")
    return Cell(
        format=option["format"],
        is_chosen=option["is_chosen"],
        num_trials=option["num_trials"],
        saving=None if after is None else _interval(after, "saving", is_estimated=is_estimated),
        harm=None if after is None else _interval(after, "harm"),
        predicted_saving=_percent(predicted.get("saving")),
        predicted_harm=_percent(predicted.get("harm")),
        heat=_heat(harm, budget),
        note=option["note"],
    )


def _interval(after: Mapping[str, float], name: str, *, is_estimated: bool = False) -> Interval:
    value, half = 100 * after[name], 100 * _INTERVAL * after[f"{name}_sd"]
    return Interval(value=value, low=value - half, high=value + half, is_estimated=is_estimated)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _heat(harm: float | None, budget: float) -> Heat:
    if harm is None:
        return "unknown"
    return "low" if harm <= _LOW * budget else "inside" if harm <= budget else "over"


def _with_shares(row: GroupRow, saved: float, harmed: float) -> GroupRow:
    def share(figure: Interval | None, whole: float) -> float | None:
        return _clear(figure) / whole if whole > 0 and _clear(figure) > 0 else None

    return replace(row, saving_share=share(row.saving, saved), harm_share=share(row.harm, harmed))


def _clear(figure: Interval | None) -> float:
    """The figure where it is above 0 beyond its interval, else 0: noise has no share in anything."""
    return figure.value if figure is not None and figure.is_clear and figure.value > 0 else 0.0
