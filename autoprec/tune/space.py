"""What a study may choose: one format per group of sites, and the loss scaler where a format needs one.

Sites of the same role in neighbouring blocks share a choice: with four bands of depth that costs at most 0.5% of the
speed that a choice per site would give, and needs a fraction of the trials.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from autoprec.errors import UsageError
from autoprec.formats import FORMATS
from autoprec.graph.site import Site
from autoprec.lower.matching import RuleMatcher
from autoprec.plan import Formats, Plan, PlanRule, ScalerSettings
from autoprec.planner.problem import Problem
from autoprec.tune.recipe_space import families, recipe_choices, recipe_defaults, recipe_settings

#: The group of all sites that no other group has: norms, softmax, activations, additions.  No module has such a name.
OTHER = "other ops"
#: Its choice "as the rules say"; a group of GEMMs names the rules' format instead.
RULES = "rules"

_BANDS = 4
_MAX_GROUPS = 40
#: Below this share of the GEMM FLOPs a site can't move the step time, and joins this group where there are many.
_SMALL = "small products"
_SMALL_SHARE = 0.002
_SIXTEEN_BIT = ("bf16", "fp16")

#: A block number in a module's name.
_NUMBER = re.compile(r"(^|\.)(\d+)(?=\.|:|$)")

Params = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Sites that get the same format.

    Args:
        name: the role, ``*`` for block numbers: ``blocks.*.attention.qkv``, with ``@0-3`` for a band of depth.
        match: globs of a plan rule that match these sites and no other GEMM.
        choices: formats, fp32 first.
        rules_choice: what the rules alone choose.
        flops_share: of the model's GEMM FLOPs.
        num_sites: how many sites.
    """

    name: str
    match: tuple[str, ...]
    choices: tuple[str, ...]
    rules_choice: str
    flops_share: float
    num_sites: int


@dataclass(frozen=True, kw_only=True)
class Space:
    """All plans that a study may try.

    Args:
        groups: in order of execution; :data:`OTHER` is the last.
        base: the plan that rules alone make.
        pins: rules of the user, before all others.
        low_format: the 16-bit format of the whole-model baseline.
        scaler_choices: parameter → values; empty where no format needs a loss scaler.
    """

    groups: tuple[Group, ...]
    base: Plan
    pins: tuple[PlanRule, ...]
    low_format: str
    scaler_choices: Mapping[str, tuple[float, ...]]

    @property
    def size(self) -> int:
        """Number of mixes, scaler settings aside."""
        size = 1
        for group in self.groups:
            size *= len(group.choices)
        return size

    def baselines(self) -> dict[str, dict[str, str]]:
        """Name → parameters of the mixes that every study tries first."""
        return {
            "fp32": {group.name: "fp32" for group in self.groups},
            self.low_format: {group.name: self.low_format for group in self.groups},
            "rules": {group.name: group.rules_choice for group in self.groups},
        }

    def plan_of(self, params: Params) -> Plan:
        """The plan of one choice for each group."""
        chosen = {group.name: str(params[group.name]) for group in self.groups}
        if not self.pins and set(chosen.values()) == {"fp32"}:
            everything = PlanRule(match=("*",), formats=Formats.all("fp32"), reason="all in fp32", source="search")
            return replace(self.base, rules=(everything,), level="O0", scaler=ScalerSettings())
        rules = [*self.pins, *(self._rule(group, chosen[group.name]) for group in self.groups[:-1])]
        if chosen[OTHER] == RULES:
            rules.extend(self.base.rules)
        else:
            rules.append(self._rule(self.groups[-1], chosen[OTHER]))
        return replace(
            self.base,
            rules=tuple(rules),
            scaler=self._scaler(rules, params),
            recipe=recipe_settings(self._families(params), params, self.base.recipe),
        )

    def settings(self, params: Params) -> dict[str, tuple[Any, ...]]:
        """Parameters beside the mix that matter for it, and their values; more of them as they are chosen.

        A trial asks for them until it has them all: a recipe's fields come after the recipe.
        """
        scaler = self.scaler_choices if self.plan_of(params).scaler.enabled else {}
        return {**scaler, **recipe_choices(self._families(params), params)}

    def defaults(self) -> dict[str, Any]:
        """Values of all settings until better ones are known."""
        prior = self.base.scaler
        scaler = {"scaler.init_scale": prior.init_scale, "scaler.growth_interval": prior.growth_interval}
        return {**scaler, **recipe_defaults(self.base.recipe)}

    def pruned(self, problem: Problem, margin: float = 0.05) -> Space:
        """Without the choices that can't win: others cost as much or less, and do no more harm.

        What the problem doesn't have goes too.  The baselines' choices stay, since every study measures them.

        Args:
            problem: harm and cost of each choice.
            margin: relative error of a cost; a choice within it stays.
        """
        kept = {group.name: _undominated(group, problem, margin, self.low_format) for group in self.groups}
        groups = tuple(replace(group, choices=kept[group.name]) for group in self.groups)
        return replace(self, groups=groups)

    def _families(self, params: Params) -> tuple[str, ...]:
        return families(str(params[group.name]) for group in self.groups)

    def _rule(self, group: Group, choice: str) -> PlanRule:
        formats = role_formats(choice, self.base.mode)
        return PlanRule(match=group.match, formats=formats, reason=f"group {group.name}", source="search")

    def _scaler(self, rules: Iterable[PlanRule], params: Params) -> ScalerSettings:
        if self.base.mode != "training" or not any(needs_scaler(rule.formats) for rule in rules):
            return ScalerSettings()
        given = {name.partition(".")[2]: params[name] for name in self.scaler_choices if name in params}
        settings = {**_scaler_fields(self.base.scaler), **given}
        low, high = settings["min_scale"], settings["max_scale"]
        settings["init_scale"] = min(max(settings["init_scale"], low), high)
        settings["growth_interval"] = int(settings["growth_interval"])
        return ScalerSettings(**{**settings, "enabled": True})

    def describe(self) -> dict[str, Any]:
        """What a study is recognised by."""
        return {
            "groups": {group.name: [*group.choices, len(group.match)] for group in self.groups},
            "pins": [[*pin.match, str(pin.formats)] for pin in self.pins],
            "scaler": {name: list(values) for name, values in self.scaler_choices.items()},
        }


def _undominated(group: Group, problem: Problem, margin: float, low_format: str) -> tuple[str, ...]:
    options = {o.format: o for g in problem.groups if g.name == group.name for o in g.options}

    def is_beaten(name: str) -> bool:
        mine = options[name]
        return any(o.cost_s * (1 + margin) <= mine.cost_s and o.harm <= mine.harm for o in options.values())

    needed = ("fp32", low_format, group.rules_choice)
    return tuple(name for name in group.choices if name in needed or (name in options and not is_beaten(name)))


def role_formats(choice: str, mode: str) -> Formats:
    """Formats of the three roles: gradients need e5m2's range where the operands take e4m3's precision."""
    if choice == "fp8_e4m3" and mode == "training":
        return Formats(input=choice, weight=choice, grad_output="fp8_e5m2")
    return Formats.all(choice)


def needs_scaler(formats: Formats) -> bool:
    """Gradients in fp16 underflow without one."""
    return "fp16" in (formats.input, formats.grad_output)


def build_space(
    sites: Sequence[Site],
    base: Plan,
    formats: Sequence[str],
    *,
    low_format: str,
    keep: Sequence[str] = (),
    pins: Sequence[PlanRule] = (),
) -> Space:
    """Group the sites and list each group's choices.

    Args:
        sites: of the model, in order of execution.
        base: the plan that rules alone make for them.
        formats: low formats that are fast on the target.
        low_format: 16-bit format of the whole-model baseline.
        keep: the user's pins, ``GLOB=FORMAT``; a glob alone pins to fp32.
        pins: more of them, as rules: those of the user's rule files.

    Raises:
        UsageError: a pin names no format, or matches no site; or the model has no site.
    """
    if not any(site.is_gemm for site in sites):
        raise UsageError("the model calls no matrix product or convolution: there is no precision to choose")
    pins = (*(_pin(text, sites, base.mode) for text in keep), *pins)
    pinned = _matcher(replace(base, rules=pins))
    free = [site for site in sites if pinned(site) is None]
    groups = _group([site for site in free if site.is_gemm], free, base, _choices(formats, low_format))
    num_others = sum(not site.is_gemm for site in free)
    other_choices = tuple(dict.fromkeys(("fp32", RULES, low_format)))
    other = Group(
        name=OTHER, match=("*::*",), choices=other_choices, rules_choice=RULES, flops_share=0.0, num_sites=num_others
    )
    space = Space(groups=(*groups, other), base=base, pins=pins, low_format=low_format, scaler_choices={})
    return replace(space, scaler_choices=_scaler_choices(space))


def _pin(text: str, sites: Sequence[Site], mode: str) -> PlanRule:
    glob, equals, name = text.rpartition("=")
    glob, name = (glob, name) if equals else (text, "fp32")
    if name not in FORMATS:
        raise UsageError(f"keep {text!r}: {name!r} is no format; write GLOB=FORMAT with one of {', '.join(FORMATS)}")
    rule = PlanRule(match=(glob,), formats=role_formats(name, mode), reason=f"kept by {text!r}", source="user")
    matches = _matcher(Plan(rules=(rule,)))
    if all(matches(site) is None for site in sites):
        known = ", ".join(dict.fromkeys(site.id for site in sites if site.is_gemm))
        raise UsageError(f"keep {text!r} matches no site of the model; its matrix products: {known[:300]}")
    return rule


def _matcher(plan: Plan) -> Callable[[Site], PlanRule | None]:
    """The plan's rule for a site, as a converted model finds it."""
    matcher = RuleMatcher(plan)
    return lambda site: matcher.rule_for_site(site.scope, site.op, site.index)


def _choices(formats: Sequence[str], low_format: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(("fp32", low_format, *(name for name in formats if name not in ("fp32", "tf32")))))


def _allowed(site: Site, choices: Sequence[str]) -> tuple[str, ...]:
    """Formats below 16 bits are for layers with a weight; products of two activations have no kernel there."""
    if site.op == "linear":
        return tuple(choices)
    return tuple(name for name in choices if name == "fp32" or name in _SIXTEEN_BIT)


def _group(gemms: Sequence[Site], free: Sequence[Site], base: Plan, choices: Sequence[str]) -> list[Group]:
    total = sum(site.flops for site in gemms) or 1
    rule_of = _matcher(base)
    keyed: dict[tuple[str, str], list[Site]] = {}
    for bands, small in ((_BANDS, 0.0), (_BANDS, _SMALL_SHARE), (1, _SMALL_SHARE)):
        keyed = defaultdict(list)
        for site, role in zip(gemms, _roles(gemms, bands), strict=True):
            keyed[_SMALL if site.flops < small * total else role, _rules_choice(rule_of(site))].append(site)
        if len(keyed) <= _MAX_GROUPS:
            break
    names = [name for name, _ in keyed]
    return [
        Group(
            name=members[0].id if len(members) == 1 else name if names.count(name) == 1 else f"{name}@{chosen}",
            match=_globs(members, free),
            choices=tuple(dict.fromkeys((*_allowed(members[0], choices), chosen))),
            rules_choice=chosen,
            flops_share=sum(site.flops for site in members) / total,
            num_sites=len(members),
        )
        for (name, chosen), members in keyed.items()
    ]


def _rules_choice(rule: PlanRule | None) -> str:
    """The rules' format as a choice; a site that follows its inputs counts as fp32, which is what they are by then."""
    return rule.formats.input if rule is not None and rule.formats.input in FORMATS else "fp32"


def _roles(sites: Sequence[Site], bands: int) -> list[str]:
    """Each site's name without block numbers, with a band of depth where a role has more blocks than bands."""
    patterns = [(_pattern(site), site.op, site.num_params) for site in sites]
    depths: dict[tuple[str, str, int], set[int]] = defaultdict(set)
    for pattern, site in zip(patterns, sites, strict=True):
        depths[pattern].add(_depth(site))
    names = [name for name, _, _ in depths]
    roles = []
    for pattern, site in zip(patterns, sites, strict=True):
        # Layers of one role in repeated blocks agree in size; a Sequential's numbered layers needn't.
        name = pattern[0] if names.count(pattern[0]) == 1 else f"{pattern[0]}#{site.num_params}"
        roles.append(name + _band(sorted(depths[pattern]), _depth(site), bands))
    return roles


def _band(depths: list[int], depth: int, bands: int) -> str:
    if len(depths) <= bands:
        return ""
    edges = [round(k * len(depths) / bands) for k in range(bands + 1)]
    position = depths.index(depth)
    low, high = next((a, b) for a, b in pairwise(edges) if a <= position < b)
    return f"@{depths[low]}-{depths[high - 1]}"


def _pattern(site: Site) -> str:
    scope = _NUMBER.sub(r"\1*", site.scope)
    return scope if site.leaf and scope.strip("*.") else f"{scope}::{site.op}"


def _depth(site: Site) -> int:
    number = _NUMBER.search(site.scope)
    return int(number.group(2)) if number else 0


def _globs(members: Sequence[Site], free: Sequence[Site]) -> tuple[str, ...]:
    """The role's own glob where it matches these sites alone, else the sites by name."""
    inside = {site.id for site in members}
    first = members[0]
    glob = _NUMBER.sub(r"\1*", first.module if first.leaf and first.module else first.aliases[-1])
    matches = _matcher(Plan(rules=(PlanRule(match=(glob,), formats=Formats.all("bf16")),)))
    matched = {site.id for site in free if matches(site) is not None}
    # A root that is one layer has the empty name, which is no glob.
    return (glob,) if matched == inside else tuple(site.id or site.aliases[-1] for site in members)


def _scaler_fields(settings: ScalerSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in ScalerSettings.__dataclass_fields__}


def _scaler_choices(space: Space) -> dict[str, tuple[float, ...]]:
    pinned = any(needs_scaler(pin.formats) for pin in space.pins)
    if space.base.mode != "training" or not (pinned or any("fp16" in group.choices for group in space.groups)):
        return {}
    prior = space.base.scaler
    scales = sorted({prior.init_scale, 2.0**6, 2.0**10, 2.0**13, 2.0**16})
    return {
        "scaler.init_scale": tuple(scales),
        "scaler.growth_interval": tuple(sorted({prior.growth_interval, 5, 20, 100, 2000})),
    }
