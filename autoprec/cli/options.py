"""Arguments and options that several commands take, each with one meaning everywhere."""

from pathlib import Path
from typing import Annotated

import typer

from autoprec.errors import UsageError

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="file.py:name or pkg.mod:name of a task, or of a factory of (module, example_inputs)."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel="Output")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite existing files.", rich_help_panel="Output")]
TargetOption = Annotated[
    str, typer.Option("--target", help="A device's name, or auto for this machine's.", rich_help_panel="Plan")
]
RulesOption = Annotated[
    list[Path] | None,
    typer.Option("--rules", metavar="FILE", help="Rules of your own (TOML); repeatable.", rich_help_panel="Plan"),
]
LevelOption = Annotated[
    str, typer.Option("--level", help="O0, O1, O2 or O3: how far precision goes down.", rich_help_panel="Plan")
]
FormatsOption = Annotated[
    str | None,
    typer.Option("--formats", help="The lowest format allowed, such as bf16. By default the target's best.", rich_help_panel="Plan"),
]
ModeOption = Annotated[str, typer.Option("--mode", help="training or inference.", rich_help_panel="Plan")]


def refuse_overwriting(*paths: Path, force: bool) -> None:
    """Raise if a file is there and ``--force`` isn't.

    Raises:
        UsageError: naming the files.
    """
    present = [str(path) for path in paths if path.exists()]
    if present and not force:
        raise UsageError(f"{' and '.join(present)} already there: give another name, or --force to overwrite")
