"""How far a converted model is from its fp32 self on the example inputs, measured: outputs and whole gradient.

Rounding adds up over a deep or chaotic model though no single site is to blame.  What is measured here is what a user
gets; :mod:`autoprec.verify.refine` takes formats back where it is too much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoprec.analyze.gradients import mean_square
from autoprec.errors import UsageError
from autoprec.frames.mode import Action
from autoprec.frames.names import is_inplace
from autoprec.frames.swap import framed
from autoprec.graph.inputs import Run
from autoprec.graph.record import floating
from autoprec.graph.sandbox import untouched
from autoprec.lower.casts import cast

#: Ops that draw random numbers, other ones in another dtype: a comparison would compare the draws.
RANDOM_OPS = frozenset(
    {
        "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout",
        "bernoulli", "rand_like", "randn_like", "rrelu", "gumbel_softmax", "multinomial", "normal", "uniform", "rand",
        "randn", "exponential", "random",
    }
)  # fmt: skip

#: Loss scales tried until no gradient is infinite; only fp16 needs more than the first.
_SCALES = tuple(2.0**k for k in range(10, -25, -4))

#: A norm below which outputs or a gradient count as zero: noise has no relative error.
_VANISHING = 1e-12


@dataclass(frozen=True, slots=True)
class Seen:
    """What one run gave: floating outputs, and gradients of the parameters that have one."""

    outputs: tuple[torch.Tensor, ...]
    gradients: tuple[torch.Tensor | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """Relative L2 error against fp32; None where it wasn't measured, NaN or infinite where a number isn't finite."""

    outputs: float
    gradient: float | None = None

    def within(self, limit: Deviation) -> bool:
        fits = self.outputs <= limit.outputs
        return fits and (self.gradient is None or limit.gradient is None or self.gradient <= limit.gradient)

    @property
    def worst(self) -> float:
        """The larger of the two; infinite if either isn't finite."""
        values = (self.outputs, 0.0 if self.gradient is None else self.gradient)
        return max(values) if all(map(math.isfinite, values)) else math.inf

    def __str__(self) -> str:
        gradient = "" if self.gradient is None else f", whole gradient by {self.gradient:.2g}"
        return f"outputs differ from fp32 by {self.outputs:.2g} of their norm{gradient}"


def observe(model: nn.Module, run: Run, gradients: bool) -> Seen:
    """Runs a model on its example inputs, without a trace.

    Args:
        model: converted or not.
        run: must return the outputs.
        gradients: also of the mean square of the outputs.

    Raises:
        UsageError: ``run`` returns no floating tensor.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    scales = _SCALES if gradients else (1.0,)
    with untouched(model):
        state = torch.get_rng_state()
        seen = Seen(())
        for scale in scales:
            torch.set_rng_state(state)
            with torch.set_grad_enabled(gradients):
                out = run(model)
            outputs = tuple(t.detach().clone() for t in floating(out))
            if not outputs:
                raise UsageError("run(model) returns no floating tensor to compare")
            if not gradients:
                return Seen(outputs)
            found = torch.autograd.grad(mean_square(out) * scale, parameters, allow_unused=True)
            seen = Seen(outputs, tuple(None if g is None else g.float() / scale for g in found))
            if all(g is None or bool(g.isfinite().all()) for g in seen.gradients):
                break
        return seen


def compare(seen: Seen, reference: Seen) -> Deviation:
    """The deviation of one run from another."""
    if [t.shape for t in seen.outputs] != [t.shape for t in reference.outputs]:
        return Deviation(outputs=math.inf)
    # Masked scores carry marks like finfo.min, which would be all of the norm.
    outputs = max(_relative_l2([(a, b)]) for a, b in zip(seen.outputs, reference.outputs, strict=True))
    both = zip(seen.gradients, reference.gradients, strict=True)
    pairs = [(a, b) for a, b in both if a is not None and b is not None]
    return Deviation(outputs=outputs, gradient=_relative_l2(pairs) if pairs else None)


def _relative_l2(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    error = norm = 0.0
    for a, b in pairs:
        real = torch.isfinite(b) & (b.abs() < 1e8)
        a, b = a[real].double(), b[real].double()
        error += float((a - b).square().sum())
        norm += float(b.square().sum())
    return math.sqrt(error) / max(math.sqrt(norm), _VANISHING) if math.isfinite(error) else math.inf


#: Calls that hand a tensor on as it is, so that a model which moves its own parameters keeps their values.
_NOT_ROUNDED = frozenset({"__get__", "__set__", "to", "float", "type", "data", "detach", "requires_grad_", "copy_"})


class _Rounded:
    """A frame in which parameters and buffers are rounded to 16 bit when they are read, and all arithmetic is fp32."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.stored = {id(t) for t in (*model.parameters(), *model.buffers())}

    @property
    def actions(self) -> Mapping[str, Action]:
        return self  # type: ignore[return-value]  # looked up through get()

    def enter(self) -> _Rounded:
        return self

    def get(self, name: str) -> Action | None:
        return None if name in _NOT_ROUNDED or is_inplace(name) else self._call

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*[self._round(a) for a in args], **{k: self._round(v) for k, v in kwargs.items()})

    def _round(self, value: Any) -> Any:
        if id(value) in self.stored:
            return cast(cast(value, self.dtype), value.dtype)
        if isinstance(value, list):
            return [self._round(item) for item in value]
        return value


def observe_rounded(model: nn.Module, run: Run, dtype: torch.dtype, gradients: bool) -> Seen:
    """The same run of an fp32 model whose parameters and buffers alone are rounded: no choice of formats is better."""
    frame = _Rounded(model, dtype)
    with framed(model, lambda fqn, module, method: frame, frame):
        return observe(model, run, gradients)
