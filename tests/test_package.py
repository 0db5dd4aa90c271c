"""The public face, the rooms' order, and what importing the package costs."""

import subprocess
import sys
from pathlib import Path

import pytest

import autoprec

ROOT = Path(__file__).parents[1]
MAX_LINES = 400
MODULES = sorted(ROOT.glob("autoprec/**/*.py"))


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_is_sorted_and_complete():
    assert autoprec.__all__ == sorted(autoprec.__all__)
    assert len(set(autoprec.__all__)) == len(autoprec.__all__)
    assert set(autoprec._HOME_OF) | {n for n in autoprec.__all__ if n.endswith("Error")} == set(autoprec.__all__)


@pytest.mark.parametrize("name", autoprec.__all__)
def test_every_public_name_resolves(name: str):
    assert getattr(autoprec, name).__name__ == name
    assert name in dir(autoprec)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        autoprec.quantise  # noqa: B018


def test_every_error_is_public():
    from autoprec import errors

    raised = {n for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, errors.AutoprecError)}
    assert raised <= set(autoprec.__all__)


def test_functions_are_not_hidden_by_the_modules_of_their_name():
    code = (
        "import importlib, autoprec\n"
        "for name in ('convert', 'analyze', 'tune'):\n"
        "    module = importlib.import_module('autoprec.' + name)\n"
        "    assert callable(getattr(autoprec, name)), name\n"
        "    assert getattr(module, name) is getattr(autoprec, name)\n"
    )
    run_python(code)


def test_importing_the_package_loads_nothing_heavy():
    loaded = run_python("import sys, autoprec; print(*sys.modules)").split()
    assert not {"torch", "numpy", "optuna", "typer", "rich", "jinja2", "scipy", "transformers"} & set(loaded)


def test_converting_loads_neither_tuner_nor_command_line():
    loaded = run_python("import sys, autoprec; autoprec.convert; autoprec.load_plan; print(*sys.modules)").split()
    heavy = {"optuna", "typer", "rich", "jinja2", "sklearn", "transformers", "torchao", "transformer_engine"}
    assert not heavy & set(loaded)


def test_rooms_import_only_the_rooms_below_them():
    # a process of its own: grimp's cache and the linter's settings are global
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_stay_small(path: Path):
    num_lines = len(path.read_text().splitlines())
    assert num_lines <= MAX_LINES, f"{num_lines} lines: a module is one idea in at most {MAX_LINES}; split it"


def test_marked_type_information_is_shipped():
    assert (ROOT / "autoprec" / "py.typed").exists()


# A change here is a change of the public interface: it belongs in CHANGELOG.md.
COMMON = {"--quiet", "-q", "--verbose", "-v", "--debug", "--json"}
PLAN = {"--target", "--level", "--formats", "--mode", "--rules", "--keep"}
SEARCH = {"--trials", "--timeout", "--max-loss-increase", "--method", "--objective", "--min-speedup", "--require-gain"}
STUDY = SEARCH | {"--storage", "--study", "--workers", "--trial-timeout", "--isolate", "--confirm"}
OPTIONS = {
    "check": {"--plan", "--seed"},
    "convert": PLAN | {"--plan", "--strict", "--seed", "--output", "-o", "--force"},
    "diff": {"--evidence"},
    "env": set(),
    "formats": set(),
    "inspect": {"--explain", "--all", "--target", "--mode", "--rules", "--seed"},
    "memory": {"--batch", "--config", "--length", "--params", "--seed", "--target"},
    "plan": PLAN | {"--seed", "--output", "-o", "--force"},
    "recommend": {"--architecture", "--params", "--stability", "--target", "--task"},
    "report": {"--output", "-o"},
    "rules list": {"--rules"},
    "rules show": {"--rules"},
    "rules test": set(),
    "solve": {"--budget", "--budgets", "--keep"},
    "targets": set(),
    "tune": STUDY | {"--target", "--keep", "--rules", "--seed", "--output-dir", "-o"},
}


def test_commands_and_their_options_are_these():
    import typer

    from autoprec.cli.app import app

    found = {}
    groups = [("", typer.main.get_command(app))]
    for prefix, group in groups:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                groups.append((f"{name} ", command))
            else:
                found[prefix + name] = {opt for param in command.params for opt in param.opts if opt.startswith("-")}
    assert found == {name: options | COMMON for name, options in OPTIONS.items()}
