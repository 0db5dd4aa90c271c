"""Tests that need a server, a browser, a device, a large package or minutes are skipped unless asked for by marker."""

import os
import re
import tempfile
from collections.abc import Iterator

import pytest
import torch

# marker -> what it needs, and the command that runs it
RESOURCES = {
    "pg": ("a PostgreSQL server", "pytest -m pg"),
    "browser": ("Debian's chromium", "make browser"),
    "te": ("transformer_engine", "pytest -m te"),
    "zoo": ("the whole model zoo", "pytest -m zoo"),
    "gpu": ("a CUDA or ROCm device", "pytest -m gpu"),
    "slow": ("minutes", "pytest -m slow"),
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked_for = set(re.findall(r"\w+", config.getoption("markexpr")))
    reasons = {
        marker: f"needs {needs}: {command}" for marker, (needs, command) in RESOURCES.items() if marker not in asked_for
    }
    if "gpu" in asked_for and not torch.cuda.is_available() and "AUTOPREC_GPU_TESTS_DEVICE" not in os.environ:
        reasons["gpu"] = "there is no CUDA or ROCm device here"
    for marker, reason in reasons.items():
        for item in items:
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measurements of this machine go to a folder of the test run, not to the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOPREC_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def lock_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Devices are locked among the test run's own processes: a study that runs beside it isn't waited for."""
    folder = str(tmp_path_factory.mktemp("locks"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield
