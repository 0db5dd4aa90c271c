"""Outputs of an outermost call keep the dtypes of the fp32 model: 16-bit tensors in them become fp32."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.utils import _pytree as pytree

_LOW = (torch.bfloat16, torch.float16)


def upcast_floats(out: Any) -> Any:
    """The same structure with each 16-bit tensor cast to fp32; containers are copied only if something changes.

    Looks into tuples, lists, dicts, registered pytrees and dataclasses; other objects (caches) stay as they are.
    """
    if isinstance(out, torch.Tensor):
        return out.float() if out.dtype in _LOW else out
    if out is None or isinstance(out, (str, int, float)):
        return out
    if type(out) in (tuple, list):
        items = [upcast_floats(item) for item in out]
        return out if all(a is b for a, b in zip(items, out, strict=True)) else type(out)(items)
    if type(out) is dict:
        values = {key: upcast_floats(value) for key, value in out.items()}
        return out if all(values[key] is value for key, value in out.items()) else values
    return _upcast_object(out)


def _upcast_object(out: Any) -> Any:
    # A pytree registered by its library (a ModelOutput, a namedtuple) knows best how to rebuild itself.
    leaves, spec = pytree.tree_flatten(out)
    if len(leaves) == 1 and leaves[0] is out:
        return _upcast_dataclass(out)
    new = [upcast_floats(leaf) for leaf in leaves]
    return out if all(a is b for a, b in zip(new, leaves, strict=True)) else pytree.tree_unflatten(new, spec)


def _upcast_dataclass(out: Any) -> Any:
    if not dataclasses.is_dataclass(out) or isinstance(out, type):
        return out
    changed = {}
    for field in dataclasses.fields(out):
        value = getattr(out, field.name, None)
        new = upcast_floats(value)
        if new is not value:
            changed[field.name] = new
    return dataclasses.replace(out, **changed) if changed else out
