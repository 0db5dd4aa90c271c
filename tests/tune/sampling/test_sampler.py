from dataclasses import replace

import optuna
import pytest

from autoprec.errors import UsageError
from autoprec.graph.site import Site
from autoprec.plan import Plan
from autoprec.planner.problem import Edge, Option, Problem, ProblemGroup
from autoprec.tune.sampling.objective import Objective
from autoprec.tune.sampling.sampler import CONSTRAINT, PlanSampler, make_sampler, prior
from autoprec.tune.space import build_space


def _space():
    return build_space(
        [Site(module=name, op="linear", leaf=True, flops=10, num_params=n) for name, n in (("a", 1), ("b", 2))],
        Plan(rules=()),
        ("fp8_e4m3", "bf16", "fp16"),
        low_format="bf16",
    )


def _problem(space, fp8_s: float = 0.2) -> Problem:
    seconds = {"fp32": 1.0, "bf16": 0.5, "fp16": 0.5, "fp8_e4m3": fp8_s, "rules": 0.9}
    harms = {"fp32": 0.0, "bf16": 1e-6, "fp16": 1e-7, "fp8_e4m3": 1e-3, "rules": 0.0}
    groups = tuple(
        ProblemGroup(
            name=group.name,
            options=tuple(Option(format=f, harm=harms[f], cost_s=seconds[f]) for f in group.choices),
        )
        for group in space.groups
    )
    return Problem(groups=groups, edges=(Edge(a="a", b="b", cast_s=0.01),), fixed_s=1.0, kind="measured")


def test_the_prior_ranks_formats_by_their_error():
    space = _space()
    harms, times = prior(space)
    assert harms["a"]["fp32"] == times["a"]["fp32"] == 0
    assert harms["a"]["fp16"] < harms["a"]["bf16"] < harms["a"]["fp8_e4m3"]
    assert times["a"]["fp8_e4m3"] < times["a"]["bf16"] == times["a"]["fp16"] < 0
    assert set(harms) == set(times) == {group.name for group in space.groups}


def test_a_problem_says_what_is_fast():
    """Where fp8 is slow, the search doesn't ask for it in both layers."""
    space = _space()
    fp8 = {}
    for name, seconds in (("fast", 0.1), ("slow", 0.9)):
        sampler = make_sampler(space, 0, 0.01, problem=_problem(space, seconds))
        assert isinstance(sampler, PlanSampler)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        fp8[name] = 0
        for _ in range(4):
            trial = study.ask()
            params = {g.name: trial.suggest_categorical(g.name, g.choices) for g in space.groups}
            fp8[name] += list(params.values()).count("fp8_e4m3")
            trial.set_constraint(CONSTRAINT, -0.005)
            study.tell(trial, 1.5)
    assert fp8["slow"] == 0 < fp8["fast"]


def test_a_prediction_before_any_trial_is_the_problems():
    space = _space()
    sampler = make_sampler(space, 0, 0.01, problem=_problem(space))
    assert isinstance(sampler, PlanSampler)
    mix = {"a": "fp8_e4m3", "b": "bf16", space.groups[-1].name: "rules"}
    assert sampler.predict(mix).speedup == pytest.approx((1 + 3 * 1.0) / (1 + 0.2 + 0.5 + 0.9))


def test_a_choice_that_the_problem_took_away_comes_last():
    """It gives no finite numbers alone; the study still has its name."""
    space = _space()
    whole = _problem(space)
    without = tuple(replace(g, options=tuple(o for o in g.options if o.format != "fp8_e4m3")) for g in whole.groups)
    sampler = make_sampler(space, 0, 0.01, problem=replace(whole, groups=without))
    assert isinstance(sampler, PlanSampler)
    rest = {g.name: "fp32" for g in space.groups}
    assert sampler.predict(rest | {"a": "fp8_e4m3"}).speedup == pytest.approx(1.0)
    assert sampler.predict(rest | {"a": "fp8_e4m3"}).loss_gap > 3 * sampler.predict(rest | {"a": "bf16"}).loss_gap
    assert "fp8_e4m3" not in space.pruned(replace(whole, groups=without)).groups[0].choices


def test_a_problem_of_another_space_is_refused():
    space = _space()
    other = Problem(groups=(ProblemGroup(name="z", options=(Option(format="fp32", harm=0, cost_s=1),)),))
    with pytest.raises(UsageError, match="has no group 'a'"):
        make_sampler(space, 0, 0.01, problem=other)


def test_objectives_reach_the_sampler():
    space = _space()
    sampler = make_sampler(space, 0, 0.01, objective=Objective(kind="loss", budget=0.01, min_speedup=1.2))
    assert isinstance(sampler, PlanSampler)
    assert sampler.objective.min_speedup == 1.2
    assert make_sampler(space, 0, 0.01, objective="front").objective.kind == "front"
    with pytest.raises(UsageError, match="min_speedup"):
        make_sampler(space, 0, 0.01, objective="loss")
    with pytest.raises(UsageError, match="allowed: speed, loss, memory, front"):
        make_sampler(space, 0, 0.01, objective="pretty")
