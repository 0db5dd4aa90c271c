"""``autoprec diff``: what changes from one plan to another."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from autoprec.cli.command import answer
from autoprec.cli.console import Output
from autoprec.cli.options import AsJson


def diff(
    output: Output,
    before: Annotated[Path, typer.Argument(metavar="A.json", help="The plan to start from.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="The plan to end with.")],
    evidence: Annotated[
        bool, typer.Option("--evidence", help="Compare reasons and measurements too.", rich_help_panel="Output")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """What changes from one plan to another; exit code 1 if anything does."""
    from autoprec.plandiff import diff as diff_plans
    from autoprec.planfile import load_plan

    changes = diff_plans(load_plan(before), load_plan(after), evidence=evidence)
    if as_json:
        output.show_json(asdict(changes))
    else:
        output.show(str(changes))
    answer(not changes)
