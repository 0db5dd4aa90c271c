"""``autoprec tune``: measure mixes on this machine's device and keep the fastest whose loss holds."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoprec.cli.console import Output
from autoprec.cli.options import AsJson, KeepOption, RulesOption, SeedOption, TargetOption
from autoprec.cli.progress import ProgressView
from autoprec.cli.quantities import parse_duration, parse_share
from autoprec.errors import UsageError

if TYPE_CHECKING:
    from autoprec.tune import TuneResult


def tune(
    output: Output,
    task: Annotated[
        str, typer.Argument(metavar="[TASK]", help="A built-in task (gpt, cnn, lstm), file.py:name or pkg.mod:name.")
    ] = "gpt",
    target: TargetOption = "auto",
    trials: Annotated[
        int, typer.Option("--trials", min=1, help="Mixes to measure, baselines included.", rich_help_panel="Search")
    ] = 50,
    timeout: Annotated[
        str | None,
        typer.Option(
            "--timeout", metavar="TIME", help="Stop after this long, such as 15m or 2h.", rich_help_panel="Search"
        ),
    ] = None,
    max_loss_increase: Annotated[
        str,
        typer.Option(
            "--max-loss-increase", metavar="SHARE", help="Allowed loss over fp32's.", rich_help_panel="Search"
        ),
    ] = "0.5%",
    keep: KeepOption = None,
    rules: RulesOption = None,
    seed: SeedOption = 0,
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage",
            metavar="URL",
            envvar="OPTUNA_STORAGE",
            help="Optuna storage; by default SQLite in the folder.",
            rich_help_panel="Study",
        ),
    ] = None,
    study: Annotated[
        str | None,
        typer.Option(
            "--study",
            metavar="NAME",
            help="Its name, by default the task's; the same name goes on with it.",
            rich_help_panel="Study",
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--output-dir",
            "-o",
            metavar="DIR",
            help="Where the files go. By default runs/STUDY.",
            rich_help_panel="Output",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a task at several precision mixes on this machine's device, and keep the fastest whose loss holds.

    Ctrl-C leaves the study where it is, and the same command goes on with it.
    """
    import autoprec
    from autoprec.report.read import command_line
    from autoprec.rulebook import load_rulebook

    options: dict[str, Any] = {
        "target": target,
        "trials": trials,
        "timeout": timeout,
        "max_loss_increase": max_loss_increase,
        "keep": tuple(keep or ()),
        "rules": tuple(rules or ()),
        "seed": seed,
        "storage": storage,
        "study": study,
        "output_dir": folder,
    }
    numbers = {
        "timeout": None if timeout is None else parse_duration(timeout),
        "max_loss_increase": parse_share(max_loss_increase),
    }
    load_rulebook(*rules or ())  # a mistake there would else be seen only after the checkpoint's training
    try:
        with ProgressView(output) as progress:
            result = autoprec.tune(task, progress=progress, **{**options, **numbers})
    except KeyboardInterrupt:
        output.note("interrupted: what is finished is kept, and the same command goes on")
        raise
    write_report(output, result, command_line(task, options), as_json=as_json)


def write_report(output: Output, result: "TuneResult", command: str, *, as_json: bool) -> None:
    """Write ``report.html`` beside the result's own files, and show the result."""
    from autoprec.atomic import write_text
    from autoprec.report import render_report
    from autoprec.report.console import result_view
    from autoprec.report.read import read_result

    document = result.to_json()
    receipt = None if result.receipt is None else result.receipt.to_json()
    path = result.folder / "report.html"
    try:
        write_text(path, render_report(document, receipt, command))
    except OSError as error:
        raise UsageError(f"the report can't be written to {str(path)!r}: {error}") from error
    if as_json:
        return output.show_json(document)
    output.show(result_view(read_result(document, receipt, command)))
    output.show(f"{result.folder}: plan.json, receipt.json, report.html")
