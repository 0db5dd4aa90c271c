"""What a run showed about each site, and the sites as a graph."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from autoprec.analyze.lineage import Kind, Lineages, numbers, widest_kind
from autoprec.graph.dataflow import Step
from autoprec.graph.site import GEMM_OPS, Site

_END_OF_FP32 = torch.finfo(torch.float32).max

#: Reads that tell nothing about the values.
_METADATA = frozenset({"__get__"})


@dataclass(slots=True)
class SiteFacts:
    """What is known of one site after all its calls.

    Args:
        site: with the shapes and FLOPs recorded.
        kind: of the result, see :data:`autoprec.analyze.lineage.Kind`; the strictest over all calls.
        producers: sites whose floating results it reads.
        pickers: sites whose integer or boolean results it reads.
        consumers: sites that read its result.
        numbers: Python numbers among its arguments.
        squares: it multiplies a value by itself.
        selects: its integer result is read by something.
        upcast: the author cast every floating operand to fp32.
        is_seen: a call of it was followed.
        max_abs: largest finite magnitude of its result; 0 before any call.
        errors: format → relative L2 error of its result, the largest over calls.
        parameters: names of the parameters among its operands.
        gradient_errors: format → relative L2 error of the gradient of those, the largest.
        lows: formats in which its result would be 16 bit.
        reads_low: formats in which one of its operands would be 16 bit.
        sentinel: largest mark (``-1e9``) among its operands, or 0.
        is_marking: it has the end of fp32's range among its numbers.
        dtype_asked_of: makers of the tensor whose dtype was read last before it.
    """

    site: Site
    kind: Kind = "constant"
    producers: dict[str, None] = field(default_factory=dict)
    pickers: dict[str, None] = field(default_factory=dict)
    consumers: dict[str, None] = field(default_factory=dict)
    numbers: tuple[float, ...] = ()
    squares: bool = False
    selects: bool = False
    upcast: bool = True
    is_seen: bool = False
    max_abs: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)
    parameters: set[str] = field(default_factory=set)
    gradient_errors: dict[str, float] = field(default_factory=dict)
    lows: set[str] = field(default_factory=set)
    reads_low: set[str] = field(default_factory=set)
    sentinel: float = 0.0
    is_marking: bool = False
    dtype_asked_of: frozenset[str] = frozenset()

    @property
    def op(self) -> str:
        return self.site.op

    @property
    def is_gemm(self) -> bool:
        return self.site.op in GEMM_OPS


class Graph:
    """The sites of a run and which reads which."""

    def __init__(self, model: nn.Module) -> None:
        self.facts: dict[str, SiteFacts] = {}
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._dtype_asked_of: frozenset[str] = frozenset()

    def __getitem__(self, site_id: str) -> SiteFacts:
        return self.facts[site_id]

    def __iter__(self) -> Iterator[SiteFacts]:
        return iter(self.facts.values())

    def note(self, step: Step, lineages: Lineages) -> SiteFacts | None:
        """Adds one call with what it reads; its facts if it is a site."""
        if step.op not in _METADATA:
            self._note_selections(step, lineages)
        elif step.attribute == "dtype":
            self._dtype_asked_of = lineages.of(step.args[0]).makers
        if step.site is None:
            return None
        facts = self.facts.setdefault(step.site.id, SiteFacts(step.site))
        floats = [lineages.of(t) for t in step.inputs if t.is_floating_point()]
        self._connect(facts, step, lineages)
        facts.numbers = tuple(numbers(step))
        facts.parameters.update(self._names[id(t)] for t in step.inputs if id(t) in self._names)
        facts.squares = facts.squares or _squares(step)
        facts.upcast = facts.upcast and bool(floats) and all(i.upcast for i in floats)
        facts.sentinel = max((facts.sentinel, *(i.sentinel for i in floats)), key=abs)
        if any(abs(c) >= _END_OF_FP32 / 2 for c in facts.numbers):
            facts.is_marking, facts.dtype_asked_of = True, self._dtype_asked_of
        return facts

    def note_result(self, facts: SiteFacts, step: Step, lineages: Lineages) -> None:
        """Adds what a call returned; ``lineages`` knows the outputs by now."""
        floats = [t for t in step.outputs if t.is_floating_point()]
        facts.kind = widest_kind(facts.kind, *(lineages.of(t).kind for t in floats))
        facts.is_seen = True
        facts.max_abs = max(facts.max_abs, *(max_abs(t) for t in floats), 0.0)

    def _note_selections(self, step: Step, lineages: Lineages) -> None:
        for tensor in step.inputs:
            if tensor.is_floating_point() or tensor.dtype == torch.bool:
                continue
            for maker in lineages.of(tensor).makers:
                if maker in self.facts:
                    self.facts[maker].selects = True

    def _connect(self, facts: SiteFacts, step: Step, lineages: Lineages) -> None:
        me = facts.site.id
        for tensor in step.inputs:
            for maker in lineages.of(tensor).makers:
                if maker == me or maker not in self.facts:
                    continue
                edges = facts.producers if tensor.is_floating_point() else facts.pickers
                edges[maker] = None
                self.facts[maker].consumers[me] = None

    def finish(self, sites: dict[str, Site]) -> None:
        """Takes the recorder's sites: their FLOPs are summed over calls."""
        for site_id, site in sites.items():
            if site_id in self.facts:
                self.facts[site_id].site = site
            else:
                self.facts[site_id] = SiteFacts(site, kind="activation", upcast=False)

    def edges(self) -> tuple[tuple[str, str], ...]:
        """(producer, consumer), in order of the producers' first call."""
        return tuple((f.site.id, c) for f in self for c in f.consumers)

    def upstream(self, site_id: str, stop: frozenset[str], limit: int = 12) -> Iterator[SiteFacts]:
        """Sites whose values reach a site, nearest first, not beyond GEMMs (included) or ops in ``stop`` (excluded).

        Args:
            site_id: where to start; not among the results.
            stop: canonical op names.
            limit: edges to follow at most.
        """
        seen, level = {site_id}, [site_id]
        for _ in range(limit):
            following: list[str] = []
            for producer in (p for s in level for p in self.facts[s].producers):
                if producer in seen or self.facts[producer].op in stop:
                    continue
                seen.add(producer)
                yield self.facts[producer]
                if not self.facts[producer].is_gemm:
                    following.append(producer)
            level = following


def max_abs(tensor: torch.Tensor) -> float:
    """Largest finite magnitude; 0 of an empty tensor, a sparse one, or one without values."""
    if tensor.numel() == 0 or tensor.device.type == "meta" or tensor.layout != torch.strided:
        return 0.0
    value = float(tensor.detach().abs().max())
    if math.isfinite(value):
        return value
    finite = tensor.detach()[torch.isfinite(tensor)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _squares(step: Step) -> bool:
    if step.op == "square":
        return True
    if step.op == "pow":
        exponents = [*step.args[1:], step.kwargs.get("exponent")]
        return any(isinstance(e, (int, float)) and e == 2 for e in exponents)
    return step.op == "mul" and len(step.args) == 2 and step.args[0] is step.args[1]
