"""Transformer Engine's real Python classes on a machine without its native library and without a GPU."""

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

PACKAGES = "transformer-engine einops onnx onnxscript pydantic triton"


@pytest.fixture(scope="session")
def native() -> ModuleType:
    """The stand-in of native.py, with the real package imported on top of it."""
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip(f"transformer_engine isn't installed: pip install --no-deps {PACKAGES}")
    if importlib.util.find_spec("transformer_engine_torch") is not None:
        pytest.skip("the native library is installed: tests/backends and pytest -m gpu run it")
    spec = importlib.util.spec_from_file_location("te_native", Path(__file__).with_name("native.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["te_native"] = module
    spec.loader.exec_module(module)
    module.install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of imports that aren't ours
        importlib.import_module("transformer_engine.pytorch")
    return module


@pytest.fixture
def hopper(native: ModuleType) -> Iterator[ModuleType]:
    """A machine with one GPU of compute capability 9.0, and Transformer Engine as after its import."""
    manager = importlib.import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager
    with native.gpu():
        manager.reset()
        native.CALLS.clear()
        yield native
        manager.reset()
