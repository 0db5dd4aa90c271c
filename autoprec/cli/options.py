"""Arguments and options that several commands take, each with one meaning everywhere."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from autoprec.errors import UsageError

_MODEL_HELP = (
    "A built-in task (gpt, cnn, lstm), or file.py:name or pkg.mod:name of a task, or of a function that returns "
    "(module, example_inputs)."
)

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP)]
SeedOption = Annotated[int, typer.Option("--seed", help="Of weights and data.", rich_help_panel="Model")]
TargetOption = Annotated[
    str,
    typer.Option("--target", help="A device's name or a target file; auto is this machine's.", rich_help_panel="Plan"),
]
RulesOption = Annotated[
    list[Path] | None,
    typer.Option("--rules", metavar="FILE", help="Rules of your own (TOML); repeatable.", rich_help_panel="Plan"),
]
KeepOption = Annotated[
    list[str] | None,
    typer.Option(
        "--keep", metavar="SITE=FORMAT", help="Pin sites, as in 'head=fp32'; repeatable.", rich_help_panel="Plan"
    ),
]
LevelOption = Annotated[
    Literal["O0", "O1", "O2", "O3"],
    typer.Option("--level", help="O0 fp32, O1 casts at run time, O2 and O3 store 16 bit.", rich_help_panel="Plan"),
]
FormatsOption = Annotated[
    str | None,
    typer.Option("--formats", help="Go no lower than this format, such as bf16.", rich_help_panel="Plan"),
]
ModeOption = Annotated[
    Literal["training", "inference"] | None,
    typer.Option("--mode", help="By default the task's, or training.", rich_help_panel="Plan"),
]
PlanOption = Annotated[
    Path | None,
    typer.Option("--plan", metavar="FILE", help="A plan; the options below then don't count.", rich_help_panel="Plan"),
]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="Fail if a site can't get what the plan asks.", rich_help_panel="Plan")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel="Output")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite existing files.", rich_help_panel="Output")]


def refuse_overwriting(*paths: Path, force: bool) -> None:
    """Raise if a file is there and ``--force`` isn't.

    Raises:
        UsageError: naming the files.
    """
    present = [str(path) for path in paths if path.exists()]
    if present and not force:
        raise UsageError(f"{' and '.join(present)} already there: give another name, or --force to overwrite")
