"""A norm whose result isn't computed until somebody reads it: the product that alone does may run both in one.

A fused product takes the norm's input and parameters.  Of a two-layer perceptron the first product and the activation
are put off too.  Any other read computes what was put off as if it had not been; where that would no longer give the
same numbers, or lose a gradient, it is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]

from autoprec.backends.base import LinearSpec, Norm
from autoprec.errors import ConversionError
from autoprec.frames.mode import Action
from autoprec.lower import casts

#: Norms that a product can be fused with: op → what Transformer Engine calls it.
KINDS = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
#: Questions that are answered without the numbers.
_SHAPE = frozenset({"size", "dim", "numel", "is_floating_point", "is_complex", "__len__", "get_device"})
_SHAPE_ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "device", "is_cuda", "is_meta", "layout", "is_nested"})


class Pending:
    """What a result is to be computed from.

    Args:
        source: the norm's input.
        norm: its kind and parameters.
        compute: gives the result, as the call that was put off does.
        mlp: the product that reads the norm is the first of two that run in one.
        first: that product and, if not None in it, the activation after it.
    """

    def __init__(
        self, source: Tensor, norm: Norm, compute: Callable[[], Tensor], *, mlp: bool, first: First | None = None
    ) -> None:
        self.source = source
        self.norm = norm
        self.mlp = mlp
        self.first = first
        self._compute = functools.cache(compute)
        self._versions = self._versions_now()
        self._records_gradients = torch.is_grad_enabled()

    def check_unwritten(self) -> None:
        """Raises if what the result is computed from has been written since."""
        if self._versions != self._versions_now():
            raise ConversionError(
                "a norm's input or parameters were written before its result was read, while the product after it was "
                "to compute it; convert without example_inputs, so that nothing is fused"
            )

    def compute(self) -> Tensor:
        """The result, for somebody else than the product."""
        self.check_unwritten()
        lost = self._records_gradients and not torch.is_grad_enabled()
        if lost and any(t.requires_grad for t in self._tensors):
            raise ConversionError(
                "a norm's result was read where no gradient is recorded, while the product after it was to compute it; "
                "convert without example_inputs, so that nothing is fused"
            )
        return self._compute()

    def after_product(self, first: First, compute: Callable[[], Tensor]) -> Pending:
        """The same with the first product put off too."""
        self.check_unwritten()
        return Pending(self.source, self.norm, compute, mlp=True, first=first)

    @property
    def _tensors(self) -> list[Tensor]:
        first = () if self.first is None else (self.first.weight, self.first.bias)
        return [t for t in (self.source, self.norm.weight, self.norm.bias, *first) if t is not None]

    def _versions_now(self) -> tuple[int, ...]:
        return tuple(t._version for t in self._tensors if not t.is_inference())


class First(NamedTuple):
    """A product that is put off, and the activation after it once that was called too."""

    weight: Tensor
    bias: Tensor | None
    spec: LinearSpec
    activation: str | None = None


class Deferred(Tensor):
    """The result of a norm, or of what was put off after it; ``pending`` says from what it will be computed.

    Args:
        pending: see there.
        dtype: of the result.
    """

    pending: Pending

    @staticmethod
    def __new__(cls, pending: Pending, dtype: torch.dtype) -> Deferred:
        source, first = pending.source, pending.first
        shape = source.shape if first is None else (*source.shape[:-1], first.weight.shape[0])
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=source.device)  # type: ignore[attr-defined]
        made.pending = pending
        return made

    def __init__(self, *args: Any) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
        if name in _SHAPE or attribute in _SHAPE_ATTRIBUTES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        compute = functools.partial(_call_computed, func, args, kwargs or {})
        first = args[0].pending.first if args and isinstance(args[0], Deferred) else None
        activation = None if first is None or first.activation else activation_of(name, args[1:], kwargs or {})
        if first is None or activation is None:
            return compute()
        pending = args[0].pending.after_product(first._replace(activation=activation), compute)
        return Deferred(pending, first.spec.output_dtype or args[0].dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ConversionError(
            f"{func} read a norm's result from below torch's functions, while the product after it was to compute it; "
            "convert without example_inputs, so that nothing is fused"
        )


class Defer:
    """The action of a norm that one product alone reads.

    Args:
        op: ``layer_norm`` or ``rms_norm``.
        action: what the norm does otherwise.
        dtype: of its result.
        mlp: that product is the first of two that run in one.
    """

    def __init__(self, op: str, action: Action, dtype: torch.dtype, *, mlp: bool) -> None:
        self._op = op
        self._action = action
        self._dtype = dtype
        self._mlp = mlp

    def __call__(self, func: casts.Func, args: casts.Args, kwargs: casts.Kwargs) -> Any:
        compute = functools.partial(self._action, func, args, kwargs)
        norm = None if torch.compiler.is_compiling() else self._norm(*args, **kwargs)
        return compute() if norm is None else Deferred(self._pending(args[0], norm, compute), self._dtype)

    def _pending(self, source: Tensor, norm: Norm, compute: Callable[[], Tensor]) -> Pending:
        # The perceptron's first bias would be rounded beside fp32 activations.
        return Pending(source, norm, compute, mlp=self._mlp and source.dtype != torch.float32)

    def _norm(
        self, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, *rest: Any, **named: Any
    ) -> Norm | None:
        """The norm, None where the product after it can't take it over in this call."""
        names = ("bias", "eps") if self._op == "layer_norm" else ("eps",)
        named |= zip(names, rest, strict=False)
        bias, eps = named.get("bias"), named.get("eps")
        fits = input.is_cuda and bool(input.numel()) and input.dtype in casts.CASTABLE and not input.is_inference()
        if weight is None or not fits or len(normalized_shape) != 1 or _functorch.maybe_current_level() is not None:
            return None
        if eps is None:
            eps = torch.finfo(input.dtype).eps if self._op == "rms_norm" else 1e-5
        return Norm(kind=KINDS[self._op], eps=eps, weight=weight, bias=bias)  # type: ignore[arg-type]


def activation_of(name: str, args: Any, kwargs: Any) -> str | None:
    """The activation that a call on a first product is, as a backend names it; None for another call.

    Args:
        name: of the function.
        args: its positional arguments after the tensor.
        kwargs: its named ones.
    """
    if name == "gelu":
        return "gelu_tanh" if kwargs == {"approximate": "tanh"} and not args else None
    if name not in ("relu", "silu") or any(args) or any(kwargs.values()):  # in place
        return None
    return name


def _call_computed(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return func(*_computed(args), **_computed(kwargs))


def _computed(tree: Any) -> Any:
    if isinstance(tree, Deferred):
        return tree.pending.compute()
    if isinstance(tree, dict):
        return {key: _computed(value) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        items = [_computed(item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return tree
