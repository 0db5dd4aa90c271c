"""What every backend is, and what it is asked.

Called from elsewhere::

    choose(op, formats, x, weight, names, mode, *, recipe=None) -> (Backend | None, reason)
    backend.linear(x, weight, bias, spec) -> Tensor              # differentiable, x [..., K], weight [N, K], bias [N]
    LinearSpec(formats=..., recipe=recipe_for(formats, plan.recipe), output_dtype=None)
    get_backend(name) -> Backend;  list_backends() -> names;  Backend.available() / .supports(Gemm(...)) -> (ok, reason)

A backend never replaces a module: a site's forward calls ``linear`` with the model's own Parameters.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from autoprec.plan import Formats, Mode
from autoprec.recipes import Recipe

Answer = tuple[bool, str]
#: FP8 tensor cores read both operands in pieces of 16 bytes.
ALIGNMENT = 16
_FP8_CAPABILITY = (8, 9)
#: Asked once: Dynamo can't trace the question before torch 2.13.
_AUTOCAST_KINDS = tuple(
    kind for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia") if torch.amp.is_autocast_available(kind)
)
#: MI300's FP8 is the fnuz variant alone, MI355's the one everybody else has.
_ROCM_FORMATS = {"gfx942": ("fp8_e4m3fnuz",), "gfx950": ("fp8_e4m3", "fp8_e5m2")}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """How a linear layer runs.

    Args:
        formats: format of each role.
        recipe: how scaled formats get their scales; None casts without a scale.
        output_dtype: of the result; None gives the input's.  ``grad_input`` and ``grad_weight`` have the dtypes of the
            tensors they are gradients of.
        mode: ``inference`` lets a backend hold the weight as its kernel wants it, and has no gradients to give.
    """

    formats: Formats
    recipe: Recipe | None = None
    output_dtype: torch.dtype | None = None
    mode: Mode = "training"


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A norm over the last dimension, with the tensors of one call.

    Args:
        kind: ``LayerNorm`` or ``RMSNorm``.
        eps: added to the variance, or to the mean square.
        weight: ``[K]``.
        bias: ``[K]``, None without.
    """

    kind: Literal["LayerNorm", "RMSNorm"]
    eps: float
    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstHalf:
    """What comes before the second product of a two-layer perceptron.

    Args:
        norm: of the input.
        weight: ``[H, K]``, of the first product.
        bias: ``[H]``, None without.
        activation: between the two products; ``gelu_tanh`` is the tanh approximation.
    """

    norm: Norm
    weight: Tensor
    bias: Tensor | None
    activation: Literal["gelu_tanh", "relu", "silu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """One site's matrix product, as a backend is asked about it.

    Args:
        op: canonical op name.
        formats: format of each role.
        recipe: how scaled formats get their scales.
        input_shape: ``[..., K]``.
        weight_shape: ``[N, K]``.
        dtype: of the activation.
        device: where it runs.
        mode: ``training`` adds the two gradient GEMMs.
    """

    op: str
    formats: Formats
    recipe: Recipe | None
    input_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    mode: Mode

    @property
    def rows(self) -> int:
        """Tokens: all dimensions of the input but the last."""
        return math.prod(self.input_shape[:-1])

    @property
    def used_formats(self) -> tuple[str, ...]:
        """Formats of the roles that take part: ``grad_output`` only in training."""
        forward = (self.formats.input, self.formats.weight)
        return (*forward, self.formats.grad_output) if self.mode == "training" else forward


class Backend:
    """Base of all backends; every answer carries its reason.

    ``speed`` orders the automatic choice, the fastest first.
    """

    name: ClassVar[str] = ""
    speed: ClassVar[int] = 0

    def available(self) -> Answer:
        """Whether it can run on this machine at all."""
        return True, "part of torch"

    def supports(self, gemm: Gemm) -> Answer:
        """Whether it can run this product, forward and, in training, backward."""
        return False, f"backend {self.name!r} doesn't say what it supports"

    def wanted(self, gemm: Gemm) -> Answer:
        """Whether the automatic choice should take it; a plan that names it gets it all the same."""
        return True, ""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """``x @ weight.T + bias``.

        Args:
            x: ``[..., K]``, fp32 or 16 bit.
            weight: ``[N, K]``.
            bias: ``[N]`` or None; added in high precision.
            spec: formats, recipe and the result's dtype.

        Returns:
            ``[..., N]``.
        """
        raise NotImplementedError

    def fuses(self, spec: LinearSpec) -> Answer:
        """Whether it can run a norm and the product that alone reads it in one, forward and backward."""
        return False, f"{self.name} has no kernel for a norm and a product in one"

    def norm_linear(self, x: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """:meth:`linear` of the norm of ``x``; for backends that fuse."""
        raise NotImplementedError

    def mlp(self, x: Tensor, first: FirstHalf, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """:meth:`linear` of the activation of :meth:`norm_linear`, for 16-bit ``x``; for backends that fuse."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forgets what past models left behind, such as scales learned from their numbers; for use between trials."""

    def forget(self, weights: Iterable[Tensor]) -> None:
        """Drops what is kept for these weights: what was learned from past steps, and what is held for inference."""

    def held_bytes(self, weights: Iterable[Tensor]) -> int:
        """Bytes that are held of these weights for inference, beside the weights themselves."""
        return 0

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # what it keeps belongs to the weights of this process


def first_refusal(gemm: Gemm, checks: tuple[Callable[[Gemm], str], ...], otherwise: str) -> Answer:
    """No with the first reason that isn't empty, or yes with ``otherwise``; a check may rely on those before it."""
    for check in checks:
        if reason := check(gemm):
            return False, reason
    return True, otherwise


def refuse_op(gemm: Gemm) -> str:
    """Why this isn't a linear layer that a scaled GEMM computes; empty if it is."""
    if gemm.op != "linear":
        return f"op {gemm.op!r} has no scaled kernel; only 'linear' has"
    if len(gemm.weight_shape) != 2 or not gemm.input_shape:
        return f"needs an input [..., K] and a weight [N, K], got {gemm.input_shape} and {gemm.weight_shape}"
    if gemm.input_shape[-1] != gemm.weight_shape[1]:
        return f"input {gemm.input_shape} and weight {gemm.weight_shape} don't fit"
    if gemm.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"takes fp32, fp16 or bf16 activations, not {str(gemm.dtype).removeprefix('torch.')}"
    return ""


def refuse_shape(gemm: Gemm) -> str:
    """Why FP8 hardware can't multiply these shapes; tokens are free, since a kernel can pad them with zeros."""
    for name, size in zip(("out_features", "in_features"), gemm.weight_shape, strict=True):
        if size % ALIGNMENT:
            return f"{name}={size} isn't a multiple of {ALIGNMENT}"
    return "" if gemm.rows else "the input is empty"


def refuse_device(gemm: Gemm) -> str:
    """Why the device has no FP8 product; a CPU's is emulated by torch, and a meta tensor has no device yet."""
    if gemm.device.type in ("cpu", "meta"):
        return ""
    if gemm.device.type != "cuda":
        return f"needs a CUDA or ROCm device, not {gemm.device.type}"
    properties = torch.cuda.get_device_properties(gemm.device)
    architecture = properties.gcnArchName.partition(":")[0] if torch.version.hip else ""
    return fp8_refusal((properties.major, properties.minor), architecture, gemm.used_formats)


def fp8_refusal(capability: tuple[int, int], architecture: str, formats: tuple[str, ...]) -> str:
    """Why a GPU can't multiply these FP8 formats.

    Args:
        capability: CUDA's compute capability.
        architecture: AMD's, e.g. ``gfx942``; empty on CUDA.
        formats: names; those that aren't FP8 are passed over.
    """
    if architecture:
        allowed = _ROCM_FORMATS.get(architecture)
        if allowed is None:
            return f"needs an MI300 or newer, not {architecture}"
    elif capability < _FP8_CAPABILITY:
        return f"needs compute capability 8.9 or newer, not {capability[0]}.{capability[1]}"
    else:
        allowed = ("fp8_e4m3", "fp8_e5m2")
    wrong = [name for name in formats if name.startswith("fp8_") and name not in allowed]
    return f"{architecture or 'CUDA'} multiplies {' and '.join(allowed)}, not {wrong[0]}" if wrong else ""


def no_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """For a kernel's body: an outer autocast would round its fp32 product to 16 bit before it is scaled."""
    kind = x.device.type
    if kind in _AUTOCAST_KINDS:
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()
