"""Quantised operands: values on a format's grid with the scales of their tensor, rows or blocks.

Every function takes an fp32 matrix ``[rows, K]`` and works along ``K``, the dimension a GEMM contracts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from autoprec.formats import scales
from autoprec.formats.elements import round_element
from autoprec.formats.table import FORMATS, Format

#: Signs of the 16-point Hadamard transform, the same in every Transformer Engine process.
_HADAMARD_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


class Quantized(NamedTuple):
    """A matrix as a GEMM sees it: ``values * scale_inv`` are the numbers meant.

    Args:
        values: fp32 ``[rows, K]``; block scales that are exact in fp32 are multiplied in.
        scale_inv: fp32 scalar or ``[rows, 1]``, applied to the GEMM's result; None is 1.
    """

    values: Tensor
    scale_inv: Tensor | None

    def dequantize(self) -> Tensor:
        return self.values if self.scale_inv is None else self.values * self.scale_inv


def quantize_unscaled(x: Tensor, fmt: Format) -> Quantized:
    """A plain cast."""
    return Quantized(round_element(x, fmt), None)


def quantize_scaled(x: Tensor, fmt: Format, scale: Tensor) -> Quantized:
    """Cast with a scale that is known, ``[]`` or ``[rows, 1]``."""
    return Quantized(round_element(x * scale, fmt), scales.reciprocal(scale))


def quantize_tensorwise(x: Tensor, fmt: Format, *, epsilon: float = 0.0, power_of_two: bool = False) -> Quantized:
    """One scale, from the tensor's own largest value."""
    amax = x.abs().amax() if x.numel() else x.new_zeros(())
    return quantize_scaled(x, fmt, scales.current_scale(amax, fmt.max, epsilon=epsilon, power_of_two=power_of_two))


def quantize_rowwise(x: Tensor, fmt: Format, *, power_of_two: bool = True) -> Quantized:
    """One scale a row, torchao's way."""
    amax = x.abs().amax(1, keepdim=True) if x.shape[1] else x.new_zeros(x.shape[0], 1)
    return quantize_scaled(x, fmt, scales.torchao_scale(amax, fmt.max, power_of_two=power_of_two))


def quantize_block128(
    x: Tensor,
    fmt: Format,
    *,
    two_d: bool = False,
    power_of_two: bool = True,
    largest_input: float = FORMATS["fp32"].max,
) -> Quantized:
    """One scale for each 1x128, or with ``two_d`` 128x128, tile; tiles at the edges are cut short."""
    tiles, amax = _tiles(x, 128 if two_d else 1, 128)
    scale = scales.current_scale(amax, fmt.max, power_of_two=power_of_two, if_infinite=largest_input)
    return Quantized(_untile(round_element(tiles * scale, fmt) * scales.reciprocal(scale), x), None)


def quantize_mxfp8(x: Tensor, *, element: str = "fp8_e4m3", two_d: bool = False, rounding: str = "ceil") -> Quantized:
    """A power-of-two scale for each 32 values along K, or with ``two_d`` each 32x32 tile."""
    tiles, amax = _tiles(x, 32 if two_d else 1, 32)
    fmt = FORMATS[element]
    exponent = scales.e8m0_exponent(amax, fmt.max, rounding=rounding)
    values = round_element(tiles * scales.e8m0_scale(exponent), fmt) * scales.e8m0_scale_inv(exponent)
    return Quantized(_untile(values, x), None)


def quantize_nvfp4(x: Tensor, *, two_d: bool = False, hadamard: bool = False, stochastic: bool = False) -> Quantized:
    """4-bit values, an e4m3 scale for each 16 along K (``two_d``: each 16x16 tile), and one fp32 scale for the tensor.

    Args:
        x: fp32 ``[rows, K]``.
        two_d: for weights, so that the transpose has the same values.
        hadamard: rotate each 16 values along K first.  Both operands of a GEMM must be rotated, its result then is as
            without.  The result's K is padded to a multiple of 16 and stays rotated.
        stochastic: round up or down at random, with the odds of the distance; for gradients.
    """
    if hadamard:
        x = _rotate(x)
    fmt = FORMATS["nvfp4"]
    tensor_scale = scales.nvfp4_tensor_scale(x.abs().amax() if x.numel() else x.new_zeros(()))
    tiles, amax = _tiles(x, 16 if two_d else 1, 16)
    block_scale_inv = scales.nvfp4_block_scale_inv(amax, tensor_scale)
    scaled = tiles * scales.nvfp4_scale(block_scale_inv, tensor_scale)
    rounded = _round_e2m1_stochastic(scaled) if stochastic else round_element(scaled, fmt)
    return Quantized(_untile(rounded * block_scale_inv, x), scales.reciprocal(tensor_scale))


def _round_e2m1_stochastic(x: Tensor) -> Tensor:
    """Add a random part of a step, 8 bits of it, and cut off what is below the step: never above 6."""
    size = x.clamp(-6.0, 6.0).abs()
    part = torch.randint(0, 256, x.shape, device=x.device, dtype=torch.int32).to(torch.float32) / 256.0
    raised = size + part * _step_e2m1(size)
    step = _step_e2m1(raised)
    return torch.copysign((torch.floor(raised / step) * step).clamp(max=6.0), x)


def _step_e2m1(size: Tensor) -> Tensor:
    """Distance of neighbours on the grid 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    return torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0))


def _rotate(x: Tensor) -> Tensor:
    """Each 16 values along K times the orthogonal matrix ``diag(signs) @ hadamard / 4``."""
    matrix = x.new_tensor([[1.0]])
    for _ in range(4):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    matrix = x.new_tensor(_HADAMARD_SIGNS)[:, None] * matrix * 0.25
    x = _pad(x, 1, 16)
    return (x.reshape(-1, 16) @ matrix).reshape(x.shape)


def _pad(x: Tensor, rows: int, columns: int) -> Tensor:
    missing_rows, missing_columns = -x.shape[0] % rows, -x.shape[1] % columns
    return F.pad(x, (0, missing_columns, 0, missing_rows)) if missing_rows or missing_columns else x


def _tiles(x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """``[R, rows, C, columns]`` with zeros at the edges, and each tile's amax ``[R, 1, C, 1]``."""
    x = _pad(x, rows, columns)
    tiles = x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    return tiles, tiles.abs().amax((1, 3), keepdim=True)


def _untile(tiles: Tensor, like: Tensor) -> Tensor:
    """The matrix again, without the padding."""
    rows, height, columns, width = tiles.shape
    return tiles.reshape(rows * height, columns * width)[: like.shape[0], : like.shape[1]]
