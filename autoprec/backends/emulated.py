"""``emulated``: exactly the operands that a kernel would see, multiplied in fp32, on any device.

It predicts the loss, not the speed.  What differs from real hardware is the order and width of accumulation alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakIdKeyDictionary

from autoprec.backends.base import (
    Answer,
    Backend,
    Gemm,
    LinearSpec,
    first_refusal,
    no_autocast,
    refuse_device,
    refuse_op,
)
from autoprec.backends.delayed import DelayedScales, DelayedSpec
from autoprec.backends.operands import GemmName, Role, is_shared, multiply, quantize_operand, transpose
from autoprec.errors import BackendError
from autoprec.formats import get_format
from autoprec.formats.quantize import Quantized
from autoprec.recipes import DelayedRecipe, NVFP4Recipe, family_of


class EmulatedBackend(Backend):
    """Reference of all backends; takes every format, shape and device."""

    name: ClassVar[str] = "emulated"
    speed: ClassVar[int] = 90

    def __init__(self) -> None:
        self._histories: Any = WeakIdKeyDictionary()
        self._eager: Callable[..., Any] = self._delayed

    def available(self) -> Answer:
        return True, "runs wherever torch does"

    def supports(self, gemm: Gemm) -> Answer:
        if isinstance(gemm.recipe, DelayedRecipe) and self._eager == self._delayed:
            self._eager = torch.compiler.disable(self._delayed, reason="delayed scaling keeps state between calls")
        return first_refusal(gemm, (refuse_op, _refuse_recipe), "rounds the operands exactly and multiplies in fp32")

    def wanted(self, gemm: Gemm) -> Answer:
        if gemm.device.type == "cuda" and not refuse_device(gemm):
            blackwell = not torch.version.hip and torch.cuda.get_device_capability(gemm.device) >= (10, 0)
            if blackwell or not any(family_of(name) in ("mxfp8", "nvfp4") for name in gemm.used_formats):
                return False, "slower than 16 bit on a device with kernels for these formats; name it to have it"
        return True, ""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> Tensor:
        if isinstance(spec.recipe, DelayedRecipe):
            return self._eager(x, weight, bias, spec, spec.recipe)
        return _EmulatedLinear.apply(x, weight, bias, spec)

    def reset(self) -> None:
        self._histories.clear()

    def forget(self, weights: Iterable[Tensor]) -> None:
        for weight in weights:
            self._histories.pop(weight, None)

    def _delayed(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearSpec, recipe: DelayedRecipe
    ) -> Tensor:
        if not weight.is_leaf or _functorch.is_functorch_wrapped_tensor(x):
            raise BackendError(
                "recipe 'delayed' keeps a history for each Parameter; under a parametrization or a torch.func "
                "transform use the recipe 'current'"
            )
        # The weight of a site is all that tells it from others: modules that do the same share a frame.
        of_weight = self._histories.setdefault(weight, {})
        key = (spec, x.device)  # moved to another device, a weight starts anew
        if key not in of_weight:
            of_weight[key] = DelayedScales(spec, recipe)
        histories = of_weight[key]
        scales = histories.begin(x, weight)
        call = DelayedSpec(
            formats=spec.formats, recipe=recipe, output_dtype=spec.output_dtype, scales=scales, histories=histories
        )
        return _EmulatedLinear.apply(x, weight, bias, call)


def _refuse_recipe(gemm: Gemm) -> str:
    recipe = gemm.recipe
    if isinstance(recipe, DelayedRecipe) and gemm.mode == "inference":
        return "recipe 'delayed' learns its scales in training steps; use 'current' for inference"
    for name in gemm.used_formats:
        if recipe is None and get_format(name).is_scaled:
            return f"format {name!r} has scales, so that it needs a recipe"
        if recipe is not None and family_of(name) not in (None, recipe.family):
            return f"recipe {recipe.name!r} scales {recipe.family}, not {name}"
    rotated = isinstance(recipe, NVFP4Recipe) and recipe.hadamard and gemm.mode == "training"
    if rotated and gemm.formats.input != gemm.formats.grad_output:
        return (
            "recipe 'nvfp4' rotates both operands of grad_weight, so that input and grad_output must be of one format, "
            f"not {gemm.formats.input} and {gemm.formats.grad_output}; or set hadamard=False"
        )
    return ""


class _EmulatedLinear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> Tensor:
        with no_autocast(x):
            rows = x.reshape(-1, x.shape[-1])
            output = multiply(_quantize(rows, spec, "input", "output"), _quantize(weight, spec, "weight", "output"))
            if bias is not None:
                output = output + bias.to(torch.float32)
            return output.reshape(*x.shape[:-1], weight.shape[0]).to(spec.output_dtype or x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, spec = inputs
        ctx.save_for_backward(x, weight)
        ctx.spec = spec
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        with no_autocast(x):
            grad_rows = grad.reshape(-1, grad.shape[-1])
            grad_input, grad_weight = _gradients(
                grad_rows, x.reshape(-1, x.shape[-1]), weight, ctx.spec, ctx.needs_input_grad
            )
            grad_bias = None
            if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
                grad_bias = grad_rows.to(torch.float32).sum(0).to(ctx.bias_dtype)
            if grad_input is not None:
                grad_input = grad_input.reshape(x.shape).to(x.dtype)
            if grad_weight is not None:
                grad_weight = grad_weight.to(weight.dtype)
            return grad_input, grad_weight, grad_bias, None


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, spec: LinearSpec, needed: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """``grad @ weight`` along N and ``grad.T @ x`` along the tokens, each with its own operands."""
    grad_input = grad_weight = None
    grad_along_n = None
    if needed[0]:
        grad_along_n = _quantize(grad, spec, "grad_output", "grad_input")
        grad_input = multiply(grad_along_n, _second_operand(weight, spec, "weight", "grad_input"))
    if needed[1]:
        if grad_along_n is not None and is_shared(spec.formats.grad_output, spec.recipe, "grad_output"):
            grad_along_rows = transpose(grad_along_n)
        else:
            grad_along_rows = _quantize(grad.T, spec, "grad_output", "grad_weight")
        grad_weight = multiply(grad_along_rows, _second_operand(x, spec, "input", "grad_weight"))
    return grad_input, grad_weight


def _second_operand(x: Tensor, spec: LinearSpec, role: Role, gemm: GemmName) -> Quantized:
    """The weight or input of a gradient GEMM, which contracts the dimension that the output GEMM doesn't."""
    name = spec.formats.weight if role == "weight" else spec.formats.input
    if getattr(spec.recipe, "backward", "quantized") == "dequantized":
        return Quantized(_quantize(x, spec, role, "output").dequantize().T, None)
    if is_shared(name, spec.recipe, role) and not _is_high_precision(spec, gemm):
        return transpose(_quantize(x, spec, role, gemm))
    return _quantize(x.T, spec, role, gemm)


def _quantize(x: Tensor, spec: LinearSpec, role: Role, gemm: GemmName) -> Quantized:
    high = _is_high_precision(spec, gemm) or (
        role == "grad_output" and getattr(spec.recipe, "backward", "quantized") == "dequantized"
    )
    if high:
        return Quantized(x.to(torch.float32), None)
    if isinstance(spec, DelayedSpec) and family_of(getattr(spec.formats, role)) is not None:
        return spec.quantize(x.to(torch.float32), role)
    return quantize_operand(x, getattr(spec.formats, role), spec.recipe, role, gemm)


def _is_high_precision(spec: LinearSpec, gemm: GemmName) -> bool:
    """Whether the recipe leaves this GEMM's operands as they came."""
    if gemm == "output":
        return False
    if getattr(spec.recipe, "backward", "quantized") == "high_precision":
        return True
    return gemm == "grad_weight" and getattr(spec.recipe, "grad_weight", "quantized") == "high_precision"
