"""The commands that make and use a plan."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

import autoprec


@pytest.fixture
def plan(cli, models) -> Path:
    result = cli("plan", "models.py:factory", "--target", "a100")
    assert result.exit_code == 0, result.stderr
    return Path("plan.json")


def test_plan_writes_what_convert_reads(cli, plan):
    made = autoprec.load_plan(plan)
    assert made.target == "a100"
    shown = json.loads(cli("plan", "models.py:factory", "--target", "a100", "--force", "--json").stdout)
    assert shown["sha256"] == made.sha256


def test_a_file_is_overwritten_by_force_only(cli, plan):
    before = plan.read_bytes()
    result = cli("plan", "models.py:factory", "--target", "v100")
    assert result.exit_code == 2
    assert "plan.json already there" in result.stderr
    assert plan.read_bytes() == before
    assert cli("plan", "models.py:factory", "--target", "v100", "--force").exit_code == 0
    assert plan.read_bytes() != before


def test_level_mode_formats_and_pins_reach_the_plan(cli, models):
    options = ("--level", "O2", "--mode", "inference", "--formats", "fp16", "--keep", "out=fp32")
    assert cli("plan", "models.py:factory", "--target", "a100", *options).exit_code == 0
    made = autoprec.load_plan("plan.json")
    assert (made.level, made.mode) == ("O2", "inference")
    assert made.rules[0].match == ("out",)
    assert str(made.rules[0].formats) == "fp32"
    assert {str(rule.formats) for rule in made.rules} == {"fp32", "fp16"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--target", "h1000"), "h100"),
        (("--level", "O9"), "'O0', 'O1', 'O2', 'O3'"),
        (("--keep", "out"), "SITE=FORMAT"),
        (("--keep", "hout=fp32"), "matches none"),
        (("--keep", "out=bf61"), "bf61"),
        (("--formats", "bf61"), "bf61"),
    ],
)
def test_a_wrong_value_is_a_usage_error_and_writes_nothing(cli, models, arguments, said):
    result = cli("plan", "models.py:factory", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not Path("plan.json").exists()


def test_convert_writes_all_keys_and_the_plan(cli, plan):
    result = cli("convert", "models.py:factory", "--plan", plan, "--json")
    assert result.exit_code == 0, result.stderr
    written = json.loads(result.stdout)
    weights = load_file(written["weights"])
    assert set(weights) == {"gate.weight", "gate.bias", "out.weight", "out.bias"}
    assert autoprec.load_plan(written["plan"]) == autoprec.load_plan(plan)
    assert written["receipt"]["low_precision_share"] == 1.0


def test_convert_keeps_the_values_of_tied_weights(cli, models):
    with models.open("a") as file:
        file.write("\ndef tied():\n    m = Gated()\n    m.again = m.out\n    return m, torch.randn(2, 32)\n")
    assert cli("convert", "models.py:tied", "--target", "a100").exit_code == 0
    weights = load_file("model.safetensors")
    assert (weights["again.weight"] == weights["out.weight"]).all()


def test_check_says_yes_to_its_own_model(cli, plan):
    result = cli("check", "models.py:factory", "--plan", plan)
    assert result.exit_code == 0, result.stdout
    assert result.stdout == "valid, active\n"


def test_check_says_no_to_another_model(cli, plan):
    result = cli("check", "cnn", "--plan", plan, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert not found["valid"]
    assert "DigitsCNN" in found["problems"][0]


def test_check_of_a_model_that_nothing_runs_is_no_answer_yes(cli, models):
    assert cli("plan", "models.py:module", "--target", "a100").exit_code == 0
    result = cli("check", "models.py:module")
    assert result.exit_code == 1
    assert "nothing ran" in result.stdout


def test_a_damaged_plan_is_an_error_not_an_answer(cli, plan):
    plan.write_text(plan.read_text()[:100])
    for command in (("check", "models.py:factory", "--plan", plan), ("diff", plan, plan)):
        result = cli(*command)
        assert result.exit_code == 2
        assert "plan.json" in result.stderr
        assert "Traceback" not in result.stderr


def test_diff_says_what_changes_and_answers_no(cli, plan):
    same = cli("diff", plan, plan)
    assert (same.exit_code, same.stdout) == (0, "no difference\n")
    assert cli("plan", "models.py:factory", "--target", "v100", "-o", "other.json").exit_code == 0
    other = cli("diff", plan, "other.json")
    assert other.exit_code == 1
    assert '~ target: "a100" -> "v100"' in other.stdout
    changes = json.loads(cli("diff", plan, "other.json", "--json").stdout)
    assert "target" in [change["name"] for change in changes["settings"]]
