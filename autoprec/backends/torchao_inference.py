"""Products with torchao's 8- and 4-bit tensors, for inference.

torchao puts its tensors in the place of a module's Parameter; here they are lent to one product at a time, so that the
Parameter, its keys and its fp32 values stay.  What torchao computes wrongly without an error is avoided:

- its int8 and int4 scales have a floor (1.2e-7 and 1e-6), below which a weight is all zeros: numbers are multiplied by
  2 ** 20 first, exactly, and the result is brought back;
- an all-zero row of a weight in fp8 is all NaN: it gets a scale of its own;
- int8 products in fp16 overflow before they are scaled, and int8 kernels of a CPU without VNNI saturate: refused;
- a weight of a shape that doesn't fit is left as it is, with a message in a log: refused, and checked;
- the settings of inductor and of fp32 products that it likes are the process's: they are left alone.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoprec.backends.base import Gemm, refuse_device, refuse_shape
from autoprec.backends.torchao_weights import GROUPS, LIFT, Kind, cpu_int4, group_of
from autoprec.errors import BackendError
from autoprec.plan import Formats
from autoprec.recipes import CurrentRecipe, Recipe, RowwiseRecipe

NO_GRADIENT = "the plan is for inference, and a weight in 8 or 4 bits has no gradient; convert with mode='training'"
_WIDE = ("fp32", "bf16", "fp16")


def kind_of(formats: Formats, recipe: Recipe | None) -> tuple[Kind | None, str]:
    """The kind that these formats ask for, or why there is none."""
    weight, dynamic = formats.weight, formats.input not in _WIDE
    if weight not in ("int8", "int4", "fp8_e4m3"):
        return None, f"torchao holds weights in int8, int4 or fp8_e4m3, not {weight}"
    if dynamic and (weight == "int4" or formats.input != weight):
        return None, f"torchao multiplies int8 by int8 and fp8_e4m3 by fp8_e4m3, not {formats.input} by {weight}"
    if not isinstance(recipe, CurrentRecipe | RowwiseRecipe) or recipe.power_of_two or getattr(recipe, "epsilon", 0):
        return None, f"its scales are those of 'current' or 'rowwise' with power_of_two=False, which {recipe} isn't"
    return Kind(weight, dynamic, isinstance(recipe, RowwiseRecipe), recipe.fast_output), ""


def has_training_kernel(formats: Formats, recipe: Recipe | None, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether fp8 by fp8 runs in torchao's training function in inference too: no weight can be held for it."""
    if formats.input != formats.weight or not formats.weight.startswith("fp8_"):
        return False
    kind, _ = kind_of(formats, recipe)
    return kind is None or device.type == "cpu" or (kind.rowwise and dtype != torch.bfloat16)


def held_as(gemm: Gemm) -> str:
    """How the weight is held, in words."""
    kind, reason = kind_of(gemm.formats, gemm.recipe)
    if kind is None:
        return reason
    if kind.format == "int4":
        return f"torchao's int4 weight, one scale for {group_of(gemm.weight_shape[1])} numbers"
    scales = f"one scale a {'row' if kind.rowwise else 'tensor'}"
    return f"torchao's {kind.format} weight, {scales}{', and activations like it' if kind.dynamic else ''}"


def refuse_inference(gemm: Gemm) -> str:
    """Why torchao can't hold this weight, or would answer wrongly; empty if it can."""
    kind, reason = kind_of(gemm.formats, gemm.recipe)
    if kind is None:
        return reason
    if gemm.device.type not in ("cpu", "cuda", "meta"):
        return f"has no kernels for {gemm.device.type}"
    if not gemm.rows:
        return "the input is empty"
    refuse = {"int8": _refuse_int8, "int4": _refuse_int4, "fp8_e4m3": _refuse_fp8}
    return refuse[kind.format](gemm, kind)


def _refuse_int8(gemm: Gemm, kind: Kind) -> str:
    if gemm.dtype == torch.float16 and not kind.dynamic:
        return "int8 numbers times fp16 activations overflow before they are scaled; use bf16"
    if gemm.device.type == "cpu":
        no_vnni = kind.dynamic and importlib.import_module("torchao.utils").should_reduce_range(gemm.device)
        return "int8 products of a CPU without VNNI saturate" if no_vnni else ""
    for name, size in zip(("out_features", "in_features"), gemm.weight_shape, strict=True):
        if kind.dynamic and size % 8:
            return f"{name}={size} isn't a multiple of 8, without which torchao multiplies on the CPU"
    return ""


def _refuse_int4(gemm: Gemm, kind: Kind) -> str:
    out_features, in_features = gemm.weight_shape
    if group_of(in_features) is None:
        return f"in_features={in_features} isn't a multiple of {GROUPS[-1]}, the smallest group of an int4 scale"
    if gemm.dtype != torch.bfloat16:
        return f"its int4 kernels take bf16 activations, not {str(gemm.dtype).removeprefix('torch.')}"
    if gemm.device.type == "cpu":
        if out_features % 16:
            return f"out_features={out_features} isn't a multiple of 16"
        return "" if cpu_int4() else "this version of torchao has no int4 kernel for CPUs"
    if gemm.device.type == "cuda" and torch.cuda.get_device_capability(gemm.device) < (8, 0):
        return "its int4 kernels need compute capability 8.0 or newer"
    return "" if out_features % 8 == 0 else f"out_features={out_features} isn't a multiple of 8"


def _refuse_fp8(gemm: Gemm, kind: Kind) -> str:
    return refuse_shape(gemm) or refuse_device(gemm) if kind.dynamic else ""


def multiply(x: Tensor, weight: Tensor, tensor: Tensor, kind: Kind) -> Tensor:
    """``x @ weight.T``: ``[M, K]`` gives ``[M, N]``, fp32 for int8 by int8, else in the dtype of ``x``.

    Args:
        x: the activations.
        weight: whose gradient is asked for, if any is.
        tensor: torchao's of the weight.
        kind: how it is held.
    """
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _WithoutGradient.apply(x, weight, tensor, kind)
    return _product(x, tensor, kind)


def _product(x: Tensor, tensor: Tensor, kind: Kind) -> Tensor:
    if kind.format == "fp8_e4m3":
        return F.linear(x, tensor)
    if not kind.dynamic:
        return F.linear(x, tensor) * (1 / LIFT)
    rows = x.to(torch.float32) * LIFT
    if x.is_cuda:  # its kernel takes more than 16 rows, in eights
        rows = F.pad(rows, (0, 0, 0, max(-len(x) % 8, 24 - len(x))))
    return F.linear(rows, tensor)[: len(x)] * (1 / LIFT**2)


class _WithoutGradient(torch.autograd.Function):
    """A product for inference, whose backward says so: torchao's gives no gradient, in silence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tensor: Tensor, kind: Kind) -> Tensor:
        return _product(x, tensor, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise BackendError(NO_GRADIENT)
