"""``autoprec tune`` on a task so small that low precision can't pay; the study is real."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

import autoprec

TASK = """
import torch
from torch import nn

import autoprec


def build_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def batches(seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(16, 8, generator=generator)
        yield x, x.sum(1, keepdim=True).sin() + 0.1 * torch.randn(16, 1, generator=generator)


task = autoprec.Task(
    name="tiny",
    build_model=build_model,
    batches=batches,
    loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
    samples_per_step=16,
)
"""


@pytest.fixture
def study(tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    Path("tiny.py").write_text(TASK)
    return cli("tune", "tiny.py:task", "--trials", 3, "--seed", 2, "--max-loss-increase", "5%", "--json")


def test_a_study_leaves_plan_receipt_and_report(study, cli):
    assert study.exit_code == 0, study.stderr
    result = json.loads(study.stdout)
    assert [row["name"] for row in result["trials"]] == ["fp32", "bf16", "rules"]
    folder = Path("runs/tiny")
    assert autoprec.load_plan(folder / "plan.json").to_json() == result["plan"]
    assert "rows" in json.loads((folder / "receipt.json").read_text())
    page = (folder / "report.html").read_text()
    HTMLParser().feed(page)
    assert result["verdict"].split(":")[0] in page
    assert "autoprec tune tiny.py:task --target auto --trials 3" in page
    # messages go to stderr, and each trial is said once
    assert study.stderr.count("trial 1 ") == 1

    # the same command goes on: nothing is left to measure
    again = cli("tune", "tiny.py:task", "--trials", 3, "--seed", 2, "--max-loss-increase", "5%")
    assert again.exit_code == 0, again.stderr
    assert result["verdict"].split(":")[0] in again.stdout
    assert "measured on this device" in again.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("missing.py:task",), "no file 'missing.py'"),
        (("nope",), "built-in task"),
        (("cnn", "--timeout", "soon"), "'soon' is no duration"),
        (("cnn", "--max-loss-increase", "half"), "'half' is no share"),
        (("cnn", "--trials", "0"), "--trials"),
        (("cnn", "--target", "gaudi3"), "can't be estimated"),
        (("cnn", "--method", "guess"), "method 'guess' is unknown"),
        (("cnn", "--objective", "loss"), "needs the speed to reach"),
        (("cnn", "--workers", "2", "--storage", "sqlite:///study.db"), "SQLite takes one process"),
        (("cnn", "--storage", "study"), "neither a URL nor the path of a journal"),
        (("cnn", "--confirm", "missing.json"), "missing.json"),
        (("cnn", "--rules", "missing.toml"), "missing.toml"),
    ],
)
def test_a_wrong_argument_is_exit_code_2_before_anything_is_trained(cli, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    result = cli("tune", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_ctrl_c_is_exit_code_130_and_says_that_the_study_goes_on(cli, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(autoprec, "tune", interrupted)
    result = cli("tune", "cnn")
    assert result.exit_code == 130
    assert "the same command goes on" in result.stderr
