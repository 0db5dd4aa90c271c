import json
from dataclasses import replace

import pytest

from autoprec.errors import UsageError
from autoprec.planner.problem import Edge, Option, Problem, ProblemGroup, problem_from_json

A = ProblemGroup(
    name="a",
    options=(
        Option(format="fp32", harm=0, cost_s=4, storage="fp32"),
        Option(format="bf16", harm=1, cost_s=2, storage="bf16"),
    ),
)
OTHER = ProblemGroup(
    name="other ops",
    options=(
        Option(format="fp32", harm=0, cost_s=3, storage="fp32"),
        Option(format="rules", harm=0.5, cost_s=2, firm_storage="fp32"),
    ),
)
PROBLEM = Problem(
    groups=(A, OTHER),
    edges=(Edge(a="a", b="other ops", cast_s=0.25), Edge(a="a", b="other ops", cast_s=0.5, firm=True)),
    fixed_s=10,
)


@pytest.mark.parametrize(
    ("mix", "cost_s", "harm"),
    [
        ({"a": "fp32", "other ops": "fp32"}, 17, 0),
        ({"a": "bf16", "other ops": "fp32"}, 15.75, 1),
        ({"a": "bf16", "other ops": "rules"}, 14.5, 1.5),
        ({"a": "fp32", "other ops": "rules"}, 16, 0.5),
    ],
)
def test_a_mix_costs_its_groups_its_casts_and_what_is_fixed(mix, cost_s, harm):
    assert PROBLEM.cost_s(mix) == cost_s
    assert PROBLEM.harm(mix) == harm


def test_json_keeps_everything(tmp_path):
    PROBLEM.save(tmp_path / "problem.json")
    assert problem_from_json(json.loads((tmp_path / "problem.json").read_text())) == PROBLEM


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"groups": (A, A)}, "names of their own"),
        ({"groups": (replace(A, options=()),)}, "at least one option"),
        ({"edges": (Edge(a="a", b="c", cast_s=1),)}, "'c'"),
        ({"edges": (Edge(a="a", b="other ops", cast_s=-1),)}, "0 seconds or more"),
        ({"fixed_s": float("nan")}, "finite"),
    ],
)
def test_a_problem_that_makes_no_sense_is_refused(change, says):
    with pytest.raises(UsageError, match=says):
        replace(PROBLEM, **change)


@pytest.mark.parametrize("data", [{}, {"schema_version": 2}, {"schema_version": 1, "groups": [{}]}])
def test_other_json_is_refused(data):
    with pytest.raises(UsageError, match=r"schema_version|not a problem"):
        problem_from_json(data)


def test_an_unknown_format_is_an_error_that_names_the_known_ones():
    with pytest.raises(UsageError, match="can't take 'fp8'; allowed: fp32, bf16"):
        PROBLEM.cost_s({"a": "fp8", "other ops": "fp32"})
