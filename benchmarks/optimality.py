"""How close to the best mix a study of 50 trials comes, on tables where every mix was measured.

    python benchmarks/optimality.py                          # minutes on one core
    python benchmarks/optimality.py --methods GP --seeds 3   # Optuna's GP, which takes long

Each study sees a table's loss gaps and seconds as trials would; the planner's own costs are off by 5% (log-normal, for
each group and format).  ``share``: speed of the plan as a share of the fastest mix within the budget, found by looking
at all of them.  ``overshoot``: part of the studies whose plan breaks the budget by more than 20%; such a plan counts as
the reference in ``share``.

Without noise a plan is the fastest trial within the budget.  With it each measured gap is off by what the tables' data
seeds differ by.  The plan is then confirmed as ``autoprec tune`` does, for all methods alike: three more measurements,
and the next candidate where they fail.  autoprec's candidates are chosen by what all trials say together, the others'
are the trials that were read as within the budget; ``unconfirmed`` is the first of them.

Writes ``benchmarks/results/optimality.json``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from scipy.optimize import nnls
from scipy.special import stdtrit

from autoprec.atomic import write_text
from autoprec.formats import FORMATS
from autoprec.measure import describe_environment
from autoprec.tune.sampling.sampler import CONSTRAINT, REPEAT, PlanSampler

RESULTS = Path(__file__).parent / "results"
TABLES, MODELOPT, RESULT = (RESULTS / f"optimality{end}.json" for end in ("_tables", "_modelopt", ""))
TRIALS, SEEDS = 50, 10
#: Shares of the mixes that are within the budget.  Of these, without noise, the smallest whose budget is above what the
#: mean of the tables' data seeds is off by, and with noise the smallest whose budget is above what one of them is.
SHARES, BUDGETS, NOISY_BUDGETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8), 3, 2
COST_ERROR, OVERSHOOT = 0.05, 1.2
Mix = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A table and a loss budget.

    Args:
        name: of the table.
        choices: group → formats.
        gap, cost: of every mix; cost in units of the fp32 step.
        spread: standard deviation of one measurement of a gap: a constant, and a share of the gap.
        scores: group → format → harm from one backward pass.
        costs: group → format → share of the fp32 step.
        fixed: share that no choice changes.
        budget: largest allowed gap.
        feasible: share of the mixes that are within it.
        kinds: whether the budget stands clear of the noise of the table, and of one trial: ``quiet``, ``noisy``.
    """

    name: str
    choices: dict[str, tuple[str, ...]]
    gap: dict[Mix, float]
    cost: dict[Mix, float]
    spread: tuple[float, float]
    scores: dict[str, dict[str, float]]
    costs: dict[str, dict[str, float]]
    fixed: float
    budget: float
    feasible: float
    kinds: tuple[str, ...]

    def noise(self, gap: float) -> float:
        return math.hypot(self.spread[0], self.spread[1] * gap)

    def best_cost(self) -> float:
        return min(self.cost[mix] for mix, gap in self.gap.items() if gap <= self.budget)

    def reference(self) -> Mix:
        """All in the first format, which is what is taken when nothing holds."""
        return tuple(names[0] for names in self.choices.values())

    def share(self, mix: Mix) -> float:
        """Speed as a share of the optimum's."""
        return self.best_cost() / self.cost[mix]


def instances(tables: Mapping[str, Any]) -> Iterator[Instance]:
    for name, table in tables.items():
        choices = {group: tuple(names) for group, names in table["choices"].items()}
        mixes = list(itertools.product(*choices.values()))
        if len(table["gaps"]) != len(mixes):
            print(f"{name}: {len(table['gaps'])} of {len(mixes)} mixes measured; left out")
            continue
        gaps = np.array(table["gaps"])
        unit = table["fixed_s"] + sum(cost["fp32"] for cost in table["costs_s"].values())
        costs = {g: {f: table["costs_s"][g][f] / unit for f in names} for g, names in choices.items()}
        fixed = table["fixed_s"] / unit
        means = gaps.mean(axis=1)
        cost = [fixed + sum(costs[g][f] for g, f in zip(choices, mix, strict=True)) for mix in mixes]
        (constant, share), _ = nnls(np.stack([np.ones(len(means)), means**2], 1), gaps.var(axis=1, ddof=1))
        spread = math.sqrt(constant), math.sqrt(share)
        budgets = {q: float(np.quantile(means, q)) for q in SHARES}
        clear = {q: b / math.hypot(spread[0], spread[1] * b) for q, b in budgets.items()}
        quiet = [q for q in SHARES if clear[q] >= len(table["seeds"]) ** -0.5][:BUDGETS]
        noisy = [q for q in SHARES if clear[q] >= 1][:NOISY_BUDGETS]
        for q in sorted({*quiet, *noisy}):
            yield Instance(
                name=name,
                choices=choices,
                gap=dict(zip(mixes, means.tolist(), strict=True)),
                cost=dict(zip(mixes, cost, strict=True)),
                spread=spread,
                scores=table.get("scores", {}),
                costs=costs,
                fixed=fixed,
                budget=budgets[q],
                feasible=q,
                kinds=(*(("quiet",) if q in quiet else ()), *(("noisy",) if q in noisy else ())),
            )


def uniform(instance: Instance) -> dict[str, dict[str, float]]:
    """Harms of one who knows nothing but the formats: the square of their rounding error."""
    return {g: {f: 4.0 ** -FORMATS[f].mantissa_bits for f in names} for g, names in instance.choices.items()}


@dataclass(frozen=True, kw_only=True)
class Study:
    """A finished one."""

    instance: Instance
    study: optuna.Study
    noise: float
    rng: np.random.Generator
    seconds: float

    def mixes(self) -> list[Mix]:
        return [tuple(t.params[g] for g in self.instance.choices) for t in self.study.trials]

    def read_feasible(self) -> list[Mix]:
        """Mixes that were read as within the budget, the fastest first."""
        kept = {mix for mix, t in zip(self.mixes(), self.study.trials, strict=True) if t.constraints[CONSTRAINT] <= 0}
        return sorted(kept, key=lambda mix: self.instance.cost[mix])

    def believed(self, sampler: PlanSampler) -> list[Mix]:
        """Mixes that the trials together say may be the answer, the most promising first."""
        mixes = self.mixes()
        beliefs = {mixes[number]: belief for number, belief in sampler.posterior(self.study.trials).items()}
        return sampler.objective.shortlist(beliefs, self.noise, 1 / self.instance.cost[self.instance.reference()])

    def confirmed(self, candidates: list[Mix], attempts: int = 4) -> Mix | None:
        """The first candidate that three more measurements confirm, see ``autoprec.tune.answers.confirm``."""
        readings: dict[Mix, list[float]] = defaultdict(list)
        for mix, trial in zip(self.mixes(), self.study.trials, strict=True):
            readings[mix].append(trial.constraints[CONSTRAINT])
        ceiling, left = math.inf, attempts
        for mix in candidates:
            reading, truth = fmean(readings[mix]), self.instance.gap[mix]
            if reading >= ceiling or not left:
                continue
            left -= 1
            fresh = truth + self.instance.noise(truth) * self.rng.standard_normal(3)
            error = max(float(fresh.std(ddof=1)), self.noise) / math.sqrt(3)
            if fresh.mean() + float(stdtrit(2, 0.84)) * error <= self.instance.budget:
                return mix
            ceiling = reading
        return None


def run(instance: Instance, sampler: BaseSampler, seed: int, *, noisy: bool, trials: int = TRIALS) -> Study:
    rng = np.random.default_rng([seed, 7])
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.enqueue_trial(dict(zip(instance.choices, instance.reference(), strict=True)))
    known: dict[Mix, float] = {}
    seconds = 0.0
    for _ in range(trials):
        start = time.perf_counter()
        trial = study.ask()
        mix = tuple(trial.suggest_categorical(g, names) for g, names in instance.choices.items())
        seconds += time.perf_counter() - start
        if mix not in known or study.trials[-1].system_attrs.get("autoprec:origin") == REPEAT:
            truth = instance.gap[mix]
            known[mix] = truth + noisy * instance.noise(truth) * rng.standard_normal()
        trial.set_constraint(CONSTRAINT, known[mix] - instance.budget)
        study.tell(trial, 1 / instance.cost[mix])
    noise = instance.noise(instance.budget) if noisy else 0.0
    return Study(instance=instance, study=study, noise=noise, rng=rng, seconds=seconds / trials)


def ours(instance: Instance, seed: int, *, noisy: bool, scored: bool = True, only_front: bool = False) -> PlanSampler:
    rng = np.random.default_rng([seed, 11])
    costs = {
        g: {f: cost * math.exp(COST_ERROR * rng.standard_normal()) for f, cost in by_format.items()}
        for g, by_format in instance.costs.items()
    }
    return PlanSampler(
        instance.scores if scored and instance.scores else uniform(instance),
        costs,
        instance.budget,
        fixed=instance.fixed,
        noise=instance.noise(instance.budget) if noisy else 0.0,
        seed=seed,
        only_front=only_front,
    )


METHODS: dict[str, Callable[[Instance, int, bool], BaseSampler]] = {
    "autoprec": lambda i, s, noisy: ours(i, s, noisy=noisy),
    "autoprec, no scores": lambda i, s, noisy: ours(i, s, noisy=noisy, scored=False),
    "solved front, bisected": lambda i, s, noisy: ours(i, s, noisy=noisy, only_front=True),
    "random": lambda i, s, noisy: RandomSampler(seed=s),
    "TPE": lambda i, s, noisy: TPESampler(seed=s),
    "NSGA-II": lambda i, s, noisy: NSGAIISampler(seed=s, population_size=10),
    "GP": lambda i, s, noisy: GPSampler(seed=s, deterministic_objective=not noisy),
}


def judge(method: str, instance: Instance, seeds: range, *, noisy: bool) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for seed in seeds:
        sampler = METHODS[method](instance, seed, noisy)
        done = run(instance, sampler, seed, noisy=noisy)
        candidates = done.believed(sampler) if noisy and isinstance(sampler, PlanSampler) else done.read_feasible()
        rows.append(
            {
                "sampler_ms": 1e3 * done.seconds,
                "to_99_pct": _trials_to(done, 0.99),
                "first": candidates[0] if candidates else None,
                "picked": done.confirmed(candidates) if noisy else candidates[0] if candidates else None,
            }
        )
    return _summary(instance, rows, noisy=noisy)


def _trials_to(done: Study, share: float) -> float:
    """Trials until one within the budget in truth has that share of the optimum's speed."""
    for k, mix in enumerate(done.mixes(), start=1):
        if done.instance.gap[mix] <= done.instance.budget and done.instance.share(mix) >= share:
            return k
    return math.inf


def _summary(instance: Instance, rows: list[dict[str, Any]], *, noisy: bool) -> dict[str, Any]:
    def share(mix: Mix | None) -> float:
        return 100 * instance.share(instance.reference() if mix is None or breaks(mix) else mix)

    def breaks(mix: Mix | None) -> bool:
        return mix is not None and instance.gap[mix] > OVERSHOOT * instance.budget

    found = {
        "share_pct": median(share(row["picked"]) for row in rows),
        "share_mean_pct": fmean(share(row["picked"]) for row in rows),
        "share_min_pct": min(share(row["picked"]) for row in rows),
        "to_99_pct": median(row["to_99_pct"] for row in rows),
        "sampler_ms": median(row["sampler_ms"] for row in rows),
        "studies": len(rows),
    }
    if noisy:
        found["overshoot_pct"] = 100 * sum(breaks(row["picked"]) for row in rows) / len(rows)
        found["overshoot_unconfirmed_pct"] = 100 * sum(breaks(row["first"]) for row in rows) / len(rows)
        found["share_unconfirmed_pct"] = median(share(row["first"]) for row in rows)
    return {k: None if v == math.inf else round(v, 2) for k, v in found.items()}


def modelopt(instance: Instance, choices: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fastest of ModelOpt's plans that is within the budget in truth; bf16 where none is."""
    plans = [tuple(plan[g] for g in instance.choices) for plan in choices.get(instance.name, ()) if plan]
    if not plans:
        return None
    kept = [mix for mix in dict.fromkeys(plans) if instance.gap[mix] <= instance.budget]
    shares = [100 * instance.share(mix) for mix in kept or [instance.reference()]]
    return {"share_pct": round(max(shares), 2), "plans": len(set(plans)), "plans_within_budget": len(kept)}


def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["table"], row["feasible"], row["method"], row["noisy"]


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each method, over tables and budgets: mean and worst of the median shares, and the part that overshoots."""
    found = []
    for noisy, method in itertools.product((False, True), dict.fromkeys(row["method"] for row in rows)):
        mine = [row for row in rows if row["noisy"] == noisy and row["method"] == method]
        if mine:
            shares = [row["share_pct"] for row in mine]
            one = {
                "method": method,
                "noisy": noisy,
                "cases": len(mine),
                "studies": sum(r.get("studies", 1) for r in mine),
            }
            one |= {"share_mean_pct": round(fmean(shares), 2), "share_worst_pct": min(shares)}
            for name in ("overshoot_pct", "overshoot_unconfirmed_pct"):
                if name in mine[0]:
                    one[name] = round(fmean(row[name] for row in mine), 1)
            found.append(one)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--methods", nargs="*", default=[name for name in METHODS if name != "GP"])
    parser.add_argument("--tables", nargs="*")
    parser.add_argument("--dry", action="store_true", help="write nothing; else rows of earlier runs are kept")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", ExperimentalWarning)  # of Optuna's GP
    tables = json.loads(TABLES.read_text())
    theirs = json.loads(MODELOPT.read_text()) if MODELOPT.is_file() else {}
    before = json.loads(RESULT.read_text())["rows"] if RESULT.is_file() and not options.dry else []
    rows = {key(row): row for row in before}

    def keep(row: dict[str, Any]) -> None:
        rows[key(row)] = row
        print(row, flush=True)
        if not options.dry:
            result = {"environment": describe_environment("cpu").to_json(), "trials": TRIALS}
            every = list(rows.values())
            write_text(RESULT, json.dumps(result | {"summary": summary(every), "rows": every}, indent=1) + "\n")

    chosen = {name: table for name, table in tables["tables"].items() if name in (options.tables or tables["tables"])}
    for instance in instances(chosen):
        case = {"table": instance.name, "feasible": instance.feasible}
        case |= {"noise_of_budget": round(instance.noise(instance.budget) / instance.budget, 3)}
        if "quiet" in instance.kinds and (found := modelopt(instance, theirs.get("choices", {}))) is not None:
            keep(case | {"method": f"ModelOpt {theirs['version']} auto_quantize", "noisy": False} | found)
        for method, kind in itertools.product(options.methods, instance.kinds):
            row = judge(method, instance, range(options.seeds), noisy=kind == "noisy")
            keep(case | {"method": method, "noisy": kind == "noisy"} | row)


if __name__ == "__main__":
    main()
