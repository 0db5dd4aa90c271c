"""Code that a forward calls but that doesn't run as part of it: autograd Functions and checkpointed functions.

* An ``autograd.Function`` written for fp32 gets fp32: its forward and backward run without the frame mode, on upcast
  arguments.  Left alone, its forward would be lowered op by op and its backward not: a crash, or, when a compiler
  traces the backward with the mode on, another gradient without a word.
* A function given to ``torch.utils.checkpoint`` is recomputed in the frame it first ran in.

The guards sit on the classes and in torch's checkpoint module for the whole process, and do nothing while no converted
model runs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from autoprec.frames.methods import code_names
from autoprec.frames.mode import pop_own_mode, push_mode, scoped
from autoprec.frames.swap import original_class
from autoprec.lower.casts import cast

_GUARD = "_autoprec_guarded"


def guard_foreign_code(model: nn.Module) -> None:
    """Guards every ``autograd.Function`` that the model's code names, and ``checkpoint`` under any alias."""
    guard_checkpoint()
    for cls in _named_functions(model):
        guard_function(cls)


def _named_functions(model: nn.Module) -> Iterator[type[torch.autograd.Function]]:
    """Functions named in the code of the model's classes, of functions it keeps, and of what those name in turn."""
    todo: list[Any] = []
    for cls in {original_class(module) for module in model.modules()}:
        todo += [value for base in cls.__mro__ for value in vars(base).values()]
    todo += [value for module in model.modules() for value in vars(module).values()]
    seen: set[int] = set()
    while todo:
        value = todo.pop()
        if isinstance(value, functools.partial):
            value = value.func
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, MethodType):  # `swish = Swish.apply`
            todo.append(value.__self__ if isinstance(value.__self__, type) else value.__func__)
        elif isinstance(value, type) and issubclass(value, torch.autograd.Function):
            yield value
        elif isinstance(value, FunctionType) and id(value) not in seen and not _is_torchs(value):
            seen.add(id(value))
            todo += _named_in(inspect.unwrap(value))


def _is_torchs(value: Any) -> bool:
    return (value.__module__ or "").startswith(("torch.", "autoprec."))


def _named_in(func: FunctionType) -> Iterator[Any]:
    """What a function's code names: globals, closed-over values, and attributes of modules and classes among them."""
    names = set(code_names(func.__code__))
    known = [func.__globals__[name] for name in names if name in func.__globals__]
    for cell in func.__closure__ or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            known.append(cell.cell_contents)
    for value in known:
        yield value
        if isinstance(value, ModuleType) or (isinstance(value, type) and not issubclass(value, nn.Module)):
            inside = vars(value)
            yield from (inside[name] for name in names if name in inside)


def guard_function(cls: type[torch.autograd.Function]) -> None:
    """Makes a Function run in fp32 and outside any frame."""
    for base in cls.__mro__:
        if base is object or _is_torchs(base) or _GUARD in vars(base):
            continue
        setattr(base, _GUARD, True)
        for name in ("forward", "backward", "setup_context"):
            method = vars(base).get(name)
            if isinstance(method, staticmethod):
                setattr(base, name, staticmethod(_outside(method.__func__)))


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
