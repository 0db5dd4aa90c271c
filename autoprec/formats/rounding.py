"""``round_to``: the reference rounding of any format."""

from __future__ import annotations

import torch
from torch import Tensor

from autoprec.errors import UsageError
from autoprec.formats.elements import fp32_for_rounding, round_element
from autoprec.formats.table import Format, get_format


def round_to(x: Tensor, name: str) -> Tensor:
    """Round to the nearest value the format can hold; ties to even; beyond the range to its largest value.

    Args:
        x: floating tensor of any shape.
        name: a key of :data:`autoprec.formats.FORMATS`.

    Returns:
        Same dtype and shape as ``x``, every value on the format's grid.  NaN stays NaN, infinities saturate.

    Raises:
        UsageError: the format is unknown, or ``x`` isn't floating.

    Example:
        >>> round_to(torch.tensor([1.1, 500.0]), "fp8_e4m3")
        tensor([  1.1250, 448.0000])
    """
    fmt = get_format(name)
    if not x.is_floating_point():
        raise UsageError(f"round_to needs a floating tensor, got {x.dtype}; convert it with .float() first")
    if fmt.name == "fp32":  # the one format in which rounding to odd would be seen
        rounded = x.to(torch.float32).clamp(-fmt.max, fmt.max)
    else:
        rounded = round_element(fp32_for_rounding(x), fmt)
    limit = _largest_in(x.dtype, fmt)
    return rounded.clamp(-limit, limit).to(x.dtype) if limit < fmt.max else rounded.to(x.dtype)


def _largest_in(dtype: torch.dtype, fmt: Format) -> float:
    """Largest value of the grid that ``dtype`` can hold."""
    largest = torch.finfo(dtype).max
    if largest >= fmt.max:
        return fmt.max
    return 65280.0 if (dtype, fmt.name) == (torch.float16, "bf16") else largest
