"""``autoprec solve``: the best mixes of a saved planning problem, without the model or the device it came from."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from autoprec.cli.console import Output
from autoprec.cli.options import AsJson
from autoprec.errors import UsageError

if TYPE_CHECKING:
    from autoprec.planner.front import Solution
    from autoprec.planner.problem import Problem


def solve(
    output: Output,
    problem: Annotated[Path, typer.Argument(metavar="PROBLEM.json", help="As autoprec tune writes it.")],
    budget: Annotated[
        float | None,
        typer.Option("--budget", help="Largest harm; left out: all budgets.", rich_help_panel="Search"),
    ] = None,
    num_budgets: Annotated[
        int, typer.Option("--budgets", min=1, help="How many, where --budget is left out.", rich_help_panel="Search")
    ] = 40,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            "--keep",
            metavar="GROUP=FORMAT",
            help="Pin a group, as in 'head=fp32'; repeatable.",
            rich_help_panel="Search",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The cheapest mixes of formats for each harm, or the one for a budget; nothing is measured."""
    from autoprec.planner import front as planner
    from autoprec.planner.problem import load_problem

    given = load_problem(problem)
    pins = dict(_pin(text) for text in keep or ())
    if budget is not None:
        found = [planner.solve(given, budget, pins=pins)]
    else:
        found = planner.front(given, num_budgets, pins=pins)
    if as_json:
        output.show_json([_row(given, solution) for solution in found])
        return
    output.show(_front(given, found) if budget is None else _mix(given, found[0]))
    place = f" on {given.device}" if given.device else ""
    output.note(f"seconds {given.kind}{place}; harm in the problem's own unit, predicted and never measured")


def _pin(text: str) -> tuple[str, str]:
    group, equals, format_name = text.rpartition("=")
    if not equals or not group:
        raise UsageError(f"--keep {text!r} isn't GROUP=FORMAT; write for example 'head=fp32'")
    return group, format_name


def _row(problem: "Problem", solution: "Solution") -> dict[str, Any]:
    return {
        **solution.to_json(),
        "speedup": _speedup(problem, solution),
        "kind": problem.kind,
        "device": problem.device,
    }


def _speedup(problem: "Problem", solution: "Solution") -> float | None:
    """Over the reference, the first option of every group."""
    reference_s = problem.cost_s({group.name: group.options[0].format for group in problem.groups})
    return reference_s / solution.cost_s if solution.cost_s > 0 else None


def _front(problem: "Problem", found: "list[Solution]") -> Table:
    table = Table("ms a step", f"speed ({problem.kind})", "harm", "best to within", "groups by format")
    for solution in found:
        counts = Counter(solution.mix.values()).most_common()
        table.add_row(
            f"{solution.cost_s * 1e3:.4g}",
            _times(_speedup(problem, solution)),
            f"{solution.harm:.4g}",
            _certainty(solution),
            ", ".join(f"{count} {name}" for name, count in counts),
        )
    return table


def _mix(problem: "Problem", solution: "Solution") -> Table:
    table = Table("group", "format", "ms", f"ms in {_reference(problem)}", "harm", show_footer=True)
    for group in problem.groups:
        option = group.option(solution.mix[group.name])
        numbers = (option.cost_s * 1e3, group.options[0].cost_s * 1e3, option.harm)
        table.add_row(group.name, option.format, *(f"{number:.4g}" for number in numbers))
    for column, text in zip(
        table.columns,
        (
            f"with casts and what is fixed: {_times(_speedup(problem, solution))} {problem.kind}",
            f"best to within {_certainty(solution)}",
            f"{solution.cost_s * 1e3:.4g}",
            "",
            f"{solution.harm:.4g}",
        ),
        strict=True,
    ):
        column.footer = text
    return table


def _reference(problem: "Problem") -> str:
    names = {group.options[0].format for group in problem.groups}
    return names.pop() if len(names) == 1 else "reference"


def _times(speedup: float | None) -> str:
    return "unknown" if speedup is None else f"{speedup:.3f}x"


def _certainty(solution: "Solution") -> str:
    """How much cheaper a mix of the same harm could be."""
    if solution.method == "reference":
        return "reference"
    return f"{solution.gap:.2%}" if solution.gap < 1 else "unknown"
