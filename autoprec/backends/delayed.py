"""Delayed scaling: what a weight's three tensors were scaled by, from the amaxes of past steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from autoprec.backends.base import LinearSpec
from autoprec.formats import get_format
from autoprec.formats.quantize import Quantized, quantize_scaled
from autoprec.formats.scales import delayed_scale
from autoprec.recipes import DelayedRecipe


class Amaxes:
    """One tensor's history.

    Until it has one, the scale is that of the tensor at hand.

    Args:
        recipe: margin, length of the history, and what is taken from it.
        largest: largest value of the tensor's format.
    """

    def __init__(self, recipe: DelayedRecipe, largest: float) -> None:
        self._recipe = recipe
        self._largest = largest
        self._history: Tensor | None = None
        self._scale: Tensor | None = None

    def scale(self, amax: Tensor) -> Tensor:
        """The scale for a tensor whose largest absolute value is ``amax``: fp32, both without dimensions."""
        return self._update(amax[None, None], amax.new_ones(1))[1][0] if self._scale is None else self._scale[0]

    def learn(self, amax: Tensor) -> None:
        """A training step has seen ``amax``."""
        history, scale = self._history, self._scale
        if history is None or scale is None:
            history, scale = amax.new_zeros(self._recipe.history_length, 1), amax.new_ones(1)
        history[0] = amax
        self._history, self._scale = self._update(history, scale)

    def _update(self, history: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        recipe = self._recipe
        return delayed_scale(history, scale, self._largest, margin=recipe.margin, algorithm=recipe.algorithm)


class DelayedScales:
    """The histories of one weight's input, weight and grad_output.

    The forward's amaxes are learned before the next forward and not at once, so that a forward that is recomputed for
    its backward has the same scales as the first; those of the gradient after each backward.
    """

    def __init__(self, spec: LinearSpec, recipe: DelayedRecipe) -> None:
        self._amaxes = {
            role: Amaxes(recipe, get_format(getattr(spec.formats, role)).max)
            for role in ("input", "weight", "grad_output")
        }
        self._news: dict[str, Tensor] = {}

    def begin(self, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """The scales of a forward; its amaxes are learned from if gradients are recorded."""
        if not in_backward():
            for role, amax in self._news.items():
                self._amaxes[role].learn(amax)
            self._news = {}
        seen = {"input": _amax(x), "weight": _amax(weight)}
        if torch.is_grad_enabled():
            self._news = seen
        return {role: self._amaxes[role].scale(amax) for role, amax in seen.items()}

    def take_gradient(self, grad: Tensor) -> Tensor:
        """The scale of a grad_output, which is learned from."""
        amax = _amax(grad)
        scale = self._amaxes["grad_output"].scale(amax)
        self._amaxes["grad_output"].learn(amax)
        return scale


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedSpec(LinearSpec):
    """One call's spec, with the scales of its forward, which its backward needs again.

    Args:
        scales: of input and weight.
        histories: for the scale of grad_output.
    """

    scales: dict[str, Tensor]
    histories: DelayedScales

    def quantize(self, x: Tensor, role: str) -> Quantized:
        """One operand, fp32."""
        scale = self.histories.take_gradient(x) if role == "grad_output" else self.scales[role]
        return quantize_scaled(x, get_format(getattr(self.formats, role)), scale)


def in_backward() -> bool:
    """Whether a forward is being recomputed for a backward."""
    return torch._C._current_graph_task_id() != -1


def _amax(x: Tensor) -> Tensor:
    x = x.detach()
    return x.abs().amax().to(torch.float32) if x.numel() else x.new_zeros((), dtype=torch.float32)
