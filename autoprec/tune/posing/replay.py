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
        input_grad: ``‖ΔgXᵀ X‖²`` over the other operands: the error that goes on to the layers before, as the weight
            of an identity layer just before this one would see it.
    """

    fisher: float = 0.0
    weight_grad: float = 0.0
    input_grad: float = 0.0


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
        trainable: ids of the parameters that train; None in inference, where no gradient counts.
    """

    def __init__(
        self, call: Call, positions: Sequence[int], gradients: Sequence[Tensor], trainable: frozenset[int] | None
    ) -> None:
        self._op, self._positions, self._gradients = call.site.op, positions, gradients
        arguments = (_without_dropout(call) if call.site.op in RANDOM_OPS else call.args, call.kwargs)
        leaves: dict[int, Tensor] = {}
        self._weights: list[Tensor] = []
        self._inputs: list[Tensor] = []

        def leaf(tensor: Tensor) -> Tensor:
            if id(tensor) not in leaves:
                found = leaves[id(tensor)] = _leaf(tensor, trainable)
                if found.requires_grad:
                    (self._weights if _parameter(tensor) is not None else self._inputs).append(found)
            return leaves[id(tensor)]

        self._args, self._kwargs = replace_tensors(arguments, leaf)
        self._exact = self._run(call.func)

    def errors(self, action: Action, func: Callable[..., Any]) -> Errors:
        """How far the call under ``action`` is from itself in fp32."""
        outputs, grads = self._run(lambda *args, **kwargs: action(func, args, kwargs))
        exact, exact_grads = self._exact
        deltas = [_difference(a, b) for a, b in zip(grads, exact_grads, strict=True)]
        num_weights = len(self._weights)
        return Errors(
            sum(_square(_difference(a, b) * g) for a, b, g in zip(outputs, exact, self._gradients, strict=True)),
            sum(map(_square, deltas[:num_weights])),
            sum(_passed_on(d, x, self._op) for d, x in zip(deltas[num_weights:], self._inputs, strict=True)),
        )

    def _run(self, function: Callable[..., Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Results, and gradients of the weights and then of the inputs."""
        wanted = [*self._weights, *self._inputs]
        with torch.set_grad_enabled(bool(wanted)):
            found = floating(function(*self._args, **self._kwargs))
            outputs = [found[k] for k in self._positions]
        return [out.detach() for out in outputs], self._backward(outputs, wanted) if wanted else []

    def _backward(self, outputs: list[Tensor], wanted: list[Tensor]) -> list[Tensor]:
        scales = _SCALES if any(out.dtype == torch.float16 for out in outputs) else (1.0,)
        gradients: list[Tensor] = []
        for scale in scales:
            scaled = [(g * scale).to(out.dtype) for g, out in zip(self._gradients, outputs, strict=True)]
            raw = torch.autograd.grad(outputs, wanted, scaled, retain_graph=True, materialize_grads=True)
            gradients = [g.float() / scale for g in raw]
            if scale == scales[-1] or all(bool(g.isfinite().all()) for g in gradients):
                break
        return gradients


def _without_dropout(call: Call) -> tuple[Any, ...]:
    """The arguments with a dropout rate of 0, the only bare number that attention and recurrent kernels take."""
    if "dropout_p" in call.kwargs:
        call.kwargs = {**call.kwargs, "dropout_p": 0.0}
    return tuple(0.0 if isinstance(arg, float) else arg for arg in call.args)


def _parameter(tensor: Tensor) -> nn.Parameter | None:
    """The parameter that a tensor is, or is a view of."""
    whole = tensor if tensor._base is None else tensor._base
    return whole if isinstance(whole, nn.Parameter) else None


def _leaf(tensor: Tensor, trainable: frozenset[int] | None) -> Tensor:
    """The operand apart from what made it; it takes a gradient if training needs that."""
    parameter = _parameter(tensor)
    if trainable is None:
        return tensor.detach()
    if parameter is tensor and id(parameter) in trainable:
        return tensor  # itself: backends know what they keep for a layer by it
    takes = tensor.requires_grad if parameter is None else id(parameter) in trainable
    return tensor.detach().requires_grad_(takes)


def _passed_on(error: Tensor, x: Tensor, op: str) -> float:
    """``‖errorᵀ x‖²``, with errors that are alike in many rows added up before they are squared.

    A sum of squares would take the small gradients that int8 rounds to zero, token by token, for chance; they aren't,
    and add up in every weight before this one.
    """
    if x.dim() == 0:
        return _square(error * x.detach())
    # a convolution's channels come before its one to three spatial dimensions
    features = -1 - int(op[-2]) if op.startswith("conv") else -1
    rows_error, rows_x = (t.detach().movedim(features, -1).reshape(-1, t.shape[features]) for t in (error, x))
    if rows_x.shape[0] >= rows_x.shape[1]:
        return _square(rows_error.T @ rows_x)
    size = float(rows_error.abs().max()) or 1.0  # squares of small gradients leave fp32
    rows_error = rows_error / size
    square = float(((rows_error @ rows_error.T) * (rows_x @ rows_x.T)).sum()) * size**2
    return max(square, 0.0) if math.isfinite(square) else math.inf


def _difference(low: Tensor, exact: Tensor) -> Tensor:
    """``low - exact``, and 0 where ``exact`` isn't finite."""
    return torch.where(exact.isfinite(), low.to(exact.dtype) - exact, 0.0)


def _square(difference: Tensor) -> float:
    """``‖difference‖²``; infinite where it isn't finite."""
    norm = float(torch.linalg.vector_norm(difference))
    if _TINY < norm < math.inf or not difference.numel():
        return norm**2
    largest = float(difference.abs().max()) or 1.0  # squares of small gradients leave fp32
    square = float((difference / largest).square().sum()) * largest**2
    return square if math.isfinite(square) else math.inf
