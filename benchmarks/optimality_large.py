"""Spaces too large to look at every mix: how good 50 trials get, and how long the sampler takes.

    python benchmarks/optimality_large.py

Made-up instances of 24 groups and 5 formats: costs and harms that differ by group, harms that don't add up for 15% of
the pairs, costs that the planner knows to 5% and harms to a factor of e^0.8 each and e^0.5 a format.  ``share`` is the
speed of the fastest trial within the budget, as a share of the fastest mix that a long local search on the true numbers
finds.  The sampler's CPU time is measured at 40 groups.

Writes ``benchmarks/results/optimality_large.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import optuna
from optuna.samplers import BaseSampler, RandomSampler, TPESampler

from autoprec.measure import describe_environment
from autoprec.tune.sampling.sampler import CONSTRAINT, PlanSampler

RESULT = Path(__file__).parent / "results" / "optimality_large.json"
FORMATS = ("fp32", "bf16", "fp16", "fp8_e4m3", "nvfp4")
TIME, HARM = np.array([1, 0.5, 0.5, 0.28, 0.16]), np.array([0, 0.002, 0.004, 0.05, 0.6])
FIXED, TRIALS, COST_ERROR, HARM_ERROR, FORMAT_ERROR = 0.25, 50, 0.05, 0.8, 0.5
CHECKPOINTS = (10, 20, 50)


@dataclass(frozen=True, kw_only=True, eq=False)
class Instance:
    """Costs and harms ``[groups, formats]``, and what pairs of groups do beyond them."""

    cost: np.ndarray
    harm: np.ndarray
    pairs: np.ndarray
    budget: float
    planner: tuple[np.ndarray, np.ndarray]

    def costs(self, mixes: np.ndarray) -> np.ndarray:
        return FIXED + self.cost[np.arange(mixes.shape[1]), mixes].sum(1)

    def gaps(self, mixes: np.ndarray) -> np.ndarray:
        each = np.arange(mixes.shape[1])
        both = self.pairs[each[:, None], each, mixes[:, :, None], mixes[:, None, :]]
        return self.harm[each, mixes].sum(1) + both.sum((1, 2))


def make(groups: int, seed: int) -> Instance:
    rng = np.random.default_rng(seed)
    shape = groups, len(FORMATS)
    share = rng.dirichlet(np.full(groups, 2.0)) * (1 - FIXED)
    cost = share[:, None] * TIME * rng.uniform(0.85, 1.15, shape)
    cost[:, 0] = share
    harm = rng.lognormal(0, 1, (groups, 1)) * HARM * rng.lognormal(0, 0.4, shape)
    size = np.sqrt(harm[:, None, :, None] * harm[None, :, None, :])
    pairs = 0.3 * size * rng.standard_normal(size.shape) * (rng.random((groups, groups, 1, 1)) < 0.15)
    pairs *= np.triu(np.ones((groups, groups)), 1)[:, :, None, None]
    known = harm * rng.lognormal(0, HARM_ERROR, shape) * rng.lognormal(0, FORMAT_ERROR, shape[1])
    return Instance(
        cost=cost,
        harm=harm,
        pairs=pairs,
        budget=float(harm[:, 3].sum()),
        planner=(known, cost * rng.lognormal(0, COST_ERROR, shape)),
    )


def best_known(instance: Instance, starts: int = 10) -> float:
    """The least cost within the budget that changes of one and of two groups lead to."""
    groups, formats = instance.cost.shape
    rng = np.random.default_rng(0)
    found = math.inf

    def value(mixes: np.ndarray) -> np.ndarray:
        return instance.costs(mixes) + 100 * np.maximum(instance.gaps(mixes) / instance.budget - 1, 0)

    for price in np.geomspace(0.01, 10, starts) / instance.budget:
        mix = (instance.cost + price * instance.harm).argmin(1)
        now = float(value(mix[None])[0])
        while True:
            near = np.repeat(mix[None], groups * formats + 4000, 0)
            one = np.arange(groups * formats)
            near[one, one // formats] = one % formats
            for _ in range(2):
                rows = np.arange(groups * formats, len(near))
                near[rows, rng.integers(groups, size=4000)] = rng.integers(formats, size=4000)
            values = value(near)
            if values.min() >= now - 1e-12:
                break
            mix, now = near[values.argmin()], float(values.min())
        found = min(found, now)
    return found


def sampler_of(method: str, instance: Instance, seed: int) -> BaseSampler:
    if method == "random":
        return RandomSampler(seed=seed)
    if method == "TPE":
        return TPESampler(seed=seed)
    harms, costs = (
        {f"g{k}": dict(zip(FORMATS, row, strict=True)) for k, row in enumerate(table.tolist())}
        for table in instance.planner
    )
    return PlanSampler(harms, costs, instance.budget, fixed=FIXED, seed=seed, only_front=method == "bisected front")


def run(method: str, instance: Instance, seed: int, trials: int = TRIALS) -> tuple[list[float], list[float]]:
    """The best speed within the budget after each trial, and CPU seconds of each proposal."""
    study = optuna.create_study(direction="maximize", sampler=sampler_of(method, instance, seed))
    names = [f"g{k}" for k in range(len(instance.cost))]
    study.enqueue_trial(dict.fromkeys(names, "bf16"))
    best, seconds = [0.0], []
    for _ in range(trials):
        start = time.process_time()
        trial = study.ask()
        mix = np.array([[FORMATS.index(trial.suggest_categorical(name, FORMATS)) for name in names]])
        seconds.append(time.process_time() - start)
        gap, cost = float(instance.gaps(mix)[0]), float(instance.costs(mix)[0])
        trial.set_constraint(CONSTRAINT, gap - instance.budget)
        study.tell(trial, 1 / cost)
        best.append(max(best[-1], 1 / cost if gap <= instance.budget else 0.0))
    return best[1:], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=6)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rows: dict[str, Any] = {}
    made = [make(24, seed) for seed in range(options.instances)]
    optima = [best_known(instance) for instance in made]
    for method in ("autoprec", "bisected front", "TPE", "random"):
        shares = [
            [100 * best * optimum for best in run(method, instance, seed)[0]]
            for seed, (instance, optimum) in enumerate(zip(made, optima, strict=True))
        ]
        rows[method] = {
            f"share_pct_after_{k}": {"mean": round(fmean(s[k - 1] for s in shares), 2)}
            | {"min": round(min(s[k - 1] for s in shares), 2)}
            for k in CHECKPOINTS
        }
        print(method, rows[method], flush=True)
    _, seconds = run("autoprec", make(40, 0), 0)
    timing = {"median_ms": round(1e3 * median(seconds), 1), "max_ms": round(1e3 * max(seconds), 1)}
    print("40 groups x 5 formats, CPU time of a proposal:", timing)
    result = {
        "environment": describe_environment("cpu").to_json(),
        "instances": options.instances,
        "trials": TRIALS,
        "methods": rows,
        "sampler_cpu_ms_40x5": timing,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
