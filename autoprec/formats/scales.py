"""Scale formulas of the FP8 and block formats, each bit-equal to the library it is named after.

All take and return fp32 tensors of any shape; an ``amax`` is the largest absolute value of a tensor, row or block, and
the scale multiplies the high-precision value before the cast.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autoprec.formats.elements import round_element
from autoprec.formats.table import FORMATS

_LARGEST = torch.finfo(torch.float32).max
_E4M3_MAX, _E2M1_MAX = FORMATS["fp8_e4m3"].max, FORMATS["nvfp4"].max
_SIGN_AND_EXPONENT = -0x800000  # 0xFF800000 as a signed number


def current_scale(
    amax: Tensor, largest: float, *, epsilon: float = 0.0, power_of_two: bool = False, if_infinite: float = _LARGEST
) -> Tensor:
    """Transformer Engine's scale for per-tensor current scaling and for 128-blocks (``compute_scale_from_amax``).

    Args:
        amax: of the unscaled tensor.
        largest: largest value of the format.
        epsilon: smaller amaxes count as this.
        power_of_two: round the scale down to one.
        if_infinite: used where the quotient overflows; 128-blocks use the largest value of the input's dtype.
    """
    amax = torch.where(amax < epsilon, epsilon, amax)
    usable = (amax > 0) & (amax < torch.inf)
    quotient = _divide(largest, torch.where(usable, amax, 1.0))
    scale = torch.where(usable, quotient.clamp(max=if_infinite), 1.0)
    return (scale.view(torch.int32) & _SIGN_AND_EXPONENT).view(torch.float32) if power_of_two else scale


def torchao_scale(amax: Tensor, largest: float, *, power_of_two: bool = False) -> Tensor:
    """Scale of torchao's float8 training, per tensor or per row: a quotient in fp64, amax never below 1e-12."""
    scale = (largest / amax.to(torch.float64).clamp(min=1e-12)).to(torch.float32)
    return torch.exp2(torch.floor(torch.log2(scale))) if power_of_two else scale


def delayed_scale(
    history: Tensor, scale: Tensor, largest: float, *, margin: int = 0, algorithm: str = "max"
) -> tuple[Tensor, Tensor]:
    """Transformer Engine's fused update at the end of a step.

    Args:
        history: ``[length, n]`` amaxes of ``n`` tensors; row 0 is this step's, the rest older ones.
        scale: ``[n]``, the scales in use.
        largest: largest value of the format.
        margin: the scale is made this many powers of two smaller.
        algorithm: ``max`` over the history, or ``most_recent``.

    Returns:
        The history rolled by one step, with row 0 free again, and the scales for the next step.  A tensor that wasn't
        seen in this step keeps both.
    """
    last = history[0]
    rolled = torch.cat([torch.zeros_like(history[:1]), history[2:], last[None]]) if len(history) > 1 else history * 0
    amax = torch.maximum(rolled.amax(0), last) if algorithm == "max" else last
    usable = (amax > 0) & (amax < torch.inf)
    wanted = _divide(largest * 2.0**-margin, torch.where(usable, amax, 1.0))
    renewed = torch.where(usable, wanted.clamp(max=_LARGEST), scale)
    seen = last != 0
    return torch.where(seen, rolled, history), torch.where(seen, renewed, scale)


def e8m0_exponent(amax: Tensor, largest: float = _E4M3_MAX, *, rounding: str = "ceil") -> Tensor:
    """Biased exponent, 0 to 254 (255 is NaN), of the power of two that a 32-block's cast values are multiplied by.

    Args:
        amax: of the block.
        largest: largest value of the element format.
        rounding: ``ceil`` never saturates (Transformer Engine, torchao's RCEIL); ``floor`` is the OCP specification's,
            by which values above 7/8 of the next power of two saturate.

    Returns:
        int32, same shape.
    """
    if rounding == "floor":
        exponent = _exponent(amax) - math.floor(math.log2(largest))
        return torch.where(amax.isnan(), 255, exponent.clamp(0, 254))
    quotient = amax * (1.0 / largest)  # a product, as the hardware path computes it
    exponent, mantissa = _exponent(quotient), quotient.view(torch.int32) & 0x7FFFFF
    exact = (mantissa == 0) | ((exponent == 0) & (mantissa <= 0x400000))
    exponent = torch.where(exact, exponent, exponent + 1).clamp(max=254)
    return torch.where(amax.isnan(), 255, exponent)


def e8m0_scale(exponent: Tensor) -> Tensor:
    """2 ** (127 - exponent), what the values are multiplied by before the cast; NaN for 255."""
    return e8m0_scale_inv(torch.where(exponent == 255, 255, 254 - exponent))


def e8m0_scale_inv(exponent: Tensor) -> Tensor:
    """2 ** (exponent - 127), the scale that is stored; NaN for 255."""
    # 2 ** -127 is the one subnormal number; 255 << 23 alone would be infinity.
    bits = torch.where(exponent == 0, 0x400000, exponent << 23)
    return torch.where(exponent == 255, 0x7FC00000, bits).view(torch.float32)


def nvfp4_tensor_scale(amax: Tensor) -> Tensor:
    """Scale that maps the tensor's largest value to the largest block scale times the largest element."""
    scale = _divide(_E4M3_MAX * _E2M1_MAX, amax).clamp(max=_LARGEST)
    return torch.where((amax == 0) | (scale == 0), 1.0, scale)


def nvfp4_block_scale_inv(block_amax: Tensor, tensor_scale: Tensor) -> Tensor:
    """A block's stored scale, on the e4m3 grid: cast values times this, over ``tensor_scale``, are the originals."""
    # The order matters: (amax / 6) * tensor_scale rounds otherwise in 39% of cases.
    return round_element((block_amax * (tensor_scale * (1.0 / _E2M1_MAX))).clamp(max=_LARGEST), FORMATS["fp8_e4m3"])


def nvfp4_scale(block_scale_inv: Tensor, tensor_scale: Tensor) -> Tensor:
    """What a block's values are multiplied by before the cast."""
    return reciprocal(block_scale_inv * reciprocal(tensor_scale)).clamp(max=_LARGEST)


def reciprocal(scale: Tensor) -> Tensor:
    """``1 / scale``, rounded once on every device."""
    return _divide(1.0, scale)


def _exponent(x: Tensor) -> Tensor:
    return (x.view(torch.int32) >> 23) & 0xFF


def _divide(number: float, by: Tensor) -> Tensor:
    """``number / by`` rounded once.

    torch turns ``number / tensor`` into a reciprocal and a product, and Triton's fp32 division is off by up to 2 ulp.
    Rounding an fp64 quotient of fp32 numbers to fp32 is exact; MPS, without fp64, divides well in fp32.
    """
    dtype = torch.float32 if by.device.type == "mps" else torch.float64
    return (torch.full_like(by, number, dtype=dtype) / by.to(dtype)).to(torch.float32)
