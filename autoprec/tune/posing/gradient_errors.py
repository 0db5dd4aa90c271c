"""How far a few plans are from fp32 in the gradient, each measured on the model converted to it.

The square of the relative error of the whole gradient is nearly proportional to the loss that training in a plan loses,
and nearly a sum over groups of sites.  It costs a forward and a backward for each plan and batch, and is for the
groups that matter most, where one pass over all sites (:mod:`autoprec.tune.posing.scores`) isn't enough.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from autoprec.errors import UsageError
from autoprec.graph.sandbox import untouched
from autoprec.lower.apply import CONVERSION, apply, undo
from autoprec.plan import Plan
from autoprec.rulebook import Rulebook, load_rulebook

#: Computes one batch's loss, a scalar.
Loss = Callable[[nn.Module], Tensor]

#: Loss scales tried until no gradient is infinite; only fp16 needs more than the last of them.
_SCALES = tuple(2.0**k for k in range(16, -9, -4))

Key = TypeVar("Key", bound=Hashable)


class GradientError(NamedTuple):
    """How far a plan is from fp32; means over the batches, infinite where a number isn't finite.

    Args:
        relative: ``‖Δg‖² / ‖g‖²`` of the whole gradient.
        gradient: ``‖Δg‖²``.
        loss: ``ΔL²``.
    """

    relative: float
    gradient: float
    loss: float


def group_gradient_errors(
    model: nn.Module,
    losses: Sequence[Loss],
    plans: Mapping[Key, Plan],
    *,
    rulebook: Rulebook | None = None,
    limit_s: float = math.inf,
) -> dict[Key, GradientError]:
    """Measure plans that each lower one group of sites, or anything else; the model is left as it was.

    Args:
        model: not converted, at the weights that a study starts from.
        losses: each computes one batch's loss.
        plans: the most important first.
        rulebook: None is the shipped rules.
        limit_s: seconds after which no plan is begun.

    Returns:
        the error of each plan that there was time for, by its key.

    Raises:
        UsageError: the model is converted, or a loss isn't a scalar.
    """
    if CONVERSION in vars(model):
        raise UsageError("errors are against fp32, and this model is converted; call autoprec.revert(model)")
    rules = rulebook or load_rulebook()
    end = time.monotonic() + limit_s
    exact = _run(model, losses, (1.0,))
    found: dict[Key, GradientError] = {}
    for key, plan in plans.items():
        if time.monotonic() >= end:
            break
        apply(model, plan, rules)
        try:
            found[key] = _compare(_run(model, losses, _scales(plan)), exact)
        finally:
            undo(model)
    return found


def scalar_loss(loss: Any) -> Tensor:
    """The loss.

    Raises:
        UsageError: it isn't one number.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise UsageError(f"a loss must be a tensor of one number; got {what}")
    return loss


class _Seen(NamedTuple):
    losses: list[float]
    gradients: list[Tensor | None]


def _run(model: nn.Module, losses: Sequence[Loss], scales: Sequence[float]) -> _Seen:
    """Loss of each batch and mean gradient of each parameter, under the largest scale that keeps them finite."""
    seen = _Seen([], [])
    for scale in scales:
        with untouched(model), torch.enable_grad():
            for module in model.modules():
                if isinstance(module, nn.modules.dropout._DropoutNd):
                    module.eval()  # formats that round at random would shift its draws
            values = []
            for compute in losses:
                loss = scalar_loss(compute(model))
                values.append(float(loss.detach()))
                if loss.requires_grad:
                    (loss * (scale / len(losses))).backward()
            grads = [None if p.grad is None else p.grad.detach().float() / scale for p in model.parameters()]
        seen = _Seen(values, grads)
        if all(g is None or bool(g.isfinite().all()) for g in grads):
            break
    return seen


def _scales(plan: Plan) -> tuple[float, ...]:
    in_fp16 = any("fp16" in (r.formats.input, r.formats.weight, r.formats.grad_output) for r in plan.rules)
    return _SCALES if in_fp16 else (1.0,)


def _compare(seen: _Seen, exact: _Seen) -> GradientError:
    error = norm = 0.0
    for a, b in zip(seen.gradients, exact.gradients, strict=True):
        if b is not None:
            error += float(torch.linalg.vector_norm(b if a is None else a - b)) ** 2
            norm += float(torch.linalg.vector_norm(b)) ** 2
    loss = sum((a - b) ** 2 for a, b in zip(seen.losses, exact.losses, strict=True)) / len(exact.losses)
    values = (error / norm if norm else 0.0, error, loss)
    return GradientError(*(v if math.isfinite(v) else math.inf for v in values))
