"""Cast weights kept from call to call, for inference: one cast per weight, not one per call."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from autoprec.lower.casts import CASTABLE


class _Entry(NamedTuple):
    weight: weakref.ref[Any]
    version: int
    address: int
    low: torch.Tensor


#: Id of a parameter → its latest cast, for as long as the parameter lives.
_KEPT: dict[int, _Entry] = {}


def cast_weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``weight`` in ``dtype``; if a parameter, kept until it is written or replaced.  Only without gradients.

    A write in place through ``weight.data`` leaves no mark, and the kept cast stays: write under ``torch.no_grad()``.
    """
    if weight.dtype not in CASTABLE or weight.dtype == dtype:
        return weight
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return weight.to(dtype)
    entry = _KEPT.get(id(weight))
    if entry is not None and entry.low.dtype == dtype and _is_current(entry, weight):
        return entry.low
    # A weight made in inference mode has no version.
    if not isinstance(weight, torch.nn.Parameter) or weight.is_inference():
        return weight.to(dtype)
    low = weight.detach().to(dtype)
    key = id(weight)
    alive = weakref.ref(weight, lambda _: _KEPT.pop(key, None))
    _KEPT[key] = _Entry(alive, weight._version, weight.data_ptr(), low)
    return low


def _is_current(entry: _Entry, weight: torch.Tensor) -> bool:
    return entry.weight() is weight and entry.version == weight._version and entry.address == weight.data_ptr()


def kept_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Bytes that the kept casts of these parameters take."""
    return sum(_KEPT[id(p)].low.nbytes for p in parameters if id(p) in _KEPT)


def forget(parameters: Iterable[torch.Tensor]) -> None:
    """Drops the kept casts of these parameters."""
    for parameter in parameters:
        _KEPT.pop(id(parameter), None)
