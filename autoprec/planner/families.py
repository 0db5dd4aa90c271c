"""What the families of a model keep high, as decisions about its sites and as plan rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from autoprec.graph.site import Site
from autoprec.plan import Formats, PlanRule
from autoprec.planner.fold import fold, grouped, literal
from autoprec.planner.layers import class_names, module_sites
from autoprec.rulebook import Family, FamilyRule, Rulebook, families_of, kept_sites

#: Of a model that belongs to no family.
FIRST_LAYER = "the first layer: its error reaches every later one"
LAST_LAYER = "the last layer: its error is that of the output"


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What families keep.

    Args:
        high: id of a site that stays at 16 bit → why.
        fp32: rules for what runs in fp32 at every level.
        fp32_sites: ids of the sites that those rules take.
    """

    high: Mapping[str, str]
    fp32: tuple[PlanRule, ...]
    fp32_sites: frozenset[str]


def kept_by_families(model: nn.Module, rulebook: Rulebook, recorded: Sequence[Site] | None) -> Kept:
    """The sites that the model's families keep high.

    Args:
        model: any module, on the meta device too.
        rulebook: with the families.
        recorded: sites in order of execution; None where nothing was run, and modules' names and classes must do.
    """
    classes = class_names(model)
    sites = module_sites(model) if recorded is None else recorded
    families = families_of(rulebook, classes.values(), [site.op for site in sites])
    high, fp32_sites = _kept(families, sites, classes)
    fp32 = _fp32(families, rulebook, recorded, classes)
    return Kept(high=high, fp32=tuple(fp32), fp32_sites=frozenset(fp32_sites))


def _kept(
    families: Iterable[Family], sites: Sequence[Site], classes: Mapping[str, str]
) -> tuple[dict[str, str], set[str]]:
    """Site id → why it stays at 16 bit (the first family's reason counts), and the sites that stay fp32."""
    high: dict[str, str] = {}
    fp32: set[str] = set()
    for family in families:
        for site, rule in kept_sites(family, sites, classes):
            if rule.precision == "fp32":
                fp32.add(site.id)
            else:
                high.setdefault(site.id, rule.why)
    linear = [site.id for site in sites if site.op == "linear" and site.leaf and site.id not in fp32]
    if len(linear) > 1 and not any(name in high for name in linear):
        high |= {linear[-1]: LAST_LAYER, linear[0]: FIRST_LAYER}
    return high, fp32


def _fp32(
    families: Iterable[Family], rulebook: Rulebook, recorded: Sequence[Site] | None, classes: Mapping[str, str]
) -> Iterable[PlanRule]:
    pairs: dict[tuple[str, str], None] = {}
    for family in families:
        for rule in family.keep:
            if rule.precision == "fp32":
                only = replace(family, keep=(rule,))
                pairs.update(
                    dict.fromkeys((rule.why, glob) for glob in _fp32_globs(only, rule, rulebook, recorded, classes))
                )
    for why, globs in grouped(pairs).items():
        yield PlanRule(match=tuple(globs), formats=Formats.all("fp32"), reason=why, source="family")


def _fp32_globs(
    family: Family,
    rule: FamilyRule,
    rulebook: Rulebook,
    recorded: Sequence[Site] | None,
    classes: Mapping[str, str],
) -> Iterable[str]:
    """Whole modules, or the named ops in them; ops that are fp32 anyway need no rule."""
    if not rule.ops:
        sites = [Site(module=name, op="") for name in classes] if recorded is None else recorded
        modules = dict.fromkeys(site.module for site, _ in kept_sites(family, sites, classes))
        return fold(name for name in modules if name)
    ops = [op for op in rule.ops if rulebook.rule_for(op).kind != "fp32"]
    if recorded is not None:
        kept = [site for site, _ in kept_sites(family, recorded, classes) if site.op in ops]
        return dict.fromkeys(f"{literal(site.scope)}::{site.op}" for site in kept)
    if not (rule.names or rule.classes):
        return ()
    sites = [Site(module=name, op=op) for name in classes for op in ops]
    kept = [site for site, _ in kept_sites(family, sites, classes)]
    # The op may be in a method beside forward, whose scope has the method's name after a colon.
    return [
        glob for site in kept for glob in (f"{literal(site.module)}::{site.op}", f"{literal(site.module)}:*::{site.op}")
    ]
