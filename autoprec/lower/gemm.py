"""What a GEMM does under its formats: operands cast to 32 or 16 bit, 8 bits and fewer by a backend's kernel."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from autoprec.backends.base import FirstHalf, LinearSpec
from autoprec.backends.registry import get_backend
from autoprec.frames.mode import Action
from autoprec.lower import casts
from autoprec.lower.deferred import Deferred, First
from autoprec.lower.single import PRODUCTS, SingleGemm
from autoprec.lower.weights import cast_weight
from autoprec.plan import FIXED, FOLLOW, Formats, Plan
from autoprec.recipes import recipe_for

#: Formats that need no kernel of a backend.
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class GemmSettings(NamedTuple):
    """What a GEMM needs to know beside its formats.

    Args:
        mode: ``training`` or ``inference``; inference keeps cast weights from call to call.
        low: the plan's 16-bit format: of activations between quantised layers, and of GEMMs no backend takes.
        recipe: settings of the fp8 and block formats, as JSON.
    """

    mode: str = "training"
    low: str = "bf16"
    recipe: str = "{}"


@dataclass(frozen=True, slots=True)
class CastGemm:
    """All operands in one 16-bit dtype; a call with a double, complex or sparse operand stays as it is.

    Sparse kernels have no 16-bit backward.

    Args:
        dtype: of the operands.
        keep_weights: parameters are cast once while no gradient is recorded, not at every call.
    """

    dtype: torch.dtype
    keep_weights: bool = False

    def __call__(self, func: casts.Func, args: casts.Args, kwargs: casts.Kwargs) -> Any:
        dtype = self.dtype
        operands = []
        # One loop, written out: this is the path of every product of every forward.
        for a in args:
            if isinstance(a, torch.Tensor):
                own = a.dtype
                if own != dtype:
                    if own in casts.CASTABLE and a.layout == torch.strided:
                        a = cast_weight(a, dtype) if self.keep_weights else a.to(dtype)
                    elif a.is_floating_point() or a.is_complex():
                        return casts.CastToWidest()(func, args, kwargs)
            elif isinstance(a, (list, tuple)):
                a = self._cast(a)
            operands.append(a)
        if not kwargs:
            return func(*operands)
        if kwargs.get("out") is not None:
            return func(*args, **kwargs)
        return func(*operands, **{name: self._cast(value) for name, value in kwargs.items()})

    def _cast(self, value: Any) -> Any:
        if self.keep_weights and isinstance(value, torch.Tensor):
            return cast_weight(value, self.dtype)
        if isinstance(value, list):
            return [self._cast(item) for item in value]
        return casts.cast(value, self.dtype)


class QuantizedLinear:
    """A linear layer whose operands a backend rounds to 8 bits or fewer, between 16-bit activations."""

    def __init__(self, formats: Formats, backend: str, settings: GemmSettings) -> None:
        self.kernel = get_backend(backend)
        self.dtype = activation_dtype(formats, settings)
        self.spec = linear_spec(formats, settings)
        self.fuses = self.kernel.fuses(self.spec)[0]

    def __call__(self, func: casts.Func, args: casts.Args, kwargs: casts.Kwargs) -> Any:
        return self._run(*args, **kwargs)

    def _run(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(input, Deferred) and self.fuses:
            return self._fused(input, weight, bias)
        if input.dtype not in casts.CASTABLE:
            return torch.nn.functional.linear(input, weight, bias)
        return self.kernel.linear(casts.cast(input, self.dtype), weight, bias, self.spec)

    def _fused(self, input: Deferred, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """With the norm before it, and with another product and an activation between, where those were put off."""
        pending = input.pending
        pending.check_unwritten()
        source, norm, first = pending.source, pending.norm, pending.first
        if first is not None:
            if first.activation is None or first.spec != self.spec:
                return self._run(pending.compute(), weight, bias)
            half = FirstHalf(norm=norm, weight=first.weight, bias=first.bias, activation=first.activation)  # type: ignore[arg-type]
            return self.kernel.mlp(source, half, weight, bias, self.spec)
        fused = functools.partial(self.kernel.norm_linear, source, norm, weight, bias, self.spec)
        if not pending.mlp:
            return fused()
        return Deferred(pending.after_product(First(weight, bias, self.spec), fused), self.dtype)


def settings_of(plan: Plan) -> GemmSettings:
    """What a plan's GEMMs need to know."""
    low = next((r.formats.input for r in reversed(plan.rules) if r.formats.input in ("bf16", "fp16")), "fp32")
    return GemmSettings(mode=plan.mode, low=low, recipe=json.dumps(plan.recipe, sort_keys=True))


def linear_spec(formats: Formats, settings: GemmSettings) -> LinearSpec:
    """What a backend is told of a linear layer in these formats."""
    recipe = recipe_for((formats.input, formats.weight, formats.grad_output), json.loads(settings.recipe))
    mode = "inference" if settings.mode == "inference" else "training"
    return LinearSpec(formats=formats, recipe=recipe, output_dtype=activation_dtype(formats, settings), mode=mode)


def activation_dtype(formats: Formats, settings: GemmSettings) -> torch.dtype:
    """What a backend gets and gives: the input's format, or the plan's 16-bit one where the input is narrower."""
    return DTYPES[formats.input if formats.input in DTYPES else settings.low]


def needs_backend(formats: Formats, mode: str) -> bool:
    """Whether a GEMM in these formats needs a backend's kernel: a role that takes part is below 16 bit."""
    if formats.input in (FOLLOW, FIXED):
        return False
    gradient = () if mode == "inference" else (formats.grad_output,)
    return any(name not in DTYPES for name in (formats.input, formats.weight, *gradient))


def gemm_action(op: str, formats: Formats, backend: tuple[str, ...], settings: GemmSettings) -> Action:
    """The action of a GEMM op; below 16 bit it is the plan's 16-bit format where no backend takes the site."""
    if needs_backend(formats, settings.mode) and backend and op == "linear":
        return QuantizedLinear(formats, backend[0], settings)
    dtype = activation_dtype(formats, settings)
    cast = CastGemm(dtype, keep_weights=settings.mode == "inference")
    if dtype != torch.float32:
        return cast
    return SingleGemm(op, "tf32" if formats.input == "tf32" and op in PRODUCTS else "ieee", cast)
