"""fp32 masters of parameters that are stored in 16 bit (level O2).

Whatever optimizer holds such a parameter steps on its master, and the 16-bit value is rounded from it afterwards.  A
loss scaler divides the gradients there too: an fp16 gradient divided by the scale would underflow again.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary


class Master(NamedTuple):
    """The fp32 value of a parameter, and the dtype that it is stored in."""

    value: torch.Tensor
    low: torch.dtype


_MASTERS: Any = WeakIdKeyDictionary()


def keep_master(parameter: nn.Parameter, master: Master) -> None:
    """From now on optimizers step on the master."""
    _MASTERS[parameter] = master
    _install_optimizer_hooks()


def master_of(parameter: nn.Parameter) -> Master | None:
    """The parameter's master; None if it has none."""
    return _MASTERS.get(parameter)


def drop_master(parameter: nn.Parameter) -> Master | None:
    """Forget the parameter's master, and give it."""
    return _MASTERS.pop(parameter, None)


def set_data(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Store ``data`` in the same Parameter object; its gradient follows the dtype."""
    gradient, parameter.grad = parameter.grad, None
    parameter.data = data
    if gradient is not None:
        parameter.grad = gradient.to(data.dtype)


def promote(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer's parameters be their masters, with gradients in fp32, until :func:`demote`."""
    for parameter in _mastered(optimizer):
        low, master = parameter.data, _MASTERS[parameter]
        if low.dtype == master.low:
            # Written by somebody else since (a loaded checkpoint): the 16-bit value is then the newer one.
            current = torch.equal(master.value.to(low.dtype), low)
            set_data(parameter, master.value if current else low.float())


def demote(optimizer: torch.optim.Optimizer) -> None:
    """Store the optimizer's parameters in 16 bit again."""
    for parameter in _mastered(optimizer):
        low = _MASTERS[parameter].low
        if parameter.dtype != low:
            _MASTERS[parameter] = Master(parameter.data, low)
            set_data(parameter, parameter.data.to(low))


@functools.cache
def _install_optimizer_hooks() -> None:
    """Once per process; the hooks do nothing for optimizers that hold no mastered parameter."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: promote(optimizer))
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: demote(optimizer))


def _mastered(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    if not _MASTERS:
        return []
    return [p for group in optimizer.param_groups for p in group["params"] if p in _MASTERS]
