"""``autoprec rules list | show | test``: what the rules say."""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from autoprec.cli.command import command
from autoprec.cli.console import Output
from autoprec.cli.options import AsJson, RulesOption

if TYPE_CHECKING:
    from autoprec.rulebook import RuleRow

rules_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="What the rules say: list, show, test.")


def list_(output: Output, rules: RulesOption = None, as_json: AsJson = False) -> None:
    """Every rule in force."""
    from autoprec.rulebook import list_rules, load_rulebook

    _show(output, list_rules(load_rulebook(*rules or ())), as_json)


def show(
    output: Output,
    name: Annotated[str, typer.Argument(metavar="NAME", help="An op, such as softmax, or a family, such as moe.")],
    rules: RulesOption = None,
    as_json: AsJson = False,
) -> None:
    """The rules of one op or family, with reason and source."""
    from autoprec.rulebook import load_rulebook, show_rule

    rows = show_rule(load_rulebook(*rules or ()), name)
    if as_json:
        return output.show_json([asdict(row) for row in rows])
    for row in rows:
        output.show(
            f"{row.name} ({row.table}): {row.effect}\n  why     {row.why}\n  source  {row.source}\n  file    {row.file}"
        )


def check(
    output: Output,
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Rule files (TOML), the last one wins.")],
    as_json: AsJson = False,
) -> None:
    """Check rule files as a conversion would, and list what they put in force."""
    from autoprec.rulebook import test_rules

    rows = test_rules(*files)
    _show(output, rows, as_json)
    output.note(f"{len(rows)} rules from {', '.join(map(str, files))} are in force")


def _show(output: Output, rows: Iterable["RuleRow"], as_json: bool) -> None:
    if as_json:
        return output.show_json([asdict(row) for row in rows])
    table = Table("table", "name", "effect", "why", "file")
    for row in rows:
        table.add_row(*(Text(cell) for cell in (row.table, row.name, row.effect, row.why, row.file)))
    output.show(table)


command(rules_app, name="list", example="autoprec rules list --rules mine.toml")(list_)
command(rules_app, example="autoprec rules show softmax")(show)
command(rules_app, name="test", example="autoprec rules test mine.toml")(check)
