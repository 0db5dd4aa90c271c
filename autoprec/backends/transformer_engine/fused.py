"""A te.LayerNormLinear outside the module tree: a norm and the product that alone reads it, in one.

The norm's result goes to the product as codes and is never written in 16 bit.  Its weight and bias are lent for one
call like those of the product; beside bf16 activations the kernel reads them in bf16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoprec.backends.base import Norm
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
        scale, shift = norm.weight, norm.bias
        if self._kind == "LayerNorm" and shift is None:  # its kernel adds one
            shift = torch.zeros_like(scale, requires_grad=False)
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
