"""Proposes the next mix to measure.

A layer's effect on time and on loss is nearly a sum over layers, so two small Gaussian processes with a linear part
learn from a few dozen trials what a per-parameter sampler needs hundreds for.  The next mix is the one with the best
expected gain in time that is likely to keep the loss.  Only :func:`make_sampler` is used elsewhere: another
:class:`optuna.samplers.BaseSampler` over the same categorical parameters can take its place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial
from scipy.special import ndtr

from autoprec.formats import FORMATS
from autoprec.tune.space import OTHER, RULES, Space
from autoprec.tune.storage import quiet_optuna
from autoprec.tune.surrogate import Surrogate, gap_surrogate, time_surrogate

#: Constraint of a trial: its loss gap less the budget.
CONSTRAINT = "loss_gap"
#: User attribute of a trial: standard deviation of its measured speed; 0 as value means that it wasn't timed.
SPEED_SD = "speed_sd"

#: Larger spaces are not listed in full; then the best mixes' neighbours and greedy solutions make the pool.
_MAX_LISTED = 4096
_DRAWS = 24

Costs = Mapping[str, Mapping[str, float]]


def make_sampler(space: Space, seed: int, budget: float, noise: float = 0.0) -> BaseSampler:
    """The sampler of a study over ``space``.

    Args:
        space: what may be chosen.
        seed: of all draws.
        budget: largest allowed loss gap.
        noise: standard deviation of a measured gap.
    """
    return PlanSampler(*prior(space), budget=budget, noise=noise, seed=seed)


def prior(space: Space) -> tuple[Costs, Costs]:
    """Guesses of ``(harm, time)`` of each choice against fp32, before anything is measured.

    Harm falls with the square of the rounding error, 2^-mantissa; time is a share of the step, negative where saved.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """What a mix is believed to be after all trials, its own noisy one among them."""

    speedup: float
    loss_gap: float
    loss_gap_sd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """Measured mixes as arrays; ``mixes`` are choice numbers, time is in units of the baseline's."""

    numbers: list[int]
    mixes: np.ndarray
    is_timed: np.ndarray
    time: np.ndarray
    time_sd: np.ndarray
    gap: np.ndarray


class PlanSampler(BaseSampler):
    """Samples one categorical parameter per group; measures no mix twice while there are others.

    The study's value is a speed to maximise, in units of the baseline's; its constraint :data:`CONSTRAINT` is the loss
    gap less the budget.

    Args:
        harms: group → choice → guessed loss gap; the first choice is the reference, with harm 0.
        times: group → choice → guessed change of the step's time, as a share of the baseline's.
        budget: largest allowed loss gap.
        noise: standard deviation of a measured gap.
        seed: of all draws.
    """

    def __init__(self, harms: Costs, times: Costs, *, budget: float, noise: float = 0.0, seed: int = 0) -> None:
        self._groups = {name: tuple(choices) for name, choices in times.items()}
        self._harms = _encode(harms, self._groups)
        self._times = _encode(times, self._groups)
        self._budget, self._noise = budget, noise
        self._rng, self._seed = np.random.default_rng(seed), seed

    def reseed_rng(self) -> None:
        self._rng = np.random.default_rng()
        self._seed = int(self._rng.integers(2**31))

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {name: CategoricalDistribution(choices) for name, choices in self._groups.items()}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """The loss scaler's numbers cost no time and aren't sums over layers: TPE moves them, by the loss gap alone."""
        with quiet_optuna():
            by_loss = optuna.create_study(sampler=TPESampler(seed=self._seed + trial.number, n_startup_trials=4))
        for done in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            if param_name in done.params and CONSTRAINT in done.constraints:
                by_loss.add_trial(
                    create_trial(
                        params={param_name: done.params[param_name]},
                        distributions={param_name: param_distribution},
                        value=done.constraints[CONSTRAINT],
                    )
                )
        return by_loss.ask({param_name: param_distribution}).params[param_name]

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        if not search_space:
            return {}
        trials = [t for t in study.get_trials(deepcopy=False) if self._groups.keys() <= t.params.keys()]
        seen = self._seen(trials)
        fitted = self._fit(seen)
        taken = {self._indices(t.params) for t in trials if t.state != TrialState.FAIL}
        feasible = seen.time[(seen.gap <= self._budget) & seen.is_timed]
        best = self._best(self._pool(seen, fitted, taken), fitted, np.min(feasible, initial=1.0))
        return {name: choices[k] for (name, choices), k in zip(self._groups.items(), best, strict=True)}

    def posterior(self, trials: Sequence[FrozenTrial]) -> dict[int, Belief]:
        """What measured mixes are believed to be, in the light of all: by the number of each mix's best trial."""
        seen = self._seen(trials)
        onehot = self._onehot(seen.mixes)
        (time, _), (gap, gap_sd) = (model.predict(onehot, seen.mixes) for model in self._fit(seen))
        return {
            number: Belief(speedup=1 / max(t, 1e-6), loss_gap=g, loss_gap_sd=sd)
            for number, t, g, sd in zip(seen.numbers, time.tolist(), gap.tolist(), gap_sd.tolist(), strict=True)
        }

    def _seen(self, trials: Sequence[FrozenTrial]) -> _Seen:
        best: dict[tuple[int, ...], FrozenTrial] = {}
        for trial in trials:
            if trial.state == TrialState.COMPLETE and CONSTRAINT in trial.constraints:
                # one mix with several scaler settings is judged by the best of them
                mix = self._indices(trial.params)
                if mix not in best or trial.constraints[CONSTRAINT] < best[mix].constraints[CONSTRAINT]:
                    best[mix] = trial
        done = list(best.values())
        gap = np.array([t.constraints[CONSTRAINT] + self._budget for t in done])
        speed = np.array([t.values[0] for t in done])
        sd = np.array([t.user_attrs.get(SPEED_SD, 0.01) for t in done])
        return _Seen(
            numbers=[t.number for t in done],
            mixes=np.array([self._indices(t.params) for t in done], dtype=int).reshape(len(done), len(self._groups)),
            is_timed=speed > 0,
            time=1 / np.maximum(speed, 0.05),
            time_sd=np.maximum(sd / np.maximum(speed, 0.05) ** 2, 0.003),
            # a diverged run says "far too much", not how much
            gap=np.clip(gap, -10 * self._budget, 10 * self._budget),
        )

    def _fit(self, seen: _Seen) -> tuple[Surrogate, Surrogate]:
        onehot, timed = self._onehot(seen.mixes), seen.is_timed
        return (
            time_surrogate(self._times, onehot[timed], seen.mixes[timed], seen.time[timed], seen.time_sd[timed]),
            gap_surrogate(self._harms, onehot, seen.mixes, seen.gap, self._budget, self._noise),
        )

    def _indices(self, params: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(choices.index(params[name]) for name, choices in self._groups.items())

    def _onehot(self, mixes: np.ndarray) -> np.ndarray:
        """``(n, groups)`` choice numbers as ``(n, all choices)`` zeros and ones."""
        columns = [np.eye(len(choices))[mixes[:, k]] for k, choices in enumerate(self._groups.values())]
        return np.concatenate(columns, axis=1) if columns else np.empty((len(mixes), 0))

    def _best(self, pool: np.ndarray, fitted: tuple[Surrogate, Surrogate], incumbent: float) -> np.ndarray:
        """The mix with the largest P(gap ≤ budget) · E[time saved on the incumbent]."""
        (time, time_sd), (gap, gap_sd) = (model.predict(self._onehot(pool), pool) for model in fitted)
        z = (incumbent - time) / time_sd
        gain = time_sd * (z * ndtr(z) + np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi))
        return pool[int(np.argmax(ndtr((self._budget - gap) / gap_sd) * gain))]

    def _pool(self, seen: _Seen, fitted: tuple[Surrogate, Surrogate], taken: set[tuple[int, ...]]) -> np.ndarray:
        """Mixes not measured yet; all mixes where each has been."""
        sizes = [len(choices) for choices in self._groups.values()]
        if math.prod(sizes) <= _MAX_LISTED:
            pool = list(product(*map(range, sizes)))
        else:
            order = np.lexsort((seen.time, ~seen.is_timed, seen.gap > self._budget))[:3]
            seeds = [tuple(seen.mixes[k]) for k in order] or [tuple(0 for _ in sizes)]
            pool = [mix for seed in seeds for mix in self._neighbours(seed, sizes)]
            pool += self._greedy(fitted, sizes)
        fresh = sorted({tuple(map(int, mix)) for mix in pool} - taken)
        return np.array(fresh or sorted(pool), dtype=int).reshape(-1, len(sizes))

    def _neighbours(self, mix: tuple[int, ...], sizes: Sequence[int]) -> list[tuple[int, ...]]:
        """All mixes that differ in one group, and for each one that differs in another group too."""
        near = []
        for k, size in enumerate(sizes):
            for choice in range(size):
                if choice != mix[k]:
                    one = (*mix[:k], choice, *mix[k + 1 :])
                    j = int(self._rng.integers(len(sizes)))
                    near += [one, (*one[:j], int(self._rng.integers(sizes[j])), *one[j + 1 :])]
        return near

    def _greedy(self, fitted: tuple[Surrogate, Surrogate], sizes: Sequence[int]) -> list[tuple[int, ...]]:
        """Cheapest mixes within the budget for draws of the models' linear parts: per group, time + λ · harm."""
        found = []
        edges = np.cumsum([0, *sizes])
        for draw in range(_DRAWS):
            scale = 0.0 if draw == 0 else 1.0
            time, harm = (
                model.mean + scale * model.sd * self._rng.standard_normal(len(model.mean)) for model in fitted
            )
            for price in np.geomspace(1e-3, 1e3, 25) / self._budget:
                cost = time + price * harm
                mix = tuple(int(np.argmin(cost[a:b])) for a, b in pairwise(edges))
                if sum(harm[a + k] for a, k in zip(edges[:-1], mix, strict=True)) <= self._budget:
                    found.append(mix)
                    break
        return found


def _encode(costs: Costs, groups: Mapping[str, tuple[str, ...]]) -> np.ndarray:
    return np.array([costs[name][choice] for name, choices in groups.items() for choice in choices], dtype=float)
