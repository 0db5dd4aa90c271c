"""Block formats for torch's scaled matrix product: codes, and scales in the order in which the kernels read them.

``F.scaled_mm`` is told each operand's kind of scale.  For an operand ``[rows, K]``, with the layouts that torch's own
checks state and cuBLAS documents ("block scaling factors layout")::

    block128         fp32 [rows, K / 128], the rows next to each other in memory
    block128, tiles  fp32 [K / 128 rounded up to 4, rows / 128], the blocks along K next to each other
    mxfp8            e8m0, one for 32 numbers, swizzled
    nvfp4            e4m3, one for 16 numbers, swizzled, and one fp32 for the tensor; two numbers a byte, the first low
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import ScalingType, SwizzleType

from autoprec.backends.base import Gemm, LinearSpec, no_autocast
from autoprec.backends.operands import Role
from autoprec.errors import BackendError
from autoprec.formats import get_format, scales
from autoprec.formats.elements import round_element
from autoprec.recipes import Block128Recipe, MXFP8Recipe, NVFP4Recipe

BLOCK_RECIPES = (Block128Recipe, MXFP8Recipe, NVFP4Recipe)
_BlockRecipe = Block128Recipe | MXFP8Recipe | NVFP4Recipe
#: What every contracted dimension must be a multiple of.
_MULTIPLE: dict[type[Any], int] = {Block128Recipe: 128, MXFP8Recipe: 32, NVFP4Recipe: 32}
#: What the tokens are padded to where they aren't contracted: whole tiles, if they may be in tiles.
_ROWS: dict[type[Any], int] = {Block128Recipe: 128, MXFP8Recipe: 16, NVFP4Recipe: 16}
#: Compute capability from which on, and before which, torch has kernels, and the CUDA that brought them.
_KERNELS: dict[type[Any], tuple[tuple[int, int], tuple[int, int], tuple[int, int]]] = {
    Block128Recipe: ((9, 0), (10, 0), (12, 9)),
    MXFP8Recipe: ((10, 0), (12, 0), (12, 8)),
    NVFP4Recipe: ((10, 0), (12, 0), (12, 8)),
}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def refuse_blocks(gemm: Gemm) -> str:
    """Why torch has no product for these blocks on this device; empty if it has one."""
    recipe = gemm.recipe
    if not isinstance(recipe, BLOCK_RECIPES):
        return ""
    return _refuse_device(gemm, recipe) or _refuse_numbers(gemm, recipe)


def _refuse_numbers(gemm: Gemm, recipe: _BlockRecipe) -> str:
    if gemm.dtype != torch.bfloat16:
        return f"block-scaled kernels give bf16, and activations are {gemm.dtype}; cast them to bf16"
    if gemm.mode == "training" and isinstance(recipe, NVFP4Recipe) and (recipe.hadamard or recipe.stochastic_rounding):
        return "has no rotation and no stochastic rounding for gradients, which recipe 'nvfp4' asks for"
    multiple = _MULTIPLE[type(recipe)]
    for name, size in zip(("out_features", "in_features"), gemm.weight_shape, strict=True):
        if size % multiple:
            return f"{name}={size} isn't a multiple of {multiple}, as recipe {recipe.name!r} needs"
    return ""


def _refuse_device(gemm: Gemm, recipe: _BlockRecipe) -> str:
    if gemm.device.type == "meta":
        return ""
    if gemm.device.type != "cuda":
        return f"torch's product on {gemm.device.type} has scales per tensor and per row, not those of {recipe.name!r}"
    if torch.version.hip:
        return f"recipe {recipe.name!r} needs an NVIDIA GPU"
    return kernel_refusal(recipe, torch.cuda.get_device_capability(gemm.device), torch.version.cuda or "0.0")


def kernel_refusal(recipe: _BlockRecipe, capability: tuple[int, int], cuda: str) -> str:
    """Why torch has no kernel for a recipe on an NVIDIA GPU.

    Args:
        recipe: the recipe.
        capability: the GPU's.
        cuda: version torch was built with.
    """
    first, end, oldest = _KERNELS[type(recipe)]
    found = ".".join(map(str, capability))
    if capability < first:
        return f"recipe {recipe.name!r} needs compute capability {first[0]}.{first[1]} or newer, not {found}"
    if capability >= end:
        return f"recipe {recipe.name!r} has kernels before compute capability {end[0]}.{end[1]}, and this is {found}"
    if tuple(int(part) for part in cuda.split(".")[:2]) < oldest:
        return f"recipe {recipe.name!r} needs CUDA {oldest[0]}.{oldest[1]} or newer, not {cuda}"
    return ""


class Operand(NamedTuple):
    """One side of a product, as ``F.scaled_mm`` takes it."""

    data: Tensor
    scales: list[Tensor]
    kinds: list[Any]
    swizzles: list[Any]


class BlockLinear(torch.autograd.Function):
    """``x @ weight.T + bias`` and its gradients, every operand quantised along the dimension it contracts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.spec, ctx.bias_dtype = spec, None if bias is None else bias.dtype
        recipe = _recipe(spec)
        with no_autocast(x):
            rows = _pad(x, _ROWS[type(recipe)])
            output = multiply(encode(rows, recipe, spec, "input"), encode(weight, recipe, spec, "weight"))[: len(x)]
        output = output.to(spec.output_dtype or x.dtype)
        return output if bias is None else output + bias.to(output.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        grad_input = grad_weight = grad_bias = None
        with no_autocast(grad):
            if ctx.needs_input_grad[0]:
                grad_input = _grad_input(grad, weight, ctx.spec).to(x.dtype)
            if ctx.needs_input_grad[1]:
                grad_weight = _grad_weight(grad, x, ctx.spec).to(weight.dtype)
            if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
                grad_bias = grad.to(torch.float32).sum(0).to(ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias, None


def _grad_input(grad: Tensor, weight: Tensor, spec: LinearSpec) -> Tensor:
    recipe = _recipe(spec)
    if recipe.backward == "high_precision":
        return torch.mm(grad, weight.to(grad.dtype))
    sides = (
        encode(_pad(grad, _ROWS[type(recipe)]), recipe, spec, "grad_output"),
        encode(weight.t(), recipe, spec, "weight"),
    )
    return multiply(*sides)[: len(grad)]


def _grad_weight(grad: Tensor, x: Tensor, spec: LinearSpec) -> Tensor:
    recipe = _recipe(spec)
    if recipe.backward == "high_precision":
        return torch.mm(grad.t(), x.to(grad.dtype))
    multiple = _MULTIPLE[type(recipe)]
    along_tokens = encode(_pad(grad, multiple).t(), recipe, spec, "grad_output")
    return multiply(along_tokens, encode(_pad(x, multiple).t(), recipe, spec, "input"))


def multiply(a: Operand, b: Operand) -> Tensor:
    """``a @ b.T`` in bf16: ``[M, K]`` and ``[N, K]`` give ``[M, N]``."""
    return F.scaled_mm(
        a.data, b.data.t(), a.scales, a.kinds, b.scales, b.kinds, a.swizzles, b.swizzles, output_dtype=torch.bfloat16
    )


def encode(x: Tensor, recipe: _BlockRecipe, spec: LinearSpec, role: Role) -> Operand:
    """Codes and scales of one operand ``[rows, K]``, the numbers of the emulated backend."""
    largest = torch.finfo(x.dtype).max
    x = x.to(torch.float32).contiguous()  # so that the codes are contiguous along K
    if isinstance(recipe, Block128Recipe):
        tiled = {"input": recipe.input_2d, "weight": recipe.weight_2d, "grad_output": recipe.grad_2d}[role]
        return _block128(x, getattr(spec.formats, role), recipe, tiled, largest)
    tiled = role == "weight" and recipe.weight_2d
    return _mxfp8(x, recipe, tiled) if isinstance(recipe, MXFP8Recipe) else _nvfp4(x, tiled)


def _block128(x: Tensor, format_name: str, recipe: Block128Recipe, tiled: bool, largest: float) -> Operand:
    fmt = get_format(format_name)
    tiles, amax = _tiles(x, 128 if tiled else 1, 128)
    scale = scales.current_scale(amax, fmt.max, power_of_two=recipe.power_of_two, if_infinite=largest)
    data = _codes(tiles, scale, fmt.max, fmt.torch_dtype).reshape(x.shape)
    inverse = scales.reciprocal(scale)
    if not tiled:
        kind = ScalingType.BlockWise1x128
        return Operand(data, [inverse.t().contiguous().t()], [kind], [SwizzleType.NO_SWIZZLE])
    inverse = F.pad(inverse, (0, -inverse.shape[1] % 4)).contiguous()
    return Operand(data, [inverse.t()], [ScalingType.BlockWise128x128], [SwizzleType.NO_SWIZZLE])


def _mxfp8(x: Tensor, recipe: MXFP8Recipe, tiled: bool) -> Operand:
    fmt = get_format("mxfp8")
    tiles, amax = _tiles(x, 32 if tiled else 1, 32)
    exponent = scales.e8m0_exponent(amax, fmt.max, rounding=recipe.rounding)
    data = _codes(tiles, scales.e8m0_scale(exponent), fmt.max, fmt.torch_dtype).reshape(x.shape)
    stored = exponent.to(torch.uint8).repeat_interleave(32, 0) if tiled else exponent.to(torch.uint8)
    blocked = swizzle(stored).view(torch.float8_e8m0fnu)
    return Operand(data, [blocked], [ScalingType.BlockWise1x32], [SwizzleType.SWIZZLE_32_4_4])


def _nvfp4(x: Tensor, tiled: bool) -> Operand:
    tensor_scale = scales.nvfp4_tensor_scale(x.abs().amax())
    tiles, amax = _tiles(x, 16 if tiled else 1, 16)
    stored = scales.nvfp4_block_scale_inv(amax, tensor_scale)
    scale = scales.nvfp4_scale(stored, tensor_scale)
    values = round_element(tiles * scale[:, None, :, None], get_format("nvfp4")).reshape(x.shape)
    if tiled:
        stored = stored.repeat_interleave(16, 0)
    blocked = swizzle(stored.to(torch.float8_e4m3fn).view(torch.uint8)).view(torch.float8_e4m3fn)
    kinds = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    swizzles = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
    return Operand(pack_e2m1(values), [blocked, scales.reciprocal(tensor_scale)], kinds, swizzles)


def _tiles(x: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """``[R, height, C, width]`` and each tile's amax ``[R, C]``."""
    tiles = x.reshape(x.shape[0] // height, height, x.shape[1] // width, width)
    return tiles, tiles.abs().amax((1, 3))


def _codes(tiles: Tensor, scale: Tensor, largest: float, dtype: torch.dtype | None) -> Tensor:
    """Clamped first: the cast of e5m2, and in older versions of torch of e4m3, doesn't saturate."""
    return (tiles * scale[:, None, :, None]).clamp(-largest, largest).to(dtype)


def swizzle(stored: Tensor) -> Tensor:
    """Bytes ``[rows, blocks]`` as the kernels read them, padded with zeros to ``[128 R, 4 C]``: flat.

    Each 128 rows by 4 blocks are 512 bytes: row ``r`` and block ``c`` at ``(r % 32) * 16 + (r // 32) * 4 + c``.
    """
    rows, blocks = stored.shape
    padded = F.pad(stored, (0, -blocks % 4, 0, -rows % 128))
    parts = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return parts.permute(0, 3, 2, 1, 4).reshape(-1)


def pack_e2m1(values: Tensor) -> Tensor:
    """Numbers on the e2m1 grid ``[rows, K]`` as 4-bit codes ``[rows, K / 2]``, the first of two in the low half."""
    index = torch.bucketize(values.abs(), values.new_tensor(_E2M1)).to(torch.uint8)
    codes = index + values.signbit().to(torch.uint8) * 8
    return (codes[:, ::2] + codes[:, 1::2] * 16).view(torch.float4_e2m1fn_x2)


def _pad(x: Tensor, multiple: int) -> Tensor:
    """Zero rows up to a multiple; they change no block's scale, and add nothing to a product that contracts them."""
    missing = -x.shape[0] % multiple
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def _recipe(spec: LinearSpec) -> _BlockRecipe:
    if not isinstance(spec.recipe, BLOCK_RECIPES):
        raise BackendError(f"backend 'native' can't run {spec.recipe}; ask supports() first")
    return spec.recipe
