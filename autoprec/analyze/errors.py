"""How far a value is off under a 16-bit format."""

from __future__ import annotations

import math

import torch

#: Values beyond this are marks (a mask's ``-1e9``), which would drown the error of all others.
MARK = 1e8

#: Norms below this may be of values whose squares are zero in fp32.
_TINY = 1e-12


def round_low(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` rounded to a 16-bit dtype and back: beyond the range it is infinite, as in a kernel's result."""
    return x.to(dtype).to(x.dtype)


def is_broken(low: torch.Tensor, real: torch.Tensor) -> bool:
    """Whether a value that is finite in fp32 isn't in the format."""
    bad = ~torch.isfinite(low)
    return bool(bad.any()) and bool((bad & torch.isfinite(real)).any())


def relative_error(low: torch.Tensor, real: torch.Tensor) -> float:
    """Relative L2 error over the elements that are finite and no marks; ``inf`` where only ``low`` isn't finite.

    Args:
        low: what the format gives, in fp32.
        real: what fp32 gives, of the same shape.
    """
    if real.numel() == 0:
        return 0.0
    norm = float(real.norm())
    if _TINY < norm <= MARK:  # no mark, and no square leaves fp32: nothing to look out for
        error = float((low - real).norm()) / norm
        if math.isfinite(error):
            return error
    if is_broken(low, real):
        return math.inf
    largest = float(real.abs().max())
    if not largest <= MARK:
        keep = real.abs() <= MARK
        low, real = low[keep], real[keep]
        if real.numel() == 0:
            return 0.0
        largest = float(real.abs().max())
    difference = (low - real).abs()
    widest = float(difference.max())
    if widest == 0.0:
        return 0.0
    if largest == 0.0:
        return math.inf
    # divided first: squares of fp32 values may leave fp32
    return float((difference / widest).norm() * widest / ((real / largest).norm() * largest))
