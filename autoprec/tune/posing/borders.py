"""Where activations change format between groups of sites, and what that costs.

Between a product and another op, a cast depends on both and on the rules: an op that has a format of its own by the
rules makes a firm edge, one that follows what it reads a usual one, which costs nothing under the rules.  Products with
nothing but followers between them have an edge of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoprec.analyze import SiteReport
from autoprec.estimate.flow import VIEWS, FormatsOf, Placed, place
from autoprec.graph.site import Site
from autoprec.lower.matching import RuleMatcher
from autoprec.plan import Formats, Plan, PlanRule
from autoprec.tune.posing.sitecosts import CastSeconds, formats_of, uniform
from autoprec.tune.space import OTHER, RULES, Space

#: Products that an op which follows what it reads may stand for: two, as in gated layers.  A sum over a residual stream
#: stands for itself.
_MAX_ORIGINS = 2


@dataclass(frozen=True, kw_only=True)
class Borders:
    """Seconds of a step.

    Args:
        own: group of products → casts that it has in 16 bit beside pinned sites.
        own_fp32: the same in fp32.
        other: choice of the other ops → casts among them, and beside pinned sites.
        edges: two groups, and whether the edge is firm → casts where they are stored differently.
        rules: sites under the rules, with all products in 16 bit.
    """

    own: Mapping[str, float]
    own_fp32: Mapping[str, float]
    other: Mapping[str, float]
    edges: Mapping[tuple[str, str, bool], float]
    rules: Mapping[str, Placed]


def group_members(space: Space, sites: Sequence[Site]) -> dict[str, str]:
    """Site id → group; sites that the user pinned have none."""
    rules = [*space.pins]
    names = {id(rule): "" for rule in rules}
    for group in space.groups[:-1]:
        rule = PlanRule(match=group.match, formats=Formats.all(space.low_format))
        rules.append(rule)
        names[id(rule)] = group.name
    matcher = RuleMatcher(Plan(rules=tuple(rules)))
    found = {site.id: matcher.rule_for_site(site.scope, site.op, site.index) for site in sites}
    members = {name: OTHER if rule is None else names[id(rule)] for name, rule in found.items()}
    return {name: group for name, group in members.items() if group}


def find_borders(space: Space, rows: Sequence[SiteReport], cast_s: CastSeconds) -> Borders:
    """The borders between the groups of a space.

    Args:
        space: the groups.
        rows: of an analysis with example inputs: shapes, and which site reads which.
        cast_s: price of a cast.
    """
    ground = _Ground(space, rows, cast_s)
    low, rules = space.low_format, formats_of(space.plan_of(uniform(space, space.low_format, RULES)))
    counted = {choice: ground.casts(uniform(space, low, choice)) for choice in space.groups[-1].choices}
    return Borders(
        own=counted[RULES].beside_pinned,
        own_fp32=ground.casts(uniform(space, "fp32", RULES)).beside_pinned,
        other={choice: found.other for choice, found in counted.items()},
        edges=ground.edges(counted[RULES].placed, ground.origins(rules)),
        rules=counted[RULES].placed,
    )


@dataclass(kw_only=True)
class _Casts:
    """Those of one plan that no edge counts."""

    placed: Mapping[str, Placed]
    beside_pinned: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    other: float = 0.0


class _Ground:
    """The sites, whose they are, and what a cast costs."""

    def __init__(self, space: Space, rows: Sequence[SiteReport], cast_s: CastSeconds) -> None:
        self._space, self._rows, self._cast_s = space, rows, cast_s
        self._members = group_members(space, [row.site for row in rows])
        self._root: dict[str, str] = {}  # the site that computed what a view shows
        for row in rows:
            read = [self._root[name] for name in row.producers if name in self._root]
            self._root[row.site.id] = read[0] if read and row.site.op in VIEWS else row.site.id

    def casts(self, mix: Mapping[str, str]) -> _Casts:
        """The casts of activations under a mix."""
        placed = place(self._rows, formats_of(self._space.plan_of(mix)), self._space.low_format)
        found = _Casts(placed={item.site.id: item for item in placed})
        for item in placed:
            for cast in item.casts:
                ends = {self._group(item.site.id), self._group(cast.producer)}
                seconds = self._cast_s(cast.numel, cast.source, cast.format)
                if ends <= {OTHER, ""}:
                    found.other += seconds if OTHER in ends else 0.0
                elif "" in ends:
                    found.beside_pinned[max(ends)] += seconds
        return found

    def edges(
        self, rules: Mapping[str, Placed], origins: Mapping[str, tuple[str, ...]]
    ) -> dict[tuple[str, str, bool], float]:
        """Casts that depend on both sides."""
        found: dict[tuple[str, str, bool], float] = defaultdict(float)

        def connect(a: str, b: str, seconds: float, *, firm: bool = False) -> None:
            if a != b and a and b:
                found[min(a, b), max(a, b), firm] += seconds

        for row in self._rows:
            name, mine = row.site.id, self._group(row.site.id)
            cast = {c.producer for c in rules[name].casts}
            read = [p for p in row.producers if p in rules] if row.site.op not in VIEWS else []
            for producer in read:
                theirs, seconds = self._group(producer), self._either_way(rules[producer].output_numel)
                connect(mine, theirs, seconds, firm=producer in cast)
                if mine != OTHER == theirs and producer not in cast:
                    for product in self._products(origins[producer]):
                        connect(mine, product, seconds / len(origins[producer]))
            followed = self._products(origins[name]) if mine == OTHER else []
            if len(followed) == len(read) == 2:  # what follows two products widens one where they differ
                connect(followed[0], followed[1], self._either_way(rules[read[0]].output_numel))
        return dict(found)

    def origins(self, rules: FormatsOf) -> dict[str, tuple[str, ...]]:
        """Site id → the sites whose format its result is in: its own, or that of what it follows."""
        found: dict[str, tuple[str, ...]] = {}
        for row in self._rows:
            name = row.site.id
            asked = rules(row.site)
            follows = row.site.op in VIEWS or asked is None or asked.input in ("follow", "fixed")
            read = tuple(dict.fromkeys(origin for p in row.producers for origin in found.get(p, ())))
            passes = follows and self._members.get(name) == OTHER and 1 <= len(read) <= _MAX_ORIGINS
            found[name] = read if passes else (name,)
        return found

    def _products(self, names: Sequence[str]) -> list[str]:
        """The groups of those that are products."""
        return [group for name in names if (group := self._group(name)) not in (OTHER, "")]

    def _group(self, name: str) -> str:
        """Of the site that computed what ``name`` gives; empty for a pinned one."""
        return self._members.get(self._root[name], "")

    def _either_way(self, numel: int) -> float:
        """The mean of a cast to 16 bit and one to fp32."""
        low = self._space.low_format
        return (self._cast_s(numel, "fp32", low) + self._cast_s(numel, low, "fp32")) / 2
