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
        str | None,
        typer.Argument(
            metavar="[TASK]", help="A built-in task (gpt, cnn, lstm), file.py:name or pkg.mod:name. By default gpt."
        ),
    ] = None,
    target: TargetOption = "auto",
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials",
            min=1,
            help="Mixes to measure, baselines included. By default 50, or as many as --timeout allows.",
            rich_help_panel="Search",
        ),
    ] = None,
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
    objective: Annotated[
        str,
        typer.Option(
            "--objective",
            metavar="NAME",
            help="speed, loss (at --min-speedup), memory, or front.",
            rich_help_panel="Search",
        ),
    ] = "speed",
    min_speedup: Annotated[
        float | None,
        typer.Option("--min-speedup", metavar="X", help="Speed to reach, over fp32's.", rich_help_panel="Search"),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            metavar="NAME",
            help="Who proposes mixes: rules, milp, loop, tpe, gp, nsga2, exhaustive.",
            rich_help_panel="Search",
        ),
    ] = "loop",
    require_gain: Annotated[
        bool,
        typer.Option("--require-gain", help="Exit with 1 where nothing beats fp32.", rich_help_panel="Search"),
    ] = False,
    confirm: Annotated[
        Path | None,
        typer.Option(
            "--confirm",
            metavar="PLAN",
            help="Measure a plan.json of a study made elsewhere, and those beside it, on this machine.",
            rich_help_panel="Study",
        ),
    ] = None,
    workers: Annotated[
        int,
        typer.Option("--workers", min=1, help="Processes that run trials here.", rich_help_panel="Study"),
    ] = 1,
    trial_timeout: Annotated[
        str | None,
        typer.Option(
            "--trial-timeout", metavar="TIME", help="A trial that takes longer is ended.", rich_help_panel="Study"
        ),
    ] = None,
    isolate: Annotated[
        bool,
        typer.Option(
            "--isolate/--no-isolate",
            help="Run trials in a process of their own, or in this one, for a debugger.",
            rich_help_panel="Study",
        ),
    ] = True,
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

    Ctrl-C leaves the study where it is, and the same command goes on with it.  A target that isn't in this machine is
    emulated, and its speed estimated, until --confirm measures it there.
    """
    import autoprec
    from autoprec.report.read import command_line
    from autoprec.rulebook import load_rulebook
    from autoprec.tune.processes.team import is_leader

    if confirm is not None:
        budget = None if max_loss_increase == "0.5%" else parse_share(max_loss_increase)
        given = {"task": task, "target": None if target == "auto" else target, "output_dir": folder}
        return settle_plans(output, confirm, {**given, "max_loss_increase": budget}, require_gain, as_json=as_json)
    options: dict[str, Any] = {
        "target": target,
        "trials": trials,
        "timeout": timeout,
        "max_loss_increase": max_loss_increase,
        "objective": objective,
        "min_speedup": min_speedup,
        "method": method,
        "keep": tuple(keep or ()),
        "rules": tuple(rules or ()),
        "seed": seed,
        "storage": storage,
        "study": study,
        "workers": workers,
        "trial_timeout": trial_timeout,
        "isolate": isolate,
        "output_dir": folder,
    }
    parsed = {
        "timeout": None if timeout is None else parse_duration(timeout),
        "trial_timeout": None if trial_timeout is None else parse_duration(trial_timeout),
        "max_loss_increase": parse_share(max_loss_increase),
    }
    load_rulebook(*rules or ())  # a mistake there would else be seen only after the checkpoint's training
    task = task or "gpt"
    try:
        with ProgressView(output) as progress:
            result = autoprec.tune(task, progress=progress, **{**options, **parsed})
    except KeyboardInterrupt:
        output.note("interrupted: what is finished is kept, and the same command goes on")
        raise
    if is_leader():
        write_report(output, result, command_line(task, options), as_json=as_json)
    if require_gain and not result.is_faster:
        raise typer.Exit(1)


def settle_plans(output: Output, path: Path, options: dict[str, Any], require_gain: bool, *, as_json: bool) -> None:
    """Measure a study's plans on their target, which is here, and show which one holds."""
    from autoprec.tune.answers.settle import settle

    with ProgressView(output) as progress:
        settled = settle(path, progress=progress, **options)
    if as_json:
        output.show_json(settled.to_json())
    else:
        output.show(settled.verdict)
        output.show(f"{settled.folder}: plan.json, settled.json")
    if require_gain and settled.winner is None:
        raise typer.Exit(1)


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
