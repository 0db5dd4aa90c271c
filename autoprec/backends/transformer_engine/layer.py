"""A te.Linear outside the module tree, lent the model's own Parameters for one call at a time.

It keeps quantisers and, for delayed scaling, their history, but no Parameter: a model can be copied, pickled and freed
without it, and its checkpoint has no ``_extra_state``.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from typing import Any

import torch
from torch import Tensor

from autoprec.backends.delayed import in_backward
from autoprec.backends.transformer_engine.recipes import te_recipe
from autoprec.formats import get_format, scales
from autoprec.plan import Formats
from autoprec.recipes import DelayedRecipe, Recipe

#: Transformer Engine's regions are global to the process: two threads would see each other's recipe.
_REGION = threading.RLock()


class Layer:
    """Runs any weight with one recipe; for recipes without state.

    A changed recipe doesn't reach a layer that has run (NVIDIA/TransformerEngine#3157), so that each has its own.

    Args:
        recipe: ours.
        formats: of the three roles.
        device: where it runs.
    """

    def __init__(self, recipe: Recipe, formats: Formats, device: torch.device) -> None:
        self.recipe = recipe
        self.formats = formats
        self._te = importlib.import_module("transformer_engine.pytorch")
        self._te_recipe = te_recipe(recipe, formats)
        self._device = device
        # Someone's quantized_model_init would make it think that its weights are stored in 8 bits.
        with _REGION, torch.cuda.device(device), self._te.quantized_model_init(enabled=False, recipe=self._te_recipe):
            self._linear = self._make()
        self._lend(None, None)

    def _make(self) -> Any:
        return self._te.Linear(16, 16, bias=True, device="meta")

    def __call__(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``rows @ weight.T + bias``: ``[M, K]`` and ``[N, K]`` give ``[M, N]`` in the dtype of ``rows``.

        Args:
            rows: fp32, or 16 bit with weight and bias in any dtype.
            weight: of the dtype of ``rows`` where that is fp32.
            bias: not for fp32 rows, where the kernel would round it to bf16.
        """
        low = rows.dtype in (torch.float16, torch.bfloat16)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_REGION)
            # Kernels run on the current device, wherever their operands are.
            stack.enter_context(torch.cuda.device(self._device))
            # Without it the weight would have to have the dtype of the rows.
            stack.enter_context(torch.autocast("cuda", dtype=rows.dtype if low else None, enabled=low))
            # Inside a region of the model's author this one counts: regions nest.
            stack.enter_context(self._te.autocast(enabled=True, recipe=self._te_recipe))
            stack.callback(self._lend, None, None)
            self._lend(weight, bias)
            return self._run(rows, weight)

    def _run(self, rows: Tensor, weight: Tensor) -> Tensor:
        return self._linear.forward(rows)

    def _lend(self, weight: Tensor | None, bias: Tensor | None) -> None:
        self._linear._parameters.update(weight=weight, bias=bias)  # any tensor: a weight may be computed
        self._linear.use_bias = self._linear.apply_bias = bias is not None


class DelayedLayer(Layer):
    """One weight's layer, with the amaxes of its three tensors.

    Transformer Engine updates all layers' scales at the end of its outermost region, by the recipe whose text they
    share.  Here each layer is a region of its own, so it updates its own scales with the same kernel: those of the
    forward before the next one, so that a recomputed forward has the scales of the first, those of the gradient after
    each backward.  Until there is a history, scales are those of the tensors at hand; Transformer Engine's first step
    has 1, by which small gradients are zero.  A copy, and a model resumed from a checkpoint, starts without a history.
    """

    recipe: DelayedRecipe

    def __init__(self, recipe: Recipe, formats: Formats, device: torch.device) -> None:
        super().__init__(recipe, formats, device)
        self._kernels = importlib.import_module("transformer_engine_torch")
        self._manager = importlib.import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager
        self._learned = {"scaling_fwd": False, "scaling_bwd": False}
        #: Whether the newest amaxes of the forward are from training, to be learned from; None if there are none.
        self._news: bool | None = None

    def _run(self, rows: Tensor, weight: Tensor) -> Tensor:
        self._linear.init_fp8_metadata()
        # As if it were listed among the layers to be updated by others.
        self._linear.fp8_meta.setdefault(self._manager.get_buffer_info(), [])
        if not in_backward():
            self._learn_or_forget()
            if not self._learned["scaling_fwd"]:
                self._start("scaling_fwd", self.formats.input, rows, weight)
        output = self._linear.forward(rows)
        self._news = torch.is_grad_enabled()
        if output.grad_fn is not None:
            if not self._learned["scaling_bwd"]:
                output.register_hook(self._before_backward)
            output.grad_fn.register_hook(self._after_backward)
        return output

    def _learn_or_forget(self) -> None:
        """What was seen in evaluation would count as this step's."""
        if self._news:
            self._update("scaling_fwd")
        elif self._news is not None:
            self._linear.fp8_meta["scaling_fwd"].amax_history[0].zero_()
        self._news = None

    def _before_backward(self, grad: Tensor) -> None:
        if not self._learned["scaling_bwd"]:  # still: a step may have several backwards
            self._start("scaling_bwd", self.formats.grad_output, grad)

    def _after_backward(self, grad_inputs: Any, grad_outputs: Any) -> None:
        with torch.cuda.device(self._device):
            self._update("scaling_bwd")

    def _start(self, key: str, format_name: str, *tensors: Tensor) -> None:
        """Scales of the first tensors, which have no history."""
        state = self._linear.fp8_meta[key]
        amax = torch.stack([t.detach().abs().amax().to(torch.float32) for t in tensors])
        largest, count = get_format(format_name).max, len(tensors)
        _, scale = scales.delayed_scale(amax[None], torch.ones_like(amax), largest, margin=self.recipe.margin)
        state.scale[:count].copy_(scale)

    def _update(self, key: str) -> None:
        state = self._linear.fp8_meta[key]
        history = state.amax_history
        self._kernels.fused_amax_and_scale_update_after_reduction(
            history[0].clone(), [history], [state.scale], self.recipe.algorithm, state.dtype, self.recipe.margin
        )
        self._learned[key] = True
