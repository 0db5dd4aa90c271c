"""``autoprec recommend`` and the guide behind it."""

import json

import pytest

from autoprec.errors import RuleError, UsageError
from autoprec.planner.guide import load_guide, parse_guide, recommend
from autoprec.rulebook.tomlfile import read_toml
from autoprec.target import list_targets, load_target


@pytest.mark.parametrize(
    ("architecture", "task", "params", "stability", "target", "format_name"),
    [
        ("transformer", "pretraining", 7e9, "normal", None, "fp8_e4m3"),
        ("transformer", "pretraining", 7e9, "normal", "h100", "fp8_e4m3"),
        ("transformer", "pretraining", 7e9, "normal", "mi300x", "fp8_e4m3"),
        ("transformer", "pretraining", 7e9, "normal", "a100", "bf16"),
        ("transformer", "pretraining", 7e9, "normal", "v100", "fp16"),
        ("transformer", "pretraining", 7e9, "normal", "cpu", "fp32"),
        ("transformer", "pretraining", 7e9, "critical", "h100", "bf16"),
        ("transformer", "pretraining", 1e9, "normal", "h100", "fp8_e4m3"),
        ("transformer", "pretraining", 0.999e9, "normal", "h100", "bf16"),
        ("transformer", "inference", 7e9, "normal", "h100", "fp8_e4m3"),
        ("transformer", "pretraining", 0.999e6, "normal", "h100", "fp32"),
        ("transformer", "pretraining", 1e6, "normal", "h100", "bf16"),
        ("moe", "pretraining", 1e11, "normal", "h100", "fp8_e4m3"),
        ("ssm", "pretraining", 7e9, "normal", "h100", "bf16"),
        ("rnn", "inference", 7e9, "normal", "h100", "bf16"),
        ("rnn", "pretraining", 7e9, "normal", "t4", "fp16"),
        ("diffusion", "finetuning", 7e9, "normal", "h100", "bf16"),
        ("cnn", "pretraining", 25e6, "normal", "h100", "bf16"),
        ("other", "inference", 25e6, "critical", "h100", "bf16"),
    ],
)
def test_what_the_guide_says(architecture, task, params, stability, target, format_name):
    device = None if target is None else load_target(target)
    found = recommend(architecture, task, params, stability, device)
    assert found.advice.format == format_name
    assert found.advice.why
    assert found.advice.requires
    assert found.advice.source


def test_every_question_has_an_answer_on_every_target():
    for target in list_targets():
        for architecture in ("cnn", "transformer", "rnn", "moe", "diffusion", "ssm", "other"):
            for task in ("pretraining", "finetuning", "inference"):
                for params in (1e3, 1e8, 1e12):
                    found = recommend(architecture, task, params, "normal", target)
                    fp8 = {"fp8_e4m3", "fp8_e4m3fnuz"} & set(target.formats)
                    assert found.advice.format in target.formats or (found.advice.format == "fp8_e4m3" and fp8)


def test_what_was_passed_over_is_said():
    found = recommend("transformer", "pretraining", 7e9, target=load_target("v100"))
    assert [reason.partition(":")[0] for reason in found.passed_over] == ["fp8_e4m3", "bf16"]
    assert all("v100 doesn't have it" in reason for reason in found.passed_over)


@pytest.mark.parametrize(
    "question",
    [
        ("gan", "pretraining", 1e9),
        ("cnn", "training", 1e9),
        ("cnn", "pretraining", 0),
        ("cnn", "pretraining", 1e9, "low"),
    ],
)
def test_questions_it_refuses(question):
    with pytest.raises(UsageError, match=r"isn't one of|must be above 0"):
        recommend(*question)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('architectures = ["gan"]', "architectures has 'gan'; allowed: cnn"),
        ('format = "fp9"', "format = 'fp9' isn't one of"),
        ("min_params = -1", "min_params = -1 must be a number above 0"),
        ('whatever = "x"', "unknown key 'whatever'"),
    ],
)
def test_a_wrong_guide_is_refused(tmp_path, change, message):
    entry = {"format": 'format = "bf16"', "why": 'why = "x"', "requires": 'requires = ["x"]', "source": 'source = "x"'}
    entry[change.partition(" ")[0]] = change
    path = tmp_path / "guide.toml"
    path.write_text("[[recommend]]\n" + "\n".join(entry.values()))
    with pytest.raises(RuleError, match=message):
        parse_guide(read_toml(path))


def test_the_quoted_table():
    quoted = {scheme.name: scheme.total_bytes(70e9) / 1e9 for scheme in load_guide().schemes if scheme.quoted}
    assert quoted == {"fp32": 1120, "fp16": 560, "mixed": 840}


def test_the_command(cli):
    result = cli("recommend", "--architecture", "transformer", "--params", "7B", "--target", "h100")
    assert result.exit_code == 0
    assert result.stdout.startswith("fp8_e4m3: ")
    assert "needs    " in result.stdout
    assert "source   http" in result.stdout
    assert "nothing was measured" in result.stderr


def test_the_command_in_json(cli):
    data = json.loads(cli("recommend", "--params", "7e9", "--target", "v100", "--json").stdout)
    assert data["kind"] == "rule"
    assert data["format"] == "fp16"
    assert len(data["passed_over"]) == 2


@pytest.mark.parametrize("params", ["many", "0", "-1", "7X", "1e30"])
def test_a_size_that_is_none(cli, params):
    result = cli("recommend", "--params", params)
    assert result.exit_code == 2
    assert "write 70e9, 70B or 350M" in result.stderr or "No such option" in result.stderr
