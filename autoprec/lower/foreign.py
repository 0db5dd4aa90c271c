"""Code that a forward calls but that doesn't run as part of it: autograd Functions and checkpointed functions.

* An ``autograd.Function`` written for fp32 gets fp32: its forward and backward run without the frame mode, on upcast
  arguments.  Left alone, its forward would be lowered op by op and its backward not (a crash, or, when a compiler traces
  the backward with the mode on, another gradient without a word).
* A function given to ``torch.utils.checkpoint`` is recomputed in the frame it first ran in.

The guards sit on the classes and in torch's checkpoint module for the whole process, and do nothing while no converted
model runs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from autoprec.frames.mode import pop_own_mode, push_mode, scoped
from autoprec.frames.swap import original_class
from autoprec.lower.casts import cast

_GUARD = "_autoprec_guarded"


def guard_foreign_code(model: nn.Module) -> None:
    """Guards what the model's classes can reach by name: Functions, and ``checkpoint`` under any alias."""
    guard_checkpoint()
    for cls in {original_class(module) for module in model.modules()}:
        for namespace in _namespaces(cls):
            for value in list(namespace.values()):
                if isinstance(value, type) and issubclass(value, torch.autograd.Function):
                    guard_function(value)


def _namespaces(cls: type) -> Iterator[dict[str, Any]]:
    """Global names and closures of the class's methods, user code only."""
    seen: set[int] = set()
    for base in cls.__mro__:
        if base.__module__.startswith("torch."):
            continue
        for func in [inspect.unwrap(f) for f in vars(base).values() if isinstance(f, FunctionType)]:
            if id(func.__globals__) not in seen and not func.__module__.startswith("torch."):
                seen.add(id(func.__globals__))
                yield func.__globals__
            yield inspect.getclosurevars(func).nonlocals if func.__closure__ else {}


def guard_function(cls: type[torch.autograd.Function]) -> None:
    """Makes a Function run in fp32 and outside any frame."""
    if _GUARD in vars(cls) or cls.__module__.startswith(("torch.", "autoprec.")):
        return
    setattr(cls, _GUARD, True)
    for name in ("forward", "backward", "setup_context"):
        method = vars(cls).get(name)
        if isinstance(method, staticmethod):
            setattr(cls, name, staticmethod(_outside(method.__func__)))


def _outside(func: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*args: Any) -> Any:
        mode = pop_own_mode()
        if mode is None:
            return func(*args)
        try:
            return func(*[cast(a, torch.float32) for a in args])
        finally:
            push_mode(mode)

    guarded.__name__, guarded.__doc__ = func.__name__, func.__doc__
    guarded.__signature__ = inspect.signature(func)  # type: ignore[attr-defined]
    return guarded


@functools.cache
def guard_checkpoint() -> None:
    """Recomputation, of both kinds, in the frame of the first run; caught below ``checkpoint``, so under any alias."""
    reentrant = torch_checkpoint.CheckpointFunction.forward
    generator = torch_checkpoint._checkpoint_without_reentrant_generator

    def forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return reentrant(ctx, scoped(run_function), *args)

    def without_reentrant(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return generator(scoped(fn), *args, **kwargs)

    torch_checkpoint.CheckpointFunction.forward = staticmethod(forward)  # type: ignore[assignment]
    torch_checkpoint._checkpoint_without_reentrant_generator = without_reentrant
