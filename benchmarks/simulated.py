"""A study whose trials only sleep: real storages, sampler and turns over a made-up, deterministic objective.

``many_workers.py`` and ``postgres_kills.py`` run it; it trains nothing.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState

from autoprec.tune.sampling.sampler import CONSTRAINT, SPEED_SD, PlanSampler
from autoprec.tune.studies.reclaim import GIVEN_UP, WITHDRAWN, evaluation_of, has_ended, planned
from autoprec.tune.studies.storage import open_study
from autoprec.tune.studies.turns import Turns

BUDGET = 0.005
FORMATS = ("fp32", "bf16", "fp8", "nvfp4")
NUM_GROUPS = 10
#: Attribute of a trial that repeats another's figures instead of measuring.
COPY = "copy"
_POLL_S = 0.2


@dataclass(frozen=True)
class World:
    """What the trials measure, and what the sampler is told of it, which is 5% off."""

    harms: dict[str, dict[str, float]]
    costs: dict[str, dict[str, float]]
    told_costs: dict[str, dict[str, float]]

    @classmethod
    def make(cls, seed: int = 0) -> World:
        rng = np.random.default_rng(seed)
        shares = rng.dirichlet(np.full(NUM_GROUPS, 2.0)) * 0.9
        sensitivity = rng.lognormal(0.0, 1.0, NUM_GROUPS)
        harms, costs, told = {}, {}, {}
        for k in range(NUM_GROUPS):
            name = f"group{k}"
            saved = shares[k] * np.array([0.0, 0.45, 0.65, 0.75])
            harm = sensitivity[k] * BUDGET / NUM_GROUPS * np.array([0.0, 0.05, 0.8, 3.0])
            harms[name] = dict(zip(FORMATS, harm.tolist(), strict=True))
            costs[name] = dict(zip(FORMATS, (-saved).tolist(), strict=True))
            told[name] = dict(zip(FORMATS, (-saved * rng.normal(1, 0.05, 4)).tolist(), strict=True))
        return cls(harms=harms, costs=costs, told_costs=told)

    def measure(self, mix: dict[str, str]) -> tuple[float, float]:
        """Speed in units of fp32's, and loss gap: sums over groups, and a little that isn't."""
        cost = sum(self.costs[name][choice] for name, choice in mix.items())
        gap = sum(self.harms[name][choice] for name, choice in mix.items())
        low = sum(choice != "fp32" for choice in mix.values())
        return 1 / (1 + cost), gap * (1 + 0.02 * low)


@dataclass(frozen=True)
class Settings:
    """Of one worker.

    Args:
        storage: URL or path.
        trials: wanted in all.
        trial_s: seconds that a trial sleeps.
        seed: of the sampler.
    """

    storage: str
    trials: int
    trial_s: float
    seed: int = 0


def work(settings: Settings) -> None:
    """One worker's life."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    world = World.make()
    study = open_study("simulated", settings.storage, Path(), {"world": 0})
    study.sampler = PlanSampler(world.harms, world.told_costs, BUDGET, seed=settings.seed)
    with Turns(study, settings.trials) as turns:
        for name in FORMATS[:2]:
            turns.plan(f"baseline {name}", dict.fromkeys(world.costs, name), {"name": name})
        while turns.num_ended() < settings.trials:
            trial = turns.take()
            if trial is None:
                time.sleep(_POLL_S)
                continue
            mix = {name: trial.suggest_categorical(name, FORMATS) for name in world.costs}
            if not turns.settle(trial, mix):
                continue
            speed, gap = world.measure(mix)
            if mix in [t.params for t in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))]:
                # it was measured while the sampler chose it
                trial.set_user_attr(COPY, True)
            else:
                time.sleep(settings.trial_s)
            trial.set_user_attr(SPEED_SD, 0.001)
            trial.set_constraint(CONSTRAINT, gap - BUDGET)
            turns.finish(trial, speed)


def start(settings: Settings) -> multiprocessing.process.BaseProcess:
    """A worker process, forked from a server that has imported what it needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["simulated"])
    process = context.Process(target=work, args=(settings,))
    process.start()
    return process


def num_ended(study: optuna.Study) -> int:
    """Evaluations that are over."""
    return sum(has_ended(trial) for trial in study.get_trials(deepcopy=False))


def census(trials: list[FrozenTrial]) -> dict[str, Any]:
    """What became of each evaluation."""
    evaluations: dict[str, list[FrozenTrial]] = {}
    for trial in trials:
        if WITHDRAWN not in trial.user_attrs and planned(trial):
            evaluations.setdefault(evaluation_of(trial), []).append(trial)
    ends = {name: sum(has_ended(trial) for trial in attempts) for name, attempts in evaluations.items()}
    measured = [t for t in trials if t.state == TrialState.COMPLETE and COPY not in t.user_attrs]
    mixes = Counter(tuple(sorted(t.params.items())) for t in measured)
    return {
        "evaluations": len(evaluations),
        "not_ended_once": {name: count for name, count in ends.items() if count != 1},
        "complete": sum(trial.state == TrialState.COMPLETE for trial in trials),
        "given_up": sum(GIVEN_UP in trial.user_attrs and trial.state == TrialState.FAIL for trial in trials),
        "tried_again": sum(len(attempts) - 1 for attempts in evaluations.values()),
        "died_before_a_mix": sum(
            trial.state == TrialState.FAIL and WITHDRAWN not in trial.user_attrs and not planned(trial)
            for trial in trials
        ),
        "withdrawn": dict(Counter(t.user_attrs[WITHDRAWN] for t in trials if WITHDRAWN in t.user_attrs)),
        "left_open": sum(not trial.state.is_finished() for trial in trials),
        "copies": sum(COPY in trial.user_attrs for trial in trials),
        "measured_twice": sum(count - 1 for count in mixes.values()),
        "best": best(trials),
    }


def best(trials: list[FrozenTrial]) -> float:
    """Speed of the fastest mix within the budget."""
    return max(
        (t.values[0] for t in trials if t.state == TrialState.COMPLETE and t.constraints[CONSTRAINT] <= 0), default=0.0
    )
