"""Makes a recorded call again in other formats, forward and backward, and compares it with itself in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autoprec.frames.mode import Action
from autoprec.frames.names import is_inplace
from autoprec.graph.dataflow import RANDOM_OPS, replace_tensors, tensors
from autoprec.graph.record import Call, floating

#: Loss scales tried for gradients in fp16, until none is infinite.
_SCALES = tuple(2.0**k for k in range(16, -9, -4))

#: Norms below this may be of numbers whose squares are zero in fp32.
_TINY = 1e-12


class Errors(NamedTuple):
    """What formats do to one call; infinite where a number isn't finite.

    Args:
        fisher: the sum of ``g² ΔY²``, with ``g`` the loss gradient at the result.
        weight_grad: ``‖ΔgW‖²`` over the trainable parameters.
    """

    fisher: float
    weight_grad: float


def can_replay(call: Call) -> bool:
    """Whether the call left its arguments as they were."""
    return not is_inplace(getattr(call.func, "__name__", "")) and call.kwargs.get("out") is None


def versions(call: Call) -> list[int]:
    """A number for each tensor argument, which grows when the tensor is written."""
    return [-1 if t.is_inference() else t._version for t in tensors((call.args, call.kwargs))]


class Replay:
    """One call with the gradient that came to its results.

    Args:
        call: as recorded in fp32.
        positions: which of the call's floating results have a gradient.
        gradients: of the loss, at those.
        trainable: ids of the parameters whose gradients count; a view of one counts as well.
    """

    def __init__(
        self, call: Call, positions: Sequence[int], gradients: Sequence[Tensor], trainable: frozenset[int]
    ) -> None:
        self._positions, self._gradients = positions, gradients
        arguments = (_without_dropout(call) if call.site.op in RANDOM_OPS else call.args, call.kwargs)
        weights = {id(t) for t in tensors(arguments) if id(t) in trainable or id(t._base) in trainable}
        leaves: dict[int, Tensor] = {}

        def leaf(tensor: Tensor) -> Tensor:
            if id(tensor) not in leaves:
                is_weight = id(tensor) in weights
                # the Parameter itself: backends know what they keep for a layer by it
                keeps = is_weight and isinstance(tensor, nn.Parameter)
                leaves[id(tensor)] = tensor if keeps else tensor.detach().requires_grad_(is_weight)
            return leaves[id(tensor)]

        self._args, self._kwargs = replace_tensors(arguments, leaf)
        self._weights = [leaves[key] for key in sorted(weights & leaves.keys())]
        self._exact = self._run(call.func)

    def errors(self, action: Action, func: Callable[..., Any]) -> Errors:
        """How far the call under ``action`` is from itself in fp32."""
        outputs, weight_grads = self._run(lambda *args, **kwargs: action(func, args, kwargs))
        exact, exact_grads = self._exact
        return Errors(
            sum(_square(a, b, g) for a, b, g in zip(outputs, exact, self._gradients, strict=True)),
            sum(_square(a, b) for a, b in zip(weight_grads, exact_grads, strict=True)),
        )

    def _run(self, function: Callable[..., Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Results and gradients of the weights."""
        with torch.set_grad_enabled(bool(self._weights)):
            found = floating(function(*self._args, **self._kwargs))
            outputs = [found[k] for k in self._positions]
        return [out.detach() for out in outputs], self._backward(outputs) if self._weights else []

    def _backward(self, outputs: list[Tensor]) -> list[Tensor]:
        scales = _SCALES if any(out.dtype == torch.float16 for out in outputs) else (1.0,)
        gradients: list[Tensor] = []
        for scale in scales:
            scaled = [(g * scale).to(out.dtype) for g, out in zip(self._gradients, outputs, strict=True)]
            raw = torch.autograd.grad(outputs, self._weights, scaled, retain_graph=True, materialize_grads=True)
            gradients = [g.float() / scale for g in raw]
            if scale == scales[-1] or all(bool(g.isfinite().all()) for g in gradients):
                break
        return gradients


def _without_dropout(call: Call) -> tuple[Any, ...]:
    """The arguments with a dropout rate of 0, the only bare number that attention and recurrent kernels take."""
    if "dropout_p" in call.kwargs:
        call.kwargs = {**call.kwargs, "dropout_p": 0.0}
    return tuple(0.0 if isinstance(arg, float) else arg for arg in call.args)


def _square(low: Tensor, exact: Tensor, weight: Tensor | None = None) -> float:
    """``‖weight (low - exact)‖²`` where ``exact`` is finite; infinite where ``low`` isn't then."""
    difference = low.to(exact.dtype) - exact
    if weight is not None:
        difference = difference * weight
    norm = float(torch.linalg.vector_norm(difference))
    if _TINY < norm < math.inf or not difference.numel():
        return norm**2
    difference = torch.where(exact.isfinite(), difference, 0.0)
    largest = float(difference.abs().max()) or 1.0  # squares of small gradients leave fp32
    squares = float((difference / largest).square().sum()) * largest**2
    return squares if math.isfinite(squares) else math.inf
