"""Cast weights kept from call to call, for inference: one cast per weight, not one per call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from autoprec.lower.casts import CASTABLE


class _Entry(NamedTuple):
    version: int
    address: int
    low: torch.Tensor


#: Parameter → its latest cast, for as long as the parameter lives.  Ids, since tensors don't compare by identity.
_KEPT: Any = WeakIdKeyDictionary()


def cast_weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``weight`` in ``dtype``; kept until the weight is written or replaced.  Only without gradients.

    A write in place through ``weight.data`` leaves no mark, and the kept cast stays: write under ``torch.no_grad()``.
    """
    if weight.dtype not in CASTABLE or weight.dtype == dtype:
        return weight
    if not isinstance(weight, torch.nn.Parameter) or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return weight.to(dtype)
    if weight.is_inference():  # made in inference mode: it has no version
        return weight.to(dtype)
    entry = _KEPT.get(weight)
    if entry is not None and entry[:2] == (weight._version, weight.data_ptr()) and entry.low.dtype == dtype:
        return entry.low
    low = weight.detach().to(dtype)
    _KEPT[weight] = _Entry(weight._version, weight.data_ptr(), low)
    return low


def kept_bytes(parameters: Any) -> int:
    """Bytes that the kept casts of these parameters take."""
    return sum(_KEPT[p].low.nbytes for p in parameters if p in _KEPT)


def forget(parameters: Any) -> None:
    """Drops the kept casts of these parameters."""
    for parameter in parameters:
        _KEPT.pop(parameter, None)
