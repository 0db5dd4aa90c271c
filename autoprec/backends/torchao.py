"""``torchao``: its float8 training function, and its int8, int4 and fp8 weights for inference.

torchao converts by replacing modules or Parameters; here its autograd function alone is called, or its tensor held
beside the Parameter, so that the module, its keys and its Parameters stay.  Without FP8 hardware torchao's training
function multiplies in fp32 itself.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]

from autoprec.backends.base import (
    Answer,
    Backend,
    Gemm,
    LinearSpec,
    first_refusal,
    no_autocast,
    refuse_device,
    refuse_op,
    refuse_shape,
)
from autoprec.backends.registry import get_backend
from autoprec.backends.torchao_inference import (
    NO_GRADIENT,
    has_training_kernel,
    held_as,
    kind_of,
    multiply,
    refuse_inference,
)
from autoprec.backends.torchao_weights import HeldWeights, Kind
from autoprec.errors import BackendError
from autoprec.plan import Formats
from autoprec.recipes import CurrentRecipe, Recipe, RowwiseRecipe

_OLDEST = (0, 18)
_HYBRID = Formats(input="fp8_e4m3", weight="fp8_e4m3", grad_output="fp8_e5m2")
_E4M3 = Formats.all("fp8_e4m3")


class TorchaoBackend(Backend):
    """In training torchao's recipes tensorwise, rowwise and rowwise_with_gw_hp; in inference weights held narrow."""

    name: ClassVar[str] = "torchao"
    speed: ClassVar[int] = 40  # without torch.compile it makes more passes over the operands than 'native'

    def __init__(self) -> None:
        # Filled by supports(), which is asked before a model runs: a compiler can't trace torchao's import.
        self._kernels: dict[_Key, _Kernel] = {}
        self._weights = HeldWeights()

    def available(self) -> Answer:
        try:
            found = version("torchao")
        except PackageNotFoundError:
            return False, "torchao isn't installed; pip install 'autoprec[ao]'"
        if tuple(int(part) for part in found.split(".")[:2] if part.isdigit()) < _OLDEST:
            return False, f"torchao {found} is older than 0.18; pip install -U 'autoprec[ao]'"
        try:
            importlib.import_module("torchao.float8")
        except Exception as error:  # a build for another torch fails in many ways
            return False, f"torchao {found} can't be imported: {error!r}"
        return True, f"torchao {found}"

    def wanted(self, gemm: Gemm) -> Answer:
        if gemm.device.type == "cuda" or (gemm.mode == "inference" and gemm.formats.weight in ("int8", "int4")):
            return True, ""
        return False, f"on {gemm.device.type} it multiplies in fp32, and 'emulated' is the reference"

    def supports(self, gemm: Gemm) -> Answer:
        if gemm.mode == "inference" and not has_training_kernel(gemm.formats, gemm.recipe, gemm.device, gemm.dtype):
            return first_refusal(gemm, (refuse_op, refuse_inference), held_as(gemm))
        checks = (refuse_op, _refuse_integers, _refuse_recipe, refuse_shape, refuse_device)
        answer = first_refusal(gemm, checks, f"torchao's {_recipe_name(gemm.recipe)}")
        if answer[0]:
            self._prepare(gemm.recipe, gemm.device)
        return answer

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> Tensor:
        if spec.mode == "inference" and not has_training_kernel(spec.formats, spec.recipe, x.device, x.dtype):
            return self._infer(x, weight, bias, spec)
        kernel = self._kernels.get(_key(spec.recipe, x.device))
        if kernel is None:
            kernel = self._prepare(spec.recipe, x.device)
        with no_autocast(x):
            output = kernel.function.apply(x, weight.t(), kernel.mm_config, kernel.config)
        output = output.to(spec.output_dtype or x.dtype)
        return output if bias is None else output + bias.to(output.dtype)

    def held(self, weight: Tensor, kind: Kind, dtype: torch.dtype) -> Tensor:
        """The tensor of a weight, for activations of that dtype."""
        return self._weights.get(weight, kind, dtype)

    def reset(self) -> None:
        self._weights.clear()

    def forget(self, weights: Iterable[Tensor]) -> None:
        self._weights.forget(weights)

    def held_bytes(self, weights: Iterable[Tensor]) -> int:
        return self._weights.bytes(weights)

    def _infer(self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> Tensor:
        kind, reason = kind_of(spec.formats, spec.recipe)
        if kind is None:
            raise BackendError(f"backend 'torchao': {reason}; ask supports() first")
        if not torch.compiler.is_compiling() and _functorch.is_functorch_wrapped_tensor(x):
            raise BackendError("torchao's weights don't run in a torch.func transform; use the backend 'emulated'")
        dtype = spec.output_dtype or x.dtype
        rows = x.reshape(-1, x.shape[-1])
        if x.is_meta or not rows.shape[0]:  # shapes alone; an expert without tokens, which kernels don't take
            return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype)).to(dtype)
        with no_autocast(x):
            if torch.compiler.is_compiling():
                output = _held_product(rows, weight, kind.format, kind.dynamic, kind.rowwise, kind.fast)
            else:
                output = multiply(rows, weight, self.held(weight, kind, x.dtype), kind)
            output = output if bias is None else output + bias.to(output.dtype)
        return output.reshape(*x.shape[:-1], weight.shape[0]).to(dtype)

    def _prepare(self, recipe: Recipe | None, device: torch.device) -> _Kernel:
        key = _key(recipe, device)
        if key[0] is None:
            raise BackendError(f"backend 'torchao' can't run {recipe}; ask supports() first")
        return self._kernels.setdefault(key, _kernel(key))


@torch.library.custom_op("autoprec::torchao_held_product", mutates_args=())
def _held_product(x: Tensor, weight: Tensor, format: str, dynamic: bool, rowwise: bool, fast: bool) -> Tensor:
    """:func:`multiply` as one op of a compiled graph, which can't look a weight up itself."""
    backend: Any = get_backend("torchao")
    kind = Kind(format, dynamic, rowwise, fast)
    with torch.no_grad():
        return multiply(x, weight, backend.held(weight, kind, x.dtype), kind)


@_held_product.register_fake  # pyright: ignore[reportFunctionMemberAccess]
def _(x: Tensor, weight: Tensor, format: str, dynamic: bool, rowwise: bool, fast: bool) -> Tensor:
    integers = format == "int8" and dynamic
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32 if integers else x.dtype)


def _refuse_gradient(ctx: Any, grad: Tensor) -> Any:
    raise BackendError(NO_GRADIENT)


_held_product.register_autograd(_refuse_gradient)  # pyright: ignore[reportFunctionMemberAccess]
_Key = tuple[str | None, bool, bool, bool]


class _Kernel(NamedTuple):
    """The autograd function and its two configurations."""

    function: Any
    mm_config: Any
    config: Any


def _key(recipe: Recipe | None, device: torch.device) -> _Key:
    """Name of the recipe, powers of two, fast accumulation, emulation."""
    fast, power_of_two = getattr(recipe, "fast_output", False), getattr(recipe, "power_of_two", False)
    return _recipe_name(recipe), power_of_two, fast, device.type != "cuda"


def _recipe_name(recipe: Recipe | None) -> str | None:
    """Name of torchao's recipe for ours, None where it has none."""
    if isinstance(recipe, CurrentRecipe):
        return (
            "tensorwise" if (recipe.epsilon, recipe.fast_grads, recipe.backward) == (0.0, False, "quantized") else None
        )
    if isinstance(recipe, RowwiseRecipe) and recipe.backward == "quantized":
        return "rowwise" if recipe.grad_weight == "quantized" else "rowwise_with_gw_hp"
    return None


def _kernel(key: _Key) -> _Kernel:
    name, power_of_two, fast_output, emulate = key
    float8 = importlib.import_module("torchao.float8")
    linear = importlib.import_module("torchao.float8.float8_linear")
    config = float8.Float8LinearConfig.from_recipe_name(name)
    config = dataclasses.replace(
        config,
        round_scales_to_power_of_2=power_of_two,
        gemm_config_output=dataclasses.replace(config.gemm_config_output, use_fast_accum=fast_output),
        pad_inner_dim=True,  # for the tokens of the grad_weight product
        emulate=emulate,
    )
    with torch.device("meta"):
        layer = linear.Float8Linear(16, 16, config=config)
    return _Kernel(linear.matmul_with_hp_or_float8_args, layer.linear_mm_config, config)


def _refuse_integers(gemm: Gemm) -> str:
    integers = [name for name in gemm.used_formats if name in ("int8", "int4")]
    return f"{integers[0]} is rounding without a gradient: torchao has it in mode='inference' alone" if integers else ""


def _refuse_recipe(gemm: Gemm) -> str:
    name = _recipe_name(gemm.recipe)
    if name is None:
        return f"torchao trains with its tensorwise and rowwise recipes, which {gemm.recipe} isn't"
    wanted = _HYBRID if name == "tensorwise" else _E4M3
    used = Formats(
        input=gemm.formats.input,
        weight=gemm.formats.weight,
        grad_output=gemm.formats.grad_output if gemm.mode == "training" else wanted.grad_output,
    )
    return "" if used == wanted else f"torchao's {name} has the formats {wanted}, not {used}"
