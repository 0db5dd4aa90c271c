"""te.LayerNormLinear and te.LayerNormMLP outside the module tree: a norm and what alone reads it, in one.

The norm's result goes to the product as codes and is never written in 16 bit.  Its weight and bias are lent for one
call like those of the products; beside bf16 activations the kernels read them in bf16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoprec.backends.base import FirstHalf, Norm
from autoprec.backends.transformer_engine.layer import Layer
from autoprec.plan import Formats
from autoprec.recipes import Recipe


class NormLayer(Layer):
    """Runs any norm of one kind and any weight with one recipe without state.

    Args:
        recipe: ours.
        formats: of the three roles.
        device: where it runs.
        kind: ``LayerNorm`` or ``RMSNorm``.
        eps: of the norm.
    """

    def __init__(self, recipe: Recipe, formats: Formats, device: torch.device, kind: str, eps: float) -> None:
        self._kind, self._eps = kind, eps
        self._norm: tuple[Tensor | None, Tensor | None] = (None, None)
        super().__init__(recipe, formats, device)

    def normed(self, rows: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``norm(rows) @ weight.T + bias``; dtypes as :meth:`Layer.__call__` takes them."""
        scale, shift = _scale_and_shift(norm)
        if rows.dtype == torch.float32:
            scale, shift = scale.to(rows.dtype), None if shift is None else shift.to(rows.dtype)
        self._norm = (scale, shift)
        try:
            return self(rows, weight, bias)
        finally:
            self._norm = (None, None)

    def _make(self) -> Any:
        return self._te.LayerNormLinear(
            16, 16, eps=self._eps, bias=True, normalization=self._kind, zero_centered_gamma=False, device="meta"
        )

    def _lend(self, weight: Tensor | None, bias: Tensor | None) -> None:
        super()._lend(weight, bias)
        scale, shift = self._norm if weight is not None else (None, None)
        self._linear._parameters["layer_norm_weight"] = scale
        if self._kind == "LayerNorm":
            self._linear._parameters["layer_norm_bias"] = shift


class MLPLayer(Layer):
    """Runs any norm of one kind and any two weights, with one activation between them and one recipe without state.

    Args:
        recipe: ours.
        formats: of the three roles, in both products.
        device: where it runs.
        kind: ``LayerNorm`` or ``RMSNorm``.
        eps: of the norm.
        activation: see :class:`~autoprec.backends.base.FirstHalf`.
    """

    def __init__(
        self, recipe: Recipe, formats: Formats, device: torch.device, kind: str, eps: float, activation: str
    ) -> None:
        self._kind, self._eps, self._activation = kind, eps, activation
        self._first: FirstHalf | None = None
        super().__init__(recipe, formats, device)

    def perceptron(self, rows: Tensor, first: FirstHalf, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``act(norm(rows) @ first.weight.T + first.bias) @ weight.T + bias`` of 16-bit rows."""
        self._first = first
        if first.norm.bias is None and torch.is_grad_enabled() and not first.norm.weight.requires_grad:
            # Transformer Engine asks next whether the bias needs a gradient, also of a norm that has none.
            rows = rows if rows.requires_grad else rows.detach().requires_grad_()
        if bias is None and first.bias is not None:
            bias = torch.zeros(len(weight), dtype=weight.dtype, device=weight.device)
        try:
            return self(rows, weight, bias)
        finally:
            self._first = None

    def _make(self) -> Any:
        made = self._te.LayerNormMLP(
            16, 16, eps=self._eps, bias=True, normalization=self._kind, activation=_ACTIVATIONS[self._activation],
            zero_centered_gamma=False, device="meta",
        )  # fmt: skip
        made.gemm_gelu_fusion = False  # an environment variable may ask for it, and it rounds otherwise
        return made

    def _lend(self, weight: Tensor | None, bias: Tensor | None) -> None:
        first, names = None if weight is None else self._first, self._linear._parameters
        scale, shift = (None, None) if first is None else _scale_and_shift(first.norm)
        first_bias = None if first is None else first.bias
        if first is not None and first_bias is None and bias is not None:
            first_bias = torch.zeros(len(first.weight), dtype=first.weight.dtype, device=first.weight.device)
        names.update(fc1_weight=None if first is None else first.weight, fc2_weight=weight)
        names.update(fc1_bias=first_bias, fc2_bias=bias, layer_norm_weight=scale)
        if self._kind == "LayerNorm":
            names["layer_norm_bias"] = shift
        self._linear.use_bias = self._linear.apply_bias = bias is not None


#: Transformer Engine's gelu is the tanh approximation.
_ACTIVATIONS = {"gelu_tanh": "gelu", "relu": "relu", "silu": "silu"}


def _scale_and_shift(norm: Norm) -> tuple[Tensor, Tensor | None]:
    if norm.kind == "LayerNorm" and norm.bias is None:  # its kernel adds one
        return norm.weight, torch.zeros_like(norm.weight, requires_grad=False)
    return norm.weight, norm.bias
