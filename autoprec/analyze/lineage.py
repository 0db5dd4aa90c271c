"""Where a value comes from: which sites made it, and whether an activation is in it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from autoprec.analyze.ops import COMPARISONS, FACTORIES, LIKE_FACTORIES, POSITIONS, RANDOM_FACTORIES, SENTINEL
from autoprec.graph.dataflow import CASTS, Step, TensorMap, leaves
from autoprec.graph.site import GEMM_OPS

#: ``activation``: an input or a trained value is in it; ``position``: made of integers and constants alone;
#: ``constant``: buffers and literals alone.
Kind = Literal["activation", "position", "constant"]


def widest_kind(*kinds: str) -> Kind:
    """The kind of what is made of several."""
    if "activation" in kinds:
        return "activation"
    return "position" if "position" in kinds else "constant"


@dataclass(frozen=True, slots=True)
class Lineage:
    """What is known of where a tensor comes from.

    Args:
        makers: sites that made it, looking through calls that are no sites.
        kind: see :data:`Kind`.
        upcast: the author cast it to fp32 explicitly.
        sentinel: largest constant beyond any activation in it (a mask's ``-1e9``), else 0.
    """

    makers: frozenset[str] = frozenset()
    kind: Kind = "activation"
    upcast: bool = False
    sentinel: float = 0.0


class Lineages:
    """The lineage of every tensor in a run."""

    def __init__(self, model: nn.Module) -> None:
        self._known: TensorMap[Lineage] = TensorMap()
        self._buffers = list(model.buffers())
        for buffer in self._buffers:
            self._known[buffer] = Lineage(kind="constant")

    def of(self, tensor: torch.Tensor) -> Lineage:
        """Its lineage; an integer tensor from outside counts as positions, a floating one as an activation."""
        known = self._known.get(tensor)
        if known is not None:
            return known
        return Lineage(kind="activation" if tensor.is_floating_point() else "position")

    def follow(self, step: Step) -> None:
        """Notes where the outputs of a call come from."""
        made = self._made(step)
        for tensor in step.outputs:
            is_input = any(tensor is t for t in step.inputs)
            if is_input and not step.writes:
                continue
            # Writing into a buffer doesn't make its earlier content an activation, but what is read from now on is one.
            self._known[tensor] = made
        if step.writes:
            self._known[step.args[0]] = made

    def _made(self, step: Step) -> Lineage:
        inputs = [self.of(t) for t in step.inputs]
        site = step.site
        makers = frozenset({site.id}) if site is not None else frozenset().union(*(i.makers for i in inputs))
        return Lineage(makers, self._kind(step, inputs), self._upcast(step, inputs), self._sentinel(step, inputs))

    def _kind(self, step: Step, inputs: list[Lineage]) -> Kind:
        if step.op in RANDOM_FACTORIES:
            return "activation"
        if step.op in POSITIONS:
            return "position"
        if step.op in FACTORIES or step.op in LIKE_FACTORIES:
            return "constant"
        return widest_kind(*(i.kind for i in inputs))

    def _upcast(self, step: Step, inputs: list[Lineage]) -> bool:
        if step.op in CASTS:
            ends = step.op == "type_as" or _names_dtype(step)
            return is_explicit_upcast(step) or (not ends and any(i.upcast for i in inputs))
        if step.op in GEMM_OPS or step.op in COMPARISONS:
            return False
        floats = [self.of(t) for t in step.inputs if t.is_floating_point() and not isinstance(t, nn.Parameter)]
        return bool(floats) and all(i.upcast for i in floats)

    def _sentinel(self, step: Step, inputs: list[Lineage]) -> float:
        if step.op in GEMM_OPS or step.op in COMPARISONS:
            return 0.0
        if any(i.kind == "activation" and not i.sentinel for i in inputs):
            return 0.0
        own = [c for c in numbers(step) if abs(c) >= SENTINEL]
        return max((*own, *(i.sentinel for i in inputs)), key=abs, default=0.0)


def is_explicit_upcast(step: Step) -> bool:
    """Whether a cast is the author's wish for fp32, not a cast back to the dtype that some tensor had.

    In an fp32 model ``x.to(torch.float32)`` and ``x.to(dtype_of_the_input)`` are the same call: the source tells them
    apart.
    """
    return step.op in ("float", "double") or (_names_dtype(step) and "float32" in step.written)


def _names_dtype(step: Step) -> bool:
    return any(isinstance(v, torch.dtype) for v in (*step.args[1:], *step.kwargs.values()))


def numbers(step: Step) -> list[float]:
    """The finite Python numbers among a call's arguments."""
    values = (*leaves(step.args), *leaves(step.kwargs))
    found = [float(v) for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    return [v for v in found if math.isfinite(v)]
