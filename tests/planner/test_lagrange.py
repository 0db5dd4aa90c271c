import numpy as np
import pytest

from autoprec.planner.arrays import encode
from autoprec.planner.knapsack import pack
from autoprec.planner.lagrange import cheapest
from autoprec.planner.problem import ANY_STORAGE, Option, Problem, ProblemGroup

BUDGETS = (0.0, 1e-4, 0.01, 0.3, 10.0)


def evaluated(arrays, choice):
    mix = arrays.mix(choice)
    return arrays.problem.cost_s(mix), arrays.problem.harm(mix)


@pytest.mark.parametrize("seed", range(12))
def test_bounds_hold_and_costs_are_those_of_the_mixes(seed, random_problem, best_cost):
    problem = random_problem(seed, groups=6, options=4)
    arrays = encode(problem)
    found = cheapest(arrays, np.array([BUDGETS]))
    for k, budget in enumerate(BUDGETS):
        best = best_cost(problem, budget)
        cost, harm = evaluated(arrays, found.choice[0, k])
        assert harm <= budget * (1 + 1e-6)
        assert cost == pytest.approx(found.cost[0, k] + problem.fixed_s)
        assert found.bound[0, k] + problem.fixed_s <= best + 1e-9
        assert best - 1e-9 <= cost <= 1.1 * best


@pytest.mark.parametrize("storages", [("fp32", "bf16"), (ANY_STORAGE, "fp32", "bf16"), tuple("abcdefg")])
def test_on_many_groups_it_is_within_half_a_percent_of_the_exact_solver(storages, random_problem):
    problem = random_problem(3, groups=120, options=8, storages=storages, skip=4, cast_s=0.1)
    arrays = encode(problem)
    budgets = [0.01, 0.1, 1.0, 5.0]
    found = cheapest(arrays, np.array([budgets]))
    for k, budget in enumerate(budgets):
        exact = pack(arrays, budget, rel_gap=1e-4, time_limit_s=20)
        best, _ = evaluated(arrays, exact.choice)
        assert found.cost[0, k] + problem.fixed_s <= 1.005 * best


def test_without_a_budget_a_chain_is_solved_exactly(random_problem, best_cost):
    problem = random_problem(5, groups=7, options=3, skip=0)
    found = cheapest(encode(problem), np.array([[100.0]]))
    assert found.cost[0, 0] + problem.fixed_s == pytest.approx(best_cost(problem, 100.0))
    assert found.bound[0, 0] == pytest.approx(found.cost[0, 0])


def test_each_question_has_harms_and_costs_of_its_own(random_problem):
    problem = random_problem(0, groups=10, options=5)
    arrays = encode(problem)
    draw = np.random.default_rng(0)
    harms = arrays.harm * draw.uniform(0.5, 2, (3, *arrays.harm.shape))
    costs = arrays.cost * draw.uniform(0.9, 1.1, (3, *arrays.harm.shape))
    budgets = np.array([[0.01, 0.1], [0.02, 0.2], [0.03, 0.3]])
    together = cheapest(arrays, budgets, harms, costs)
    for k in range(3):
        alone = cheapest(arrays, budgets[k : k + 1], harms[k : k + 1], costs[k : k + 1])
        assert np.array_equal(alone.choice[0], together.choice[k])
        harm = harms[k][np.arange(10), together.choice[k]].sum(axis=1)
        assert (harm <= budgets[k] * (1 + 1e-6)).all()


def test_below_the_least_harm_the_least_harmful_mix_is_given(random_problem):
    arrays = encode(random_problem(1, groups=5, options=3), {"g0": "f1"})
    found = cheapest(arrays, np.array([[0.0]]))
    assert evaluated(arrays, found.choice[0, 0])[1] == pytest.approx(arrays.least_harm)


def test_harms_may_be_negative_as_posterior_draws_are():
    options = (Option(format="a", harm=0, cost_s=1), Option(format="b", harm=-1, cost_s=2))
    more = (Option(format="a", harm=0, cost_s=3), Option(format="b", harm=1.5, cost_s=1))
    arrays = encode(Problem(groups=(ProblemGroup(name="x", options=options), ProblemGroup(name="y", options=more))))
    found = cheapest(arrays, np.array([[0.5, 1.5, -1.0]]))
    assert [arrays.mix(c) for c in found.choice[0]] == [
        {"x": "b", "y": "b"},
        {"x": "a", "y": "b"},
        {"x": "b", "y": "a"},
    ]
