"""What a plan does to one call: cast its arguments, then run it.

Only fp32, fp16 and bf16 arguments are cast.  An argument that the call writes (``out=``, an in-place destination) is
never cast: the write would go to the copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

CASTABLE = (torch.float32, torch.float16, torch.bfloat16)

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Func = Callable[..., Any]


def cast(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with every castable tensor in it, lists and (named) tuples included, in ``dtype``."""
    if isinstance(value, torch.Tensor):
        own = value.dtype
        return value if own == dtype or own not in CASTABLE else value.to(dtype)
    if isinstance(value, list):
        return [cast(item, dtype) for item in value]
    if isinstance(value, tuple):
        items = [cast(item, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def floats(value: Any) -> Iterator[torch.Tensor]:
    """The castable tensors in an argument, lists and tuples included."""
    if isinstance(value, torch.Tensor):
        if value.dtype in CASTABLE:
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from floats(item)


def cast_call(func: Func, args: Args, kwargs: Kwargs, dtype: torch.dtype) -> Any:
    """Calls ``func`` with its floating arguments in ``dtype``; a call that writes ``out=`` stays as it is."""
    if not kwargs:
        return func(*[cast(a, dtype) for a in args])
    if kwargs.get("out") is not None:
        return func(*args, **kwargs)
    return func(*[cast(a, dtype) for a in args], **{k: cast(v, dtype) for k, v in kwargs.items()})


@dataclass(frozen=True, slots=True)
class CastTo:
    """All floating arguments in one dtype."""

    dtype: torch.dtype

    def __call__(self, func: Func, args: Args, kwargs: Kwargs) -> Any:
        return cast_call(func, args, kwargs, self.dtype)


@dataclass(frozen=True, slots=True)
class CastAround:
    """Like :class:`CastTo` for an op that writes running statistics: their casts are copied back after the call.

    Statistics are the vectors among the arguments that take no gradient: ``F.batch_norm`` and ``torch.batch_norm``, one
    name, have them at different places.  A frozen weight gets the value that it has.
    """

    dtype: torch.dtype

    def __call__(self, func: Func, args: Args, kwargs: Kwargs) -> Any:
        new = [cast(a, self.dtype) for a in args]
        named = {k: cast(v, self.dtype) for k, v in kwargs.items()}
        out = func(*new, **named)
        for before, after in zip((*args, *kwargs.values()), (*new, *named.values()), strict=True):
            if (
                after is not before
                and isinstance(before, torch.Tensor)
                and before.ndim == 1
                and not before.requires_grad
            ):
                before.copy_(after)
        return out


@dataclass(frozen=True, slots=True)
class KeepStatistics:
    """Batch norm as its input comes: the kernel computes in fp32, if all else is fp32 or like the input.

    Any other mixture (a model moved to 16 bit after conversion) runs in fp32, with the statistics copied back.
    """

    def __call__(self, func: Func, args: Args, kwargs: Kwargs) -> Any:
        given = list(floats((*args, *kwargs.values())))
        parameters = {t.dtype for t in given[1:]}
        if parameters <= {torch.float32} or parameters == {given[0].dtype}:
            return func(*args, **kwargs)
        return CastAround(torch.float32)(func, args, kwargs)


@dataclass(frozen=True, slots=True)
class CastToDestination:
    """Arguments take the dtype of the first one, which the call writes or which sets the result's dtype."""

    def __call__(self, func: Func, args: Args, kwargs: Kwargs) -> Any:
        target: Any = args[0] if args else kwargs.get("input")
        if not isinstance(target, torch.Tensor) or target.dtype not in CASTABLE:
            return func(*args, **kwargs)
        dtype = target.dtype
        return func(*args[:1], *[cast(a, dtype) for a in args[1:]], **{k: cast(v, dtype) for k, v in kwargs.items()})


@dataclass(frozen=True, slots=True)
class CastToWidest:
    """Arguments of different dtypes all take the widest, for ops that don't promote by themselves."""

    def __call__(self, func: Func, args: Args, kwargs: Kwargs) -> Any:
        dtypes = {t.dtype for t in floats((*args, *kwargs.values()))}
        if len(dtypes) < 2:
            return func(*args, **kwargs)
        return cast_call(func, args, kwargs, torch.float32)


@dataclass(frozen=True, slots=True)
class KeepRange:
    """An op that doesn't care, unless a Python number among its arguments leaves the range of its 16-bit tensor.

    ``masked_fill(scores, mask, -1e9)`` on fp16 would fill with ``-inf``; the call then runs in fp32.  In place the
    tensor can't be widened: the number is brought to the end of its range instead.
    """

    inplace: bool = False

    def __call__(self, func: Func, args: Args, kwargs: Kwargs) -> Any:
        narrow = [t.dtype for t in floats(args) if t.dtype != torch.float32]
        if not narrow:
            return func(*args, **kwargs)
        limit = min(torch.finfo(dtype).max for dtype in narrow)
        numbers = [v for v in (*args, *kwargs.values()) if isinstance(v, float) and math.isfinite(v)]
        if all(abs(v) <= limit for v in numbers):
            return func(*args, **kwargs)
        if self.inplace:
            clamp = lambda v: max(-limit, min(limit, v)) if isinstance(v, float) and math.isfinite(v) else v  # noqa: E731
            return func(*[clamp(a) for a in args], **{k: clamp(v) for k, v in kwargs.items()})
        return cast_call(func, args, kwargs, torch.float32)


@dataclass(frozen=True, slots=True)
class WideFactory:
    """``arange(n, dtype=h.dtype)`` stays fp32: a bf16 position is wrong above 256."""

    def __call__(self, func: Func, args: Args, kwargs: Kwargs) -> Any:
        if kwargs.get("dtype") in (torch.float16, torch.bfloat16):
            kwargs = {**kwargs, "dtype": torch.float32}
        return func(*args, **kwargs)


#: Ops that write running statistics.
WRITTEN = ("batch_norm", "instance_norm", "native_batch_norm")

#: Ops whose Python number may leave a 16-bit range, beside those that the rules guard as fills.
NUMBER_OPS = ("where", "add", "sub", "clamp", "clamp_min", "clamp_max")
