"""``autoprec recommend``: which format to start from, by the kind of model."""

import re
from typing import Annotated, Literal

import typer

from autoprec.cli.console import Output
from autoprec.cli.options import AsJson
from autoprec.errors import UsageError

_COUNT = re.compile(r"(\d+(?:\.\d*)?(?:e\d+)?)\s*([kmb]?)", re.IGNORECASE)
_TIMES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}

ParamsOption = Annotated[
    str, typer.Option("--params", metavar="NUMBER", help="Of parameters: 70e9 or 70B.", rich_help_panel="Model")
]


def recommend(
    output: Output,
    architecture: Annotated[
        Literal["cnn", "transformer", "rnn", "moe", "diffusion", "ssm", "other"],
        typer.Option("--architecture", help="Kind of model.", rich_help_panel="Model"),
    ] = "transformer",
    task: Annotated[
        Literal["pretraining", "finetuning", "inference"],
        typer.Option("--task", help="What is done with it.", rich_help_panel="Model"),
    ] = "pretraining",
    params: ParamsOption = "1e9",
    stability: Annotated[
        Literal["normal", "critical"],
        typer.Option("--stability", help="critical: a run that can't be repeated.", rich_help_panel="Model"),
    ] = "normal",
    target: Annotated[
        str | None,
        typer.Option("--target", help="A device's name; left out: any.", rich_help_panel="Plan"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The format to start from, why, and what it takes; a rule of thumb, where plan and tune look at the model."""
    from autoprec.planner import guide
    from autoprec.target import load_target

    device = None if target is None else load_target(target)
    found = guide.recommend(architecture, task, parse_count(params), stability, device)
    if as_json:
        return output.show_json(found.to_json())
    advice = found.advice
    lines = [f"{advice.format}: {advice.why}", *(f"  needs    {need}" for need in advice.requires)]
    lines += [f"  not      {reason}" for reason in found.passed_over]
    output.show("\n".join([*lines, f"  source   {advice.source}"]))
    output.note(
        "a rule by the kind of model, nothing was measured: autoprec plan looks at yours, autoprec tune measures it"
    )


def parse_count(text: str) -> float:
    """A number of parameters: ``70e9``, ``70B`` and ``70000M`` are the same.

    Raises:
        UsageError: anything else, or nothing.
    """
    match = _COUNT.fullmatch(text.strip())
    count = float(match[1]) * _TIMES[match[2].lower()] if match else 0.0
    if not 1 <= count < 1e18:
        raise UsageError(f"--params {text!r} is no number of parameters; write 70e9, 70B or 350M")
    return count
