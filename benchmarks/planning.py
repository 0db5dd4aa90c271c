"""How long planning takes for 3,000 sites with 8 formats each and casts between them.

    python benchmarks/planning.py                 # about a minute; writes results/planning.json
    python benchmarks/planning.py --blocks 4 --output -

A model of 125 blocks with 24 roles, in order of execution; every fourth site is also read three sites later.  Its
numbers are drawn: a role's size, and per site and format an efficiency; harms lie over four decades.  ``ungrouped`` has
a group for each site; ``grouped`` one for each role and band of depth (4 bands).  The whole front of 40 budgets is
solved, and ``one`` budget alone: twice the harm of bf16 everywhere.
"""

import argparse
import datetime
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import scipy

from autoprec.measure import describe_environment
from autoprec.planner.front import Solution, front, solve
from autoprec.planner.problem import Edge, Option, Problem, ProblemGroup

RESULTS = Path(__file__).parent / "results"

#: Name → storage, seconds as a share of fp32's, and the order of magnitude of its harm.
FORMATS = {
    "fp32": ("fp32", 1.0, 0.0),
    "tf32": ("fp32", 0.6, 1e-5),
    "bf16": ("bf16", 0.5, 1e-4),
    "fp16": ("fp16", 0.5, 5e-5),
    "fp8_e4m3": ("bf16", 0.35, 1e-3),
    "fp8_e5m2": ("bf16", 0.35, 3e-3),
    "mxfp8": ("bf16", 0.33, 1e-3),
    "nvfp4": ("bf16", 0.25, 1e-2),
}
CAST_SHARE = 0.03


def per_site(blocks: int, roles: int, seed: int) -> Problem:
    """A group for each site."""
    draw = random.Random(seed)
    sizes = [draw.uniform(0.2, 2.0) for _ in range(roles)]
    weights = [10 ** draw.gauss(0, 0.5) for _ in range(roles)]
    groups = []
    for block in range(blocks):
        for role in range(roles):
            options = tuple(
                Option(
                    format=name,
                    harm=order * weights[role] * 10 ** draw.gauss(0, 0.3),
                    cost_s=sizes[role] * share * (1 if name == "fp32" else draw.uniform(0.85, 1.25)),
                    storage=storage,
                )
                for name, (storage, share, order) in FORMATS.items()
            )
            groups.append(ProblemGroup(name=f"blocks.{block}.role{role}", options=options))
    count = len(groups)
    pairs = [(k, k + 1) for k in range(count - 1)] + [(k, k + 3) for k in range(0, count - 3, 4)]
    edges = [Edge(a=groups[a].name, b=groups[b].name, cast_s=draw.uniform(0, 2 * CAST_SHARE)) for a, b in pairs]
    return Problem(groups=tuple(groups), edges=tuple(edges), fixed_s=0.25 * sum(sizes) * blocks, device="made up")


def by_role(problem: Problem, blocks: int, bands: int) -> Problem:
    """The same sites, those of one role and band of depth together."""
    members: dict[str, list[ProblemGroup]] = defaultdict(list)
    name_of = {}
    for group in problem.groups:
        _, block, role = group.name.split(".")
        name_of[group.name] = f"{role}@{int(block) * bands // blocks}"
        members[name_of[group.name]].append(group)
    groups = tuple(
        ProblemGroup(name=name, options=tuple(summed([s.options[k] for s in sites]) for k in range(len(FORMATS))))
        for name, sites in members.items()
    )
    edges = tuple(Edge(a=name_of[e.a], b=name_of[e.b], cast_s=e.cast_s) for e in problem.edges)
    return Problem(groups=groups, edges=edges, fixed_s=problem.fixed_s, device=problem.device)


def summed(options: Sequence[Option]) -> Option:
    """One format of several sites."""
    return Option(
        format=options[0].format,
        harm=math.fsum(option.harm for option in options),
        cost_s=math.fsum(option.cost_s for option in options),
        storage=options[0].storage,
    )


def timed(call: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """A result with the seconds it took, by the wall and of this process's processor time."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    seconds = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    return result, {name: round(value, 2) for name, value in seconds.items()}


def report(problem: Problem) -> dict[str, Any]:
    """Time and quality of the whole front, and of one budget."""
    found, front_time = timed(lambda: front(problem))
    budget = 2 * problem.harm({group.name: "bf16" for group in problem.groups})
    one, one_time = timed(lambda: solve(problem, budget))
    solved = [solution for solution in found if solution.method != "reference"]
    return {
        "groups": len(problem.groups),
        "edges": len(problem.edges),
        "front": {
            **front_time,
            "mixes": len(found),
            "by_milp": sum(solution.method == "milp" for solution in solved),
            "proven": sum(solution.is_proven for solution in solved),
            "largest_gap": max(solution.gap for solution in solved),
        },
        "one": {**one_time, "method": one.method, "gap": one.gap, "speedup": speedup(problem, one)},
    }


def speedup(problem: Problem, solution: Solution) -> float:
    """Over the reference."""
    return problem.cost_s({group.name: group.options[0].format for group in problem.groups}) / solution.cost_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=125)
    parser.add_argument("--roles", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default=str(RESULTS / "planning.json"), help="a file, or - for stdout alone")
    arguments = parser.parse_args()
    ungrouped = per_site(arguments.blocks, arguments.roles, arguments.seed)
    grouped = by_role(ungrouped, arguments.blocks, bands=4)
    result = {
        "sites": len(ungrouped.groups),
        "formats": len(FORMATS),
        "environment": {**describe_environment().to_json(), "scipy": scipy.__version__},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "ungrouped": report(ungrouped),
        "grouped": report(grouped),
    }
    text = json.dumps(result, indent=1) + "\n"
    print(text, end="")
    if arguments.output != "-":
        Path(arguments.output).write_text(text)


if __name__ == "__main__":
    main()
