"""``round_to``: the reference rounding of any format."""

from __future__ import annotations

import torch
from torch import Tensor

from autoprec.errors import UsageError
from autoprec.formats.elements import fp32_for_rounding, round_element
from autoprec.formats.quantize import quantize_mxfp8, quantize_nvfp4, quantize_tensorwise
from autoprec.formats.table import Format, get_format


def round_to(x: Tensor, name: str) -> Tensor:
    """Round to the nearest value the format can hold; ties to even; beyond the range to its largest value.

    Formats with a scale compute it from ``x``: mxfp8 and nvfp4 in blocks along the last dimension, int8 and int4 one
    for the tensor; their result is scaled back.  Options (2-D blocks, rotation, stochastic rounding) are on the
    functions of :mod:`autoprec.formats.quantize`.

    Args:
        x: floating tensor of any shape.
        name: a key of :data:`autoprec.formats.FORMATS`.

    Returns:
        Same dtype and shape as ``x``, every value on the format's grid as far as that dtype holds it.  NaN stays NaN,
        infinities saturate.

    Raises:
        UsageError: the format is unknown, or ``x`` isn't floating.

    Example:
        >>> round_to(torch.tensor([1.1, 500.0]), "fp8_e4m3")
        tensor([  1.1250, 448.0000])
    """
    fmt = get_format(name)
    if not x.is_floating_point():
        raise UsageError(f"round_to needs a floating tensor, got {x.dtype}; convert it with .float() first")
    if fmt.name == "fp32":  # the one format in which rounding to odd would show
        rounded = x.to(torch.float32).clamp(-fmt.max, fmt.max)
    elif fmt.is_scaled:
        rounded = _round_scaled(x.to(torch.float32), fmt)
    else:
        rounded = round_element(fp32_for_rounding(x), fmt)
    if x.dtype not in (torch.float16, torch.bfloat16):
        return rounded.to(x.dtype)
    # A number can round up to one that its own dtype lacks; bf16's last grid point below 65504 is 65280.
    limit = 65280.0 if (x.dtype, fmt.name) == (torch.float16, "bf16") else torch.finfo(x.dtype).max
    return rounded.clamp(-limit, limit).to(x.dtype)


def _round_scaled(x: Tensor, fmt: Format) -> Tensor:
    if x.numel() == 0:
        return x
    matrix = x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)
    if fmt.name == "mxfp8":
        quantized = quantize_mxfp8(matrix)
    elif fmt.name == "nvfp4":
        quantized = quantize_nvfp4(matrix)
    else:
        quantized = quantize_tensorwise(matrix, fmt)
    return quantized.dequantize().reshape(x.shape)
