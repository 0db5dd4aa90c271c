"""Run the command line in this process, and models for it to name."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

MODELS = """
import torch
from torch import nn


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.out = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, x):
        return self.out(torch.softmax(self.gate(x), -1))


def factory():
    return Gated(), (torch.randn(4, 32),)


def module():
    return Gated()


def broken():
    raise RuntimeError("no such weights")


number = 3
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a file of models."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    return path


@pytest.fixture
def cli() -> Iterator[Callable[..., Result]]:
    """``cli("plan", "gpt")`` gives exit code, stdout and stderr."""
    from autoprec.cli.app import app

    logger = logging.getLogger("autoprec")
    before = logger.handlers, logger.level, logger.propagate
    runner = CliRunner(env={"COLUMNS": "200"})
    yield lambda *arguments: runner.invoke(app, [str(argument) for argument in arguments], prog_name="autoprec")
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])
