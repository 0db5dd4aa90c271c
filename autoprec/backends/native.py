"""``native``: torch's own scaled matrix product, with autoprec's casts and scales.

The three products of a linear layer, with x [M, K], weight [N, K] and grad [M, N]::

    output      = x    @ weight.T    contracts K
    grad_input  = grad @ weight      contracts N
    grad_weight = grad.T @ x         contracts M, which is padded with zeros to a multiple of 16

On CUDA both operands must be contiguous along the contracted dimension, so that the gradients need transposed copies.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import ScalingType

from autoprec.backends.base import (
    ALIGNMENT,
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
from autoprec.backends.native_blocks import BLOCK_RECIPES, BlockLinear, refuse_blocks
from autoprec.errors import BackendError
from autoprec.formats import get_format, scales
from autoprec.recipes import CurrentRecipe, Recipe, RowwiseRecipe, family_of

#: The product that is told what kind each scale is, and doesn't guess from shapes; torch 2.11 has it on CUDA alone.
_TOLD_ON_CPU = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU")


class NativeBackend(Backend):
    """FP8 with scales per tensor (``current``) and per row (``rowwise``); on GPUs that have it, per block."""

    name: ClassVar[str] = "native"
    speed: ClassVar[int] = 30

    def available(self) -> Answer:
        if not hasattr(torch, "_scaled_mm"):
            return False, f"torch {torch.__version__} has no scaled matrix product; needs 2.11 or newer"
        return True, "torch's scaled matrix product"

    def wanted(self, gemm: Gemm) -> Answer:
        if gemm.device.type != "cuda":
            return False, f"on {gemm.device.type} torch emulates it, and 'emulated' is the reference"
        return True, ""

    def supports(self, gemm: Gemm) -> Answer:
        checks = (refuse_op, _refuse_recipe, _refuse_formats, refuse_shape, refuse_blocks, refuse_device)
        kind = f"block-scaled {gemm.formats.input}" if isinstance(gemm.recipe, BLOCK_RECIPES) else "scaled FP8"
        return first_refusal(gemm, checks, f"{kind} matrix product")

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> Tensor:
        function = BlockLinear if isinstance(spec.recipe, BLOCK_RECIPES) else _NativeLinear
        output = function.apply(x.reshape(-1, x.shape[-1]), weight, bias, spec)
        return output.reshape(*x.shape[:-1], weight.shape[0])


class _Codes(NamedTuple):
    """``data * scale_inv`` are the numbers meant: fp8 ``[rows, K]``, and fp32 ``[]`` or ``[rows, 1]``."""

    data: Tensor
    scale_inv: Tensor

    def transposed(self) -> _Codes:
        """Contracted along the other dimension; for per-tensor scales."""
        return _Codes(self.data.t().contiguous(), self.scale_inv)


class _NativeLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> Tensor:
        ctx.spec, ctx.dtype, ctx.bias_dtype = spec, x.dtype, None if bias is None else bias.dtype
        output_dtype = spec.output_dtype or x.dtype
        # The kernel adds a 16-bit bias before it rounds; an fp32 one it doesn't take on CUDA.
        fused = None if bias is None or output_dtype == torch.float32 else bias.to(output_dtype)
        with no_autocast(x):
            codes = _encode(x, spec.formats.input, spec)
            weight_codes = _encode(weight, spec.formats.weight, spec)
            output = _multiply(codes, weight_codes, output_dtype, fast=_recipe(spec).fast_output, bias=fused)
        if isinstance(spec.recipe, CurrentRecipe) and spec.recipe.backward == "quantized":
            ctx.save_for_backward(codes.data, codes.scale_inv, weight)  # a byte a number instead of two or four
        else:
            ctx.save_for_backward(x, None, weight)
        return output if bias is None or fused is not None else output + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved, scale_inv, weight = ctx.saved_tensors
        x = saved if scale_inv is None else _Codes(saved, scale_inv)
        needed = ctx.needs_input_grad
        grad_input = grad_weight = grad_bias = None
        with no_autocast(grad):
            if needed[0]:
                grad_input = _grad_input(grad, weight, ctx.spec, ctx.dtype)
            if needed[1]:
                grad_weight = _grad_weight(grad, x, ctx.spec, weight.dtype)
            if needed[2] and ctx.bias_dtype is not None:
                grad_bias = grad.to(torch.float32).sum(0).to(ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias, None


def _grad_input(grad: Tensor, weight: Tensor, spec: LinearSpec, dtype: torch.dtype) -> Tensor:
    recipe = _recipe(spec)
    if recipe.backward == "high_precision":
        return torch.mm(grad, weight.to(grad.dtype)).to(dtype)
    codes = _encode(grad, spec.formats.grad_output, spec)
    if isinstance(recipe, RowwiseRecipe) and recipe.grad_weight == "quantized":
        weight_codes = _encode(weight.t(), spec.formats.weight, spec)
    else:
        weight_codes = _encode(weight, spec.formats.weight, spec, per_tensor=True).transposed()
    return _multiply(codes, weight_codes, dtype, fast=getattr(recipe, "fast_grads", False))


def _grad_weight(grad: Tensor, x: Tensor | _Codes, spec: LinearSpec, dtype: torch.dtype) -> Tensor:
    recipe = _recipe(spec)
    if isinstance(x, _Codes):
        x_codes = _Codes(_pad_rows(x.data), x.scale_inv).transposed()
    elif "high_precision" in (recipe.backward, getattr(recipe, "grad_weight", "quantized")):
        return torch.mm(grad.t(), x.to(grad.dtype)).to(dtype)
    else:
        x_codes = _encode(_pad_rows(x).t(), spec.formats.input, spec)
    grad_codes = _encode(_pad_rows(grad).t(), spec.formats.grad_output, spec)
    return _multiply(grad_codes, x_codes, dtype, fast=getattr(recipe, "fast_grads", False))


def _recipe(spec: LinearSpec) -> CurrentRecipe | RowwiseRecipe:
    if not isinstance(spec.recipe, CurrentRecipe | RowwiseRecipe):
        raise BackendError(f"backend 'native' can't run {spec.recipe}; ask supports() first")
    return spec.recipe


def _encode(x: Tensor, format_name: str, spec: LinearSpec, *, per_tensor: bool = False) -> _Codes:
    """Cast ``[rows, K]`` with the recipe's scale, contiguous along K."""
    fmt, recipe = get_format(format_name), _recipe(spec)
    if isinstance(recipe, CurrentRecipe):
        scale = scales.current_scale(_amax(x), fmt.max, epsilon=recipe.epsilon, power_of_two=recipe.power_of_two)
    elif per_tensor:
        scale = scales.current_scale(_amax(x), fmt.max, power_of_two=recipe.power_of_two)
    else:
        amax = x.abs().amax(1, keepdim=True).to(torch.float32)
        scale = scales.torchao_scale(amax, fmt.max, power_of_two=recipe.power_of_two)
    # Clamped first: the cast of e5m2, and in older versions of torch of e4m3, doesn't saturate.
    data = (x.to(torch.float32) * scale).clamp(-fmt.max, fmt.max).to(fmt.torch_dtype)
    return _Codes(data.contiguous(), scales.reciprocal(scale))


def _amax(x: Tensor) -> Tensor:
    return x.abs().amax().to(torch.float32) if x.numel() else x.new_zeros((), dtype=torch.float32)


def _multiply(a: _Codes, b: _Codes, dtype: torch.dtype, *, fast: bool, bias: Tensor | None = None) -> Tensor:
    """``a @ b.T``: ``[M, K]`` and ``[N, K]`` give ``[M, N]``."""
    scale_a, scale_b = a.scale_inv, b.scale_inv
    if scale_a.dim() == 0 and scale_b.dim() == 0:
        return torch._scaled_mm(a.data, b.data.t(), scale_a, scale_b, bias=bias, out_dtype=dtype, use_fast_accum=fast)
    # Per row on one side needs it on both.
    scale_a = scale_a.expand(a.data.shape[0], 1).contiguous()
    scale_b = scale_b.expand(b.data.shape[0], 1).contiguous().t()
    # Not every version's per-row kernel writes anything else on CUDA.
    kernel_dtype = torch.bfloat16 if a.data.is_cuda else dtype
    if a.data.is_cuda or (a.data.device.type == "cpu" and _TOLD_ON_CPU):
        row = ScalingType.RowWise
        product = F.scaled_mm(
            a.data, b.data.t(), scale_a, row, scale_b, row, bias=bias, output_dtype=kernel_dtype, use_fast_accum=fast
        )
    else:
        product = torch._scaled_mm(
            a.data, b.data.t(), scale_a, scale_b, bias=bias, out_dtype=kernel_dtype, use_fast_accum=fast
        )
    return product.to(dtype)


def _pad_rows(x: Tensor) -> Tensor:
    """Zero rows up to a multiple of 16; they add nothing to a product that contracts them."""
    missing = -x.shape[0] % ALIGNMENT
    if not missing:
        return x
    if x.dtype.itemsize > 1:
        return F.pad(x, (0, 0, 0, missing))
    # Padding has no kernel for fp8, and a byte of zeros is 0.0 in all its formats.
    return F.pad(x.view(torch.uint8), (0, 0, 0, missing)).view(x.dtype)


def _refuse_recipe(gemm: Gemm) -> str:
    recipe = gemm.recipe
    if not isinstance(recipe, (CurrentRecipe, RowwiseRecipe, *BLOCK_RECIPES)):
        return f"takes the recipes 'current', 'rowwise', 'block128', 'mxfp8' and 'nvfp4', not {_name(recipe)}"
    if gemm.mode == "training" and getattr(recipe, "backward", "") == "dequantized":
        return "can't run gradients with backward='dequantized'; 'quantized' and 'high_precision' it can"
    if isinstance(recipe, RowwiseRecipe) and gemm.device.type == "cuda" and gemm.dtype != torch.bfloat16:
        return f"per-row kernels give bf16, and activations are {gemm.dtype}; cast them to bf16 or use 'current'"
    return ""


def _name(recipe: Recipe | None) -> str:
    return repr(recipe.name if recipe else None)


def _refuse_formats(gemm: Gemm) -> str:
    high = gemm.recipe is not None and getattr(gemm.recipe, "backward", "") == "high_precision"
    used = gemm.used_formats[:2] if high else gemm.used_formats
    if others := [name for name in used if not name.startswith("fp8_") and name not in ("mxfp8", "nvfp4")]:
        return f"takes FP8 in every role, not {others[0]}"
    wrong = [name for name in used if gemm.recipe is not None and family_of(name) != gemm.recipe.family]
    if wrong:
        return f"recipe {_name(gemm.recipe)} scales {gemm.recipe.family if gemm.recipe else ''}, not {wrong[0]}"
    formats = gemm.formats
    pairs = {"output": (formats.input, formats.weight)}
    if gemm.mode == "training" and not high:
        pairs |= {
            "grad_input": (formats.grad_output, formats.weight),
            "grad_weight": (formats.grad_output, formats.input),
        }
    for product, names in pairs.items():
        if names == ("fp8_e5m2", "fp8_e5m2"):
            return f"no kernel multiplies e5m2 by e5m2, as {product} would"
    return ""
