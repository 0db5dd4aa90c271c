import subprocess
import sys
from pathlib import Path

import pytest

import autoprec

COMMANDS = [
    "env",
    "inspect",
    "plan",
    "tune",
    "solve",
    "convert",
    "check",
    "diff",
    "rules",
    "targets",
    "formats",
    "recommend",
    "memory",
]


def test_help_lists_each_command_in_one_line(cli):
    result = cli("-h")
    assert result.exit_code == 0
    for command in COMMANDS:
        assert f"│ {command} " in result.stdout
    assert "130 interrupted" in result.stdout


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "rules"] + ["rules list", "rules show", "rules test"])
def test_each_help_ends_in_an_example_and_shows_defaults(cli, command):
    result = cli(*command.split(), "--help")
    assert result.exit_code == 0
    assert result.stdout.split("Example:")[1].strip().startswith(f"autoprec {command}")
    assert "--debug" in result.stdout


def test_version(cli):
    assert cli("--version").stdout == f"autoprec {autoprec.__version__}\n"


def test_an_unknown_command_or_option_is_a_usage_error_with_a_hint(cli):
    result = cli("formts")
    assert result.exit_code == 2
    assert "Did you mean 'formats'" in result.stderr
    result = cli("formats", "--jsn")
    assert result.exit_code == 2
    assert result.stdout == ""


def test_the_module_runs_as_the_command_and_starts_without_torch():
    code = (
        "import runpy, sys\n"
        "sys.argv = ['autoprec', '--version']\n"
        "try: runpy.run_module('autoprec')\n"
        "finally: print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False
    )
    assert done.stdout.split() == ["autoprec", autoprec.__version__, "False"], done.stderr
