"""Runs the same call both ways and says where they differ: outputs, arguments written, buffers and random state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoprec.graph.sandbox import untouched

#: Arguments that can be copied, or needn't be.
_PLAIN = (str, bytes, int, float, complex, bool, type(None), slice, range, torch.dtype, torch.device, torch.Size)

Call = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def copied(value: Any) -> Any:
    """``value`` with every tensor in it copied, so that a call may write it.

    Raises:
        TypeError: something in it can't be copied safely (a cache object, a tensor subclass).
    """
    return pytree.tree_map(_copied_leaf, value)


def _copied_leaf(leaf: Any) -> Any:
    if type(leaf) in (torch.Tensor, nn.Parameter):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    if isinstance(leaf, _PLAIN):
        return leaf
    raise TypeError(f"an argument is a {type(leaf).__name__}")


@dataclasses.dataclass(frozen=True)
class Seen:
    """All that one call leaves behind."""

    output: Any
    arguments: Any
    buffers: dict[str, torch.Tensor]
    random: list[torch.Tensor]

    def difference(self, other: Seen) -> str | None:
        """The first place where the two aren't equal bit for bit, or None."""
        for part in dataclasses.fields(self):
            place = difference(getattr(self, part.name), getattr(other, part.name), part.name)
            if place is not None:
                return place
        return None


def run_both(model: nn.Module, args: Any, kwargs: Any, trial: Call, real: Call) -> tuple[Any, str | None]:
    """``trial`` on copies, without a trace left, then ``real`` on the arguments themselves.

    Returns:
        the real call's output, and where the two differ or None.
    """
    with untouched(model):
        trial_args, trial_kwargs = copied((args, kwargs))
        tried = _seen(model, trial(trial_args, trial_kwargs), (trial_args, trial_kwargs), copy_buffers=True)
    output = real(args, kwargs)
    return output, tried.difference(_seen(model, output, (args, kwargs), copy_buffers=False))


def _seen(model: nn.Module, output: Any, arguments: Any, copy_buffers: bool) -> Seen:
    buffers = {name: b.detach().clone() if copy_buffers else b for name, b in model.named_buffers()}
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    random = [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in sorted(devices, key=str))]
    return Seen(output, arguments, buffers, random)


def difference(a: Any, b: Any, place: str) -> str | None:
    """Where two values of one structure differ, or None; tensors are compared bit for bit."""
    if type(a) is not type(b):
        return f"{place} is a {type(a).__name__} here, a {type(b).__name__} there"
    if isinstance(a, torch.Tensor):
        return None if _same_bits(a, b) else place
    if isinstance(a, Mapping):
        return place if list(a) != list(b) else _first_difference(a.items(), b.values(), place)
    if isinstance(a, (list, tuple)):
        return place if len(a) != len(b) else _first_difference(enumerate(a), b, place)
    if isinstance(a, _PLAIN) or a is b:
        return None if a == b or a != a else place
    if hasattr(a, "__dict__"):
        return difference(vars(a), vars(b), place)
    return f"{place} can't be compared: it is a {type(a).__name__}"


def _first_difference(items: Any, others: Any, place: str) -> str | None:
    for (key, value), other in zip(items, others, strict=True):
        found = difference(value, other, f"{place}[{key!r}]")
        if found is not None:
            return found
    return None


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape, a.stride(), a.device, a.requires_grad) != (
        b.dtype,
        b.shape,
        b.stride(),
        b.device,
        b.requires_grad,
    ):
        return False
    raw = [t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*raw)
