import itertools

import pytest

from autoprec.planner.problem import Edge, Option, Problem, ProblemGroup
from autoprec.planner.prune import never_helps

FP32 = Option(format="fp32", harm=0, cost_s=1.0, storage="fp32")
BF16 = Option(format="bf16", harm=1, cost_s=0.5, storage="bf16")
FP8 = Option(format="fp8", harm=2, cost_s=0.6, storage="bf16")


def problem(*options: Option, cast_s: float = 0.0) -> Problem:
    groups = (ProblemGroup(name="a", options=options), ProblemGroup(name="b", options=(FP32, BF16)))
    return Problem(groups=groups, edges=(Edge(a="a", b="b", cast_s=cast_s),))


def test_a_format_that_is_slower_and_worse_than_another_never_helps():
    assert never_helps(problem(FP32, BF16, FP8)) == {
        ("a", "fp8"): "fp8 takes 0.6 s a step and bf16 0.5 s, and its harm of 2 isn't below 1"
    }


def test_a_slow_format_with_less_harm_or_in_reach_of_the_margin_stays():
    less = Option(format="fp8", harm=0.5, cost_s=0.6, storage="bf16")
    near = Option(format="fp8", harm=2, cost_s=0.52, storage="bf16")
    assert not never_helps(problem(FP32, BF16, less))
    assert not never_helps(problem(FP32, BF16, near))
    assert never_helps(problem(FP32, BF16, near), margin=0.01)


def test_16_bit_that_saves_nothing_stays_while_it_may_save_a_cast():
    slow = Option(format="bf16", harm=1, cost_s=1.2, storage="bf16")
    assert ("a", "bf16") in never_helps(problem(FP32, slow, cast_s=0.1))
    assert not never_helps(problem(FP32, slow, cast_s=0.3))


def test_the_reference_stays_whatever_it_costs():
    free = Option(format="tf32", harm=0, cost_s=0.1, storage="fp32")
    assert not never_helps(problem(FP32, free))


@pytest.mark.parametrize("seed", range(10))
def test_no_best_mix_of_any_budget_has_a_choice_that_never_helps(seed, random_problem):
    problem = random_problem(seed, groups=5, options=4, cast_s=0.05)
    useless = never_helps(problem, margin=0.0)
    names = [group.name for group in problem.groups]
    mixes = [
        dict(zip(names, mix, strict=True))
        for mix in itertools.product(*[[o.format for o in group.options] for group in problem.groups])
    ]
    points = sorted(((problem.cost_s(mix), problem.harm(mix), mix) for mix in mixes), key=lambda point: point[:2])
    least = float("inf")
    for _, harm, mix in points:
        if harm < least:
            least = harm
            assert not useless.keys() & mix.items()
    assert seed > 0 or useless
