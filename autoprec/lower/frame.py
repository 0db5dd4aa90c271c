"""The frame of a converted module: raw function name → the casts its plan asks for."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from autoprec.frames.mode import Action
from autoprec.frames.names import is_inplace, spellings
from autoprec.lower import casts
from autoprec.lower.deferred import Defer
from autoprec.lower.gemm import DTYPES, GemmSettings, gemm_action
from autoprec.plan import Formats


class Choice(NamedTuple):
    """What one op does, as plain data: equal choices give one shared frame, and a frame pickles as its choices.

    Args:
        kind: ``cast`` (all arguments in ``formats.input``), ``gemm`` (formats by role), ``widest``, ``destination``,
            ``statistics``, ``range`` (see :class:`autoprec.lower.casts.KeepRange`) or ``factory``; ``defer`` is the
            ``cast`` of a norm that is left to the product after it, ``defer_mlp`` that before two products.
        formats: for ``cast`` and ``gemm``.
        backend: the backend that takes a ``gemm`` of fewer than 16 bits; empty if none does.
    """

    kind: str
    formats: Formats | None = None
    backend: tuple[str, ...] = ()


#: ``(op, index or None, choice)``, sorted.
Choices = tuple[tuple[str, int | None, Choice], ...]


class CastFrame:
    """The casts of one module's forward."""

    def __init__(self, choices: Choices, settings: GemmSettings) -> None:
        self.choices = choices
        self.settings = settings
        self.actions: Mapping[str, Action] = {}
        counted: dict[str, tuple[str, dict[int, Action]]] = {}
        default: dict[str, Action] = {}
        for op, index, choice in choices:
            for name in spellings(op):
                action = make_action(op, name, choice, settings)
                if index is None:
                    default[name] = action
                else:
                    counted.setdefault(name, (op, {}))[1][index] = action
        self.actions = default
        self._counted = counted

    def enter(self) -> CastFrame:
        return _CountingFrame(self) if self._counted else self

    def __reduce__(self) -> tuple[Any, ...]:
        return frame_for, (self.choices, self.settings)

    def __deepcopy__(self, memo: dict[int, Any]) -> CastFrame:
        return self


class _CountingFrame(CastFrame):
    """One activation of a frame whose plan tells the k-th call of an op from the others."""

    def __init__(self, frame: CastFrame) -> None:
        self._frame = frame
        self._counts: dict[str, int] = {}
        self.actions = self  # type: ignore[assignment]  # looked up through get()

    def get(self, name: str) -> Action | None:
        default = self._frame.actions.get(name)
        entry = self._frame._counted.get(name)
        if entry is None:
            return default
        op, by_index = entry  # a compiler can't take the name apart, hence the op beside it

        def counted(func: casts.Func, args: casts.Args, kwargs: casts.Kwargs) -> Any:
            action = default
            if _any_float(args) or _any_float(tuple(kwargs.values())):
                index = self._counts.get(op, 0)
                self._counts[op] = index + 1
                action = by_index.get(index, default)
            return func(*args, **kwargs) if action is None else action(func, args, kwargs)

        return counted


def _any_float(value: Any) -> bool:
    """Whether a call counts: it has a floating tensor among its arguments."""
    if isinstance(value, torch.Tensor):
        return value.is_floating_point()
    return isinstance(value, (list, tuple)) and any(_any_float(item) for item in value)


def make_action(op: str, name: str, choice: Choice, settings: GemmSettings) -> Action:
    """The action of one spelling of an op."""
    if choice.kind == "range":
        return casts.KeepRange(inplace=is_inplace(name))
    if choice.kind == "factory":
        return casts.WideFactory()
    if choice.kind == "statistics":
        return casts.KeepStatistics()
    if choice.kind == "destination" or is_inplace(name):
        return casts.CastToDestination()
    if choice.kind == "widest":
        return casts.CastToWidest()
    assert choice.formats is not None
    if choice.kind == "gemm":
        return gemm_action(op, choice.formats, choice.backend, settings)
    dtype = DTYPES[choice.formats.input]
    if choice.kind in ("defer", "defer_mlp"):
        return Defer(op, casts.CastTo(dtype), dtype, mlp=choice.kind == "defer_mlp")
    if op in casts.WRITTEN:
        return casts.CastAround(dtype)
    return casts.CastTo(dtype)


@functools.cache
def frame_for(choices: Choices, settings: GemmSettings) -> CastFrame:
    """The one frame object of these choices."""
    return CastFrame(choices, settings)
