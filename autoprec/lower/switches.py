"""torch's own choice of TF32 (on some CPUs bf16) for fp32 products, held for one product and its gradients.

The choice is a switch of the process.  It is set for as long as one product is launched, in its forward and again in
its backward, which runs later and elsewhere, and then put back, also after an error.  Where several threads run plans
their products take turns; but a product outside of any plan, launched by another thread in those microseconds, sees the
switch too.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C import _autograd, _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from autoprec.errors import BackendError

#: Values of a switch that both mean fp32 as it is.
_IEEE = ("ieee", "none")
_ONE_AT_A_TIME = threading.RLock()
#: Threads that ever held a switch.
_HOLDERS: set[int] = set()


@torch.compiler.assume_constant_result
def is_set(device_type: str, op: str, precision: str) -> bool:
    """Whether a product on the device runs in that precision as the process is set; never while others may set it.

    Args:
        device_type: of the operands.
        op: canonical op name.
        precision: ``ieee`` or ``tf32``.
    """
    switch = _switch(device_type, op)
    if switch is None:
        return True
    if _HOLDERS and {threading.get_ident()} != _HOLDERS:
        return False
    found = switch.fp32_precision
    return found in _IEEE if precision == "ieee" else found == precision


@torch.compiler.assume_constant_result
def is_ieee_everywhere(op: str) -> bool:
    """Whether the process asks for nothing but fp32 from an op's products, on any device of this machine."""
    return is_set("cpu", op, "ieee") and (not _has_cuda() or is_set("cuda", op, "ieee"))


@functools.cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()


def hold(device_type: str, op: str, precision: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``run(*args, **kwargs)`` in that precision, and its gradients too; they have no second derivatives.

    Raises:
        BackendError: inside a ``torch.func`` transform, which computes gradients where no switch could be held.
    """
    if _functorch.maybe_current_level() is not None:
        raise BackendError(
            f"a plan wants {op!r} in {precision} inside a torch.func transform, and torch.backends says otherwise: set "
            f"fp32_precision={precision!r} there for the transform"
        )
    _HOLDERS.add(threading.get_ident())
    leaves, structure = pytree.tree_flatten((args, kwargs))
    held = (device_type, op, precision)

    def call(*leaves: Any) -> Any:
        args, kwargs = pytree.tree_unflatten(list(leaves), structure)
        with holding(*held):
            return run(*args, **kwargs)

    if not torch.is_grad_enabled() or not any(isinstance(a, Tensor) and a.requires_grad for a in leaves):
        return call(*leaves)
    return _Held.apply(held, call, *leaves)


@contextlib.contextmanager
def holding(device_type: str, op: str, precision: str) -> Iterator[None]:
    """The body runs with the switch of the op's kind at that precision."""
    switch = _switch(device_type, op)
    if switch is None:
        yield
        return
    with _ONE_AT_A_TIME:
        before, inherited = switch.fp32_precision, _above(device_type).fp32_precision
        switch.fp32_precision = precision
        try:
            yield
        finally:
            # What it would inherit is read as its own; written back as its own it would stop to inherit.
            switch.fp32_precision = "none" if before == inherited else before


class _Held(torch.autograd.Function):
    """A call and, when its gradients are wanted, the backward of that very call, each with the switch held."""

    @staticmethod
    def forward(ctx: Any, held: tuple[str, str, str], call: Callable[..., Any], *leaves: Any) -> Any:
        ctx.held, ctx.call, ctx.leaves = held, call, [None if isinstance(a, Tensor) else a for a in leaves]
        ctx.save_for_backward(*(a for a in leaves if isinstance(a, Tensor)))
        graph = _recorded(call, leaves)
        # Under checkpointing, what a forward saves must be what the hooks hand out again.
        ctx.graph = None if _autograd._top_saved_tensors_default_hooks(True) is not None else graph
        return pytree.tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, graph[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        tensors = iter(ctx.saved_tensors)  # read before the switch is held: a checkpoint recomputes others here
        leaves = [next(tensors) if a is None else a for a in ctx.leaves]
        inputs, outputs = ctx.graph or _recorded(ctx.call, leaves)
        keep = _autograd._get_current_graph_task_keep_graph()
        if not keep:
            ctx.graph = None
        needed = ctx.needs_input_grad[2:]
        pairs = [(o, g) for o, g in zip(pytree.tree_leaves(outputs), grads, strict=True) if _is_differentiable(o)]
        wanted = [leaf for leaf, need in zip(inputs, needed, strict=True) if need]
        with holding(*ctx.held):
            found = torch.autograd.grad(
                [o for o, _ in pairs], wanted, [g for _, g in pairs], retain_graph=keep, allow_unused=True
            )
        remaining = iter(found)
        return None, None, *(next(remaining) if need else None for need in needed)


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _recorded(call: Callable[..., Any], leaves: Any) -> tuple[list[Any], Any]:
    """The call with a graph of its own: its inputs, cut off from what made them, and its outputs."""
    with torch.enable_grad():
        inputs = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in leaves]
        return inputs, call(*inputs)


@functools.cache
def _switch(device_type: str, op: str) -> Any:
    """The switch that an op's fp32 products obey; None on a device without one."""
    kind = "conv" if op.startswith("conv") else "rnn" if op.startswith(("lstm", "gru", "rnn")) else "matmul"
    if device_type == "cpu":
        return getattr(torch.backends.mkldnn, kind)
    if device_type != "cuda":
        return None
    return torch.backends.cuda.matmul if kind == "matmul" else getattr(torch.backends.cudnn, kind)


def _above(device_type: str) -> Any:
    """What a switch inherits from while it is unset."""
    return torch.backends.mkldnn if device_type == "cpu" else torch.backends.cudnn
