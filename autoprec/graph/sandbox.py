"""Calls a model and leaves no trace: buffers, RNG, gradients, caches and train/eval stay.  Copies no weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restores what a forward may change: buffers, attributes (caches kept on ``self``), RNG state, gradients.

    Attributes are compared one level deep: a dict or list on a module gets its entries back; an object of another kind
    that changes inside keeps the change.
    """
    modules = list(model.modules())
    attributes = [_snapshot(module) for module in modules]
    buffers = [(b, b._version, b.requires_grad, b.detach().clone()) for b in model.buffers() if not b.is_meta]
    parameters = [(p, p.data, p.grad) for p in model.parameters()]
    for parameter, _, _ in parameters:
        parameter.grad = None  # a backward adds to a gradient in place
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for module, saved in zip(modules, attributes, strict=True):
            _restore(module, saved)
        with torch.no_grad():
            for buffer, version, had_gradient, saved in buffers:
                if buffer.requires_grad and not had_gradient:
                    buffer.detach_()  # written where gradients are recorded, as a cache is
                # batch norm writes its running statistics without a new version
                if buffer._version != version or not torch.equal(buffer, saved):
                    buffer.copy_(saved)
        for parameter, data, gradient in parameters:
            parameter.grad = None
            if parameter.dtype != data.dtype or parameter.data_ptr() != data.data_ptr():
                parameter.data = data  # the forward moves its own layers
            parameter.grad = gradient


def _snapshot(module: nn.Module) -> dict[str, Any]:
    return {name: (value, _entries(value)) for name, value in vars(module).items()}


def _entries(value: Any) -> Any:
    return value.copy() if isinstance(value, (dict, list, set)) else None


def _restore(module: nn.Module, saved: dict[str, Any]) -> None:
    now = vars(module)
    for name in [name for name in now if name not in saved]:
        del now[name]
    for name, (value, entries) in saved.items():
        now[name] = value
        if entries is not None and not _same(value, entries):
            _refill(value, entries)


def _same(now: Any, before: Any) -> bool:
    """Whether a container holds the same objects; equality won't do, since tensors have none."""
    if isinstance(before, set):
        return now == before
    if isinstance(before, dict):
        return list(now) == list(before) and all(now[key] is value for key, value in before.items())
    return len(now) == len(before) and all(x is y for x, y in zip(now, before, strict=True))


def _refill(now: Any, before: Any) -> None:
    now.clear()
    if isinstance(now, list):
        now.extend(before)
    else:
        now.update(before)
