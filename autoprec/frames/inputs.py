"""Modules that look at their inputs' dtype before any op runs: they get the dtype they were built for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def like(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with every floating tensor in it in ``dtype``; packed sequences and tuples included."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype in _FLOATS else value
    if isinstance(value, PackedSequence):
        return value._replace(data=like(value.data, dtype))
    if isinstance(value, tuple):
        items = [like(item, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [like(item, dtype) for item in value]
    return value


def recurrent_forward(inner: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of an RNN layer, which refuses a sequence or state in another dtype than its weights'.

    Nothing is lost: a 16-bit sequence is exact in fp32, and the plan's cast comes at the kernel.
    """

    def forward(self: nn.RNNBase, *args: Any, **kwargs: Any) -> Any:
        dtype = self._flat_weights[0].dtype  # type: ignore[union-attr]
        return inner(self, *like(args, dtype), **{name: like(value, dtype) for name, value in kwargs.items()})

    forward.__signature__ = inspect.signature(inner)  # type: ignore[attr-defined]
    return forward


def script_call(inner: Callable[..., Any]) -> Callable[..., Any]:
    """``_call_impl`` of a ScriptModule: compiled code can't be entered, so it gets the dtype of its parameters."""

    def _call_impl(self: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = next((p.dtype for p in self.parameters() if p.dtype in _FLOATS), torch.float32)
        return inner(self, *like(args, dtype), **{name: like(value, dtype) for name, value in kwargs.items()})

    return _call_impl
