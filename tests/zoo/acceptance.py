"""What a converted model must keep, for any model that trains in fp32; for the tests and for zoo stages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import autoprec
from autoprec.graph.sandbox import untouched

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TARGETS = {"bf16": "a100", "fp16": "v100"}

#: Relative L2 error that any model may have; an ill-conditioned one may have a multiple of that of rounded weights.
TOLERANCE = {"bf16": 5e-2, "fp16": 2e-2}

#: Values beyond this are marks (a mask's ``-1e9``), no results.
_MARK = 1e8

#: A norm below this counts as this: an untrained net may give outputs of 1e-35, whose errors mean nothing.
_VANISHING = 1e-12

#: Makes the model, its positional and its keyword arguments, the same each time.
Fresh = Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]

Gradient = dict[str, torch.Tensor]


@dataclass
class Computed:
    """What a model gives: floating outputs, gradient by parameter, and the loss scale that this took."""

    outputs: list[torch.Tensor]
    gradient: Gradient
    scale: float = 1.0


def accept(fresh: Fresh, format_name: str, multiple: float = 2.0) -> dict[str, float]:
    """Converts a model and checks that it still is that model, and as exact as the format allows.

    Args:
        fresh: makes the fp32 model and its inputs.
        format_name: ``bf16`` or ``fp16``.
        multiple: an error may be that of rounding weights and inputs alone, times this.

    Returns:
        What was measured: the share of GEMM FLOPs that ran low, errors and their limits, the loss scale.

    Raises:
        AssertionError: the model lost something, or is less exact than it must be.
    """
    reference = compute(fresh)
    rounded = compute(fresh, DTYPES[format_name])
    model, args, kwargs = fresh()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    counters = _changed_by_a_call(fresh)
    kinds = [type(module) for module in model.modules()]
    autoprec.convert(model, TARGETS[format_name], lambda m: run(m, args, kwargs))
    assert list(model.state_dict()) == list(before), "the keys of the state_dict changed"
    share = autoprec.receipt(model).low_precision_share
    assert share > 0, "no product runs low"

    copied = copy.deepcopy(model) if _can_be_copied(fresh) else None
    converted = compute_scaled(model, fresh, scale=2.0**16 if format_name == "fp16" else 1.0)
    measured = {"share": share, "scale": converted.scale}
    measured |= compare(converted, reference, rounded, TOLERANCE[format_name], multiple)
    if copied is not None:
        outputs = floats(run(copied, *fresh()[1:]))
        assert all(map(_same, outputs, converted.outputs)), "a deep copy of the converted model gives something else"
    autoprec.revert(model)
    assert [type(module) for module in model.modules()] == kinds, "a module isn't its own class again"
    for name, value in model.state_dict().items():
        assert name in counters or _same(value, before[name]), f"{name} isn't as before"
    again = floats(run(model, *fresh()[1:]))
    assert all(map(_same, again, reference.outputs)), "the reverted model isn't the fp32 model again"
    return measured


def run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One call, with the random numbers it may draw always the same."""
    torch.manual_seed(1)
    return model(*args, **kwargs)


def compute(fresh: Fresh, rounding: torch.dtype | None = None) -> Computed:
    """What the model gives in fp32; with ``rounding``, with weights and inputs that were rounded to it first."""
    model, args, kwargs = fresh()
    if rounding is not None:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.is_floating_point():
                    tensor.copy_(tensor.to(rounding))
        args, kwargs = pytree.tree_map(lambda x: _rounded(x, rounding), (args, kwargs))
    outputs = floats(run(model, args, kwargs))
    loss(outputs).backward()
    return Computed([o.detach() for o in outputs], _gradient(model))


def compute_scaled(model: nn.Module, fresh: Fresh, scale: float) -> Computed:
    """What the model gives under the largest loss scale, halved from ``scale``, whose gradient is finite.

    Each attempt leaves the model as it was: one that keeps a tensor with its graph can't go backward twice.
    """
    while True:
        with untouched(model):
            outputs = floats(run(model, *fresh()[1:]))
            (loss(outputs) * scale).backward()
            gradient = {name: g / scale for name, g in _gradient(model).items()}
        if scale <= 2.0**-24 or all(bool(g.isfinite().all()) for g in gradient.values()):
            return Computed([o.detach() for o in outputs], gradient, scale)
        scale /= 2


def compare(
    converted: Computed, reference: Computed, rounded: Computed, tolerance: float, multiple: float
) -> dict[str, float]:
    """Holds each output and the whole gradient against their limits; of the outputs, the worst is returned."""
    dtypes, expected = ([o.dtype for o in c.outputs] for c in (converted, reference))
    assert dtypes == expected, f"the outputs are {dtypes}, in fp32 they are {expected}"
    worst = {"output_error": 0.0, "output_limit": tolerance}
    for i, values in enumerate(zip(converted.outputs, reference.outputs, rounded.outputs, strict=True)):
        value, real, low = values
        error, limit = relative_error(value, real), max(tolerance, multiple * relative_error(low, real))
        assert error <= limit, f"output {i} is off by {error:.3g}, allowed are {limit:.3g}"
        if error / limit > worst["output_error"] / worst["output_limit"]:
            worst = {"output_error": error, "output_limit": limit}
    error = gradient_error(converted.gradient, reference.gradient)
    limit = max(tolerance, multiple * gradient_error(rounded.gradient, reference.gradient))
    assert error <= limit, f"the gradient is off by {error:.3g}, allowed are {limit:.3g}"
    return worst | {"gradient_error": error, "gradient_limit": limit}


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative L2 error over what is finite and no mark in the reference; infinite where ``value`` isn't finite."""
    assert value.shape == reference.shape, f"shape {tuple(value.shape)} instead of {tuple(reference.shape)}"
    value, reference = value.detach().double(), reference.detach().double()
    real = reference.isfinite() & (reference.abs() < _MARK)
    if not bool(value[real].isfinite().all()):
        return float("inf")
    return float((value - reference)[real].norm() / reference[real].norm().clamp(min=_VANISHING))


def gradient_error(gradient: Gradient, reference: Gradient) -> float:
    """Relative L2 error of the gradient as one vector; a parameter without any counts as zeros."""
    zero = torch.zeros(())
    off = sum(float((gradient.get(n, zero).double() - g.double()).square().sum()) for n, g in reference.items())
    norm = sum(float(g.double().square().sum()) for g in reference.values())
    return off**0.5 / max(norm**0.5, _VANISHING)


def floats(tree: Any) -> list[torch.Tensor]:
    """The floating tensors in a model's output, also in mappings and data classes that pytrees don't know."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()

    def go(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if value.is_floating_point() and value.layout is torch.strided:
                found.append(value)
        elif id(value) not in seen and isinstance(value, (Mapping, list, tuple)):
            seen.add(id(value))
            for item in value.values() if isinstance(value, Mapping) else value:
                go(item)
        elif hasattr(value, "__dataclass_fields__"):
            go({name: getattr(value, name) for name in value.__dataclass_fields__})

    go(tree)
    return found


def loss(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Mean squares of all outputs, without marks."""
    terms = [
        x[x.isfinite() & (x.abs() < _MARK)].float().square().mean() for x in outputs if x.requires_grad and x.numel()
    ]
    assert terms, "no output requires a gradient: this model doesn't train"
    return torch.stack(terms).sum()


def _can_be_copied(fresh: Fresh) -> bool:
    """Whether torch copies the fp32 model: it refuses one with the old ``weight_norm``."""
    try:
        copy.deepcopy(fresh()[0])
    except RuntimeError:
        return False
    return True


def _changed_by_a_call(fresh: Fresh) -> set[str]:
    """Names of the buffers that the fp32 model itself writes: counters and the like."""
    model, args, kwargs = fresh()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run(model, args, kwargs)
    return {name for name, value in model.state_dict().items() if not _same(value, before[name])}


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype).to(value.dtype) if is_float else value


def _gradient(model: nn.Module) -> Gradient:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
