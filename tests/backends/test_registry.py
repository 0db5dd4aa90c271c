"""The registry: names, entry points, automatic choice and its reasons."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autoprec.backends import Backend, choose, get_backend, list_backends, registry
from autoprec.errors import BackendError, UsageError
from autoprec.plan import Formats
from autoprec.recipes import CurrentRecipe

HYBRID = Formats(input="fp8_e4m3", weight="fp8_e4m3", grad_output="fp8_e5m2")
X, WEIGHT = torch.zeros(32, 64), torch.zeros(48, 64)


@pytest.fixture
def _fresh() -> Iterator[None]:
    registry._factories.cache_clear()
    yield
    registry._factories.cache_clear()


def install(folder: Path, package: str, name: str, code: str) -> None:
    """A real, if small, installed package that offers one backend."""
    (folder / f"{package}.py").write_text(code)
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[autoprec.backends]\n{name} = {package}:Plugged\n")


PLUGIN = """
from autoprec.backends import Backend

class Plugged(Backend):
    name = "plugged"
    speed = 1

    def supports(self, gemm):
        return gemm.mode == "inference", "inference only"
"""


def test_names_are_sorted_and_each_makes_one_backend() -> None:
    assert list_backends() == tuple(sorted(registry.BUILTIN))
    for name in list_backends():
        backend = get_backend(name)
        assert isinstance(backend, Backend)
        assert backend is get_backend(name)
        assert backend.name == name
        ok, reason = backend.available()
        assert isinstance(ok, bool)
        assert reason


def test_by_speed_ends_in_emulation() -> None:
    assert [b.name for b in registry.by_speed()] == ["transformer_engine", "native", "torchao", "emulated"]


def test_unknown_name() -> None:
    with pytest.raises(UsageError, match="unknown backend 'cutlass'; known: emulated, native, torchao, trans"):
        choose("linear", HYBRID, X, WEIGHT, ("emulated", "cutlass"), "training")


@pytest.mark.usefixtures("_fresh")
def test_a_package_adds_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "plugged_one", "plugged", PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    assert "plugged" in list_backends()
    backend, reason = choose("linear", HYBRID, X, WEIGHT, (), "inference", recipe=CurrentRecipe())
    assert backend is get_backend("plugged")
    assert reason == "plugged: inference only"
    backend, reason = choose("linear", HYBRID, X, WEIGHT, (), "training", recipe=CurrentRecipe())
    assert backend is get_backend("emulated")
    assert reason.startswith("not plugged: inference only; not transformer_engine: has no kernels for cpu; not native:")


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize(("name", "owner"), [("emulated", "autoprec"), ("plugged", "plugged_one")])
def test_a_clash_names_both_owners(name: str, owner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "plugged_one", "plugged", PLUGIN)
    install(tmp_path, "plugged_two", name, PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=f"a backend named '{name}': {owner} and plugged_two; uninstall one"):
        list_backends()


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize(
    ("code", "message"),
    [("1 / 0", "can't be loaded: ZeroDivisionError"), ("class Plugged: pass", r"isn't an autoprec\.backends\.Backend")],
)
def test_a_broken_package_is_named(code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = f"plugged_{len(code)}"
    install(tmp_path, package, "broken", code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendError, match=f"'broken' of package {package} {message}"):
        get_backend("broken")


def test_automatic_choice_on_a_cpu_is_the_reference_and_says_why() -> None:
    backend, reason = choose("linear", HYBRID, X, WEIGHT, (), "training", recipe=CurrentRecipe())
    assert backend is get_backend("emulated")
    assert "not transformer_engine: has no kernels for cpu" in reason
    assert "not native: on cpu torch emulates it" in reason
    assert "not torchao: on cpu it multiplies in fp32" in reason
    assert reason.endswith("emulated: rounds the operands exactly and multiplies in fp32")


def test_named_backends_are_tried_in_order() -> None:
    backend, reason = choose("linear", HYBRID, X, WEIGHT, ("native", "emulated"), "training", recipe=CurrentRecipe())
    assert backend is get_backend("native")
    assert reason == "native: scaled FP8 matrix product"
    odd = torch.zeros(48, 60), torch.zeros(10, 60)
    backend, reason = choose("linear", HYBRID, *odd, ("native", "emulated"), "training", recipe=CurrentRecipe())
    assert backend is get_backend("emulated")
    assert reason.startswith("not native: out_features=10 isn't a multiple of 16; emulated: ")
    backend, reason = choose("linear", HYBRID, *odd, ("native",), "training", recipe=CurrentRecipe())
    assert (backend, reason) == (None, "not native: out_features=10 isn't a multiple of 16")


def test_only_inference_ignores_the_gradients_format() -> None:
    mixed = Formats(input="fp8_e4m3", weight="fp8_e4m3", grad_output="bf16")
    for mode, ok in (("training", False), ("inference", True)):
        backend, _ = choose("linear", mixed, X, WEIGHT, ("native",), mode, recipe=CurrentRecipe())
        assert (backend is not None) == ok


def test_meta_tensors_are_enough_to_choose() -> None:
    big = torch.empty(8, 4096, 4096, device="meta"), torch.empty(14336, 4096, device="meta")
    backend, _ = choose("linear", HYBRID, *big, ("native",), "training", recipe=CurrentRecipe())
    assert backend is get_backend("native")


def test_backends_in_use_can_be_made_to_forget(monkeypatch):
    backend = get_backend("emulated")
    resets = []
    monkeypatch.setattr(backend, "reset", lambda: resets.append(backend.name))
    registry.reset_backends()
    assert resets == ["emulated"]
