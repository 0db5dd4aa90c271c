import pytest
import typer
from typer.testing import CliRunner

from autoprec.cli.command import answer, command
from autoprec.errors import UsageError


def run(function, *arguments):
    app = typer.Typer()
    command(app, example="x")(function)
    return CliRunner().invoke(app, list(arguments), catch_exceptions=True)


def test_an_error_of_ours_is_its_message_on_stderr_and_exit_code_2():
    def fails(output):
        raise UsageError("speed='fast' must be a number")

    result = run(fails)
    assert result.exit_code == 2
    assert result.stderr == "error: speed='fast' must be a number\n"
    assert result.stdout == ""


def test_any_other_error_is_named_with_its_place_and_no_traceback():
    def fails(output):
        raise KeyError("layer.0")

    result = run(fails)
    assert result.exit_code == 2
    assert "KeyError: 'layer.0'" in result.stderr
    assert "test_command.py:" in result.stderr
    assert "Traceback" not in result.stderr


def test_debug_lets_the_error_through():
    def fails(output):
        raise UsageError("no")

    assert isinstance(run(fails, "--debug").exception, UsageError)


def test_the_answer_no_is_exit_code_1():
    def asks(output, yes: bool = False):
        output.show("looked")
        answer(yes)

    assert run(asks).exit_code == 1
    assert run(asks).stdout == "looked\n"
    assert run(asks, "--yes").exit_code == 0


def test_ctrl_c_is_exit_code_130():
    def interrupted(output):
        raise KeyboardInterrupt

    assert run(interrupted).exit_code == 130


@pytest.mark.parametrize(("flag", "shown"), [("-q", ""), ("-v", "working\n")])
def test_quiet_keeps_results_and_drops_notes(flag, shown):
    def works(output):
        output.note("working")
        output.show("result [0]")

    result = run(works, flag)
    assert result.stdout == "result [0]\n"
    assert result.stderr == shown
