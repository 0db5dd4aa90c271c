"""Each example runs as its docstring says, on a CPU, and stays short."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(*arguments: object, cwd: Path) -> str:
    """Run Python in another folder, with this checkout's package."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def example(name: str) -> Path:
    return ROOT / "examples" / name


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_short_and_each_has_a_test(path):
    assert len(path.read_text().splitlines()) < 80
    assert Path(__file__).read_text().count(f'"{path.name}"') == 1


def test_a_transformers_model_is_converted_generates_and_is_reverted(tmp_path):
    printed = run(example("convert_transformers_model.py"), cwd=tmp_path)
    assert "class LlamaForCausalLM, logits in torch.float32" in printed
    assert "generated 8 tokens for each of 2 prompts" in printed
    assert "reverted exactly: True" in printed


def test_a_plan_is_applied_in_a_training_loop(tmp_path):
    run("-m", "autoprec", "plan", "cnn", "--target", "a100", cwd=tmp_path)
    printed = run(example("train_with_plan.py"), "plan.json", "--steps", 20, cwd=tmp_path)
    losses = [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0]
    assert "digits.pt loads into the plain model" in printed


def test_a_custom_task_is_tuned(tmp_path):
    printed = run(example("tune_custom_task.py"), "--trials", 3, "-o", "out", cwd=tmp_path)
    assert printed
    assert (tmp_path / "out" / "plan.json").exists()


def test_the_readmes_plan_loads_and_its_commands_exist(tmp_path):
    from typer.main import get_command

    import autoprec
    from autoprec.cli.app import app

    readme = (ROOT / "README.md").read_text()
    (sample,) = re.findall(r"```json\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "plan.json").write_text(sample)
    plan = autoprec.load_plan(tmp_path / "plan.json")
    assert [str(rule.formats) for rule in plan.rules] == ["fp32", "fp32", "bf16"]
    commands = set(re.findall(r"autoprec ([a-z]+)", "".join(re.findall(r"```console\n(.*?)```", readme, re.DOTALL))))
    assert commands == set(get_command(app).commands)
