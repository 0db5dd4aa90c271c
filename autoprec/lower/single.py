"""Products on fp32 operands: as fp32, whatever the process allows, or as TF32.

TF32 multiplies operands rounded to 10 bits of mantissa, with fp32's range, and accumulates in fp32.  A GPU that has it
does so by torch's own switch; any other device multiplies operands rounded that way, which costs time and shows the
loss.  Rounding is to nearest, ties to even; what a kernel does with the bits it drops is not documented.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autoprec.formats import get_format
from autoprec.formats.elements import round_element
from autoprec.lower import casts
from autoprec.lower.switches import hold, is_ieee_everywhere, is_set

#: Ops that are one product, so that TF32 is the rounding of their operands and of their gradient.
PRODUCTS = frozenset(
    {
        "linear", "matmul", "mm", "bmm", "mv", "addmm", "addmv", "baddbmm", "inner", "tensordot", "einsum",
        "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    }
)  # fmt: skip
#: Products that also add their first argument.
_ADDING: dict[str, Callable[..., Tensor]] = {"addmm": torch.mm, "addmv": torch.mv, "baddbmm": torch.bmm}


@dataclass(frozen=True, slots=True)
class SingleGemm:
    """One fp32 product, its gradients included.

    Args:
        op: canonical name.
        precision: ``ieee`` or ``tf32``.
        cast: brings the operands to fp32.
        eager_hold: :func:`autoprec.lower.switches.hold` for compiled code, where it breaks the graph.
    """

    op: str
    precision: str
    cast: Callable[[casts.Func, casts.Args, casts.Kwargs], Any]
    eager_hold: Callable[..., Any] = field(default_factory=lambda: _disabled_hold())

    def __call__(self, func: casts.Func, args: casts.Args, kwargs: casts.Kwargs) -> Any:
        if self.precision == "ieee" and is_ieee_everywhere(self.op):
            return self.cast(func, args, kwargs)
        return self.cast(functools.partial(self._run, func), args, kwargs)

    def _run(self, func: casts.Func, *args: Any, **kwargs: Any) -> Any:
        operand = next(casts.floats((*args, *kwargs.values())), None)
        if operand is None or operand.dtype != torch.float32 or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        if self.precision == "ieee" or not is_one_product(self.op, args):
            return self._in("ieee", func, *args, **kwargs)
        if has_tf32(operand.device):
            return self._in("tf32", func, *args, **kwargs)
        if self.op in _ADDING:
            return _emulate_adding(functools.partial(self._in, "ieee", _ADDING[self.op]), *args, **kwargs)
        product = functools.partial(self._in, "ieee", func)
        if self.op == "linear" or self.op.startswith("conv"):
            return _emulate_biased(product, *args, **kwargs)
        return _emulate(product, *args, **kwargs)

    def _in(self, precision: str, func: casts.Func, *args: Any, **kwargs: Any) -> Any:
        kind = next(casts.floats((*args, *kwargs.values()))).device.type
        if is_set(kind, self.op, precision):
            return func(*args, **kwargs)
        run = self.eager_hold if torch.compiler.is_compiling() else hold
        return run(kind, self.op, precision, func, args, kwargs)


def is_one_product(op: str, args: Any) -> bool:
    """Whether a call multiplies two tensors, once: a longer ``einsum`` has products between products."""
    return op in PRODUCTS and (op != "einsum" or len(list(casts.floats(args))) == 2)


def has_tf32(device: torch.device) -> bool:
    """Whether the device multiplies in TF32: NVIDIA's, from Ampere on."""
    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def _disabled_hold() -> Callable[..., Any]:
    return torch.compiler.disable(hold, reason="a switch of the process is held around one product")


def _emulate(product: casts.Func, *args: Any, **kwargs: Any) -> Tensor:
    return _RoundGradient.apply(product(*_rounded(args), **{k: _rounded(v) for k, v in kwargs.items()}))


def _emulate_biased(
    product: casts.Func, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """A layer's product; its bias is added in fp32, and so is the bias's gradient."""
    output = _RoundGradient.apply(product(_round(input), _round(weight), None, *args, **kwargs))
    return output if bias is None else output + bias.view(-1, *[1] * (weight.dim() - 2))


def _emulate_adding(
    product: casts.Func, input: Tensor, first: Tensor, second: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    output = alpha * _RoundGradient.apply(product(_round(first), _round(second)))
    return output if beta == 0 else output + beta * input


def _rounded(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return _round(value) if isinstance(value, Tensor) and value.dtype == torch.float32 else value


def _round(x: Tensor) -> Tensor:
    return _RoundOperand.apply(x)


class _RoundOperand(torch.autograd.Function):
    """Rounds to TF32; the gradient of the operand is the product's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.where(x.isfinite(), round_element(x, get_format("tf32")), x)  # a kernel hides no infinity

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad


class _RoundGradient(torch.autograd.Function):
    """The output as it is; its gradient, an operand of both gradients' products, rounded to TF32."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _round(grad)
