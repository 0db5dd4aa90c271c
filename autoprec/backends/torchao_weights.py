"""torchao's 8- and 4-bit tensors of weights, held beside the weights and made anew when those are written."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from autoprec.errors import BackendError

#: Numbers of a row that share an int4 scale, the fewest scales first.
GROUPS = (128, 64, 32)
#: What int8 and int4 operands are multiplied by, so that a scale's floor is 10 ** -13 or less.
LIFT = 2.0**20


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
        """The tensor of a weight as it is now; only a Parameter's is kept.

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
    """The tensor of a weight ``[N, K]``; the weight stays as it is.

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
            source = source * LIFT
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
            return cpu_int4()(group_size=group, set_inductor_config=False)
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
def cpu_int4() -> Any:
    """The configuration of torchao's int4 kernel for CPUs, None where there is none: it is a prototype's."""
    try:
        return importlib.import_module("torchao.prototype.quantization.int4").PrototypeInt4WeightOnlyConfig
    except (ImportError, AttributeError):
        return None


def _parts(tensor: Any) -> list[Tensor]:
    """The plain tensors that a tensor subclass is made of."""
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]
