"""How well costs of ops that were measured alone add up to whole steps, on the device in this machine.

    python benchmarks/costs.py                # all built-in tasks, a few minutes; writes results/costs.json
    python benchmarks/costs.py --only cnn --mixes 12 --rounds 5 --output -
    python benchmarks/costs.py --clock process   # on a busy machine: time that others take isn't counted; 1 thread

Mixes put random products of a task's model into bf16 and leave the others in fp32; all other ops follow the rules, or
run in one of the two.  A mix's step is predicted as the sum of its ops' measured costs, its casts, and what the
optimizer takes; the measured steps take turns in one process.  The roofline's estimates of the same mixes stand beside.
"""

import argparse
import datetime
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr

import autoprec
from autoprec.analyze import Analysis, SiteReport, analyze
from autoprec.estimate import estimate_step
from autoprec.estimate.flow import FormatsOf, Placed, place
from autoprec.graph.site import Site
from autoprec.lower.matching import RuleMatcher
from autoprec.measure import describe_environment, measure_ratios
from autoprec.measure.microbench import Costs, measure_costs, measure_seconds
from autoprec.measure.replay import record_calls
from autoprec.plan import Formats, Plan, PlanRule
from autoprec.planner.rules import plan_by_rules
from autoprec.rulebook import load_rulebook
from autoprec.target import Target, load_target
from autoprec.tasks import Task, load_task

RESULTS = Path(__file__).parent / "results"
TARGET, LOW = "cpu-avx512-bf16", "bf16"
TASKS = ("gpt", "cnn", "lstm")
KINDS = ("predicted", "predicted_given_fp32_step", "estimated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Products in fp32, and what all other ops do: ``rules``, ``fp32`` or ``bf16``."""

    kept: tuple[str, ...]
    others: str

    def plan(self, base: Plan) -> Plan:
        rules = [PlanRule(match=(name,), formats=Formats.all("fp32")) for name in self.kept]
        if self.others == "rules":
            return base.with_rules_first(*rules)
        lowered = PlanRule(match=("*",), formats=Formats.all(LOW))
        others = PlanRule(match=("*::*",), formats=Formats.all(self.others))
        return base.with_rules_first(*rules, lowered, others)


class Trainer:
    """A task's model under a plan, and its training step."""

    def __init__(self, task: Task, plan: Plan | None, batch: Any) -> None:
        self.task, self.batch = task, batch
        self.model = task.build_model(0)
        if plan is not None:
            autoprec.convert(self.model, plan=plan)
        if task.optimizer is None:
            raise SystemExit(f"task {task.name!r} trains nothing")
        self.optimizer = task.optimizer(self.model.parameters())

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.task.loss(self.model, self.batch).backward()
        self.optimizer.step()


def draw_mixes(sites: Sequence[Site], count: int, seed: int) -> list[Mix]:
    """Everything in fp32, everything as the rules say, and random mixes, no two alike."""
    products = [site.id for site in sites if site.is_gemm]
    mixes = {Mix(kept=tuple(products), others="fp32"): None, Mix(kept=(), others="rules"): None}
    drawn = random.Random(seed)
    for _ in range(100 * count):
        if len(mixes) == count:
            break
        kept = tuple(name for name in products if drawn.random() < 0.5)
        mixes[Mix(kept=kept, others=drawn.choice(("rules", "rules", "fp32", LOW)))] = None
    return list(mixes)


def formats_of(plan: Plan) -> FormatsOf:
    """What a plan asks of a site."""
    matcher = RuleMatcher(plan)

    def formats(site: Site) -> Formats | None:
        rule = matcher.rule_for_site(site.scope, site.op, site.index)
        return None if rule is None else rule.formats

    return formats


def place_mix(rows: Sequence[SiteReport], asked: FormatsOf) -> list[Placed]:
    """The sites under a plan; a batch norm reads and gives 16 bit as it comes, beside parameters in fp32."""
    widened = {item.site.id for item in place(rows, asked, LOW) if item.site.op == "batch_norm" and item.casts}

    def formats(site: Site) -> Formats | None:
        follows = site.id in widened and asked(site) != Formats.all("fp32")
        return Formats.all(LOW) if follows else asked(site)

    return place(rows, formats, LOW)


def predict_s(placed: Sequence[Placed], costs: Costs, fixed_s: float) -> float:
    """The sum of the sites' costs and casts; a site that wasn't measured counts nothing."""
    seconds = fixed_s
    for item in placed:
        chosen = costs.seconds.get(item.site.id, {})
        if item.formats.input in chosen:
            seconds += chosen[item.formats.input].value
        seconds += sum(costs.cast_s(cast.numel, cast.source, cast.format) for cast in item.casts)
    return seconds


@dataclass(frozen=True, kw_only=True)
class Priced:
    """A task's model with what its ops cost."""

    analysis: Analysis
    costs: Costs
    fixed_s: float
    seconds: float
    cpu_seconds: float
    num_distinct: int


def price(task: Task, batch: Any, target: Target) -> Priced:
    """Record and measure the sites, and what of a step is no site: the optimizer's."""
    model = task.build_model(0)

    def run(model: torch.nn.Module) -> torch.Tensor:
        return task.loss(model, batch)

    analysis = analyze(model, run, target=target)
    start, cpu_start = time.monotonic(), time.process_time()
    calls = record_calls(model, run)
    costs = measure_costs(calls, {row.site.id: ("fp32", LOW) for row in analysis.rows}, budget_s=120)
    seconds, cpu_seconds = time.monotonic() - start, time.process_time() - cpu_start
    trainer = Trainer(task, None, batch)
    trainer.step()
    trainer.task.loss(trainer.model, batch).backward()
    fixed = measure_seconds({"optimizer": trainer.optimizer.step})["optimizer"].value
    return Priced(
        analysis=analysis,
        costs=costs,
        fixed_s=fixed,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        num_distinct=len({call.key for call in calls}),
    )


def run(name: str, num_mixes: int, rounds: int, seed: int) -> dict[str, Any]:
    """Predict and measure the mixes of one task."""
    task, target = load_task(name), load_target("auto")
    batch = next(iter(task.stream(0)))
    priced = price(task, batch, target)
    model = task.build_model(0)
    base = plan_by_rules(model, load_target(TARGET), load_rulebook(), analysis=priced.analysis)
    mixes = draw_mixes([row.site for row in priced.analysis.rows], num_mixes, seed)
    plans = [mix.plan(base) for mix in mixes]
    trainers = [Trainer(task, plan, batch) for plan in plans]
    fp32 = Trainer(task, None, batch)
    compared = measure_ratios({str(n): t.step for n, t in enumerate(trainers)}, fp32.step, rounds=rounds)
    step_s = measure_seconds({"fp32": fp32.step})["fp32"]
    rows = priced.analysis.rows
    placed_fp32 = place(rows, lambda site: Formats.all("fp32"), LOW)
    fp32_s = predict_s(placed_fp32, priced.costs, priced.fixed_s)
    roof_s = estimate_step(rows, lambda site: Formats.all("fp32"), target, low=LOW).value
    table = []
    for n, (mix, plan) in enumerate(zip(mixes, plans, strict=True)):
        asked = formats_of(plan)
        predicted_s = predict_s(place_mix(rows, asked), priced.costs, priced.fixed_s)
        speedup = compared[str(n)].speedup
        table.append(
            {
                "fp32": list(mix.kept),
                "others": mix.others,
                "measured": [round(v, 4) for v in (speedup.value, speedup.low, speedup.high)],
                "predicted": round(fp32_s / predicted_s, 4),
                # all that no site's cost explains counts as fixed
                "predicted_given_fp32_step": round(step_s.value / (step_s.value + predicted_s - fp32_s), 4),
                "estimated": round(roof_s / estimate_step(rows, asked, target, low=LOW).value, 4),
            }
        )
    return {
        "task": task.name,
        "data": task.data,
        "sites": len(rows),
        "distinct_calls": priced.num_distinct,
        "seconds_to_measure_them": {"wall": round(priced.seconds, 2), "cpu": round(priced.cpu_seconds, 2)},
        "not_measured": dict(priced.costs.missing),
        "fp32_step_s": {"measured": step_s.value, "sum_of_costs": fp32_s, "optimizer": priced.fixed_s},
        "control": compared["0"].control.to_json(),
        "agreement": {kind: agreement(table, kind) for kind in KINDS},
        "mixes": table,
    }


def agreement(table: Sequence[dict[str, Any]], kind: str) -> dict[str, float]:
    """Of predicted and measured speed ratios."""
    measured = [row["measured"][0] for row in table]
    errors = sorted(abs(row[kind] / row["measured"][0] - 1) for row in table)
    return {
        "rank_correlation": round(float(spearmanr([row[kind] for row in table], measured).statistic), 4),
        "median_relative_error": round(errors[len(errors) // 2], 4),
        "largest_relative_error": round(errors[-1], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=TASKS, help="one task")
    parser.add_argument("--mixes", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", default=str(RESULTS / "costs.json"), help="- prints only")
    parser.add_argument("--clock", choices=("wall", "process"), default="wall")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.clock == "process":
        if options.threads != 1:
            parser.error("--clock process adds up the threads' time: take --threads 1")
        time.perf_counter = time.process_time
    results = []
    for name in [options.only] if options.only else TASKS:
        results.append(run(name, options.mixes, options.rounds, options.seed))
        found = results[-1]
        print(
            f"{name}: {found['distinct_calls']} calls in {found['seconds_to_measure_them']} s, {found['fp32_step_s']}"
        )
        for kind in KINDS:
            print(f"  {kind}: {found['agreement'][kind]}")
    if options.output != "-":
        written = {
            "environment": describe_environment().to_json(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "clock": options.clock,
            "mixes": options.mixes,
            "rounds": options.rounds,
            "tasks": results,
        }
        Path(options.output).write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
