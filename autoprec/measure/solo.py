"""One recorded call as a small module of its own, converted as the model would be, and a step of it to time.

A parameter is a parameter again, so that its cast is in the step; buffers and views of parameters stay fp32 too.
Activations come in the format that the op's neighbours would store them in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoprec.convert import convert, receipt
from autoprec.errors import ConversionError
from autoprec.graph.site import GEMM_OPS
from autoprec.lower.gemm import DTYPES
from autoprec.measure.replay import OpCall, TensorSpec
from autoprec.measure.timing import Step
from autoprec.plan import Formats, Mode, Plan, PlanRule


def solo_step(
    call: OpCall,
    formats: Formats,
    *,
    low: str,
    mode: Mode,
    recipe: Mapping[str, Any],
    device: torch.device,
    copies: int,
) -> Step:
    """A call that does ``copies`` of a site's call, forward and in training backward.

    Args:
        call: recorded.
        formats: of the site; all in fp32 leaves the module as it is.
        low: 16-bit format of activations around formats in fewer bits.
        mode: ``training`` or ``inference``.
        recipe: of formats in fewer bits, as a plan holds it.
        device: of this machine.
        copies: each with tensors of its own.

    Raises:
        ConversionError: the site would run in another format.
        Exception: whatever the op itself raises.
    """
    storage = formats.input if formats.input in DTYPES else low
    solo = _Solo(call, DTYPES[storage], device, copies)
    if formats != Formats.all("fp32"):
        match = (f"*::{call.site.op}",)
        # the first rule wins; the second only says in which format activations come
        rules = (PlanRule(match=match, formats=formats), PlanRule(match=match, formats=Formats.all(low)))
        convert(solo, plan=Plan(rules=rules, mode=mode, recipe=dict(recipe)), strict=True)
        if not is_wide(formats):
            refused = receipt(solo, example_inputs=lambda model: model()).refused
            if refused:
                raise ConversionError(refused[0].why)
    if mode == "inference":
        return no_grad(solo.body)
    held = pytree.tree_leaves([call.held for call in solo.body.calls])
    leaves = [leaf for leaf in held if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return forward_backward(lambda: _tensors(solo.body()), leaves)


def is_wide(formats: Formats) -> bool:
    """Whether no operand is below 16 bit."""
    return {formats.input, formats.weight, formats.grad_output} <= DTYPES.keys()


def forward_backward(forward: Callable[[], Iterable[torch.Tensor]], leaves: list[torch.Tensor]) -> Step:
    """A step that computes some results and the gradients of ``leaves``; results without a gradient are let go.

    Args:
        forward: gives results; called once here, to see what the gradients look like.
        leaves: tensors that get a gradient.
    """
    gradients = [torch.randn_like(out) for out in forward() if out.requires_grad]

    def step() -> None:
        results = [out for out in forward() if out.requires_grad]
        if results:
            torch.autograd.grad(results, leaves, gradients, allow_unused=True)

    return step


def no_grad(step: Step) -> Step:
    """The step without gradients."""

    def quiet() -> object:
        with torch.no_grad():
            return step()

    return quiet


def _tensors(results: Iterable[_Result]) -> Iterator[torch.Tensor]:
    for result in results:
        if isinstance(result.value, torch.Tensor):
            yield result.value
        else:
            yield from (leaf for leaf in pytree.tree_leaves(result.value) if isinstance(leaf, torch.Tensor))


class _Solo(nn.Module):
    """Copies of one call, so that they share what calls in a model share: the way in, and the start of the backward.

    A converted root does more than its sites, so :attr:`body` is what is called.
    """

    def __init__(self, call: OpCall, storage: torch.dtype, device: torch.device, copies: int) -> None:
        super().__init__()
        self.body = _Body(call, storage, device, copies)

    def forward(self) -> Any:
        return self.body()


class _Body(nn.Module):
    def __init__(self, call: OpCall, storage: torch.dtype, device: torch.device, copies: int) -> None:
        super().__init__()
        self.calls = nn.ModuleList(_make(call, storage, device) for _ in range(copies))

    def forward(self) -> list[Any]:
        return [_Result(call()) for call in self.calls]


class _Result:
    """Hides a 16-bit result from the outermost call, which would cast it to fp32; a site inside a model doesn't."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class _Call(nn.Module):
    """A call on arguments that it holds."""

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.func, self.held = func, (args, kwargs)

    def forward(self) -> Any:
        args, kwargs = self.held
        return self.func(*args, **kwargs)


class _LinearCall(nn.Module):
    """A layer of its own, since only layers get kernels below 16 bit."""

    def __init__(self, x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        out_features, in_features = weight.shape
        self.layer = nn.Linear(in_features, out_features, bias=bias is not None, device="meta")
        self.layer.register_parameter("weight", weight)
        self.layer.register_parameter("bias", bias)
        self.held = (x, weight, bias)

    def forward(self) -> torch.Tensor:
        return self.layer(self.held[0])


def _make(call: OpCall, storage: torch.dtype, device: torch.device) -> nn.Module:
    is_gemm = call.site.op in GEMM_OPS

    def fill(leaf: Any) -> Any:
        return _fill(leaf, storage, device, is_gemm) if isinstance(leaf, TensorSpec) else leaf

    args, kwargs = pytree.tree_map(fill, (call.args, call.kwargs))
    if call.site.op == "linear" and call.site.leaf:
        return _LinearCall(*args, **kwargs)
    return _Call(call.func, args, kwargs)


def _fill(spec: TensorSpec, storage: torch.dtype, device: torch.device, is_gemm: bool) -> torch.Tensor:
    """A tensor like the recorded one.

    Numbers are normal for products, whose time on a GPU depends on them, and else lie in 0.05 … 0.95, where
    logarithms, divisions and variances are fine.
    """
    if spec.tensor is not None:
        return spec.tensor.to(device)
    extent = 1 + sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True))
    flat = torch.randn(extent, device=device) if is_gemm else 0.05 + 0.9 * torch.rand(extent, device=device)
    tensor = flat.to(storage if spec.role == "activation" else spec.dtype)
    tensor = tensor.as_strided(spec.shape, spec.stride) if spec.numel else tensor.new_empty(spec.shape)
    if spec.role == "parameter":
        return nn.Parameter(tensor, requires_grad=spec.requires_grad)
    return tensor.requires_grad_(spec.requires_grad)
