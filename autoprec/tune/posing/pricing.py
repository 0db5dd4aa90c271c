"""The planner's problem of a space: what each choice of each group harms and costs, and the casts between groups."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoprec.analyze import SiteReport
from autoprec.errors import UsageError
from autoprec.estimate.roofline import bytes_of
from autoprec.planner.problem import ANY_STORAGE, Edge, Option, Problem, ProblemGroup
from autoprec.tune.posing.borders import Borders, find_borders, group_members
from autoprec.tune.posing.sitecosts import SiteCosts
from autoprec.tune.space import OTHER, RULES, Group, Space

#: Site id, or name of a group, → choice → harm.
Harms = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Pricing:
    """A problem, and what it rests on.

    Args:
        problem: to solve.
        notes: what couldn't be priced and what was taken instead, one sentence each.
    """

    problem: Problem
    notes: tuple[str, ...]


def make_problem(space: Space, rows: Sequence[SiteReport], harms: Harms, costs: SiteCosts) -> Pricing:
    """Sum scores and seconds of each group's sites, and count the casts between groups.

    Args:
        space: groups and their choices.
        rows: of an analysis with example inputs: shapes, and which site reads which.
        harms: of each site and choice, fp32's being 0, in any unit; a group's own name stands for the sum over its
            sites, as it must for :data:`~autoprec.tune.space.OTHER`.  An infinite one takes the choice away.
        costs: seconds of each site and format.

    Raises:
        UsageError: a harm is missing.
    """
    return _Pricer(space, rows, harms, costs).price()


class _Pricer:
    def __init__(self, space: Space, rows: Sequence[SiteReport], harms: Harms, costs: SiteCosts) -> None:
        self._space, self._harms, self._costs = space, harms, costs
        self._borders: Borders = find_borders(space, rows, costs.cast_s)
        self._sites: dict[str, list[str]] = defaultdict(list)
        for site, group in group_members(space, [row.site for row in rows]).items():
            self._sites[group].append(site)
        self._notes: dict[str, None] = {}

    def price(self) -> Pricing:
        costs, space = self._costs, self._space
        groups = tuple(ProblemGroup(name=group.name, options=self._options(group)) for group in space.groups)
        edges = tuple(
            Edge(a=a, b=b, cast_s=seconds, firm=firm) for (a, b, firm), seconds in self._borders.edges.items()
        )
        explained = sum(group.options[0].cost_s for group in groups)
        fixed_s = 0.0 if costs.step_s is None else costs.step_s - explained
        if fixed_s < 0:
            self._note(
                f"the sites of an fp32 step take {explained:.4g} s one by one and {costs.step_s:.4g} s together: "
                "nothing is counted as fixed"
            )
        problem = Problem(groups=groups, edges=edges, fixed_s=max(0.0, fixed_s), kind=costs.kind, device=costs.device)
        return Pricing(problem=problem, notes=tuple(self._notes))

    def _options(self, group: Group) -> tuple[Option, ...]:
        found = []
        for choice in group.choices:
            harm = self._harm(group, choice)
            if not math.isfinite(harm):
                self._note(f"{group.name} can't be {choice}: it gives numbers that aren't finite")
                continue
            stored = self._stored(choice)
            found.append(
                Option(format=choice, harm=harm, cost_s=self._cost(group, choice, stored["storage"]), **stored)
            )
        return tuple(found)

    def _harm(self, group: Group, choice: str) -> float:
        if choice == "fp32":
            return 0.0
        names = [group.name] if group.name in self._harms else self._sites[group.name]
        missing = [name for name in names if choice not in self._harms.get(name, {})]
        if missing:
            raise UsageError(
                f"group {group.name!r} has choice {choice!r}, and there is no harm of it for {missing[0]!r}; give one "
                f"for each of its sites, or one for the group by its name"
            )
        return math.fsum(self._harms[name][choice] for name in names)

    def _cost(self, group: Group, choice: str, storage: str) -> float:
        seconds = math.fsum(self._seconds(site, choice) for site in self._sites[group.name])
        if group.name == OTHER:
            return seconds + self._borders.other[choice]
        own = self._borders.own_fp32 if storage == "fp32" else self._borders.own
        return seconds + own.get(group.name, 0.0)

    def _seconds(self, site: str, choice: str) -> float:
        """Of a site; where its format has none, those of the format that it would run in instead."""
        known = self._costs.seconds.get(site, {})
        name = self._borders.rules[site].formats.input if choice == RULES else choice
        for instead in (name, self._space.low_format if bytes_of(name) < 2 else "fp32", "fp32"):
            if instead in known:
                if instead != name:
                    why = self._costs.missing.get(site, f"{name} wasn't priced")
                    self._note(f"{site} in {name} costs what it does in {instead}: {why}")
                return known[instead]
        self._note(f"{site} is left out of every choice: {self._costs.missing.get(site, 'it was not priced')}")
        return 0.0

    def _stored(self, choice: str) -> dict[str, str]:
        if choice == RULES:
            return {"storage": ANY_STORAGE, "firm_storage": "fp32"}
        if bytes_of(choice) < 2:
            return {"storage": self._space.low_format}
        return {"storage": "fp32" if bytes_of(choice) == 4 else choice}

    def _note(self, sentence: str) -> None:
        self._notes[sentence] = None
