"""The report's numbers on a terminal."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoprec.report.data import ReportData, SiteRow, TrialRow

_ROLE_NAMES = {"winner": "chosen", "reference": "fp32", "baseline": "baseline", "candidate": ""}


def result_view(data: ReportData) -> RenderableType:
    """The verdict, the facts behind it, and the trials that matter: baselines, the front and the chosen one."""
    facts = Table.grid(padding=(0, 2))
    for name, text in data.facts:
        facts.add_row(Text(name, style="dim"), Text(text))
    kind = "measured on this device" if data.is_measured else "speed estimated, unconfirmed"
    shown = [row for row in data.trials if row.role != "candidate" or row.is_on_front]
    parts: list[RenderableType] = [Text(data.verdict, style="bold"), Text(f"({kind})", style="dim"), facts]
    if shown:
        parts.append(trials_table(shown))
    return Group(*parts)


def trials_table(rows: list[TrialRow]) -> Table:
    """One line a trial."""
    table = Table("trial", "", "mix", "speed", "loss gap", "FLOPs below fp32", "outcome")
    for row in rows:
        table.add_row(*(Text(cell) for cell in _trial_cells(row)), style="bold" if row.role == "winner" else None)
    return table


def sites_table(rows: tuple[SiteRow, ...]) -> Table:
    """One line a site: asked, got, why; red where it got something else."""
    table = Table("site", "asked", "got", "by", "why")
    for row in rows:
        got = Text(row.got, style="" if row.is_as_asked else "bold red")
        table.add_row(Text(row.site or "(root)"), Text(row.asked), got, Text(row.mechanism), Text(row.why))
    return table


def _trial_cells(row: TrialRow) -> Iterator[str]:
    yield str(row.number)
    yield _ROLE_NAMES[row.role]
    yield row.mix
    yield row.speedup.shown(2, "×") if row.speedup else ""
    yield row.loss_gap_pct.shown(3, "%") if row.loss_gap_pct else ""
    yield "" if row.low_share is None else f"{row.low_share:.0%}"
    yield row.end
