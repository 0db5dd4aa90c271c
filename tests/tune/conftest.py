import importlib.util
import itertools
import sys
import time
from pathlib import Path

import pytest

_PATH = Path(__file__).with_name("tiny.py")


@pytest.fixture(scope="session")
def tiny():
    """The module of tiny tasks, importable by name, so that what it defines is one and the same in all tests."""
    if "autoprec_tiny_tasks" not in sys.modules:
        spec = importlib.util.spec_from_file_location("autoprec_tiny_tasks", _PATH)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return sys.modules["autoprec_tiny_tasks"]


@pytest.fixture
def planted_clock(tiny, monkeypatch):
    """Time as the tiny tasks plant it; else each look at the clock takes a millisecond, whatever ran in between."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: tiny.Clock.now + 1e-3 * next(ticks))
