import itertools
import math

import pytest

from autoprec.errors import UsageError
from autoprec.planner import front as planner
from autoprec.planner.front import REL_GAP, front, solve
from autoprec.planner.problem import Option, Problem, ProblemGroup

BUDGETS = (0.0, 1e-4, 0.01, 0.3, math.inf)
REFERENCE = {f"g{k}": "f0" for k in range(6)}


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("seed", range(8))
def test_no_mix_is_cheaper_by_more_than_the_gap(seed, budget, random_problem, best_cost):
    problem = random_problem(seed, groups=6, options=4)
    found = solve(problem, budget)
    best = best_cost(problem, budget)
    assert found.harm <= budget * (1 + 1e-6)
    assert found.cost_s <= best * (1 + REL_GAP)
    assert found.is_proven
    assert found.cost_s * (1 - found.gap) <= best + 1e-9
    assert found.cost_s == problem.cost_s(found.mix)
    assert found.harm == problem.harm(found.mix)


@pytest.mark.parametrize("seed", range(6))
def test_pins_hold_and_the_rest_is_solved_around_them(seed, random_problem, best_cost):
    problem = random_problem(seed, groups=6, options=4)
    pins = {"g1": "f2", "g4": "f0"}
    found = solve(problem, 1.5, pins=pins)
    assert found.mix["g1"] == "f2"
    assert found.mix["g4"] == "f0"
    assert found.cost_s <= best_cost(problem, 1.5, pins) * (1 + REL_GAP)


def test_a_budget_of_nothing_gives_the_reference_where_all_else_harms(random_problem):
    assert solve(random_problem(0, groups=6, options=4), 0.0).mix == REFERENCE


def test_a_budget_that_no_mix_keeps_is_refused_with_the_least_harm(random_problem):
    problem = random_problem(0, groups=6, options=4)
    harm = problem.groups[2].option("f3").harm
    with pytest.raises(UsageError, match=rf"the least harmful has {harm:.4g} with g2=f3"):
        solve(problem, harm / 2, pins={"g2": "f3"})
    with pytest.raises(UsageError, match="no mix has a harm of -1"):
        solve(problem, -1.0)
    with pytest.raises(UsageError, match="no mix has a harm of nan"):
        solve(problem, math.nan)


@pytest.mark.parametrize(("pins", "says"), [({"x": "f0"}, "no group 'x'"), ({"g0": "f9"}, "allowed: f0, f1, f2")])
def test_a_pin_that_names_nothing_is_refused(pins, says, random_problem):
    problem = random_problem(0, groups=4, options=3)
    for call in (lambda: solve(problem, 1.0, pins=pins), lambda: front(problem, pins=pins)):
        with pytest.raises(UsageError, match=says):
            call()


def test_without_time_the_answer_says_how_far_it_may_be_off(random_problem, best_cost):
    found = [solve(random_problem(seed, groups=6, options=4), 0.1, time_limit_s=0.0) for seed in range(8)]
    assert {one.method for one in found} == {"lagrange"}
    assert not all(one.is_proven for one in found)
    for seed, one in enumerate(found):
        assert one.cost_s * (1 - one.gap) <= best_cost(random_problem(seed, groups=6, options=4), 0.1)


def test_a_solver_that_gives_junk_is_not_believed(monkeypatch, random_problem, best_cost):
    problem = random_problem(3, groups=6, options=4)
    real = planner.pack

    def junk(arrays, budget, **options):
        found = real(arrays, budget, **options)
        return type(found)(0 * found.choice + arrays.allowed.shape[1] - 1, -math.inf)

    monkeypatch.setattr(planner, "pack", junk)
    for budget in BUDGETS:
        found = solve(problem, budget)
        assert found.harm <= budget
        assert found.cost_s <= 1.1 * best_cost(problem, budget)


def test_beyond_the_exact_solvers_reach_prices_answer(monkeypatch, random_problem):
    monkeypatch.setattr(planner, "pack", None)
    problem = random_problem(0, groups=planner.MAX_EXACT_GROUPS + 1, options=3)
    found = solve(problem, 1.0)
    assert found.method == "lagrange"
    assert found.harm <= 1.0 * (1 + 1e-6)
    assert 0 <= found.gap < 0.05


def test_the_front_is_the_best_of_all_mixes_for_its_harms(random_problem, best_cost):
    problem = random_problem(1, groups=6, options=4)
    found = front(problem)
    assert len(found) > 8
    for cheaper, dearer in itertools.pairwise(found):
        assert cheaper.cost_s < dearer.cost_s
        assert cheaper.harm > dearer.harm
    for one in found:
        assert one.cost_s <= best_cost(problem, one.harm) * (1 + 2 * REL_GAP)
    assert found[0].cost_s <= best_cost(problem, 100.0) * (1 + REL_GAP)
    assert found[-1].mix == REFERENCE


def test_the_front_keeps_a_reference_that_another_mix_beats():
    options = (Option(format="fp32", harm=0, cost_s=2), Option(format="tf32", harm=0, cost_s=1))
    problem = Problem(groups=(ProblemGroup(name="a", options=options),))
    assert [(one.mix["a"], one.method) for one in front(problem)] == [("tf32", "lagrange"), ("fp32", "reference")]


def test_the_front_of_one_choice_is_that_mix(random_problem):
    problem = random_problem(0, groups=3, options=1)
    assert [one.mix for one in front(problem)] == [{"g0": "f0", "g1": "f0", "g2": "f0"}]


def test_pins_hold_in_the_front(random_problem):
    found = front(random_problem(4, groups=6, options=4), pins={"g3": "f2"})
    assert {one.mix["g3"] for one in found} == {"f2"}
    assert len(found) > 3


def test_the_same_question_has_the_same_answer(random_problem):
    problem = random_problem(7, groups=30, options=5)
    assert front(problem, 8) == front(problem, 8)


def test_a_front_needs_budgets(random_problem):
    with pytest.raises(UsageError, match="num_budgets is 0"):
        front(random_problem(0, groups=2, options=2), 0)


def test_an_unknown_gap_is_null_in_json(random_problem):
    found = solve(random_problem(0, groups=3, options=2), 1.0)
    assert found.to_json()["gap"] == found.gap
    assert planner.Solution(mix={}, cost_s=1, harm=0, method="reference").to_json()["gap"] is None
