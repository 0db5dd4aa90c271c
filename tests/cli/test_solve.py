"""``autoprec solve`` on a saved problem."""

import json

import pytest

from autoprec.planner.problem import Edge, Option, Problem, ProblemGroup


def group(name: str, scale: float) -> ProblemGroup:
    return ProblemGroup(
        name=name,
        options=(
            Option(format="fp32", harm=0, cost_s=scale * 1e-3, storage="fp32"),
            Option(format="bf16", harm=scale, cost_s=scale * 5e-4, storage="bf16"),
            Option(format="fp8_e4m3", harm=10 * scale, cost_s=scale * 3e-4, storage="bf16"),
        ),
    )


PROBLEM = Problem(
    groups=(group("qkv[0]", 1.0), group("head", 2.0)),
    edges=(Edge(a="qkv[0]", b="head", cast_s=1e-4),),
    fixed_s=1e-3,
    device="NVIDIA H100",
)


@pytest.fixture
def problem(tmp_path):
    path = tmp_path / "problem.json"
    PROBLEM.save(path)
    return path


def test_the_front_says_cost_speed_harm_and_that_it_is_estimated(cli, problem):
    result = cli("solve", problem)
    lines = [line for line in result.stdout.splitlines() if "x" in line]
    assert "speed (estimated)" in result.stdout
    assert "2 fp8_e4m3" in lines[0]
    assert "1.9" in lines[0]
    assert "2.105x" in lines[0]
    assert "30" in lines[0]
    assert "1.000x" in lines[-1]
    assert "seconds estimated on NVIDIA H100" in result.stderr


def test_one_budget_shows_each_group(cli, problem):
    result = cli("solve", problem, "--budget", 3)
    rows = {line.split("│")[1].strip(): line for line in result.stdout.splitlines() if line.count("│") > 4}
    assert "bf16" in rows["qkv[0]"]
    assert "bf16" in rows["head"]
    assert "1.600x estimated" in result.stdout
    assert "2.5" in result.stdout


def test_json_has_whole_mixes(cli, problem):
    rows = json.loads(cli("solve", problem, "--json", "--budgets", 8).stdout)
    assert rows[-1]["mix"] == {"qkv[0]": "fp32", "head": "fp32"}
    assert [row["cost_s"] for row in rows] == sorted(row["cost_s"] for row in rows)
    assert rows[0]["speedup"] == pytest.approx(4e-3 / 1.9e-3)
    assert {row["kind"] for row in rows} == {"estimated"}
    assert rows[0]["gap"] <= 1e-3


def test_pins_hold(cli, problem):
    (row,) = json.loads(cli("solve", problem, "--budget", 100, "--keep", "head=fp32", "--json").stdout)
    assert row["mix"] == {"qkv[0]": "fp8_e4m3", "head": "fp32"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--budget", "-1"), "the least harmful has 0"),
        (("--keep", "head"), "isn't GROUP=FORMAT"),
        (("--keep", "tail=fp32"), "no group 'tail'"),
        (("--keep", "head=int8"), "allowed: fp32, bf16, fp8_e4m3"),
    ],
)
def test_what_cannot_be_solved_is_said(cli, problem, options, says):
    result = cli("solve", problem, *options)
    assert result.exit_code == 2
    assert says in result.stderr


@pytest.mark.parametrize(("text", "says"), [(None, "No such file"), ("{", "can't be read"), ("[]", "holds no problem")])
def test_a_file_that_holds_no_problem_is_said(cli, tmp_path, text, says):
    path = tmp_path / "other.json"
    if text is not None:
        path.write_text(text)
    result = cli("solve", path)
    assert result.exit_code == 2
    assert says in result.stderr
