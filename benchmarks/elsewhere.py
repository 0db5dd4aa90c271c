"""Does a plan tuned for a target that isn't here keep the loss?  The whole recipe, end to end, on real trainings.

    python benchmarks/elsewhere.py                      # gpt, cnn and lstm, for an H100 (fp8) and a B200 (nvfp4)
    python benchmarks/elsewhere.py --only gpt --targets h100 --trials 20

Each study trains with the target's formats emulated, prices speed by estimate, and confirms its plan.  Then the plan
trains on five data seeds that no part of the study has seen, paired with fp32 from the same checkpoint.  Models that
train in seconds on a CPU would leave an H100 idle, so that each is priced as the model that is 32 times as long in each
dimension: its products take 32³ times the FLOPs and 32² times the bytes.  Losses are the small model's own.

Writes ``benchmarks/results/elsewhere.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from autoprec import tune
from autoprec.atomic import write_text
from autoprec.errors import StudyError
from autoprec.measure import describe_environment
from autoprec.target import Target, load_target
from autoprec.tasks import Task, byte_gpt, byte_lstm, digits_cnn
from autoprec.tune.trials.bench import Bench
from autoprec.tune.trials.checkpoint import load_checkpoint
from autoprec.tune.trials.prepare import find_place

RESULT = Path(__file__).parent / "results" / "elsewhere.json"
#: Neither the trials' (from 1 on), nor a confirmation's (from 1000 on), nor a settlement's (from 2000 on).
FIRST_SEED, NUM_SEEDS, STEPS = 5000, 5, 50
#: A task whose own noise is too large for the first is given the next.
BUDGETS = (0.005, 0.01, 0.02, 0.04)
#: Two-sided 95% quantile of Student's t for 4 degrees of freedom.
_T_4 = 2.776

TASKS: dict[str, Callable[[], Task]] = {
    "gpt": lambda: byte_gpt.make_task(width=96, layers=4, heads=4, context=64, batch=8),
    "cnn": lambda: digits_cnn.make_task(width=16, batch=64),
    "lstm": lambda: byte_lstm.make_task(width=96, layers=2, length=32, batch=16),
}


def scaled(name: str, factor: int) -> Target:
    """The target as a model sees it that is ``factor`` times as long in each dimension."""
    target = load_target(name)
    if factor == 1:
        return target
    return dataclasses.replace(
        target,
        name=f"{name}-{factor}x",
        title=f"{target.title}, for a model {factor} times as long in each dimension",
        peaks_flops={key: peak / factor**3 for key, peak in target.peaks_flops.items()},
        bandwidth_bytes_per_s=target.bandwidth_bytes_per_s and target.bandwidth_bytes_per_s / factor**2,
    )


def study(task: Task, target: Target, trials: int, folder: Path) -> tuple[Any, list[str]]:
    """The result of a study, and the refusals of smaller budgets before it."""
    refusals: list[str] = []
    for budget in BUDGETS:
        try:
            name = f"{task.name}-{target.name}-{budget}"
            result = tune(
                task, target=target, trials=trials, max_loss_increase=budget, study=name, output_dir=folder, seed=0
            )
            return result, refusals
        except StudyError as error:
            if budget == BUDGETS[-1]:
                raise
            refusals.append(str(error))
    raise AssertionError("unreachable")


def fresh_gaps(result: Any, task: Task, target: Target, seeds: Sequence[int]) -> list[float]:
    """The plan's gap on data that the study never saw."""
    place = find_place(target)
    checkpoint = load_checkpoint(result.folder)
    assert checkpoint is not None
    bench = Bench(
        task=task,
        checkpoint=checkpoint,
        device=place.device,
        seed=0,
        budget=result.budget,
        elsewhere=place.elsewhere,
    )
    return [bench.gap(result.plan, seed, STEPS) for seed in seeds]


def run(name: str, target: Target, trials: int) -> dict[str, Any]:
    """One study, and its plan on fresh data."""
    task, start = TASKS[name](), time.monotonic()
    if find_place(target).is_here:
        raise SystemExit(f"{target.name} is in this machine: this benchmark is about targets that aren't")
    with tempfile.TemporaryDirectory() as folder:
        result, refusals = study(task, target, trials, Path(folder))
        seeds = range(FIRST_SEED, FIRST_SEED + NUM_SEEDS)
        gaps = fresh_gaps(result, task, target, seeds)
    finite = all(map(math.isfinite, gaps))
    mean, spread = (fmean(gaps), stdev(gaps)) if finite else (math.nan, math.nan)
    rows = {row.name: row for row in result.trials if row.name != "search"}
    formats = next((row.formats for row in result.trials if row.plan_sha256 == result.winner), {})
    return {
        "task": name,
        "target": target.name,
        "budget": result.budget,
        "refused_budgets": refusals,
        "verdict": result.verdict,
        "is_faster": result.is_faster,
        "formats": formats,
        "num_trials": len(result.trials),
        "speedup_estimated": result.plan.evidence.get("speedup"),
        "speedup_of": {key: None if row.speedup is None else row.speedup.value for key, row in rows.items()},
        "gap_in_study": result.plan.evidence.get("loss_gap"),
        "from_scratch": result.plan.evidence.get("from_scratch"),
        "noise": result.noise,
        "seeds": list(seeds),
        "steps": STEPS,
        "gaps": [gap if math.isfinite(gap) else None for gap in gaps],
        "gap": {
            "mean": mean,
            "low": mean - _T_4 * spread / math.sqrt(NUM_SEEDS),
            "high": mean + _T_4 * spread / math.sqrt(NUM_SEEDS),
        }
        if finite
        else None,
        "is_inside": finite and mean <= result.budget,
        "num_inside": sum(gap <= result.budget for gap in gaps),
        "seconds": round(time.monotonic() - start, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=TASKS, action="append", help="tasks; all by default")
    parser.add_argument("--targets", default="h100,b200")
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--factor", type=int, default=32, help="how many times as long the priced model is")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    rows = []
    for target in (scaled(name, args.factor) for name in args.targets.split(",")):
        for name in args.only or TASKS:
            row = run(name, target, args.trials)
            rows.append(row)
            gap = row["gap"] and f"{row['gap']['mean']:+.3%} ({row['gap']['low']:+.3%} to {row['gap']['high']:+.3%})"
            print(f"{name} {target.name}: gap {gap} of {row['budget']:.2%} on {NUM_SEEDS} fresh seeds, "
                  f"{row['seconds']:.0f} s\n  {row['verdict']}", flush=True)  # fmt: skip
    document = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "environment": describe_environment(torch.device("cpu")).to_json(),
        "factor": args.factor,
        "rows": rows,
    }
    write_text(args.out, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
