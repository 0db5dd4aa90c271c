"""What each site of a model costs in each format: measured alone on this device, or estimated for another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from autoprec.analyze import SiteReport
from autoprec.estimate import Roofline, estimate_step
from autoprec.estimate.flow import FormatsOf, place
from autoprec.estimate.step import cast_seconds, op_seconds
from autoprec.formats import FORMATS
from autoprec.graph.site import Site
from autoprec.lower.matching import RuleMatcher
from autoprec.plan import Formats, Plan
from autoprec.target import Target
from autoprec.tune.space import OTHER, RULES, Space

if TYPE_CHECKING:
    from autoprec.measure.microbench import Costs

#: Seconds of a step that a cast of an activation takes: elements, format it is in, format it goes to.  In training the
#: cast of its gradient back is part of it.
CastSeconds = Callable[[int, str, str], float]


@dataclass(frozen=True, kw_only=True)
class SiteCosts:
    """Seconds of a step.

    Args:
        seconds: site id → format → seconds of the op, with the casts of its weight, without those of its activations.
        cast_s: what a cast of an activation takes.
        kind: ``measured`` on a device here, or ``estimated``.
        device: that they are for.
        step_s: a whole fp32 step; what its sites don't explain is fixed.  None if that isn't known.
        missing: site id → why some or all of its seconds aren't there.
    """

    seconds: Mapping[str, Mapping[str, float]]
    cast_s: CastSeconds
    kind: Literal["measured", "estimated"]
    device: str
    step_s: float | None
    missing: Mapping[str, str]


def measured_costs(costs: Costs, step_s: float | None = None) -> SiteCosts:
    """Costs of ops that were measured alone.

    Args:
        costs: of the sites.
        step_s: of a whole fp32 step, in the same unit (:func:`autoprec.measure.microbench.measure_seconds`).
    """
    seconds = {site: {name: one.value for name, one in found.items()} for site, found in costs.seconds.items()}
    return SiteCosts(
        seconds=seconds,
        cast_s=costs.cast_s,
        kind="measured",
        device=costs.device,
        step_s=step_s,
        missing=costs.missing,
    )


def estimated_costs(
    space: Space, rows: Sequence[SiteReport], target: Target, *, as_there: Callable[[Plan], Plan] = lambda plan: plan
) -> SiteCosts:
    """Costs by the roofline of a target that isn't here.

    Args:
        space: whose choices are priced.
        rows: of an analysis with example inputs, whose shapes count.
        target: the device.
        as_there: gives a plan the formats that the target's kernels really run.

    Raises:
        TargetError: a peak or the bandwidth isn't known.
    """
    roof, mode, low = Roofline(target), space.base.mode, space.low_format
    formats = dict.fromkeys(name for group in space.groups for name in group.choices if name in FORMATS)
    seconds: dict[str, dict[str, float]] = {row.site.id: {} for row in rows}
    for name in formats:
        plan = as_there(space.plan_of(uniform(space, name)))
        for item in place(rows, formats_of(plan), low):
            seconds[item.site.id][name] = op_seconds(item, roof, low, mode)
    whole = estimate_step(rows, formats_of(space.plan_of(uniform(space, "fp32"))), target, low="fp32", mode=mode)
    return SiteCosts(
        seconds=seconds,
        cast_s=lambda numel, source, format_name: cast_seconds(numel, source, format_name, roof, mode),
        kind="estimated",
        device=target.title,
        step_s=whole.value,
        missing={},
    )


def uniform(space: Space, choice: str, other: str | None = None) -> dict[str, str]:
    """One choice for all groups that have it, and the 16-bit format for those that don't.

    Args:
        space: whose groups.
        choice: of the matrix products.
        other: of all other ops; by default the same, or the rules' where they can't have it.
    """
    mix = {group.name: choice if choice in group.choices else space.low_format for group in space.groups}
    last = space.groups[-1]
    return {**mix, OTHER: other or (choice if choice in last.choices else RULES)}


def formats_of(plan: Plan) -> FormatsOf:
    """What a plan asks of a site, as a converted model finds it; None where it follows what it reads."""
    if plan.level == "O0":
        return lambda site: Formats.all("fp32")
    matcher = RuleMatcher(plan)

    def of(site: Site) -> Formats | None:
        rule = matcher.rule_for_site(site.scope, site.op, site.index)
        return None if rule is None else rule.formats

    return of
