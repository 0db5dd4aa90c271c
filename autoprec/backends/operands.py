"""Operands of a GEMM, quantised along the dimension it contracts as a recipe says."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from autoprec import recipes
from autoprec.errors import BackendError
from autoprec.formats import get_format
from autoprec.formats.quantize import (
    Quantized,
    quantize_block128,
    quantize_mxfp8,
    quantize_nvfp4,
    quantize_rowwise,
    quantize_tensorwise,
    quantize_unscaled,
)
from autoprec.recipes import Recipe, family_of

Role = Literal["input", "weight", "grad_output"]
GemmName = Literal["output", "grad_input", "grad_weight"]


def quantize_operand(x: Tensor, format_name: str, recipe: Recipe | None, role: Role, gemm: GemmName) -> Quantized:
    """One operand of one GEMM.

    Args:
        x: ``[rows, K]`` with K the contracted dimension; any float dtype.
        format_name: format of the role.
        recipe: how it is scaled; without one, and for the 16- and 32-bit formats, numbers are cast as they are.
        role: whose operand it is.
        gemm: which of the three products.
    """
    largest = torch.finfo(x.dtype).max
    x = x.to(torch.float32)
    if format_name == "fp32":
        return Quantized(x, None)
    fmt = get_format(format_name)
    if recipe is None or family_of(format_name) is None:
        return quantize_unscaled(x, fmt)
    if isinstance(recipe, recipes.CurrentRecipe):
        return quantize_tensorwise(x, fmt, epsilon=recipe.epsilon, power_of_two=recipe.power_of_two)
    if isinstance(recipe, recipes.RowwiseRecipe):
        if recipe.grad_weight == "high_precision" and (role, gemm) == ("weight", "grad_input"):
            return quantize_tensorwise(x, fmt, power_of_two=recipe.power_of_two)
        return quantize_rowwise(x, fmt, power_of_two=recipe.power_of_two)
    two_d = _is_tiled(recipe, role)
    if isinstance(recipe, recipes.Block128Recipe):
        return quantize_block128(x, fmt, two_d=two_d, power_of_two=recipe.power_of_two, largest_input=largest)
    if isinstance(recipe, recipes.MXFP8Recipe):
        return quantize_mxfp8(x, two_d=two_d, rounding=recipe.rounding)
    if isinstance(recipe, recipes.NVFP4Recipe):
        return quantize_nvfp4(
            x,
            two_d=two_d,
            hadamard=recipe.hadamard and gemm == "grad_weight",
            stochastic=recipe.stochastic_rounding and role == "grad_output",
        )
    raise BackendError(f"recipe {recipe.name!r} can't quantise an operand without state from past steps")


def is_shared(format_name: str, recipe: Recipe | None, role: Role) -> bool:
    """Whether an operand has the same values in both GEMMs it takes part in, but for the transpose."""
    per_tensor = isinstance(recipe, recipes.CurrentRecipe | recipes.DelayedRecipe)
    if recipe is None or family_of(format_name) is None or per_tensor:
        return True
    return _is_tiled(recipe, role)


def _is_tiled(recipe: Recipe, role: Role) -> bool:
    """Whether the role's blocks are square."""
    if isinstance(recipe, recipes.Block128Recipe):
        return {"input": recipe.input_2d, "weight": recipe.weight_2d, "grad_output": recipe.grad_2d}[role]
    return role == "weight" and isinstance(recipe, recipes.MXFP8Recipe | recipes.NVFP4Recipe) and recipe.weight_2d


def transpose(operand: Quantized) -> Quantized:
    """The same numbers, contracted along the other dimension; for :func:`is_shared` operands."""
    return Quantized(operand.values.T, operand.scale_inv)


def multiply(a: Quantized, b: Quantized) -> Tensor:
    """``a @ b.T`` accumulated in fp32: ``[M, K]`` and ``[N, K]`` give ``[M, N]``, fp32."""
    product = torch.mm(a.values, b.values.T)
    # Two products, since that of two tiny scales could underflow where the result doesn't.
    if a.scale_inv is not None:
        product = product * a.scale_inv
    if b.scale_inv is not None:
        product = product * (b.scale_inv.T if b.scale_inv.dim() == 2 else b.scale_inv)
    return product
