"""Levels O2 and O3: parameters stored in 16 bit, in the same Parameter objects.

O2 keeps fp32 masters, on which optimizers step.  O3 has none: the optimizer steps on 16 bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autoprec.masters import Master, drop_master, keep_master, master_of, set_data

#: Layers whose parameters stay fp32 at O2: their statistics and scales are cheap, and rounding them is not.
_KEPT_AT_O2 = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm, nn.LocalResponseNorm)


class Stored:
    """The fp32 values a conversion rounded away, so that revert gives back what wasn't trained bit for bit."""

    def __init__(self, originals: dict[str, torch.Tensor], mastered: list[nn.Parameter]) -> None:
        self.originals = originals
        self.mastered = mastered

    def __getstate__(self) -> dict[str, Any]:
        masters = [(p, master_of(p)) for p in self.mastered]
        return {"originals": self.originals, "masters": [(p, master) for p, master in masters if master is not None]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copied or unpickled model has its own parameters: they get masters of their own.
        self.originals, self.mastered = state["originals"], []
        for parameter, master in state["masters"]:
            keep_master(parameter, Master(*master))
            self.mastered.append(parameter)

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for t in self.originals.values())


def store(model: nn.Module, dtype: torch.dtype, masters: bool) -> Stored:
    """Stores the model's fp32 parameters in ``dtype``; norms keep fp32 when there are masters.

    Args:
        model: the model.
        dtype: a 16-bit dtype.
        masters: O2: optimizers step on fp32 masters.
    """
    kept = {
        id(p) for m in model.modules() if masters and isinstance(m, _KEPT_AT_O2) for p in m.parameters(recurse=False)
    }
    originals: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32 or id(parameter) in kept:
            continue
        original = parameter.data
        originals[name] = original
        set_data(parameter, original.to(dtype))
        if masters:
            keep_master(parameter, Master(original, dtype))
    return Stored(originals, [p for p in model.parameters() if master_of(p) is not None])


def restore(model: nn.Module, stored: Stored) -> None:
    """Gives parameters back their fp32 storage; a value that wasn't changed since gets its original bits."""
    for name, parameter in model.named_parameters():
        original = stored.originals.get(name)
        if original is None:
            continue
        low = parameter.data
        master = drop_master(parameter)
        exact = original if master is None else master.value
        untouched = exact.to(low.dtype) == low
        set_data(parameter, exact if bool(untouched.all()) else torch.where(untouched, exact, low.float()))
