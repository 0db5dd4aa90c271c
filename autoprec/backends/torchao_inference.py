"""torchao's 8- and 4-bit tensors for inference: held beside the model's own weight, and made anew when that is written.

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

import functools
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakIdKeyDictionary

from autoprec.backends.base import Gemm, refuse_device, refuse_shape
from autoprec.errors import BackendError
from autoprec.plan import Formats
from autoprec.recipes import CurrentRecipe, Recipe, RowwiseRecipe

_WIDE = ("fp32", "bf16", "fp16")
#: Numbers of a row that share an int4 scale, the fewest scales first.
GROUPS = (128, 64, 32)
#: What int8 and int4 operands are multiplied by, so that a scale's floor is 10 ** -13 or less.
_LIFT = 2.0**20


@dataclass(frozen=True, slots=True)
class Kind:
    """How a weight is held.

    Args:
        format: of the weight: ``int8``, ``int4`` or ``fp8_e4m3``.
        dynamic: activations are quantised to the same format, at each call.
        rowwise: one scale a row and a token, else one a tensor; int4 has one a group.
        fast: the product may accumulate in less than fp32.
    """

    format: str
    dynamic: bool
    rowwise: bool
    fast: bool


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
        return "" if _cpu_int4() else "this version of torchao has no int4 kernel for CPUs"
    if gemm.device.type == "cuda" and torch.cuda.get_device_capability(gemm.device) < (8, 0):
        return "its int4 kernels need compute capability 8.0 or newer"
    return "" if out_features % 8 == 0 else f"out_features={out_features} isn't a multiple of 8"


def _refuse_fp8(gemm: Gemm, kind: Kind) -> str:
    return refuse_shape(gemm) or refuse_device(gemm) if kind.dynamic else ""


def group_of(in_features: int) -> int | None:
    """Numbers that share an int4 scale: the most that divide a row."""
    return next((group for group in GROUPS if in_features % group == 0), None)


class _Held(NamedTuple):
    tensor: Tensor
    version: int
    address: int


class HeldWeights:
    """torchao's tensors, by the weight they were made from and the way they are held; they go with their weight."""

    def __init__(self) -> None:
        self._of_weights: Any = WeakIdKeyDictionary()

    def get(self, weight: Tensor, kind: Kind, dtype: torch.dtype) -> Tensor:
        """Torchao's tensor of a weight as it is now; only a Parameter's is kept.

        A write in place through ``weight.data`` leaves no mark, and the kept one stays: write under
        ``torch.no_grad()``.
        """
        if not isinstance(weight, nn.Parameter) or weight.is_inference():
            return quantize(weight, kind, dtype)
        held = self._of_weights.setdefault(weight, {})
        key, entry = (kind, dtype), held.get((kind, dtype))
        if entry is None or (entry.version, entry.address) != (weight._version, weight.data_ptr()):
            held[key] = entry = _Held(quantize(weight, kind, dtype), weight._version, weight.data_ptr())
        return entry.tensor

    def forget(self, weights: Iterable[Tensor]) -> None:
        """Drops what is held for these weights."""
        for weight in weights:
            self._of_weights.pop(weight, None)

    def clear(self) -> None:
        """Drops all."""
        self._of_weights.clear()

    def bytes(self, weights: Iterable[Tensor]) -> int:
        """Bytes that are held for these weights."""
        held = [entry.tensor for weight in weights for entry in self._of_weights.get(weight, {}).values()]
        return sum(part.nbytes for tensor in held for part in _parts(tensor))


def quantize(weight: Tensor, kind: Kind, dtype: torch.dtype) -> Tensor:
    """Torchao's tensor of a weight ``[N, K]``; the weight stays as it is.

    Args:
        weight: any dtype; it is rounded from its own, not from that of the activations, where torchao can.
        kind: how.
        dtype: of the activations.

    Raises:
        BackendError: torchao left the weight as it was.
    """
    with torch.no_grad(), torch.device(weight.device):
        source = weight.detach().to(torch.float32 if kind.format == "int8" else dtype)
        empty = None
        if kind.format == "fp8_e4m3":
            empty = (source == 0).all(1) if kind.rowwise else (source == 0).all().expand(len(source))
            source = torch.where(empty[:, None], torch.ones_like(source), source)
        else:
            source = source * _LIFT
        tensor = _quantized(source, kind)
        if empty is not None:
            tensor.qdata.view(torch.uint8)[empty] = 0
    return tensor


def _quantized(source: Tensor, kind: Kind) -> Any:
    quantization = importlib.import_module("torchao.quantization")
    with torch.device("meta"):
        holder = nn.Linear(source.shape[1], source.shape[0], bias=False)
    holder.weight = nn.Parameter(source, requires_grad=False)
    quantization.quantize_(holder, _config(kind, source))
    if type(holder.weight) is nn.Parameter:
        raise BackendError(
            f"torchao left a weight {tuple(source.shape)} as it was that was to be {kind.format}; ask supports() first"
        )
    return holder.weight.detach()


def _config(kind: Kind, weight: Tensor) -> Any:
    quantization = importlib.import_module("torchao.quantization")
    granularity = quantization.PerRow() if kind.rowwise else quantization.PerTensor()
    if kind.format == "int4":
        group = group_of(weight.shape[1])
        if weight.device.type == "cpu":
            return _cpu_int4()(group_size=group, set_inductor_config=False)
        return quantization.Int4WeightOnlyConfig(
            group_size=group, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
        )
    common = {"granularity": granularity, "set_inductor_config": False}
    if kind.format == "int8":
        name = "Int8DynamicActivationInt8WeightConfig" if kind.dynamic else "Int8WeightOnlyConfig"
        return getattr(quantization, name)(**common)
    if not kind.dynamic:
        return quantization.Float8WeightOnlyConfig(**common)
    # cuBLASLt of CUDA 12.9 fails at some per-row shapes with fast accumulation, which torchao only warns of.
    fast = kind.fast and not (kind.rowwise and str(torch.version.cuda).startswith("12.9"))
    return quantization.Float8DynamicActivationFloat8WeightConfig(
        **common,
        activation_value_lb=1e-12,  # without it a token of zeros is NaN (pytorch/ao#3356)
        mm_config=quantization.Float8MMConfig(use_fast_accum=fast),
    )


@functools.cache
def _cpu_int4() -> Any:
    """The configuration of torchao's int4 kernel for CPUs, None where there is none: it is a prototype's."""
    try:
        return importlib.import_module("torchao.prototype.quantization.int4").PrototypeInt4WeightOnlyConfig
    except (ImportError, AttributeError):
        return None


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
        return F.linear(x, tensor) * (1 / _LIFT)
    rows = x.to(torch.float32) * _LIFT
    if x.is_cuda:  # its kernel takes more than 16 rows, in eights
        rows = F.pad(rows, (0, 0, 0, max(-len(x) % 8, 24 - len(x))))
    return F.linear(rows, tensor)[: len(x)] * (1 / _LIFT**2)


class _WithoutGradient(torch.autograd.Function):
    """A product for inference, whose backward says so: torchao's gives no gradient, in silence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tensor: Tensor, kind: Kind) -> Tensor:
        return _product(x, tensor, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise BackendError(
            "the plan is for inference, and a weight in 8 or 4 bits has no gradient; convert with mode='training'"
        )


def _parts(tensor: Any) -> list[Tensor]:
    """The plain tensors that a tensor subclass is made of."""
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]
