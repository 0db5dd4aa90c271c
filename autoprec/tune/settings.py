"""Settings beside the mix: the loss scaler's and the recipes' numbers.

They cost no time and aren't sums over layers, so that they are moved only at mixes where a lower loss would win, in a
few trials; all other trials take the best ones known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from autoprec.tune.history import CONSTRAINT, SETTINGS
from autoprec.tune.storage import quiet_optuna

#: Trials that a study spends on settings, and how many others come between two.
MAX_TRIALS, EVERY = 10, 4
_STARTUP, _TRIES = 4, 20


def propose_settings(
    trials: Sequence[FrozenTrial],
    believed: Mapping[int, float],
    distributions: Mapping[str, BaseDistribution],
    tried: Sequence[Mapping[str, Any]],
    seed: int,
) -> dict[str, Any] | None:
    """Settings that weren't tried yet, by TPE; None where it finds none.

    Args:
        trials: of the study.
        believed: trial → loss gap that its mix is expected to have, which isn't the settings' doing.
        distributions: of the mix's settings.
        tried: what the mix was already measured with.
        seed: of the draws.
    """
    with quiet_optuna():
        study = optuna.create_study(sampler=TPESampler(seed=seed, n_startup_trials=_STARTUP))
        for done in trials:
            known = {name: value for name, value in done.params.items() if name in distributions}
            if done.state == TrialState.COMPLETE and known and done.number in believed:
                gap = done.constraints[CONSTRAINT] - believed[done.number]
                shapes = {name: done.distributions[name] for name in known}
                study.add_trial(create_trial(params=known, distributions=shapes, value=gap))
        for _ in range(_TRIES):
            drawn = study.ask(dict(distributions)).params
            if drawn not in tried:
                return drawn
    return None


def settings_of(trial: FrozenTrial) -> dict[str, Any]:
    """The settings that a trial was proposed with."""
    return trial.system_attrs.get(SETTINGS, {})
