"""Proposes the next mix to measure.

A choice's effects on time and on loss are nearly sums over groups, and are known in proportion before the first trial.
So the solved front is bisected with real trials first; then two models with a linear part are refitted after each
trial, and the next mix is the one with the best expected gain that is likely to keep the limit.

All state is in the study's trials: a sampler in another process, or made anew, goes on where this one is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, TypedDict, Unpack

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from autoprec.tune.sampling.bisect import front_mixes, next_on_front
from autoprec.tune.sampling.encoding import Encoding, Numbers, encode_numbers
from autoprec.tune.sampling.history import (
    FRONT,
    MIX,
    ORIGIN,
    REPEAT,
    SEARCH,
    SETTINGS,
    History,
    Mix,
    read_history,
)
from autoprec.tune.sampling.objective import Belief, Beliefs, Objective
from autoprec.tune.sampling.pool import candidates
from autoprec.tune.sampling.settings import best_setting, is_turn, propose_settings, settings_of
from autoprec.tune.sampling.surrogate import Model, cost_model, gap_model

#: Trials that bisect the front.
_MAX_FRONT = 6
#: A mix is measured at most so often.
_MAX_REPEATS = 6
#: Standard deviations that the best mix must be inside the limit, where gaps are noisy: searching, and in the end.
_CAUTION, FINAL_CAUTION = 0.5, 1.0
_NEVER = 1e-12


class Options(TypedDict, total=False):
    """What a sampler may be told.

    Args:
        noise: standard deviation of a measured gap; 0 by default.
        seed: of all draws; 0 by default.
        objective: what to look for; by default the fastest within the budget.
        defaults: other parameters → their values until better ones are known.
        only_front: propose nothing but the solved front while a mix of it is left.
    """

    noise: float
    seed: int
    objective: Objective | None
    defaults: Mapping[str, Any] | None
    only_front: bool


class PlanSampler(BaseSampler):
    """Samples one categorical parameter per group; measures no mix twice, but on purpose.

    The study's value is what the objective makes large: speed (or the saving of bytes) in units of the reference's,
    0 where it wasn't measured.  Its constraint :data:`~autoprec.tune.sampling.history.CONSTRAINT` is the loss gap less
    the budget.

    Args:
        harms: group → choice → expected share in the loss gap, in any unit; the first choice is the reference.
        costs: group → choice → cost, as a share of the reference's whole cost.
        budget: largest allowed loss gap.
        casts: ``(group, group, cost)`` where the two store their numbers differently.
        fixed: cost that no choice changes; 1 where ``costs`` are changes against the reference.
        options: see :class:`Options`.

    Raises:
        UsageError: harms and costs name different choices, or a number can't be used.
    """

    def __init__(
        self,
        harms: Numbers,
        costs: Numbers,
        budget: float,
        *,
        casts: Sequence[tuple[str, str, float]] = (),
        fixed: float = 1.0,
        **options: Unpack[Options],
    ) -> None:
        self._start(encode_numbers(harms, costs, casts=casts, fixed=fixed), budget, options)

    @classmethod
    def of(cls, encoding: Encoding, budget: float, **options: Unpack[Options]) -> Self:
        """The sampler for a planner's problem, see :func:`~autoprec.tune.sampling.encoding.encode_problem`."""
        sampler = cls.__new__(cls)
        sampler._start(encoding, budget, options)
        return sampler

    def _start(self, encoding: Encoding, budget: float, options: Options) -> None:
        self.objective = options.get("objective") or Objective(kind="speed", budget=budget)
        self._encoding, self._budget = encoding, budget
        self._noise, self._seed = options.get("noise", 0.0), options.get("seed", 0)
        self._defaults = dict(options.get("defaults") or {})
        self._only_front = options.get("only_front", False)
        self._front = front_mixes(encoding)
        if self.objective.kind == "loss":
            self._front.reverse()

    def reseed_rng(self) -> None:
        self._seed = int(np.random.default_rng().integers(2**31))

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {name: CategoricalDistribution(values) for name, values in self._encoding.choices.items()}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        if not search_space:
            return {}
        trials = study.get_trials(deepcopy=False)
        history = read_history(self._encoding, trials, self._budget, trial.number)
        attributes = self._propose(history, trials, trial.number)
        for key, value in attributes.items():
            study._storage.set_trial_system_attr(trial._trial_id, key, value)
        return self._encoding.params(attributes[MIX])

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Settings: those that the trial is for, else the best known, else the defaults."""
        trials = study.get_trials(deepcopy=False)
        asked = settings_of(trials[trial.number]).get(param_name)
        for value in (
            asked,
            best_setting(self._encoding, trials, param_name, 2 * self._noise),
            self._defaults.get(param_name),
        ):
            if value is not None and _holds(param_distribution, value):
                return value
        sampler = optuna.samplers.RandomSampler(seed=self._seed + trial.number)
        return sampler.sample_independent(study, trial, param_name, param_distribution)

    def posterior(self, trials: Sequence[FrozenTrial]) -> dict[int, Belief]:
        """What measured mixes are believed to be, in the light of all, by trial.

        Of a mix that was tried with several settings, only the trials with the best ones are there.
        """
        history = read_history(self._encoding, trials, self._budget)
        beliefs = _listed(self._measured(history, self._models(history)))
        return {number: beliefs[row] for number, row in sorted(history.number.items())}

    def predict(self, params: Mapping[str, Any], trials: Sequence[FrozenTrial] = ()) -> Belief | None:
        """What is believed of a mix, measured or not; None if it isn't of this space."""
        mix = self._encoding.indices(params)
        if mix is None:
            return None
        models = self._models(read_history(self._encoding, trials, self._budget))
        return _listed(_predict(models, np.array([mix])))[0]

    def fitted(self, trials: Sequence[FrozenTrial]) -> tuple[Encoding, History, tuple[Model, Model]]:
        """The encoding, what was measured, and the models of cost and gap in its light; to read, for explanations."""
        history = read_history(self._encoding, trials, self._budget)
        return self._encoding, history, self._models(history)

    def _propose(self, history: History, trials: Sequence[FrozenTrial], turn: int) -> dict[str, Any]:
        """System attributes of the next trial."""
        models = self._models(history)
        mix = self._next_on_front(history, models)
        if mix is not None:
            return {MIX: list(mix), ORIGIN: FRONT}
        cost, gap = models
        if len(history.running):
            cost, gap = cost.believing(history.running), gap.believing(history.running)
        settings = self._next_settings(history, models, trials, turn)
        if settings is not None:
            return settings
        mix, origin = self._next_in_pool(history, (cost, gap), turn)
        row = history.row(mix)
        if origin == REPEAT and row is not None:  # of the same plan
            return {MIX: list(mix), ORIGIN: origin, SETTINGS: dict(history.settings[row])}
        return {MIX: list(mix), ORIGIN: origin}

    def _models(self, history: History) -> tuple[Model, Model]:
        timed = history.is_timed
        noise = self._noise / np.sqrt(np.maximum(history.repeats, 1.0))
        return (
            cost_model(self._encoding, history.mixes[timed], history.cost[timed], history.cost_sd[timed]),
            gap_model(self._encoding, history.mixes, history.gap, noise, self._budget),
        )

    def _measured(self, history: History, models: tuple[Model, Model]) -> Beliefs:
        """Of the measured mixes; where the models can't believe what was measured, that counts."""
        beliefs = _predict(models, history.mixes)
        noise = self._noise / np.sqrt(np.maximum(history.repeats, 1.0)) + 0.05 * np.abs(history.gap)
        is_odd = np.abs(history.gap - beliefs.gap) > 3 * np.hypot(noise, beliefs.gap_sd) + 0.05 * self._budget
        gap, gap_sd = np.where(is_odd, history.gap, beliefs.gap), np.where(is_odd, noise, beliefs.gap_sd)
        return Beliefs(beliefs.cost, beliefs.cost_sd, gap, gap_sd)

    def _next_on_front(self, history: History, models: tuple[Model, Model]) -> Mix | None:
        if history.num_from_front >= _MAX_FRONT and not self._only_front:
            return None
        kept = self.objective.allowed(self._measured(history, models), 0.0)
        outcome: dict[Mix, bool | None] = {tuple(mix): None for mix in history.running.tolist()}
        outcome |= {tuple(mix): bool(k) for mix, k in zip(history.mixes.tolist(), kept, strict=True)}
        outcome = {mix: outcome.get(mix) for mix in self._front if mix in history.taken}
        if self.objective.kind == "front":  # no limit cuts it: its middle, quarters, …
            outcome = dict.fromkeys(outcome, None)
        found = next_on_front(self._front, outcome)
        if found is None and self._only_front:
            return next((mix for mix in self._front if mix not in history.taken), None)
        return found

    def _best(self, history: History, models: tuple[Model, Model], turn: int) -> tuple[float, float, list[Mix]]:
        """Value and gap of the best mix that is allowed, else of the reference, and the best mixes."""
        beliefs = self._measured(history, models)
        value = self.objective.value(beliefs)
        allowed = self.objective.allowed(beliefs, _CAUTION if self._noise else 0.0, turn)
        order = np.lexsort((value, ~allowed))
        mixes = [tuple(mix) for mix in history.mixes[order].tolist()]
        if allowed.any():
            return float(value[order[0]]), float(beliefs.gap[order[0]]), mixes
        worst = float(np.max(value, initial=self._budget)) if self.objective.kind == "loss" else 1.0
        return worst, self._budget, mixes or [tuple(0 for _ in self._encoding.sizes)]

    def _next_in_pool(self, history: History, models: tuple[Model, Model], turn: int) -> tuple[Mix, str]:
        """The mix with the largest expected gain, and whether it is a repeat."""
        best, gap, mixes = self._best(history, models, turn)
        rng = np.random.default_rng([self._seed, turn])
        budgets = self.objective.solver_budgets(gap, turn)
        pool = candidates(self._encoding, *models, mixes, budgets, rng)
        is_new = np.array([tuple(mix) not in history.taken for mix in pool.tolist()], dtype=bool)
        fresh, again = pool[is_new], self._repeatable(history, models, best, is_last=not is_new.any())
        both = np.concatenate([fresh, again])
        gain = self.objective.acquisition(_predict(models, both), best, turn)
        if len(fresh) and gain.max() <= _NEVER:  # nothing promises anything: the safest that would be a gain
            beliefs = _predict(models, fresh)
            gain = -beliefs.gap - 1e6 * (self.objective.value(beliefs) >= best)
        k = int(np.argmax(gain))
        return tuple(both[k].tolist()), SEARCH if k < len(fresh) else REPEAT

    def _repeatable(self, history: History, models: tuple[Model, Model], best: float, *, is_last: bool) -> np.ndarray:
        """Measured mixes that would be the best if another measurement allowed them; all where there are no others."""
        if is_last:
            return history.mixes if len(history.mixes) else np.array([[0] * len(self._encoding.sizes)])
        if not self._noise:
            return history.mixes[:0]
        running = {tuple(mix) for mix in history.running.tolist()}
        idle = np.array([tuple(mix) not in running for mix in history.mixes.tolist()], dtype=bool)
        is_better = self.objective.value(self._measured(history, models)) < best
        return history.mixes[idle & is_better & (history.repeats < _MAX_REPEATS)]

    def _next_settings(
        self, history: History, models: tuple[Model, Model], trials: Sequence[FrozenTrial], turn: int
    ) -> dict[str, Any] | None:
        """Other settings for a mix that a lower loss would make, or keep, the best."""
        if not is_turn(history, turn):
            return None
        beliefs = self._measured(history, models)
        value = self.objective.value(beliefs)
        best, _, _ = self._best(history, models, turn)
        near = (value <= best) & (beliefs.gap <= 2 * self._budget)
        if self.objective.kind != "loss":  # a gap that is small already needs no better settings
            near &= beliefs.gap >= 0.7 * self._budget
        rows = [k for k in np.flatnonzero(near).tolist() if history.settings[k]]
        if not rows:
            return None
        row = min(rows, key=lambda k: float(value[k]))
        expected = {number: float(beliefs.gap[k]) - self._budget for number, k in history.number.items()}
        found = propose_settings(self._encoding, history, row, trials, expected, self._seed + turn)
        return None if found is None else {MIX: history.mixes[row].tolist(), ORIGIN: SEARCH, SETTINGS: found}


def _holds(distribution: BaseDistribution, value: Any) -> bool:
    try:
        return distribution._contains(distribution.to_internal_repr(value))
    except ValueError:  # what a categorical one says of any other value
        return False


def _predict(models: tuple[Model, Model], mixes: np.ndarray) -> Beliefs:
    (cost, cost_sd), (gap, gap_sd) = (model.predict(mixes) for model in models)
    return Beliefs(np.maximum(cost, 1e-6), cost_sd, gap, gap_sd)


def _listed(beliefs: Beliefs) -> list[Belief]:
    speed = 1 / beliefs.cost
    rows = (speed, speed**2 * beliefs.cost_sd, beliefs.gap, beliefs.gap_sd)
    return [
        Belief(speedup=a, speedup_sd=b, loss_gap=c, loss_gap_sd=d)
        for a, b, c, d in zip(*(row.tolist() for row in rows), strict=True)
    ]
