"""What a study knows: its trials as arrays, repeats of one plan merged, and the mixes that are being measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from optuna.trial import FrozenTrial, TrialState

from autoprec.tune.sampling.encoding import Encoding
from autoprec.tune.studies.reclaim import GIVEN_UP

#: Constraint of a trial: its loss gap less the budget.
CONSTRAINT = "loss_gap"
#: User attribute of a trial: standard deviation of its measured speed; 0 as value means that it wasn't timed.
SPEED_SD = "speed_sd"
#: System attributes of a trial: why the sampler proposed it (only a repeat is measured again), its mix, before the
#: parameters are stored one by one, and the settings that it tries.
ORIGIN, MIX, SETTINGS = "autoprec:origin", "autoprec:mix", "autoprec:settings"
FRONT, SEARCH, REPEAT = "front", "search", "repeat"

_SLOWEST = 0.01
#: A diverged run says "far too much", not how much.
_WORST_GAP = 10.0

Mix = tuple[int, ...]
Settings = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class History:
    """Measured mixes as arrays, n of them; a mix that was tried with several settings counts with the best ones.

    Args:
        mixes: choice numbers, ``(n, G)``.
        settings: of each mix, what it was measured with beside the groups' choices.
        gap, repeats: mean loss gap and how often it was measured, ``(n,)``.
        is_timed: whether the cost is known, ``(n,)``.
        cost, cost_sd: in units of the reference's, ``(n,)``.
        number: trial → row of ``mixes``.
        running: mixes that are being measured, ``(m, G)``.
        taken: mixes that are measured, being measured or waiting.
        num_from_front: trials that the front proposed, running ones among them.
        distributions: of the settings.
        num_settings: trials that tried settings.
    """

    mixes: np.ndarray
    settings: list[Settings]
    gap: np.ndarray
    repeats: np.ndarray
    is_timed: np.ndarray
    cost: np.ndarray
    cost_sd: np.ndarray
    number: dict[int, int]
    running: np.ndarray
    taken: frozenset[Mix]
    num_from_front: int
    distributions: dict[str, Any]
    num_settings: int

    def row(self, mix: Sequence[int]) -> int | None:
        """Where a mix is, if it was measured."""
        rows = np.flatnonzero((self.mixes == np.asarray(mix)).all(axis=1))
        return int(rows[0]) if len(rows) else None


def read_history(encoding: Encoding, trials: Sequence[FrozenTrial], budget: float, number: int = -1) -> History:
    """The trials that chose from these groups.

    Args:
        encoding: of the groups.
        trials: of the study.
        budget: which the constraint is relative to.
        number: of the trial that asks, which isn't counted.
    """
    merged: dict[tuple[Mix, Settings], list[FrozenTrial]] = defaultdict(list)
    copies: dict[int, tuple[Mix, Settings]] = {}
    running: dict[Mix, None] = {}
    taken: set[Mix] = set()
    distributions: dict[str, Any] = {}
    for trial in trials:
        mix = _mix_of(encoding, trial)
        if mix is None or trial.number == number:
            continue
        if trial.state == TrialState.FAIL:
            if GIVEN_UP in trial.user_attrs:  # it took its process down again and again
                taken.add(mix)
            continue
        taken.add(mix)
        if trial.state == TrialState.RUNNING:
            running[mix] = None
        if trial.state == TrialState.COMPLETE and CONSTRAINT in trial.constraints:
            key = mix, _settings_of(encoding, trial.params)
            distributions |= {name: trial.distributions[name] for name, _ in key[1]}
            # a plan that came up again without a purpose wasn't measured again
            if key in merged and trial.system_attrs.get(ORIGIN) != REPEAT:
                copies[trial.number] = key
            else:
                merged[key].append(trial)
    best = _best_settings(merged)
    rows = {mix: k for k, mix in enumerate(best)}
    read = [_Reading(merged[mix, settings], budget) for mix, settings in best.items()]
    number_of = {t.number: rows[mix] for (mix, settings), done in merged.items() if best[mix] == settings for t in done}
    number_of |= {k: rows[mix] for k, (mix, settings) in copies.items() if best[mix] == settings}
    groups = len(encoding.choices)
    return History(
        mixes=np.array(list(best), dtype=int).reshape(len(best), groups),
        settings=list(best.values()),
        gap=np.array([r.gap for r in read]),
        repeats=np.array([r.count for r in read], dtype=float),
        is_timed=np.array([r.cost > 0 for r in read], dtype=bool),
        cost=np.array([r.cost for r in read]),
        cost_sd=np.array([r.cost_sd for r in read]),
        number=number_of,
        running=np.array(list(running), dtype=int).reshape(len(running), groups),
        taken=frozenset(taken),
        num_from_front=sum(t.system_attrs.get(ORIGIN) == FRONT for t in trials if t.state != TrialState.FAIL),
        distributions=distributions,
        num_settings=sum(tries_settings(t) for t in trials),
    )


def tries_settings(trial: FrozenTrial) -> bool:
    """Whether the trial is for its settings; a repeat has those of the plan that it repeats."""
    return SETTINGS in trial.system_attrs and trial.system_attrs.get(ORIGIN) != REPEAT


class _Reading:
    """The mean of one plan's trials."""

    def __init__(self, done: Sequence[FrozenTrial], budget: float) -> None:
        gaps = [t.constraints[CONSTRAINT] + budget for t in done]
        self.gap = float(np.clip(np.mean(gaps), -_WORST_GAP * budget, _WORST_GAP * budget))
        self.count = len(done)
        timed = [t for t in done if t.values[0] > 0]
        speed = np.array([max(t.values[0], _SLOWEST) for t in timed])
        sd = np.array([t.user_attrs.get(SPEED_SD, 0.0) for t in timed])
        self.cost, self.cost_sd = 0.0, 0.0
        if timed:
            each = np.maximum(sd / speed**2, 1e-3 / speed)
            self.cost = float(np.average(1 / speed, weights=each**-2))
            self.cost_sd = float((each**-2).sum() ** -0.5)


def _mix_of(encoding: Encoding, trial: FrozenTrial) -> Mix | None:
    """From its parameters; of one that has just begun from what it was proposed as, or enqueued with."""
    known = encoding.indices(trial.params)
    if known is not None or trial.state.is_finished():
        return known
    proposed = trial.system_attrs.get(MIX)
    if proposed is not None and len(proposed) == len(encoding.choices):
        return tuple(proposed)
    return encoding.indices({**trial.system_attrs.get("fixed_params", {}), **trial.params})


def _settings_of(encoding: Encoding, params: Mapping[str, Any]) -> Settings:
    return tuple(sorted((name, value) for name, value in params.items() if name not in encoding.choices))


def _best_settings(merged: Mapping[tuple[Mix, Settings], Sequence[FrozenTrial]]) -> dict[Mix, Settings]:
    best: dict[Mix, tuple[float, Settings]] = {}
    for (mix, settings), done in merged.items():
        gap = float(np.mean([t.constraints[CONSTRAINT] for t in done]))
        if mix not in best or gap < best[mix][0]:
            best[mix] = gap, settings
    return {mix: settings for mix, (_, settings) in best.items()}
