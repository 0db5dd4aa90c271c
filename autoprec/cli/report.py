"""``autoprec report``: a finished study's report, as a page and on the terminal."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoprec.cli.console import Output
from autoprec.cli.options import AsJson
from autoprec.errors import UsageError

if TYPE_CHECKING:
    from autoprec.report.data import ReportData


def report(
    output: Output,
    study: Annotated[
        str, typer.Argument(metavar="STUDY", help="A study's name under runs/, its folder, or its result.json.")
    ],
    path: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The page; by default report.html beside the result.",
            rich_help_panel="Output",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a finished study's report again, and show its numbers: why each part of the model has its format.

    The page is one file that needs no network and no script.
    """  # fmt: skip
    from autoprec.atomic import write_text
    from autoprec.report.console import report_view
    from autoprec.report.html import render
    from autoprec.report.load import load_result

    loaded = load_result(study)
    page = path or loaded.path.with_name("report.html")
    try:
        write_text(page, render(loaded.data))
    except OSError as error:
        raise UsageError(f"the report can't be written to {str(page)!r}: {error}") from error
    if as_json:
        return output.show_json(_as_json(loaded.data))
    output.show(report_view(loaded.data))
    output.show(f"\n{page}")


def _as_json(data: "ReportData") -> dict[str, Any]:
    """The report's numbers; a loss that isn't finite is null."""
    document = asdict(data)
    for curve in document["curves"]:
        curve["losses"] = [loss if math.isfinite(loss) else None for loss in curve["losses"]]
    return {"kind": "measured" if data.is_measured else "estimated", **document}
