"""Calls of a model, written down so that each can be made again alone: same op, same shapes, other numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoprec.frames.names import is_inplace
from autoprec.graph.inputs import Run
from autoprec.graph.record import Call, record
from autoprec.graph.site import Site
from autoprec.lower.casts import CASTABLE
from autoprec.plan import Mode

#: ``stored`` is a buffer, or a view of one or of a parameter; a ``value`` is an integer or a mask: its numbers count.
Role = Literal["parameter", "stored", "activation", "value"]

_PLAIN = (bool, int, float, str, slice, torch.dtype, torch.device, torch.memory_format, torch.layout, type(...))
#: What a convolution layer's forward adds to its arguments.
_CONV_SETTINGS = ("stride", "padding", "dilation", "groups", "padding_mode")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor argument, without its numbers.

    Args:
        role: what it is to the model.
        shape, stride, dtype: as the op got it in fp32.
        requires_grad: the backward computes its gradient.
        tensor: the tensor itself, of a ``value``.
    """

    role: Role
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    tensor: torch.Tensor | None = None

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def __str__(self) -> str:
        learns = " learns" if self.requires_grad else ""
        return f"{self.role} {self.dtype} {list(self.shape)} {list(self.stride)}{learns}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCall:
    """A call that one site makes, and how often in a step.

    Args:
        site: the site, with the FLOPs of one such call.
        func: what it calls.
        args, kwargs: its arguments, tensors as :class:`TensorSpec`.
        key: op, shapes, strides, dtypes and settings: calls of one key cost the same.
        count: such calls in a step.
        why_not: why it can't be made again alone; empty if it can.
    """

    site: Site
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: str
    count: int = 1
    why_not: str = ""

    @property
    def numel(self) -> int:
        """Elements of the tensors that it reads."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return sum(leaf.numel for leaf in leaves if isinstance(leaf, TensorSpec))


def record_calls(model: nn.Module, run: Run, mode: Mode = "training") -> list[OpCall]:
    """Every call that the model's sites make in one step, equal calls of a site counted together.

    Args:
        model: any module, not converted; stays as it is.
        run: makes one step's forward, the loss included; see :func:`autoprec.graph.inputs.as_run`.
        mode: ``training`` also notes which arguments get a gradient.
    """
    calls: dict[tuple[str, str], OpCall] = {}
    stored = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}

    def spec(leaf: Any) -> Any:
        return _spec(leaf, stored, mode == "training")

    def observe(call: Call) -> None:
        described = _describe(call, spec)
        known = calls.get((described.site.id, described.key))
        calls[described.site.id, described.key] = replace(described, count=1 if known is None else known.count + 1)

    record(model, run, observe, grad=mode == "training")
    return list(calls.values())


def _describe(call: Call, spec: Callable[[Any], Any]) -> OpCall:
    kwargs = dict(call.kwargs)
    if kwargs.get("inplace") is True:
        kwargs["inplace"] = False  # what gets a gradient can't be written; out of place costs nearly the same
    given = pytree.tree_map(spec, (tuple(call.args), kwargs))
    words = json.dumps([call.site.op, call.site.leaf, _settings(call.func), _words(given)], sort_keys=True)
    return OpCall(
        site=call.site,
        func=call.func,
        args=given[0],
        kwargs=given[1],
        key=f"{call.site.op} {hashlib.sha256(words.encode()).hexdigest()[:24]}",
        why_not=_why_not(getattr(call.func, "__name__", ""), *given),
    )


def _spec(leaf: Any, stored: set[int], training: bool) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
        return leaf
    role: Role = "activation"
    if isinstance(leaf, nn.Parameter):
        role = "parameter"
    elif not leaf.is_floating_point():
        role = "value"
    elif id(leaf) in stored or (leaf._is_view() and id(leaf._base) in stored):
        role = "stored"
    return TensorSpec(
        role=role,
        shape=tuple(leaf.shape),
        stride=leaf.stride(),
        dtype=leaf.dtype,
        requires_grad=training and leaf.requires_grad,
        tensor=leaf.detach() if role == "value" else None,
    )


def _why_not(name: str, args: Any, kwargs: Any) -> str:
    if is_inplace(name) or kwargs.get("out") is not None:
        return f"{name} writes its argument"
    for leaf in pytree.tree_leaves((args, kwargs)):
        if leaf is not None and not isinstance(leaf, (TensorSpec, *_PLAIN)):
            return f"an argument of type {type(leaf).__name__} can't be made again"
        if isinstance(leaf, TensorSpec) and leaf.role != "value" and leaf.dtype not in CASTABLE:
            return f"an argument is {leaf.dtype}, which no plan casts"
    return ""


def _settings(func: Callable[..., Any]) -> list[str]:
    """Of the layer whose method a call is."""
    layer = getattr(func, "__self__", None)
    return [f"{name}={getattr(layer, name, None)}" for name in _CONV_SETTINGS] if isinstance(layer, nn.Module) else []


def _words(tree: Any) -> Any:
    """A structure of arguments as JSON values, the same in every process."""
    if isinstance(tree, dict):
        return {str(name): _words(value) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_words(item) for item in tree]
    return tree if tree is None or isinstance(tree, (bool, int, float, str)) else str(tree)
