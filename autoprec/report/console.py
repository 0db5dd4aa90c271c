"""The report's numbers on a terminal."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoprec.report.data import Cell, ConfirmationRow, GroupRow, ReportData, SiteRow, TrialRow

_ROLE_NAMES = {"winner": "chosen", "reference": "fp32", "baseline": "baseline", "candidate": ""}


def result_view(data: ReportData) -> RenderableType:
    """The verdict, the figures behind it, each group's format with its reason, and the trials that matter.

    Those are the baselines, the front and the chosen one; :func:`report_view` has all.
    """
    shown = [row for row in data.trials if row.role != "candidate" or row.is_on_front]
    return Group(*_head(data), *_groups(data), *([trials_table(shown)] if shown else []))


def report_view(data: ReportData) -> RenderableType:
    """All that the page has as tables; pictures are the page's."""
    parts: list[RenderableType] = [*_head(data)]
    if data.confirmations:
        parts += [_title("Confirmation"), confirmations_table(data.confirmations)]
    parts += _groups(data)
    if data.formats:
        caption = "saves, adds to the loss; in brackets what was predicted where no trial had it; * chosen"
        parts += [_title(f"Every format in every group ({caption})"), formats_table(data.groups, data.formats)]
    if data.trials:
        parts += [_title("Trials"), trials_table(data.trials)]
    tuned = [row for row in data.trials if row.settings]
    if tuned:
        parts += [_title("Loss scaler and recipe"), settings_table(tuned)]
    if data.method:
        parts += [_title("How it was found"), _pairs(data.method)]
    parts += [Text(f"- {note}", style="dim") for note in data.notes]
    parts += [_title("Environment"), _pairs(data.environment), _title("Reproduce"), Text(data.command)]
    return Group(*parts)


def groups_table(rows: Sequence[GroupRow]) -> Table:
    """One line a group: its format, what that saves and adds to the loss, and what would change it."""
    table = Table("group", "", "format", "saves", "adds to the loss", "what would change it")
    for row in rows:
        saving = row.saving.spread(1, "%") if row.saving else ""
        harm = row.harm.spread(3, "%", sign="+") if row.harm else ""
        cells = (row.group, row.size, row.chosen, saving, harm, row.sentence)
        table.add_row(*map(Text, cells))
    return table


def formats_table(rows: Sequence[GroupRow], formats: Sequence[str]) -> Table:
    """One line a group, one column a format."""
    table = Table("group", *formats)
    for row in rows:
        if any(row.cells):
            table.add_row(Text(row.group), *(_cell(cell) for cell in row.cells))
    return table


def confirmations_table(rows: Sequence[ConfirmationRow]) -> Table:
    """One line a confirmation."""
    has_scratch = any(row.from_scratch for row in rows)
    scratch = ("from fresh weights",) if has_scratch else ()
    table = Table("mix", "speed", "fp32 against itself", "loss gap", *scratch, "outcome")
    for row in rows:
        cells = [row.mix, row.speedup.shown(2, "×"), row.control.shown(2, "×") if row.control else "not timed"]
        cells.append(row.loss_gap_pct.shown(3, "%", sign="+") if row.loss_gap_pct else "")
        cells += [row.from_scratch] if has_scratch else []
        cells.append(": ".join(filter(None, ("accepted" if row.is_accepted else "refused", row.why))))
        table.add_row(*map(Text, cells), style="bold" if row.is_chosen else None)
    return table


def trials_table(rows: Sequence[TrialRow]) -> Table:
    """One line a trial; columns that are empty in all of them are left out."""
    names = ("trial", "", "mix", "speed", "loss gap", "predicted", "memory, MiB", "low FLOPs", "proposed as", "outcome")
    cells = [list(_trial_cells(row)) for row in rows]
    kept = [k for k in range(len(names)) if k < 2 or any(line[k] for line in cells)]
    table = Table(*(names[k] for k in kept))
    for row, line in zip(rows, cells, strict=True):
        table.add_row(*(Text(line[k]) for k in kept), style="bold" if row.role == "winner" else None)
    return table


def settings_table(rows: Sequence[TrialRow]) -> Table:
    """One line a trial: its settings beside the mix, and what came of them."""
    table = Table("trial", "settings", "skipped steps", "loss gap")
    for row in rows:
        gap = row.loss_gap_pct.shown(3, "%", sign="+") if row.loss_gap_pct else row.outcome
        table.add_row(*map(Text, (str(row.number), row.settings, str(row.num_skipped), gap)))
    return table


def sites_table(rows: tuple[SiteRow, ...]) -> Table:
    """One line a site: asked, got, why; red where it got something else."""
    table = Table("site", "asked", "got", "by", "why")
    for row in rows:
        got = Text(row.got, style="" if row.is_as_asked else "bold red")
        table.add_row(Text(row.site or "(root)"), Text(row.asked), got, Text(row.mechanism), Text(row.why))
    return table


def _head(data: ReportData) -> Iterator[RenderableType]:
    yield Text(data.verdict, style="bold")
    yield Text(f"({data.kind})", style="dim")
    if data.settled:
        yield Text(data.settled, style="bold")
    table = Table.grid(padding=(0, 2))
    for item in data.headlines:
        table.add_row(Text(item.name, style="dim"), Text.assemble((item.figure, "bold"), f"  {item.detail}"))
    for name, text in data.facts:
        table.add_row(Text(name, style="dim"), Text(text))
    yield table


def _groups(data: ReportData) -> list[RenderableType]:
    if not data.groups:
        return []
    title = f"Why each group has its format (savings: share of {data.saved}; ± 95% interval)"
    return [_title(title), groups_table(data.groups)]


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _pairs(pairs: Sequence[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, text in pairs:
        table.add_row(Text(name, style="dim"), Text(text))
    return table


def _cell(cell: Cell | None) -> Text:
    if cell is None:
        return Text("")
    after = [cell.saves.removeprefix("saves "), cell.harm.spread(3, "%", sign="+") if cell.harm else ""]
    text = "\n".join(filter(None, after)) or (f"({cell.predicted})" if cell.predicted else cell.note)
    over = "\nover the budget" if cell.heat == "over" else ""
    return Text(f"{'* ' if cell.is_chosen else ''}{text}{over}", style="bold" if cell.is_chosen else "")


def _trial_cells(row: TrialRow) -> Iterator[str]:
    yield str(row.number)
    yield _ROLE_NAMES[row.role]
    yield row.mix
    yield row.speedup.shown(2, "×") if row.speedup else ""
    yield row.loss_gap_pct.shown(3, "%", sign="+") if row.loss_gap_pct else ""
    yield row.predicted
    yield row.memory_mib.shown(1) if row.memory_mib else ""
    yield "" if row.low_share is None else f"{row.low_share:.0%}"
    yield row.origin
    yield row.end
