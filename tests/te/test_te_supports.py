"""What Transformer Engine takes on which hardware, as which recipe of its own, and every refusal's reason."""

import importlib
import subprocess
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from autoprec.backends import choose
from autoprec.backends.base import Gemm
from autoprec.backends.transformer_engine import backend as te_backend
from autoprec.backends.transformer_engine.backend import TransformerEngineBackend
from autoprec.backends.transformer_engine.recipes import te_recipe
from autoprec.plan import Formats, Mode
from autoprec.recipes import (
    Block128Recipe,
    CurrentRecipe,
    DelayedRecipe,
    MXFP8Recipe,
    NVFP4Recipe,
    Recipe,
    RowwiseRecipe,
)

HYBRID = Formats(input="fp8_e4m3", weight="fp8_e4m3", grad_output="fp8_e5m2")
E4M3, MXFP8, NVFP4 = Formats.all("fp8_e4m3"), Formats.all("mxfp8"), Formats.all("nvfp4")

CURRENT = CurrentRecipe()


@dataclass(frozen=True)
class Asked:
    """A product on a GPU."""

    formats: Formats = HYBRID
    recipe: Recipe | None = CURRENT
    x: tuple[int, ...] = (128, 64)
    weight: tuple[int, ...] = (96, 64)
    dtype: torch.dtype = torch.bfloat16
    mode: Mode = "training"
    device: str = "cuda"
    op: str = "linear"

    def gemm(self) -> Gemm:
        return Gemm(
            op=self.op,
            formats=self.formats,
            recipe=self.recipe,
            input_shape=self.x,
            weight_shape=self.weight,
            dtype=self.dtype,
            device=torch.device(self.device),
            mode=self.mode,
        )


TAKEN = {
    "Ada": ((8, 9), Asked()),
    "Hopper, delayed": ((9, 0), Asked(recipe=DelayedRecipe())),
    "Hopper, all e4m3": ((9, 0), Asked(formats=E4M3)),
    "Hopper, block128": ((9, 0), Asked(formats=E4M3, recipe=Block128Recipe())),
    "Hopper, fp32 activations": ((9, 0), Asked(dtype=torch.float32)),
    "Blackwell, mxfp8": ((10, 0), Asked(formats=MXFP8, recipe=MXFP8Recipe())),
    "Blackwell, nvfp4": ((10, 3), Asked(formats=NVFP4, recipe=NVFP4Recipe())),
    "RTX 50, nvfp4 inference": ((12, 0), Asked(formats=NVFP4, recipe=NVFP4Recipe(), mode="inference")),
    "inference takes out_features by 8": ((9, 0), Asked(weight=(40, 64), mode="inference")),
    "unrounded gradients have any format": (
        (9, 0),
        Asked(
            formats=Formats(input="fp8_e4m3", weight="fp8_e4m3", grad_output="bf16"),
            recipe=CurrentRecipe(backward="high_precision"),
        ),
    ),
    "a meta tensor is of the GPU at hand": ((9, 0), Asked(device="meta")),
}
REFUSED: dict[str, tuple[tuple[int, int], Asked]] = {
    "op 'conv2d' has no scaled kernel": ((9, 0), Asked(op="conv2d")),
    "needs a CUDA device, not cpu": ((9, 0), Asked(device="cpu")),
    "takes the recipes 'current', 'delayed', 'block128', 'mxfp8', 'nvfp4', not 'rowwise'": (
        (9, 0),
        Asked(formats=E4M3, recipe=RowwiseRecipe()),
    ),
    "not None": ((9, 0), Asked(recipe=None)),
    "has fp8_e4m3 in the forward, not fp8_e5m2 as input": ((9, 0), Asked(formats=Formats.all("fp8_e5m2"))),
    "has fp8_e4m3 in the forward, not bf16 as weight": (
        (9, 0),
        Asked(formats=Formats(input="fp8_e4m3", weight="bf16", grad_output="bf16")),
    ),
    "has gradients in fp8_e4m3 or fp8_e5m2, not bf16": (
        (9, 0),
        Asked(formats=Formats(input="fp8_e4m3", weight="fp8_e4m3", grad_output="bf16")),
    ),
    "accumulates fast in the output GEMM alone": ((9, 0), Asked(recipe=DelayedRecipe(fast_output=False))),
    "learns its scales in training steps": ((9, 0), Asked(recipe=DelayedRecipe(), mode="inference")),
    "in_features=72 isn't a multiple of 16": ((9, 0), Asked(x=(128, 72), weight=(96, 72))),
    "out_features=40 isn't a multiple of 16": ((9, 0), Asked(weight=(40, 64))),
    "out_features=48 isn't a multiple of 32": ((10, 0), Asked(MXFP8, MXFP8Recipe(), weight=(48, 64))),
    "in_features=80 isn't a multiple of 32": ((10, 0), Asked(NVFP4, NVFP4Recipe(), x=(128, 80), weight=(96, 80))),
    "the input is empty": ((9, 0), Asked(x=(0, 64))),
    "recipe 'current' needs compute capability 8.9 or newer, not 8.0": ((8, 0), Asked()),
    "recipe 'block128' needs compute capability 9.0 or newer, not 8.9": ((8, 9), Asked(E4M3, Block128Recipe())),
    "recipe 'mxfp8' needs compute capability 10.0 or newer, not 9.0": ((9, 0), Asked(MXFP8, MXFP8Recipe())),
    "recipe 'mxfp8' has no kernels for compute capability 12.0 yet": ((12, 0), Asked(MXFP8, MXFP8Recipe())),
    "has scales with rounding='ceil', not 'floor'": ((10, 0), Asked(MXFP8, MXFP8Recipe(rounding="floor"))),
    "rotates bf16 activations alone, not torch.float16": (
        (10, 0),
        Asked(NVFP4, NVFP4Recipe(), dtype=torch.float16),
    ),
    "no kernels for training on compute capability 12.0": ((12, 0), Asked(NVFP4, NVFP4Recipe())),
    "needs power_of_two=True on compute capability 10.0": (
        (10, 0),
        Asked(E4M3, Block128Recipe(power_of_two=False)),
    ),
}


@pytest.mark.te
@pytest.mark.parametrize(("capability", "asked"), TAKEN.values(), ids=TAKEN)
def test_takes(native: ModuleType, capability: tuple[int, int], asked: Asked) -> None:
    with native.gpu(capability):
        ok, reason = TransformerEngineBackend().supports(asked.gemm())
    if "needs Transformer Engine 2.15" in reason:
        pytest.skip(reason)
    assert ok, reason
    assert asked.recipe is not None
    assert reason == f"Transformer Engine, recipe {asked.recipe.name!r}"


@pytest.mark.te
@pytest.mark.parametrize(("reason", "capability", "asked"), [(r, *c) for r, c in REFUSED.items()], ids=REFUSED)
def test_refuses(native: ModuleType, reason: str, capability: tuple[int, int], asked: Asked) -> None:
    with native.gpu(capability):
        ok, found = TransformerEngineBackend().supports(asked.gemm())
    assert not ok
    assert reason in found


@pytest.mark.te
def test_an_old_cuda_is_the_librarys_own_reason(native: ModuleType) -> None:
    with native.gpu((9, 0), cuda="12.8"):
        ok, reason = TransformerEngineBackend().supports(Asked(E4M3, Block128Recipe()).gemm())
    assert (ok, "CUDA >= 12.9" in reason) == (False, True)


@pytest.mark.te
def test_asking_leaves_no_region_open(native: ModuleType) -> None:
    before = native.region()
    with native.gpu((9, 0)):
        for _, asked in REFUSED.values():
            TransformerEngineBackend().supports(asked.gemm())
    assert native.region() == before == (0, False)


@pytest.mark.te
def test_chosen_first_where_there_is_a_gpu(hopper: ModuleType) -> None:
    x, weight = torch.empty(128, 64, dtype=torch.bfloat16, device="meta"), torch.empty(96, 64, device="meta")
    chosen, reason = choose("linear", HYBRID, x, weight, (), "training", recipe=CurrentRecipe())
    assert chosen is not None
    assert (chosen.name, reason) == ("transformer_engine", "transformer_engine: Transformer Engine, recipe 'current'")


@pytest.mark.te
def test_recipes_are_transformer_engines_own(native: ModuleType) -> None:
    common: Any = importlib.import_module("transformer_engine.common.recipe")
    delayed = te_recipe(DelayedRecipe(margin=1, history_length=32, algorithm="most_recent"), HYBRID)
    assert delayed == common.DelayedScaling(
        margin=1, amax_history_len=32, amax_compute_algo="most_recent", reduce_amax=False
    )
    block = te_recipe(Block128Recipe(input_2d=True, weight_2d=False, power_of_two=False), HYBRID)
    assert (block.x_block_scaling_dim, block.w_block_scaling_dim, block.grad_block_scaling_dim) == (2, 1, 1)
    assert block.fp8_format is common.Format.HYBRID
    assert not block.fp8_quant_fwd_inp.power_2_scale
    nvfp4 = te_recipe(NVFP4Recipe(hadamard=False), NVFP4)
    assert not nvfp4.fp4_quant_fwd_inp.random_hadamard_transform
    assert nvfp4.fp4_quant_bwd_grad.stochastic_rounding
    assert nvfp4.fp4_quant_fwd_weight.fp4_2d_quantization
    for recipe, formats, field, value in (  # of later versions
        (MXFP8Recipe(weight_2d=True), MXFP8, "enable_2d_quantization", True),
        (CurrentRecipe(backward="dequantized"), E4M3, "backward_override", "dequantized"),
        (CurrentRecipe(), E4M3, "backward_override", None),
    ):
        assert getattr(te_recipe(recipe, formats), field, value) == value


@pytest.mark.te
@pytest.mark.parametrize(
    ("recipe", "field", "reason"),
    [
        (CurrentRecipe(backward="high_precision"), "backward_override", "backward='high_precision' needs"),
        (MXFP8Recipe(weight_2d=True), "enable_2d_quantization", "weight_2d=True of recipe 'mxfp8' needs a newer"),
    ],
)
def test_what_an_older_version_lacks_is_refused(native: ModuleType, recipe: Recipe, field: str, reason: str) -> None:
    common: Any = importlib.import_module("transformer_engine.common.recipe")
    kind = {"current": common.Float8CurrentScaling, "mxfp8": common.MXFP8BlockScaling}[recipe.name]
    fields = {name: f for name, f in kind.__dataclass_fields__.items() if name != field}
    formats = MXFP8 if recipe.name == "mxfp8" else HYBRID
    with native.gpu((10, 0)), mock.patch.object(kind, "__dataclass_fields__", fields):
        ok, found = TransformerEngineBackend().supports(Asked(formats, recipe).gemm())
    assert not ok
    assert reason in found


def test_availability_is_told_without_an_import() -> None:
    code = (
        "import sys; from autoprec.backends import get_backend; "
        "print(*get_backend('transformer_engine').available()); "
        "sys.exit('transformer_engine' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = ("True transformer_engine", "False transformer_engine isn't installed", "False needs an NVIDIA GPU")
    if not torch.cuda.is_available():
        assert done.stdout.startswith(answers[1:])


@pytest.mark.parametrize(
    ("found", "reason"),
    [("2.8.1", "is older than 2.9"), ("2.20.2", "needs an NVIDIA GPU"), ("2.10", "needs an NVIDIA GPU")],
)
def test_versions(found: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_backend, "version", lambda name: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ok, answer = TransformerEngineBackend().available()
    assert not ok
    assert reason in answer


def test_an_import_that_fails_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError("libnccl.so.2: cannot open shared object file")

    monkeypatch.setattr(te_backend, "version", lambda name: "2.20.2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(te_backend.importlib, "import_module", fail)
    ok, answer = TransformerEngineBackend().available()
    assert not ok
    assert answer.startswith("transformer_engine 2.20.2 can't be imported: OSError('libnccl")
