"""Settings beside the mix: the loss scaler's and the recipes' numbers.

They cost no time and aren't sums over layers, so that they are moved only at mixes where a lower loss would win, in a
few trials; all other trials take the best ones known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, create_trial

from autoprec.tune.sampling.encoding import Encoding
from autoprec.tune.sampling.history import CONSTRAINT, SETTINGS, History, Mix, tries_settings
from autoprec.tune.studies.storage import quiet_optuna

#: Trials that a study spends on settings, and how many trials there are for one of them.
_MAX_TRIALS, _EVERY = 10, 4
_STARTUP, _TRIES = 4, 20


def is_turn(history: History, turn: int) -> bool:
    """Whether the trial of this number may try settings."""
    return bool(history.distributions) and history.num_settings < _MAX_TRIALS and turn % _EVERY == 0


def propose_settings(
    encoding: Encoding,
    history: History,
    row: int,
    trials: Sequence[FrozenTrial],
    expected: Mapping[int, float],
    seed: int,
) -> dict[str, Any] | None:
    """Settings that weren't tried yet for a mix, by TPE; None where it finds none.

    Args:
        encoding: of the mixes.
        history: of the study.
        row: the mix, in the history.
        trials: of the study.
        expected: trial → constraint that its mix is expected to have; what differs from it is the settings' doing.
        seed: of the draws.
    """
    shapes = {name: history.distributions[name] for name, _ in history.settings[row]}
    mix = tuple(history.mixes[row].tolist())
    tried = [
        {name: t.params[name] for name in shapes}
        for t in trials
        if encoding.indices(t.params) == mix and shapes.keys() <= t.params.keys()
    ]
    with quiet_optuna():
        study = optuna.create_study(sampler=TPESampler(seed=seed, n_startup_trials=_STARTUP))
        for done in trials:
            known = {name: value for name, value in done.params.items() if name in shapes}
            if known and done.number in expected:
                study.add_trial(
                    create_trial(
                        params=known,
                        distributions={name: done.distributions[name] for name in known},
                        value=done.constraints[CONSTRAINT] - expected[done.number],
                    )
                )
        for _ in range(_TRIES):
            drawn = study.ask(dict(shapes)).params
            if drawn not in tried:
                return drawn
    return None


def best_setting(encoding: Encoding, trials: Sequence[FrozenTrial], name: str, margin: float) -> Any:
    """Of the trial that tried settings and came out furthest below what its mix gave before; None where none did.

    Args:
        encoding: of the mixes.
        trials: of the study.
        name: of the setting.
        margin: differences of the loss gap up to this are chance.
    """
    gaps: dict[Mix, float] = {}
    found, least = None, -margin
    for trial in trials:
        mix = encoding.indices(trial.params)
        if mix is None or not trial.state.is_finished() or CONSTRAINT not in trial.constraints:
            continue
        gap = trial.constraints[CONSTRAINT]
        change = gap - gaps.setdefault(mix, gap)
        if tries_settings(trial) and name in trial.params and change < least:
            found, least = trial.params[name], change
    return found


def settings_of(trial: FrozenTrial) -> dict[str, Any]:
    """The settings that a trial was proposed with."""
    return trial.system_attrs.get(SETTINGS, {})
