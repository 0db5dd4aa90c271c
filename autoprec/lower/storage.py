"""Levels O2 and O3: parameters stored in 16 bit, in the same Parameter objects.

O2 keeps fp32 masters: any optimizer that holds such a Parameter steps on its master, and the 16-bit value is rounded
from it afterwards.  O3 has no masters: the optimizer steps on 16 bit.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary


class _Master(NamedTuple):
    value: torch.Tensor
    low: torch.dtype


#: Parameter → its fp32 master, for parameters stored at O2.
_MASTERS: Any = WeakIdKeyDictionary()

#: Layers whose parameters stay fp32 at O2: their statistics and scales are cheap, and rounding them is not.
_KEPT_AT_O2 = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm, nn.LocalResponseNorm)


class Stored:
    """The fp32 values a conversion rounded away, so that revert gives back what wasn't trained bit for bit."""

    def __init__(self, originals: dict[str, torch.Tensor], mastered: list[nn.Parameter]) -> None:
        self.originals = originals
        self.mastered = mastered

    def __getstate__(self) -> dict[str, Any]:
        masters = [(p, _MASTERS[p]) for p in self.mastered if p in _MASTERS]
        return {"originals": self.originals, "masters": masters}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copied or unpickled model has its own parameters: they get masters of their own.
        self.originals, self.mastered = state["originals"], []
        for parameter, master in state["masters"]:
            _MASTERS[parameter] = _Master(*master)
            self.mastered.append(parameter)
        if self.mastered:
            _install_optimizer_hooks()

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
        _set_data(parameter, original.to(dtype))
        if masters:
            _MASTERS[parameter] = _Master(original, dtype)
    if masters:
        _install_optimizer_hooks()
    return Stored(originals, [p for p in model.parameters() if p in _MASTERS])


def restore(model: nn.Module, stored: Stored) -> None:
    """Gives parameters back their fp32 storage; a value that wasn't changed since gets its original bits."""
    for name, parameter in model.named_parameters():
        original = stored.originals.get(name)
        if original is None:
            continue
        low = parameter.data
        master = _MASTERS.pop(parameter, None)
        exact = original if master is None else master.value
        untouched = exact.to(low.dtype) == low
        _set_data(parameter, exact if bool(untouched.all()) else torch.where(untouched, exact, low.float()))


def _set_data(parameter: nn.Parameter, data: torch.Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    parameter.data = data
    if gradient is not None:
        parameter.grad = gradient.to(data.dtype)


@functools.cache
def _install_optimizer_hooks() -> None:
    """Once per process; the hooks do nothing for optimizers that hold no mastered parameter."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for parameter in _mastered(optimizer):
        low, master = parameter.data, _MASTERS[parameter]
        # Written by somebody else since (a loaded checkpoint): the 16-bit value is then the newer one.
        current = torch.equal(master.value.to(low.dtype), low)
        _set_data(parameter, master.value if current else low.float())


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for parameter in _mastered(optimizer):
        low = _MASTERS[parameter].low
        _MASTERS[parameter] = _Master(parameter.data, low)
        _set_data(parameter, parameter.data.to(low))


def _mastered(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p in _MASTERS]
