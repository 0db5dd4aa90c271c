"""``autoprec check``: whether a plan fits a model and is in force, for a CI job."""

from pathlib import Path
from typing import Annotated, Any

import typer

from autoprec.cli.command import answer
from autoprec.cli.console import Output
from autoprec.cli.model import NamedModel, load_model
from autoprec.cli.options import AsJson, ModelArgument, SeedOption
from autoprec.errors import PlanMismatchError


def check(
    output: Output,
    model: ModelArgument,
    plan: Annotated[
        Path, typer.Option("--plan", metavar="FILE", help="The plan to check.", rich_help_panel="Plan")
    ] = Path("plan.json"),
    seed: SeedOption = 0,
    as_json: AsJson = False,
) -> None:
    """Whether a plan fits a model and is in force when the model runs; exit code 1 if not."""
    result = check_plan(load_model(model, seed), plan)
    if as_json:
        output.show_json(result)
    else:
        words = ["valid" if result["valid"] else "not valid", "active" if result["active"] else "not active"]
        output.show("\n".join([", ".join(words), *(f"  {problem}" for problem in result["problems"])]))
    answer(result["valid"] and result["active"])


def check_plan(named: NamedModel, path: Path) -> dict[str, Any]:
    """Convert the model by the plan, run its example batch and compare.

    Returns:
        ``valid``: the plan was made for this model. ``active``: each site that ran got what the plan asks.
        ``problems``: why not. ``low_precision_share``: of matmul and convolution FLOPs, None if nothing ran.

    Raises:
        PlanFileError: the plan can't be read.
    """
    import autoprec
    from autoprec.planfile import load_plan

    plan = load_plan(path)
    result: dict[str, Any] = {"valid": True, "active": False, "problems": [], "low_precision_share": None}
    try:
        autoprec.convert(named.module, plan=plan, example_inputs=named.example_inputs)
    except PlanMismatchError as error:
        return {**result, "valid": False, "problems": [str(error)]}
    receipt = autoprec.receipt(named.module)
    problems = [f"{row.site} asked for {row.asked} and got {row.got}: {row.why}" for row in receipt.refused]
    if not receipt.recorded:
        problems.append(f"nothing ran: {named.spec} gives no example inputs, so that the plan can't be seen at work")
    share = receipt.to_json()["low_precision_share"]
    return {**result, "active": not problems, "problems": problems, "low_precision_share": share}
