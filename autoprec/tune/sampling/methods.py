"""Who proposes the mixes: autoprec's own search, parts of it, or one of Optuna's samplers for comparison.

Optuna's TPE, GP and NSGA-II heed a trial's constraint; the others need not.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, Literal, get_args

from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, TPESampler
from optuna.trial import FrozenTrial

from autoprec.errors import UsageError
from autoprec.tune.sampling.encoding import Encoding
from autoprec.tune.sampling.history import MIX, ORIGIN, SEARCH, History
from autoprec.tune.sampling.objective import Objective
from autoprec.tune.sampling.plan_sampler import PlanSampler

#: ``rules``: the baselines alone.  ``milp``: they, and the solved front, bisected.  ``loop``: the same, then models of
#: time and loss that are refitted after each trial.  ``tpe``, ``gp``, ``nsga2``: Optuna's.  ``exhaustive``: every mix.
Method = Literal["rules", "milp", "loop", "tpe", "gp", "nsga2", "exhaustive"]
METHODS: tuple[str, ...] = get_args(Method)

#: More mixes than this aren't measured one by one.
MAX_EXHAUSTIVE = 2000
#: NSGA-II's own 50 would be the whole study.
_POPULATION = 10


class EveryMix(PlanSampler):
    """Proposes every mix once, in order; then it repeats."""

    def _propose(self, history: History, trials: Sequence[FrozenTrial], turn: int) -> dict[str, Any]:
        mixes = product(*map(range, self._encoding.sizes))
        mix = next((mix for mix in mixes if mix not in history.taken), None)
        if mix is None:
            return super()._propose(history, trials, turn)
        return {MIX: list(mix), ORIGIN: SEARCH}


def check_method(method: str) -> None:
    """Refuse an unknown method.

    Raises:
        UsageError: it is unknown.
    """
    if method not in METHODS:
        raise UsageError(f"method {method!r} is unknown; allowed: {', '.join(METHODS)}")


def method_sampler(
    method: str,
    encoding: Encoding,
    *,
    seed: int,
    noise: float,
    objective: Objective,
    defaults: Mapping[str, Any] | None = None,
) -> BaseSampler:
    """The sampler of a method.

    Args:
        method: one of :data:`METHODS`.
        encoding: of the space.
        seed: of all draws.
        noise: standard deviation of a measured gap.
        objective: what to look for.
        defaults: settings beside the mix → their values.

    Raises:
        UsageError: an unknown method, a space too large to measure every mix of, or an objective that it can't have.
    """
    check_method(method)
    if method == "exhaustive":
        if encoding.size > MAX_EXHAUSTIVE:
            raise UsageError(
                f"method 'exhaustive' would measure all {encoding.size:.3g} mixes of this space; it takes up to "
                f"{MAX_EXHAUSTIVE}. Pin sites (--keep GLOB=FORMAT), or take method 'loop'"
            )
        return EveryMix.of(encoding, objective.budget, noise=noise, seed=seed, objective=objective, defaults=defaults)
    if method in ("tpe", "gp", "nsga2") and objective.kind in ("loss", "front"):
        raise UsageError(
            f"method {method!r} looks for the largest speed within a loss budget; objective {objective.kind!r} needs "
            "method 'loop' or 'exhaustive'"
        )
    if method == "tpe":
        return TPESampler(seed=seed)
    if method == "gp":
        with warnings.catch_warnings():  # Optuna may still change how it is called
            warnings.simplefilter("ignore", ExperimentalWarning)
            return GPSampler(seed=seed, deterministic_objective=not noise)
    if method == "nsga2":
        return NSGAIISampler(seed=seed, population_size=_POPULATION)
    return PlanSampler.of(
        encoding,
        objective.budget,
        noise=noise,
        seed=seed,
        objective=objective,
        defaults=defaults,
        only_front=method == "milp",
    )


def trials_of(method: str, baselines: int, trials: int) -> int:
    """How many trials a study of the method has: of ``rules`` the baselines alone."""
    check_method(method)
    return min(trials, baselines) if method == "rules" else trials
