"""The ``autoprec`` command."""

from typing import Annotated

import typer

from autoprec import __version__
from autoprec.cli.check import check
from autoprec.cli.command import command
from autoprec.cli.convert import convert
from autoprec.cli.diff import diff
from autoprec.cli.env import env
from autoprec.cli.formats import formats
from autoprec.cli.inspect import inspect
from autoprec.cli.memory import memory
from autoprec.cli.plan import plan
from autoprec.cli.recommend import recommend
from autoprec.cli.report import report
from autoprec.cli.rules import rules_app
from autoprec.cli.solve import solve
from autoprec.cli.targets import targets
from autoprec.cli.tune import tune

app = typer.Typer(
    name="autoprec",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    epilog="Exit codes: 0 done; 1 done, but the answer is no; 2 a usage or configuration error; 130 interrupted.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"autoprec {__version__}")
        raise typer.Exit


@app.callback()
def autoprec(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Find the fastest precision mix that keeps a PyTorch model's loss."""


command(app, example="autoprec env")(env)
command(app, example="autoprec inspect mytask.py:task --explain blocks.0.attn::softmax")(inspect)
command(app, example="autoprec plan mytask.py:task --target h100 -o plan.json")(plan)
command(app, example="autoprec tune mytask.py:task --trials 50 --max-loss-increase 0.5%")(tune)
command(app, example="autoprec report gpt")(report)
command(app, example="autoprec solve runs/gpt/problem.json --budget 0.5")(solve)
command(app, example="autoprec convert mytask.py:task --plan plan.json -o model.safetensors")(convert)
command(app, example="autoprec check mytask.py:task --plan plan.json")(check)
command(app, example="autoprec diff old.json new.json")(diff)
app.add_typer(rules_app, name="rules")
command(app, example="autoprec targets h100")(targets)
command(app, example="autoprec formats")(formats)
command(app, example="autoprec recommend --architecture transformer --params 7e9 --target h100")(recommend)
command(app, example="autoprec memory --params 70e9")(memory)


def main() -> None:
    """Run the command line; never returns normally."""
    app(prog_name="autoprec")
