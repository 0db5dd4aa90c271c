"""The sampler of a study: what is known of a space before the first trial, and who proposes its mixes."""

from __future__ import annotations

from collections.abc import Mapping

from optuna.samplers import BaseSampler

from autoprec.formats import FORMATS
from autoprec.planner.problem import Problem
from autoprec.tune.sampling.encoding import Encoding, encode_numbers, encode_problem
from autoprec.tune.sampling.history import CONSTRAINT, ORIGIN, REPEAT, SPEED_SD
from autoprec.tune.sampling.methods import method_sampler
from autoprec.tune.sampling.objective import Belief, Kind, Objective
from autoprec.tune.sampling.plan_sampler import PlanSampler
from autoprec.tune.space import OTHER, RULES, Space

__all__ = ["CONSTRAINT", "ORIGIN", "REPEAT", "SPEED_SD", "Belief", "PlanSampler", "make_sampler", "prior"]

Costs = Mapping[str, Mapping[str, float]]


def make_sampler(
    space: Space,
    seed: int,
    budget: float,
    noise: float = 0.0,
    *,
    problem: Problem | None = None,
    method: str = "loop",
    objective: Kind | Objective = "speed",
) -> BaseSampler:
    """The sampler of a study over ``space``.

    Args:
        space: what may be chosen.
        seed: of all draws.
        budget: largest allowed loss gap.
        noise: standard deviation of a measured gap.
        problem: harms and costs of its choices; None takes the guesses of :func:`prior`.
        method: see :data:`~autoprec.tune.sampling.methods.METHODS`.
        objective: what to look for; ``loss`` needs an :class:`~autoprec.tune.sampling.objective.Objective`.

    Raises:
        UsageError: an unknown method or objective, or one that can't be used here.
    """
    wanted = objective if isinstance(objective, Objective) else Objective(kind=objective, budget=budget)
    encoding = encoding_of(space, problem)
    return method_sampler(method, encoding, seed=seed, noise=noise, objective=wanted, defaults=space.defaults())


def plan_sampler(
    space: Space, budget: float, noise: float, *, problem: Problem | None = None, objective: Kind | Objective = "speed"
) -> PlanSampler:
    """What the trials of a study say together, whatever proposed them: for beliefs and predictions."""
    wanted = objective if isinstance(objective, Objective) else Objective(kind=objective, budget=budget)
    return PlanSampler.of(encoding_of(space, problem), budget, noise=noise, objective=wanted)


def encoding_of(space: Space, problem: Problem | None) -> Encoding:
    """The space's groups and choices with the problem's numbers, or with guesses."""
    choices = {group.name: group.choices for group in space.groups}
    return encode_numbers(*prior(space)) if problem is None else encode_problem(problem, choices)


def prior(space: Space) -> tuple[Costs, Costs]:
    """Guesses of ``(harm, cost)`` of each choice against fp32, where nobody priced them.

    Harm falls with the square of the rounding error, 2^-mantissa; cost is a change of the step's time as a share of
    the fp32 step.
    """
    harms: dict[str, dict[str, float]] = {}
    times: dict[str, dict[str, float]] = {}
    for group in space.groups:
        # kernels whose FLOPs aren't counted, and small ones, still take time
        share = 0.15 if group.name == OTHER else max(0.85 * group.flops_share, 0.02)
        harms[group.name], times[group.name] = {}, {}
        for choice in group.choices:
            low = FORMATS[space.low_format if choice == RULES else choice]
            harm = 0.0 if low.name == "fp32" else share * 4.0**-low.mantissa_bits
            harms[group.name][choice] = harm * (0.1 if choice == RULES else 1.0)
            times[group.name][choice] = -share * (1 - max(0.3, low.bits / 32)) * 0.7
    return harms, times
