"""How well estimates agree with measurements on this machine: step time and peak memory of many plans.

    python benchmarks/estimates.py                 # about two minutes; writes results/estimates.json
    python benchmarks/estimates.py --plans 6 --rounds 3 --output -

Plans of the built-in GPT put random groups of its sites into bf16 and leave the others in fp32.  Their steps take turns
in one process, and a plan's time is the median of its ratios to fp32 in the same round.
"""

import argparse
import datetime
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr

import autoprec
from autoprec.analyze import Analysis, analyze
from autoprec.estimate import Estimate, estimate_memory, estimate_step
from autoprec.graph.site import Site
from autoprec.lower.matching import RuleMatcher
from autoprec.measure import describe_environment, measure_peak_memory, measure_ratios
from autoprec.plan import Formats, Plan, PlanRule
from autoprec.planner.rules import plan_by_rules
from autoprec.rulebook import load_rulebook
from autoprec.target import Target, load_target
from autoprec.tasks import Task
from autoprec.tasks.byte_gpt import make_task

RESULTS = Path(__file__).parent / "results"
TARGET = "cpu-avx512-bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan: which groups run in bf16, and what was estimated and measured."""

    lowered: tuple[str, ...]
    estimated_s: float
    measured_of_fp32: tuple[float, float, float]
    estimated_bytes: float
    measured_bytes: float

    @property
    def bytes_error(self) -> float:
        return self.estimated_bytes / self.measured_bytes - 1


def groups(layers: int) -> dict[str, tuple[str, ...]]:
    """Name of a group → the globs of its sites."""
    found: dict[str, tuple[str, ...]] = {"head": ("head",), "scores": ("*::scaled_dot_product_attention",)}
    for n in range(layers):
        found[f"attention {n}"] = (f"blocks.{n}.attention.qkv", f"blocks.{n}.attention.out")
        found[f"mlp {n}"] = (f"blocks.{n}.up", f"blocks.{n}.down")
    return found


def choices(names: Sequence[str], num_plans: int, seed: int) -> list[tuple[str, ...]]:
    """Nothing lowered, everything, and random sets of every size between."""
    draw = random.Random(seed)
    sizes = [round(k * len(names) / (num_plans - 1)) for k in range(num_plans)]
    return [tuple(sorted(draw.sample(list(names), size))) for size in sizes]


def make_plan(base: Plan, kept: Sequence[tuple[str, ...]]) -> Plan:
    """The base plan with these groups in fp32."""
    rules = [PlanRule(match=globs, formats=Formats.all("fp32"), source="user") for globs in kept]
    return base.with_rules_first(*rules)


class Trainer:
    """One model under one plan, and its training step."""

    def __init__(self, task: Task, plan: Plan | None, batch: Any) -> None:
        self.task, self.batch = task, batch
        self.model = task.build_model(0)
        if plan is not None:
            autoprec.convert(self.model, plan=plan)
        self.optimizer = task.optimizer(self.model.parameters())

    def step(self) -> None:
        self.task.loss(self.model, self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def peak_bytes(self) -> float:
        """Parameters, optimizer state, and the peak of a step beside them."""
        self.step()
        held = sum(p.nbytes for p in self.model.parameters())
        states = self.optimizer.state.values()
        held += sum(t.nbytes for state in states for t in state.values() if isinstance(t, torch.Tensor))
        return held + measure_peak_memory(self.step)


def formats_of(plan: Plan) -> Callable[[Site], Formats | None]:
    """What a plan asks of a site."""
    matcher = RuleMatcher(plan)

    def formats(site: Site) -> Formats | None:
        rule = matcher.rule_for_site(site.scope, site.op, site.index)
        return None if rule is None else rule.formats

    return formats


def estimate(analysis: Analysis, plan: Plan, target: Target, num_params: int) -> tuple[Estimate, Estimate]:
    """Step time and peak bytes."""
    asked = formats_of(plan)
    step = estimate_step(analysis.rows, asked, target, low="bf16")
    return step, estimate_memory(analysis.rows, asked, num_params=num_params, low="bf16")


def run(task: Task, num_plans: int, rounds: int, seed: int, layers: int) -> dict[str, Any]:
    """Estimate and measure the plans."""
    target, rulebook = load_target("auto"), load_rulebook()
    batch = next(task.stream(0))
    model = task.build_model(0)
    num_params = sum(p.numel() for p in model.parameters())
    analysis = analyze(model, lambda m: task.loss(m, batch), target=target)
    base = plan_by_rules(model, load_target(TARGET), rulebook, analysis=analysis)
    named = groups(layers)
    lowered = choices(list(named), num_plans, seed)
    plans = [make_plan(base, [globs for name, globs in named.items() if name not in low]) for low in lowered]
    trainers = [Trainer(task, plan, batch) for plan in plans]
    compared = measure_ratios(
        {str(n): trainer.step for n, trainer in enumerate(trainers)}, Trainer(task, None, batch).step, rounds=rounds
    )
    rows = []
    for n, (plan, trainer, names) in enumerate(zip(plans, trainers, lowered, strict=True)):
        step, memory = estimate(analysis, plan, target, num_params)
        speedup = compared[str(n)].speedup
        rows.append(
            Row(
                lowered=names,
                estimated_s=step.value,
                measured_of_fp32=(1 / speedup.value, 1 / speedup.high, 1 / speedup.low),
                estimated_bytes=memory.value,
                measured_bytes=trainer.peak_bytes(),
            )
        )
    return _result(task, target, rows, compared["0"].control.to_json(), rounds, compared["0"].baseline_s)


def _result(
    task: Task, target: Target, rows: Sequence[Row], control: dict[str, Any], rounds: int, fp32_s: float
) -> dict[str, Any]:
    rank = spearmanr([row.estimated_s for row in rows], [row.measured_of_fp32[0] for row in rows]).statistic
    errors = [row.bytes_error for row in rows]
    return {
        "task": task.name,
        "data": task.data,
        "environment": describe_environment().to_json(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "target": {"name": target.name, "peaks_flops": dict(target.peaks_flops), "measured": target.measured},
        "plans": len(rows),
        "rounds": rounds,
        "fp32_step_s": {"kind": "measured", "value": fp32_s},
        "control": control,
        "rank_correlation_of_step_time": None if math.isnan(rank) else round(float(rank), 4),
        "largest_error_of_peak_bytes": round(max(errors, key=abs), 4),
        "rows": [
            {
                "bf16": list(row.lowered),
                "step_s": {"kind": "estimated", "value": row.estimated_s},
                "step_of_fp32": {"kind": "measured", "value_low_high": [round(v, 4) for v in row.measured_of_fp32]},
                "peak_bytes": {"estimated": row.estimated_bytes, "measured": row.measured_bytes},
                "error_of_peak_bytes": round(row.bytes_error, 4),
            }
            for row in rows
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", default=str(RESULTS / "estimates.json"), help="- prints only")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    task = make_task(width=options.width, layers=options.layers, heads=4, context=options.context)
    result = run(task, options.plans, options.rounds, options.seed, options.layers)
    print(f"rank correlation of step time {result['rank_correlation_of_step_time']}")
    print(f"largest error of peak bytes {result['largest_error_of_peak_bytes']:+.1%}")
    if options.output != "-":
        Path(options.output).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
