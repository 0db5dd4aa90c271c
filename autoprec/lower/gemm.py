"""What a GEMM does under its formats: 16-bit operands by a cast, 8 bits and fewer by a backend's kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from autoprec.frames.mode import Action
from autoprec.lower import casts
from autoprec.lower.weights import cast_weight
from autoprec.plan import Formats

if TYPE_CHECKING:
    from autoprec.lower.frame import GemmSettings


@dataclass(frozen=True, slots=True)
class CastKeepingWeights:
    """Like :class:`~autoprec.lower.casts.CastTo`, with parameters cast once while no gradient is recorded."""

    dtype: torch.dtype

    def __call__(self, func: casts.Func, args: casts.Args, kwargs: casts.Kwargs) -> Any:
        if kwargs.get("out") is not None or any(t.dtype not in casts.CASTABLE for t in _floating(args)):
            return func(*args, **kwargs)
        return func(*[self._cast(a) for a in args], **{k: self._cast(v) for k, v in kwargs.items()})

    def _cast(self, value: Any) -> Any:
        if isinstance(value, torch.nn.Parameter):
            return cast_weight(value, self.dtype)
        if isinstance(value, list):
            return [self._cast(item) for item in value]
        return casts.cast(value, self.dtype)


@dataclass(frozen=True, slots=True)
class CastGemm:
    """All operands in one 16-bit dtype; a call with a double or complex operand stays as it is."""

    dtype: torch.dtype

    def __call__(self, func: casts.Func, args: casts.Args, kwargs: casts.Kwargs) -> Any:
        if any(t.dtype not in casts.CASTABLE for t in _floating(args)):
            return func(*args, **kwargs)
        return casts.cast_call(func, args, kwargs, self.dtype)


def _floating(args: casts.Args) -> list[torch.Tensor]:
    return [a for a in args if isinstance(a, torch.Tensor) and (a.is_floating_point() or a.is_complex())]


def gemm_action(op: str, formats: Formats, backend: tuple[str, ...], settings: GemmSettings) -> Action:
    """The action of a GEMM op; ``fp32`` and 16-bit formats need no backend."""
    from autoprec.lower.frame import DTYPES

    if formats.input in DTYPES:
        dtype = DTYPES[formats.input]
        return CastKeepingWeights(dtype) if settings.mode == "inference" else CastGemm(dtype)
    raise NotImplementedError(formats)
