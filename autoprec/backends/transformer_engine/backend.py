"""The backend: what it takes and why not, and one layer for each recipe or, with delayed scaling, each weight."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from autoprec.backends.base import Answer, Backend, FirstHalf, Gemm, LinearSpec, Norm, first_refusal, refuse_op
from autoprec.backends.transformer_engine.fused import MLPLayer, NormLayer
from autoprec.backends.transformer_engine.layer import DelayedLayer, Layer
from autoprec.backends.transformer_engine.recipes import SUPPORT, refuse_recipe
from autoprec.errors import BackendError
from autoprec.plan import Formats
from autoprec.recipes import Block128Recipe, DelayedRecipe, MXFP8Recipe, NVFP4Recipe, Recipe

_OLDEST = (2, 9)
#: Compute capability from which on, and before which, there are kernels.
_CAPABILITIES: dict[type[Recipe], tuple[tuple[int, int], tuple[int, int]]] = {
    Block128Recipe: ((9, 0), (100, 0)),
    MXFP8Recipe: ((10, 0), (12, 0)),
    NVFP4Recipe: ((10, 0), (100, 0)),
}
_FP8_CAPABILITIES = ((8, 9), (100, 0))
_Key = tuple[Recipe, Formats, torch.device]


class TransformerEngineBackend(Backend):
    """Delayed, current, 128-block, MXFP8 and NVFP4 scaling."""

    name: ClassVar[str] = "transformer_engine"
    speed: ClassVar[int] = 20

    def __init__(self) -> None:
        self._layers: dict[_Key, Layer] = {}
        self._norm_layers: dict[tuple[_Key, str, float], NormLayer] = {}
        self._mlp_layers: dict[tuple[_Key, str, float, str], MLPLayer] = {}
        # The weight of a site is all that tells it from others: modules that do the same share a frame.
        self._of_weights: Any = WeakIdKeyDictionary()
        self._eager: Callable[..., Any] = self._linear

    def available(self) -> Answer:
        try:
            found = version("transformer_engine")
        except PackageNotFoundError:
            return False, "transformer_engine isn't installed; pip install 'autoprec[te]'"
        if tuple(int(part) for part in found.split(".")[:2] if part.isdigit()) < _OLDEST:
            return False, f"transformer_engine {found} is older than 2.9; pip install -U 'autoprec[te]'"
        if torch.version.hip or not torch.cuda.is_available():  # before the import, which takes seconds
            return False, "needs an NVIDIA GPU, and torch finds none"
        try:
            importlib.import_module("transformer_engine.pytorch")
        except Exception as error:  # a missing library, or a build for another torch, fails in many ways
            return False, f"transformer_engine {found} can't be imported: {error!r}"
        return True, f"transformer_engine {found}"

    def wanted(self, gemm: Gemm) -> Answer:
        if gemm.device.type not in ("cuda", "meta"):
            return False, f"has no kernels for {gemm.device.type}"
        return True, ""

    def supports(self, gemm: Gemm) -> Answer:
        checks = (refuse_op, refuse_recipe, _refuse_shape, _refuse_device, _refuse_library)
        answer = first_refusal(gemm, checks, f"Transformer Engine, recipe {gemm.recipe.name if gemm.recipe else ''!r}")
        if answer[0] and self._eager == self._linear:
            # Asked before a model runs: a compiler can neither trace the library nor this import.
            self._eager = torch.compiler.disable(self._linear, reason="Transformer Engine's layers run eagerly")
        return answer

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> Tensor:
        return self._eager(x, weight, bias, spec)

    def fuses(self, spec: LinearSpec) -> Answer:
        if isinstance(spec.recipe, DelayedRecipe):
            return False, "recipe 'delayed' starts from the norm's result, which a fused kernel doesn't show"
        return True, "Transformer Engine's LayerNormLinear and LayerNormMLP"

    def norm_linear(self, x: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> Tensor:
        if spec.recipe is None or isinstance(spec.recipe, DelayedRecipe) or not x.is_cuda or not x.numel():
            raise BackendError(
                f"backend 'transformer_engine' can't fuse {spec.recipe} on {x.device}; ask fuses() first"
            )
        key = (spec.recipe, spec.formats, x.device)
        layer = self._norm_layers.get((key, norm.kind, norm.eps))
        if layer is None:
            layer = self._norm_layers[key, norm.kind, norm.eps] = NormLayer(*key, norm.kind, norm.eps)
        rows = x.reshape(-1, x.shape[-1])
        single = x.dtype == torch.float32
        output = layer.normed(
            _repeat_last(rows, _multiple(spec.recipe)),
            norm,
            weight.to(x.dtype) if single else weight,
            None if single else bias,
        )[: rows.shape[0]]
        if single and bias is not None:
            output = output + bias
        return output.reshape(*x.shape[:-1], weight.shape[0]).to(spec.output_dtype or x.dtype)

    def mlp(self, x: Tensor, first: FirstHalf, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> Tensor:
        key, kind, eps = _fused_key(x, spec), first.norm.kind, first.norm.eps
        layer = self._mlp_layers.get((key, kind, eps, first.activation))
        if layer is None:
            layer = self._mlp_layers[key, kind, eps, first.activation] = MLPLayer(*key, kind, eps, first.activation)
        rows = x.reshape(-1, x.shape[-1])
        output = layer.perceptron(_repeat_last(rows, _multiple(spec.recipe)), first, weight, bias)[: rows.shape[0]]
        return output.reshape(*x.shape[:-1], weight.shape[0]).to(spec.output_dtype or x.dtype)

    def reset(self) -> None:
        self._layers.clear()
        self._norm_layers.clear()
        self._mlp_layers.clear()
        self._of_weights.clear()
        if self.available()[0]:
            importlib.import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager.reset()

    def forget(self, weights: Iterable[Tensor]) -> None:
        for weight in weights:
            self._of_weights.pop(weight, None)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> Tensor:
        if not (x.is_cuda or x.is_meta):
            raise BackendError(
                f"backend 'transformer_engine' got an input on {x.device}; move the model to a CUDA device, "
                "or convert it again for this one"
            )
        dtype = spec.output_dtype or x.dtype
        rows = x.reshape(-1, x.shape[-1])
        if x.is_meta or not rows.shape[0]:  # shapes alone; an expert without tokens, which kernels don't take
            return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype)).to(dtype)
        layer = self._layer(weight, spec, x.device)
        single = x.dtype == torch.float32
        output = layer(
            _pad_rows(rows, _multiple(spec.recipe)),
            weight.to(x.dtype) if single else weight,
            None if single else bias,
        )[: rows.shape[0]]
        if single and bias is not None:
            output = output + bias
        return output.reshape(*x.shape[:-1], weight.shape[0]).to(dtype)

    def _layer(self, weight: Tensor, spec: LinearSpec, device: torch.device) -> Layer:
        if spec.recipe is None:
            raise BackendError("backend 'transformer_engine' needs a recipe; ask supports() first")
        key = (spec.recipe, spec.formats, device)
        if not isinstance(spec.recipe, DelayedRecipe):
            if key not in self._layers:
                self._layers[key] = Layer(*key)
            return self._layers[key]
        if not weight.is_leaf:
            raise BackendError(
                "recipe 'delayed' keeps a history for each Parameter, and this weight is computed anew in each call; "
                "use the recipe 'current'"
            )
        layers = self._of_weights.setdefault(weight, {})
        if key not in layers:
            layers[key] = DelayedLayer(*key)
        return layers[key]


def _multiple(recipe: Recipe | None) -> int:
    """What tokens are padded to: the gradient of the weight contracts them."""
    return 32 if isinstance(recipe, MXFP8Recipe | NVFP4Recipe) else 16


def _pad_rows(rows: Tensor, multiple: int) -> Tensor:
    """Zero rows up to a multiple; they change no scale, and add nothing to a product that contracts them."""
    missing = -rows.shape[0] % multiple
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _fused_key(x: Tensor, spec: LinearSpec) -> _Key:
    if spec.recipe is None or isinstance(spec.recipe, DelayedRecipe) or not x.is_cuda or not x.numel():
        raise BackendError(f"backend 'transformer_engine' can't fuse {spec.recipe} here; ask fuses() first")
    return spec.recipe, spec.formats, x.device


def _repeat_last(rows: Tensor, multiple: int) -> Tensor:
    """Copies of the last row up to a multiple: unlike that of zeros their norm changes no scale."""
    missing = -rows.shape[0] % multiple
    return torch.cat([rows, rows[-1:].expand(missing, -1)]) if missing else rows


def _refuse_shape(gemm: Gemm) -> str:
    """Every GEMM of the mode: an ``out_features`` that the forward takes can fail in the backward."""
    multiple = _multiple(gemm.recipe)
    forward = multiple == 16 and gemm.mode == "inference"
    for name, size, needed in zip(
        ("out_features", "in_features"), gemm.weight_shape, (8 if forward else multiple, multiple), strict=True
    ):
        if size % needed:
            return f"{name}={size} isn't a multiple of {needed}"
    return "" if gemm.rows else "the input is empty"


def _refuse_device(gemm: Gemm) -> str:
    """By the layer's own device, since the library answers for the current one; a meta tensor gets that."""
    if gemm.device.type not in ("cuda", "meta"):
        return f"needs a CUDA device, not {gemm.device.type}"
    capability = torch.cuda.get_device_capability(gemm.device if gemm.device.type == "cuda" else None)
    recipe = gemm.recipe
    oldest, too_new = _CAPABILITIES.get(type(recipe), _FP8_CAPABILITIES) if recipe else _FP8_CAPABILITIES
    name, found = recipe.name if recipe else "", ".".join(map(str, capability))
    if capability < oldest:
        return f"recipe {name!r} needs compute capability {oldest[0]}.{oldest[1]} or newer, not {found}"
    if capability >= too_new:
        return f"recipe {name!r} has no kernels for compute capability {found} yet"
    if isinstance(recipe, NVFP4Recipe) and capability >= (12, 0) and gemm.mode == "training":
        return f"recipe 'nvfp4' has no kernels for training on compute capability {found}"
    if isinstance(recipe, Block128Recipe) and capability >= (10, 0) and not recipe.power_of_two:
        return f"recipe 'block128' needs power_of_two=True on compute capability {found}, whose kernels are MXFP8's"
    return ""


def _refuse_library(gemm: Gemm) -> str:
    """What the versions of CUDA and cuBLAS lack."""
    te = importlib.import_module("transformer_engine.pytorch")
    with torch.cuda.device(gemm.device if gemm.device.type == "cuda" else torch.cuda.current_device()):
        ok, reason = getattr(te, SUPPORT[type(gemm.recipe)])(return_reason=True)
    return "" if ok else reason
