"""Known computations written out by hand, found in which site reads which."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from autoprec.analyze.facts import Graph, SiteFacts
from autoprec.analyze.findings import Findings
from autoprec.analyze.ops import PHASES, SHAPES
from autoprec.formats import get_format

_SUMS = frozenset({"mean", "sum", "nanmean", "nansum"})
_ROOTS = frozenset({"rsqrt", "sqrt", "pow", "reciprocal"})
_BETWEEN = frozenset({"add", "clamp", "clamp_min", "maximum", "mul", "div"}) | SHAPES
_PROBABILITIES = frozenset(
    {"sigmoid", "softmax", "clamp", "clamp_min", "clamp_max", "sub", "where", "mul", "neg", "add"}
)
_LOGS = frozenset({"log", "log2", "log10", "log1p", "xlogy", "logit"})
_CUMULATIVE = frozenset({"cumsum", "cumprod", "logcumsumexp"})
_NORMS = frozenset({"norm", "linalg_vector_norm", "linalg_norm", "sqrt", "rsqrt"})

#: Sites of one occurrence.
Members = Iterable[SiteFacts]


def find_patterns(graph: Graph, findings: Findings, formats: tuple[str, ...]) -> None:
    """Keeps every member of a known computation in fp32, and names the computation."""
    for facts in list(graph):
        for find, name in _FINDERS:
            for member in find(graph, facts):
                for format_name in formats:
                    findings.keep(member.site.id, format_name, "pattern", f"part of {name}")
    for format_name in formats:
        _find_masks(graph, findings, format_name)


def _norm(graph: Graph, facts: SiteFacts) -> Iterator[SiteFacts]:
    """x·x or var → mean → (+ eps) → root; with x - mean before it for a layer norm."""
    if facts.op in ("var", "std", "var_mean"):
        starts, sums = [facts], [facts]
    elif facts.squares:
        starts, sums = [facts, *_producers(graph, facts, {"sub"})], _below(graph, facts, _SUMS, SHAPES)
    else:
        return
    for total in sums:
        ends = _below(graph, total, _ROOTS, _BETWEEN)
        if ends:
            yield from starts
            yield total
            yield from _between(graph, total, ends, _BETWEEN)
            yield from ends


def _variance(graph: Graph, facts: SiteFacts) -> Iterator[SiteFacts]:
    """(x - mean)² → mean."""
    if facts.squares:
        centred = list(_producers(graph, facts, {"sub"}))
        sums = _below(graph, facts, _SUMS, SHAPES)
        if sums and any(any(p in _ops_of(graph, c, _SUMS) for p in c.producers) for c in centred):
            yield from (facts, *centred, *sums)


def _softmax(graph: Graph, facts: SiteFacts) -> Iterator[SiteFacts]:
    """Exp → sum → division of one by the other."""
    if facts.op not in ("exp", "exp2"):
        return
    for total in _below(graph, facts, {"sum"}, SHAPES):
        ends = [d for d in _below(graph, total, {"div"}, SHAPES | {"add", "clamp"}) if _reads(graph, d, facts)]
        if ends:
            yield from (*_producers(graph, facts, {"sub"}), facts, total, *ends)


def _log_sum_exp(graph: Graph, facts: SiteFacts) -> Iterator[SiteFacts]:
    """Exp → sum → log."""
    if facts.op not in ("exp", "exp2"):
        return
    for total in _below(graph, facts, {"sum"}, SHAPES):
        ends = _below(graph, total, _LOGS, SHAPES | {"add", "clamp"})
        if ends:
            yield from (*_producers(graph, facts, {"sub"}), facts, total, *ends)


def _cosine(graph: Graph, facts: SiteFacts) -> Iterator[SiteFacts]:
    """a·b → sum → divided by norms."""
    if facts.op != "mul" or facts.squares:
        return
    for total in _below(graph, facts, {"sum"}, SHAPES):
        for end in _below(graph, total, {"div"}, SHAPES):
            if any(f.op in _NORMS for f in graph.upstream(end.site.id, frozenset(), limit=4)):
                yield from (facts, total, end)


def _differences(graph: Graph, facts: SiteFacts) -> Iterator[SiteFacts]:
    """Cumulative sum → difference of two of its entries."""
    if facts.op == "sub":
        sums = [f for f in _above(graph, facts, SHAPES | _CUMULATIVE) if f.op in _CUMULATIVE]
        if sums:
            yield from (*sums, facts)


def _loss(graph: Graph, facts: SiteFacts) -> Iterator[SiteFacts]:
    """Probability (→ clamp) → log."""
    if facts.op not in _LOGS:
        return
    above = [f for f in _above(graph, facts, _PROBABILITIES)]
    if any(f.op in ("sigmoid", "softmax") for f in above):
        yield from (*above, facts)


def _angles(graph: Graph, facts: SiteFacts) -> Iterator[SiteFacts]:
    """Positions times frequencies → sin, cos."""
    if facts.op in PHASES and facts.kind == "position":
        yield facts
        yield from (f for f in graph.upstream(facts.site.id, frozenset()) if f.kind != "activation")


_FINDERS: tuple[tuple[Callable[[Graph, SiteFacts], Members], str], ...] = (
    (
        _norm,
        "a hand-written layer or RMS norm: squares overflow fp16, and the root of a rounded mean scales every value",
    ),
    (_variance, "a hand-written variance: squares overflow fp16, and a rounded mean leaves only rounding behind"),
    (_softmax, "a hand-written softmax: exponentials amplify roundings, and their sum loses the small terms"),
    (_log_sum_exp, "a hand-written log-sum-exp: exponentials amplify roundings, and their sum loses the small terms"),
    (
        _cosine,
        "a hand-written cosine similarity: products overflow fp16, and the quotient of rounded sums leaves [-1, 1]",
    ),
    (_loss, "a hand-written cross-entropy or focal loss: a probability near 1 rounds to 1, and log(1 - p) is infinite"),
    (
        _differences,
        "differences of a cumulative sum: two long sums are rounded, and little is left when they cancel",
    ),
    (
        _angles,
        "rotary or sinusoidal position embeddings: a rounded angle of some hundred radians is off by whole turns",
    ),
)


def _find_masks(graph: Graph, findings: Findings, format_name: str) -> None:
    """Marks (``-1e9``, ``finfo.min``) added to scores that would be in a format where the sum overflows."""
    fmt = get_format(format_name)
    for facts in graph:
        adds = facts.op in ("add", "sub") and facts.sentinel and format_name in facts.reads_low
        # The mark itself may become the format's own, where code asks for finfo(x.dtype).min.
        if adds and abs(facts.sentinel) > fmt.max / 2 and fmt.max < _END_OF_FP32 / 2:
            facts.lows.add(format_name)
            findings.keep(
                facts.site.id, format_name, "pattern",
                f"adds a mask's mark {facts.sentinel:.3g} to scores: in {fmt} a row of such sums is -inf and gives NaN",
            )  # fmt: skip
        if facts.is_marking and fmt.max < _END_OF_FP32 / 2:
            for maker in (graph[m] for m in facts.dtype_asked_of if m in graph.facts):
                if not maker.is_gemm:
                    findings.keep(
                        maker.site.id, format_name, "pattern",
                        f"{facts.site.id} takes a mask's mark from the dtype of its result: in {fmt} it is only "
                        f"{fmt.max:g}, and a score beside it overflows",
                    )  # fmt: skip


_END_OF_FP32 = torch.finfo(torch.float32).max


def _producers(graph: Graph, facts: SiteFacts, ops: Iterable[str]) -> list[SiteFacts]:
    return [graph[p] for p in facts.producers if graph[p].op in ops]


def _ops_of(graph: Graph, facts: SiteFacts, ops: Iterable[str]) -> set[str]:
    return {p for p in facts.producers if graph[p].op in ops}


def _reads(graph: Graph, facts: SiteFacts, source: SiteFacts) -> bool:
    return any(f is source for f in _above(graph, facts, SHAPES | {"exp", "exp2"}))


def _below(graph: Graph, facts: SiteFacts, ops: Iterable[str], through: frozenset[str]) -> list[SiteFacts]:
    """Nearest consumers that are one of ``ops``, looking through others."""
    return _walk(graph, facts, lambda f: f.consumers, frozenset(ops), through)[0]


def _between(graph: Graph, facts: SiteFacts, ends: list[SiteFacts], through: frozenset[str]) -> list[SiteFacts]:
    ops = frozenset(f.op for f in ends)
    passed = _walk(graph, facts, lambda f: f.consumers, ops, through)[1]
    return [f for f in passed if any(e.site.id in f.consumers for e in ends)]


def _above(graph: Graph, facts: SiteFacts, through: frozenset[str]) -> list[SiteFacts]:
    """Producers of producers as long as they are one of ``through``."""
    return _walk(graph, facts, lambda f: f.producers, frozenset(), through)[1]


def _walk(
    graph: Graph,
    start: SiteFacts,
    edges: Callable[[SiteFacts], Iterable[str]],
    ends: frozenset[str],
    through: frozenset[str],
) -> tuple[list[SiteFacts], list[SiteFacts]]:
    """(sites whose op is in ``ends``, sites passed on the way), at most six edges away."""
    found: dict[str, SiteFacts] = {}
    passed: dict[str, SiteFacts] = {}
    level = [start]
    for _ in range(6):
        following = []
        for site_id in (i for f in level for i in edges(f)):
            facts = graph[site_id]
            if site_id in found or site_id in passed or facts is start:
                continue
            if facts.op in ends:
                found[site_id] = facts
            elif facts.op in through:
                passed[site_id] = facts
                following.append(facts)
        level = following
    return list(found.values()), list(passed.values())
