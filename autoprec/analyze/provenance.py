"""What a value is made of and what it is for: positions, explicit upcasts, discrete choices, decompositions."""

from __future__ import annotations

from autoprec.analyze.facts import Graph, SiteFacts
from autoprec.analyze.findings import Findings
from autoprec.analyze.ops import NORMS, ROUNDINGS, SELECTIONS, SHAPES, is_decomposition

#: Scores become probabilities before they are picked from.
_SCORES = frozenset({"softmax", "sigmoid", "log_softmax", "_softmax"})


def island_reason(facts: SiteFacts) -> str | None:
    """Why a matrix product stays in fp32 for what its operands are made of, or None."""
    if not facts.is_gemm:
        return None
    if facts.kind == "position":
        return "its operands derive from integer positions alone: rounded positions collapse into each other"
    if facts.kind == "constant":
        return "its operands are constants alone: computed once in fp32 they are exact"
    if facts.upcast:
        return "the author cast all its operands to fp32"
    return None


def find_islands(graph: Graph, findings: Findings, formats: tuple[str, ...]) -> None:
    """Products of positions, of constants, and those whose operands the author upcast."""
    for facts in graph:
        reason = island_reason(facts)
        if reason is not None:
            for name in formats:
                findings.keep(facts.site.id, name, "provenance", reason)


def _makers(graph: Graph, facts: SiteFacts) -> list[SiteFacts]:
    """Sites that compute what this one reads, back to the nearest matrix products."""
    return [f for f in graph.upstream(facts.site.id, NORMS, limit=8) if f.op not in SHAPES]


def find_choices(graph: Graph, findings: Findings, formats: tuple[str, ...]) -> None:
    """Everything from a discrete choice back to the matrix product that makes what it chooses from."""
    for facts in graph:
        if not facts.selects or facts.op not in SELECTIONS | ROUNDINGS | {"to"}:
            continue
        above = _makers(graph, facts)
        is_router = facts.op == "topk" and any(f.is_gemm for f in above) and any(f.op in _SCORES for f in above)
        source = "pattern" if is_router else "provenance"
        reason = (
            f"router: the topk at {facts.site.id} picks by its result, and a rounding picks another expert"
            if is_router
            else f"the {facts.op} at {facts.site.id} turns its result into a whole number: a rounding picks another one"
        )
        for name in formats:
            for site in above:
                findings.keep(site.site.id, name, source, reason)
            findings.keep(facts.site.id, name, source, "picks by value: it must see fp32 values")


def find_decompositions(graph: Graph, findings: Findings, formats: tuple[str, ...]) -> None:
    """The matrix products that feed a decomposition or a solver directly, and what lies between."""
    for facts in graph:
        if not is_decomposition(facts.op):
            continue
        for site in _makers(graph, facts):
            reason = f"feeds the {facts.op} at {facts.site.id}, which multiplies its error by a condition number"
            for name in formats:
                findings.keep(site.site.id, name, "provenance", reason)
