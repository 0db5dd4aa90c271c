import math

import optuna
import pytest

from autoprec.errors import UsageError
from autoprec.tune.sampling.encoding import encode_numbers
from autoprec.tune.sampling.history import CONSTRAINT
from autoprec.tune.sampling.methods import METHODS, check_method, method_sampler, trials_of
from autoprec.tune.sampling.objective import Objective

BUDGET = 0.01
FORMATS = ("fp32", "bf16", "fp8_e4m3")
HARM, TIME = (0.0, 0.0005, 0.005), (0.0, -0.12, -0.18)


def _numbers(groups: int) -> tuple[dict, dict]:
    """Later groups do more harm."""
    names = [f"g{k}" for k in range(groups)]
    harms = {n: {f: h * (k + 1) for f, h in zip(FORMATS, HARM, strict=True)} for k, n in enumerate(names)}
    return harms, {n: dict(zip(FORMATS, TIME, strict=True)) for n in names}


def _study(method: str, trials: int, groups: int = 4) -> optuna.Study:
    harms, costs = _numbers(groups)
    objective = Objective(kind="speed", budget=BUDGET)
    sampler = method_sampler(method, encode_numbers(harms, costs), seed=0, noise=0.0, objective=objective)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for _ in range(trials):
        trial = study.ask()
        params = {name: trial.suggest_categorical(name, FORMATS) for name in harms}
        trial.set_constraint(CONSTRAINT, sum(harms[n][f] for n, f in params.items()) - BUDGET)
        study.tell(trial, 1 / (1 + sum(costs[n][f] for n, f in params.items())))
    return study


@pytest.fixture(autouse=True)
def quiet():
    optuna.logging.set_verbosity(optuna.logging.WARNING)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_proposes_and_heeds_the_budget(method: str):
    """The best mix has fp8 in the groups that it harms least; each of Optuna's finds a fast one."""
    study = _study(method, 81 if method == "exhaustive" else 40)
    kept = [t for t in study.trials if t.constraints[CONSTRAINT] <= 0]
    assert max(t.value for t in kept) > 1.9  # all bf16
    late = study.trials[20:]
    if method in ("tpe", "gp", "nsga2"):
        assert sum(t.constraints[CONSTRAINT] <= 0 for t in late) > 0.4 * len(late)


def test_exhaustive_measures_every_mix_once():
    study = _study("exhaustive", 81)
    assert len({tuple(t.params.values()) for t in study.trials}) == 81


def test_exhaustive_refuses_a_space_that_is_too_large():
    with pytest.raises(UsageError, match=r"all 2\.19e\+03 mixes of this space; it takes up to 2000\. Pin sites"):
        _study("exhaustive", 0, groups=7)


def test_milp_measures_the_solved_front_alone():
    study = _study("milp", 8)
    harms, costs = _numbers(4)
    for trial in study.trials:
        harm = sum(harms[n][f] for n, f in trial.params.items())
        cost = sum(costs[n][f] for n, f in trial.params.items())
        # no single change is better in both
        for name in harms:
            for f in FORMATS:
                other_harm = harm - harms[name][trial.params[name]] + harms[name][f]
                other_cost = cost - costs[name][trial.params[name]] + costs[name][f]
                assert not (other_harm < harm - 1e-12 and other_cost < cost - 1e-12)


def test_rules_measures_the_baselines_alone():
    assert trials_of("rules", 3, 50) == 3
    assert trials_of("loop", 3, 50) == 50


def test_an_unknown_method_is_refused_with_those_there_are():
    with pytest.raises(UsageError, match="'anneal' is unknown; allowed: rules, milp, loop, tpe, gp, nsga2, exhaustive"):
        check_method("anneal")


@pytest.mark.parametrize("method", ["tpe", "gp", "nsga2"])
def test_optunas_samplers_refuse_an_objective_they_cannot_have(method: str):
    objective = Objective(kind="loss", budget=BUDGET, min_speedup=1.5)
    with pytest.raises(UsageError, match="needs method 'loop' or 'exhaustive'"):
        method_sampler(method, encode_numbers(*_numbers(2)), seed=0, noise=0.0, objective=objective)


def test_harms_and_costs_must_name_the_same_choices():
    harms, costs = _numbers(2)
    del harms["g1"]["bf16"]
    with pytest.raises(UsageError, match="group 'g1': harms for"):
        encode_numbers(harms, costs)


def test_casts_are_priced_between_unlike_neighbours():
    encoding = encode_numbers(*_numbers(2), casts=(("g0", "g1", 0.25),))
    like, unlike = encoding.base_cost(encoding_mixes(encoding, ("bf16", "fp8_e4m3"), ("fp32", "bf16")))
    assert like == 1.0  # fp8 gives 16-bit results
    assert math.isclose(unlike, 1.25)


def encoding_mixes(encoding, *mixes):
    import numpy as np

    return np.array([encoding.indices(dict(zip(("g0", "g1"), mix, strict=True))) for mix in mixes])
