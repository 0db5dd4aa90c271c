"""The planner's problem of a task: how much each choice hurts and what it costs, measured before the first trial."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from os import PathLike
from typing import Any

from torch import nn

from autoprec.analyze import SiteReport
from autoprec.formats import FORMATS
from autoprec.measure.costcache import CostCache
from autoprec.measure.microbench import measure_costs, measure_seconds
from autoprec.measure.replay import record_calls
from autoprec.plan import Formats, Plan
from autoprec.rulebook import Rulebook, load_rulebook
from autoprec.tune.posing.borders import group_members
from autoprec.tune.posing.gradient_errors import Loss, group_gradient_errors
from autoprec.tune.posing.pricing import Pricing, make_problem
from autoprec.tune.posing.scores import score_sites
from autoprec.tune.posing.sitecosts import SiteCosts, estimated_costs, formats_of, measured_costs
from autoprec.tune.space import OTHER, RULES, Space, role_formats
from autoprec.tune.studies.lock import device_lock
from autoprec.tune.trials.bench import Bench
from autoprec.tune.trials.trainer import own_random_state

_BATCHES = 3
#: Seconds that measuring ops one by one may take.
COSTS_BUDGET_S = 20.0
#: Harm of the other ops' low format where no gradient says, as a share of the products'.
_OTHER_SHARE = 0.1

OnStep = Callable[[int, int, str], None]


def pose_problem(
    space: Space, bench: Bench, *, rules: Iterable[str | PathLike[str]] = (), on_step: OnStep | None = None
) -> Pricing:
    """Score and price every choice of a space.

    Args:
        space: of the task's plans.
        bench: the task at its checkpoint, and the device.
        rules: the user's rule files.
        on_step: told of each op measured: how many, of how many, which.
    """
    posing = _Posing(space=space, bench=bench, rulebook=load_rulebook(*rules), on_step=on_step)
    with own_random_state(bench.device):
        rows = bench.estimator().rows
        return make_problem(space, rows, posing.harms(rows), posing.costs(rows))


@dataclass(frozen=True, kw_only=True)
class _Posing:
    space: Space
    bench: Bench
    rulebook: Rulebook
    on_step: OnStep | None

    def harms(self, rows: tuple[SiteReport, ...]) -> dict[str, dict[str, float]]:
        """Of each product's choices, and of the other ops' as a group."""
        choices = self._choices(rows, products=True)
        scores = score_sites(
            self._model(),
            self._losses(),
            choices,
            self._formats_of,
            mode=self.space.base.mode,
            low_format=self.space.low_format,
            recipe=self.space.base.recipe,
            rulebook=self.rulebook,
        )
        harms = {site: {choice: score.harm for choice, score in of.items()} for site, of in scores.items()}
        low = self.space.low_format
        whole = math.fsum(of[low] for of in harms.values() if math.isfinite(of.get(low, math.inf)))
        return {**harms, OTHER: self._other_harms(whole)}

    def _other_harms(self, whole: float) -> dict[str, float]:
        """Of the ops that aren't products, in the products' unit: by each one's error of the whole gradient."""
        low, other = self.space.low_format, self.space.groups[-1]
        products = self._plan(low, "fp32")
        plans = {"products": products, **{name: self._plan("fp32", name) for name in other.choices if name != "fp32"}}
        if self.bench.task.mode != "training":
            return {name: 0.0 if name == "fp32" else _OTHER_SHARE * whole for name in other.choices}
        errors = group_gradient_errors(self._model(), self._losses(), plans, rulebook=self.rulebook)
        unit = errors["products"].relative
        shares = {name: errors[name].relative / unit if unit > 0 else _OTHER_SHARE for name in plans}
        harms = {name: 0.0 if name == "fp32" else whole * shares[name] for name in other.choices}
        # the rules leave some ops in fp32, so that they do no more harm than lowering all
        return {**harms, RULES: min(harms[RULES], harms.get(low, math.inf))} if RULES in harms else harms

    def _plan(self, choice: str, other: str) -> Plan:
        groups = self.space.groups
        mix = {group.name: choice if choice in group.choices else "fp32" for group in groups[:-1]}
        return self.space.plan_of({**mix, OTHER: other})

    def costs(self, rows: tuple[SiteReport, ...]) -> SiteCosts:
        """Seconds of each site and choice: measured here, or estimated for a target that isn't here."""
        bench = self.bench
        if bench.elsewhere is not None:
            return estimated_costs(self.space, rows, bench.elsewhere, as_there=bench.estimator().as_there)
        model, losses = self._model(), self._losses()
        cache = CostCache.of_device(bench.device)
        with device_lock(bench.device):
            costs = measure_costs(
                record_calls(model, losses[0]),
                self._choices(rows, products=False),
                device=bench.device,
                mode=self.space.base.mode,
                low=self.space.low_format,
                formats_of=self._formats_of,
                recipe=self.space.base.recipe,
                budget_s=COSTS_BUDGET_S,
                cache=cache,
                on_progress=self.on_step,
            )
            batches = bench.batches(bench.data_seed, bench.effort.steps)
            step = measure_seconds({"step": bench.baseline().stepper(batches)}, device=bench.device, cache=cache)[
                "step"
            ]
        return measured_costs(costs, step.value)

    def _choices(self, rows: tuple[SiteReport, ...], *, products: bool) -> dict[str, tuple[str, ...]]:
        """Formats that each site may take, its group's; of the other ops, where they are asked for, the 16-bit one."""
        choices = {group.name: tuple(name for name in group.choices if name != "fp32") for group in self.space.groups}
        members = group_members(self.space, [row.site for row in rows])
        found = {site: choices[group] for site, group in members.items() if group != OTHER}
        if products:
            return found
        others = {site: (self.space.low_format,) for site in members if site not in found}
        return {**found, **others, **self._pinned(rows)}

    def _pinned(self, rows: tuple[SiteReport, ...]) -> dict[str, tuple[str, ...]]:
        """The user's pins: they have no choice, but casts between them and their neighbours have a price."""
        pins = formats_of(Plan(rules=self.space.pins))
        pinned = {row.site.id: pins(row.site) for row in rows}
        return {site: (of.input,) for site, of in pinned.items() if of is not None and of.input in FORMATS}

    def _formats_of(self, choice: str) -> Formats:
        return role_formats(choice, self.space.base.mode)

    def _model(self) -> nn.Module:
        return self.bench.trainer(None).model

    def _losses(self) -> list[Loss]:
        task, bench = self.bench.task, self.bench

        def of(batch: Any) -> Loss:
            return lambda model: task.loss(model, batch)

        return [of(batch) for batch in bench.batches(bench.data_seed, bench.effort.steps)[:_BATCHES]]
