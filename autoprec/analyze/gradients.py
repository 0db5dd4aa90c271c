"""Gradient score: how far the gradient of each parameter is off when matrix products run in a 16-bit format.

A forward can be right while its gradient isn't: a LayerNorm on tiny embeddings multiplies the roundings of every
product behind it by 1/std.  The products of one run are rounded as a 16-bit kernel rounds them (operands, result and
their gradients), and the weight gradients are compared with those of the fp32 run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from autoprec.analyze.errors import relative_error, round_low
from autoprec.analyze.facts import Graph, SiteFacts
from autoprec.analyze.findings import Findings
from autoprec.errors import UsageError
from autoprec.frames.mode import Action
from autoprec.frames.swap import framed
from autoprec.graph.dataflow import leaves, replace_tensors
from autoprec.graph.inputs import Run
from autoprec.graph.record import floating, is_leaf
from autoprec.graph.sandbox import untouched
from autoprec.graph.site import GEMM_OPS, Site
from autoprec.rulebook.opnames import canonical_op

#: Relative L2 error of one parameter's gradient beyond which fp32 is tried for the products around it.
MAX_GRADIENT_ERROR = 0.5

#: Loss scales tried for fp16, until no gradient is infinite.
_SCALES = tuple(2.0**e for e in range(16, -9, -4))

Loss = Callable[[Any], torch.Tensor]


def mean_square(out: Any) -> torch.Tensor:
    """The default loss: the mean square of the floating outputs, marks and infinities left out.

    Raises:
        UsageError: there is no output that depends on a parameter.
    """
    parts = [t[torch.isfinite(t) & (t.abs() < 1e8)] for t in _outputs(out) if t.requires_grad]
    parts = [t.float().square().mean() for t in parts if t.numel()]
    if not parts:
        raise UsageError(
            "gradients need a floating output that depends on a parameter; let run(model) return it, or give loss="
        )
    return torch.stack(parts).sum()


def score_gradients(
    model: nn.Module, run: Run, loss: Loss | None, graph: Graph, findings: Findings, formats: Mapping[str, torch.dtype]
) -> None:
    """Notes each site's gradient error, and keeps in fp32 what cures a large one.

    Args:
        model: any module; stays as it is.
        run: its result goes to ``loss``.
        loss: a scalar from what ``run`` returns; None for :func:`mean_square`.
        graph: the sites of a run, with their parameters; gets the errors.
        findings: products already in fp32, and those found here.
        formats: name → dtype.
    """
    take = _Gradients(model, run, loss or mean_square)
    real = take(_Rounding(None, frozenset()))
    for name, dtype in formats.items():
        kept = frozenset(site_id for site_id, fmt in findings if fmt == name)
        errors = _compare(take.scaled(_Rounding(dtype, kept)), real)
        _note(graph, name, errors)
        bad = {p for p, error in errors.items() if error > MAX_GRADIENT_ERROR}
        culprits = _products_around(graph, bad) - kept
        if not bad or not culprits:
            continue
        cured = _compare(take.scaled(_Rounding(dtype, kept | culprits)), real)
        helped = sorted(p for p in bad if cured[p] < min(MAX_GRADIENT_ERROR, errors[p] / 4))
        for site_id in _products_around(graph, set(helped)) - kept:
            reason = f"the gradient of {helped[0]} is off by {errors[helped[0]]:.2g} of its norm with this in {name}"
            findings.keep(site_id, name, "gradient", reason)


@dataclass(frozen=True)
class _Rounding:
    """Rounds every matrix product to ``dtype`` but those of the sites in ``kept``; None rounds nothing."""

    dtype: torch.dtype | None
    kept: frozenset[str]


class _Gradients:
    """Takes the gradients of a model's parameters, each time from the same random state."""

    def __init__(self, model: nn.Module, run: Run, loss: Loss) -> None:
        self._model, self._run, self._loss = model, run, loss

    def __call__(self, rounding: _Rounding, scale: float = 1.0) -> dict[str, torch.Tensor]:
        """Parameter name → gradient; parameters without one are left out."""

        def make(fqn: str, module: nn.Module, method: str) -> _Frame:
            return _Frame(rounding, fqn, module, method)

        model = self._model
        with untouched(model), torch.enable_grad(), framed(model, make, _Frame(rounding, "", None, "forward")):
            torch.manual_seed(0)  # of all devices; the sandbox puts their states back
            for parameter in model.parameters():
                parameter.grad = None
            (self._loss(self._run(model)) * scale).backward()
            return {n: p.grad.detach() / scale for n, p in model.named_parameters() if p.grad is not None}

    def scaled(self, rounding: _Rounding) -> dict[str, torch.Tensor]:
        """The same under the largest loss scale that keeps every gradient finite, where the range isn't fp32's."""
        gradients: dict[str, torch.Tensor] = {}
        for scale in _SCALES if rounding.dtype == torch.float16 else (1.0,):
            gradients = self(rounding, scale)
            if all(bool(torch.isfinite(g).all()) for g in gradients.values()):
                break
        return gradients


class _Frame:
    """Counts the products of one activation as a recording does, and rounds those that aren't kept."""

    def __init__(self, rounding: _Rounding, fqn: str, module: nn.Module | None, method: str) -> None:
        self._rounding, self._fqn, self._method = rounding, fqn, method
        self._is_leaf = module is not None and is_leaf(module)
        self._counts: dict[str, int] = {}

    @property
    def actions(self) -> Any:
        return self

    def enter(self) -> _Frame:
        frame = object.__new__(_Frame)
        frame.__dict__ = {**self.__dict__, "_counts": {}}
        return frame

    def get(self, name: str) -> Action | None:
        op = canonical_op(name)
        return self._product(op) if op in GEMM_OPS and self._rounding.dtype is not None else None

    def _product(self, op: str) -> Action:
        def action(func: Any, args: Any, kwargs: Any) -> Any:
            if not floating((args, kwargs)):
                return func(*args, **kwargs)
            index = self._counts.get(op, 0)
            self._counts[op] = index + 1
            is_leaf_site = self._is_leaf and index == 0
            site = Site(module=self._fqn, op=op, index=index, method=self._method, leaf=is_leaf_site)
            if site.id in self._rounding.kept:
                return func(*args, **kwargs)
            out = func(*replace_tensors(args, self._round), **replace_tensors(kwargs, self._round))
            return replace_tensors(out, self._round)

        return action

    def _round(self, tensor: torch.Tensor) -> torch.Tensor:
        return _RoundBoth.apply(tensor, self._rounding.dtype) if tensor.dtype == torch.float32 else tensor


class _RoundBoth(torch.autograd.Function):
    """Rounds a value on its way forward, and its gradient on its way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = dtype
        return round_low(x, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return round_low(gradients[0], ctx.dtype), None


def _compare(low: Mapping[str, torch.Tensor], real: Mapping[str, torch.Tensor]) -> dict[str, float]:
    return {name: relative_error(low[name], gradient) for name, gradient in real.items() if name in low}


def _note(graph: Graph, name: str, errors: Mapping[str, float]) -> None:
    for facts in graph:
        known = [errors[p] for p in facts.parameters if p in errors]
        if known:
            facts.gradient_errors[name] = max(known)


def _products_around(graph: Graph, parameters: set[str]) -> frozenset[str]:
    """Matrix products that use one of the parameters, and the first ones that read what is made of it."""
    found: set[str] = set()
    level = [facts for facts in graph if parameters & facts.parameters]
    seen = {facts.site.id for facts in level}
    while level:
        following: list[SiteFacts] = []
        for facts in level:
            if facts.is_gemm:
                found.add(facts.site.id)
                continue
            fresh = [c for c in facts.consumers if c not in seen]
            seen.update(fresh)
            following += [graph[c] for c in fresh]
        level = following
    return frozenset(found)


def _outputs(tree: Any) -> list[torch.Tensor]:
    """Floating tensors of an output, looked up in registered structures too."""
    flat = tree_leaves(tree)
    return [t for t in leaves(flat) if isinstance(t, torch.Tensor) and t.is_floating_point()]
