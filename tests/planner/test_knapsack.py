import logging
import os
import sys
from dataclasses import replace

import numpy as np
import pytest

from autoprec.planner import knapsack
from autoprec.planner.arrays import encode
from autoprec.planner.knapsack import pack


@pytest.mark.parametrize("budget", [0.0, 1e-4, 0.01, 0.3, 10.0])
@pytest.mark.parametrize("seed", range(4))
def test_it_finds_the_best_mix_of_small_problems(seed, budget, random_problem, best_cost):
    problem = random_problem(seed, groups=6, options=4)
    arrays = encode(problem)
    found = pack(arrays, budget, rel_gap=0.0, time_limit_s=10)
    best = best_cost(problem, budget)
    assert problem.cost_s(arrays.mix(found.choice)) == pytest.approx(best)
    assert found.bound + problem.fixed_s == pytest.approx(best)


def test_any_unit_of_harm_and_cost_gives_the_same_mix(random_problem):
    arrays = encode(random_problem(2, groups=20, options=5))
    scaled = replace(arrays, harm=arrays.harm * 1e-15)
    first = pack(arrays, 0.05, rel_gap=1e-6, time_limit_s=10)
    second = pack(scaled, 0.05e-15, rel_gap=1e-6, time_limit_s=10)
    assert np.array_equal(first.choice, second.choice)


def test_out_of_time_it_gives_nothing_or_a_mix_with_an_honest_bound(random_problem):
    problem = random_problem(0, groups=150, options=6, storages=tuple("abcdef"))
    arrays = encode(problem)
    found = pack(arrays, 0.5, rel_gap=0.0, time_limit_s=0.02)
    exact = pack(arrays, 0.5, rel_gap=1e-3, time_limit_s=20)
    best = problem.cost_s(arrays.mix(exact.choice))
    assert found.bound + problem.fixed_s <= best + 1e-9


def test_what_the_solver_prints_stays_off_stdout(monkeypatch, capfd, caplog, random_problem):
    real = knapsack.milp

    def talkative(*args, **kwargs):
        os.write(1, b"HighsMipSolverData: a debug line\nanother's line\n")
        return real(*args, **kwargs)

    monkeypatch.setattr(knapsack, "milp", talkative)
    # a command that ran in this process has its own handler there, which prints
    monkeypatch.setattr(logging.getLogger("autoprec"), "handlers", [])
    monkeypatch.setattr(logging.getLogger("autoprec"), "propagate", True)
    print("before")
    with caplog.at_level("DEBUG", logger="autoprec"):
        pack(encode(random_problem(0, groups=4, options=3)), 0.1, rel_gap=1e-3, time_limit_s=2)
    print("after")
    sys.stdout.flush()
    printed = capfd.readouterr()
    assert printed.out == "before\nafter\n"
    assert printed.err == "another's line\n"
    assert "a debug line" in caplog.text
